"""Checks of requests that are left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "importer/request.py",
        "replaces a base by its own overlay",
        "    if made.backing and os.path.realpath(made.backing) in used:\n",
        "    if made.backing and made.backing in used:\n",
        "tests/end_to_end/test_qcow2_targets.py::test_target_is_not_its_own_base",
    ),
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
        "importer/request.py",
        "writes a report over a file that is read",
        "        if is_had or any(each.reads(path) for each in read) or os.path.realpath(path) in kept:\n",
        "        if False:\n",
        "tests/end_to_end/test_existing.py::test_file_that_is_read_is_not_replaced",
    ),
    mutant(
        "sources/nbd/locations.py",
        "copies an export to itself",
        "        return ours.export == other.export and ours.server == other.server\n",
        "        return False\n",
        "tests/end_to_end/test_nbd_targets.py::test_export_is_not_copied_to_itself",
    ),
    mutant(
        "importer/plan.py",
        "unpacks an archive that is not a tar",
        '    if content.format != "tar":\n',
        "    if False:\n",
        "tests/importer/test_plan.py::test_archive_is_unpacked",
    ),
    mutant(
        "importer/plan.py",
        "takes a tar archive for a disk",
        '    if content.format == "tar":\n',
        "    if False:\n",
        "tests/importer/test_plan.py::test_archive_is_unpacked",
    ),
    mutant(
        "importer/plan.py",
        "reads the layers of a disk from a source without byte ranges",
        ("def _check_random(offer: Offer) -> None:\n    if not offer.ranges:\n"),
        ("def _check_random(offer: Offer) -> None:\n    if False:\n"),
        "tests/importer/test_plan.py::test_layers_need_byte_ranges",
    ),
    mutant(
        "importer/plan.py",
        "begins to spool into a scratch that is too small",
        "    if chosen.route is not Route.CONVERT and offer.size is not None and offer.size > scratch:\n",
        "    if False:\n",
        "tests/importer/test_plan.py::test_too_small_scratch_is_found_before_the_transfer",
    ),
    mutant(
        "importer/plan.py",
        "begins with a disk that is larger than the target",
        "    if size - content.footer > space.available and not space.thin:\n",
        "    if False:\n",
        "tests/importer/test_plan.py::test_image_larger_than_the_volume_is_refused",
    ),
    mutant(
        "importer/plan.py",
        "unpacks an archive on a device",
        ("    if space.block:\n        raise"),
        ("    if False:\n        raise"),
        "tests/importer/test_plan.py::test_archive_is_unpacked",
    ),
    mutant(
        "importer/routes/stage.py",
        "applies a delta to the disk of another checkpoint",
        "    if held is not None and not held.allows(*checkpoints(attempt)):\n",
        "    if False:\n",
        "tests/end_to_end/test_chains.py::test_stage_from_another_checkpoint_is_refused",
    ),
    mutant(
        "importer/plan.py",
        "begins with a requested size that does not fit",
        "    if request.is_exact and asked > space.usable:\n",
        "    if False:\n",
        "tests/importer/test_exact_sizes.py::test_device_of_the_size_is_accepted_and_a_smaller_one_refused",
    ),
    mutant(
        "importer/routes/stage.py",
        "leaves old bytes behind a disk that a delta makes smaller",
        "        opened.zero_rest(size)\n",
        "        pass\n",
        "tests/end_to_end/test_chains.py::test_disk_that_shrinks_and_grows_between_stages_has_no_old_bytes",
    ),
    mutant(
        "importer/routes/stage.py",
        "applies a delta to the left-over of a killed run",
        "    if targets.is_left_over(attempt.claim):\n",
        "    if False:\n",
        "tests/end_to_end/test_update.py::test_delta_is_not_applied_to_a_device_after_a_failed_import",
    ),
    mutant(
        "importer/plan.py",
        "imports a source with a known obstacle",
        "    if offer.obstacle is not None:\n",
        "    if False:\n",
        "tests/importer/test_plan.py::test_obstacle_of_a_source_ends_the_plan",
    ),
)
