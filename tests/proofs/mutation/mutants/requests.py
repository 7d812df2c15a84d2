"""Checks of requests that are left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "importer/request.py",
        "runs without a target",
        "    if needs_target and not made.target:\n",
        "    if False:\n",
        "tests/importer/test_library.py::test_missing_target_is_reported_with_all_other_faults",
    ),
    mutant(
        "importer/request.py",
        "compares a source with what an empty target would be",
        "    if made.target and any(",
        "    if any(",
        "tests/importer/test_library.py::test_inspect_without_target_looks_at_no_file_of_the_working_directory",
    ),
    mutant(
        "sources/nbd/locations.py",
        "copies an export to itself",
        "        return ours.export == other.export and ours.server == other.server\n",
        "        return False\n",
        "tests/end_to_end/test_nbd_targets.py::test_addresses_of_one_export",
    ),
    mutant(
        "importer/request.py",
        "remembers a disk of layers as another file than the last",
        '    if made.stage.current not in {"", last}:\n',
        "    if False:\n",
        "tests/end_to_end/test_chains.py::test_disk_of_layers_is_remembered_as_the_last_one",
    ),
    mutant(
        "importer/roles/importer.py",
        "reads layers on top of the file of a pod's checkpoint",
        "    if request.layers and request.stage.current:\n",
        "    if False:\n",
        "tests/end_to_end/test_chains.py::test_pod_reads_no_layers_beside_the_file_of_its_checkpoint",
    ),
)
