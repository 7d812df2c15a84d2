"""Demands of a request, and of an administrator, that are dropped in silence."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "importer/commands/parameters.py",
        "drops an empty option in silence",
        "        if not self.empty and _is_empty(value):\n",
        "        if False:\n",
        "tests/contract/test_settings_that_demand.py::test_empty_option_is_refused",
    ),
    mutant(
        "importer/contract.py",
        "ignores an empty variable of ours",
        "        elif not env[name].strip() and name not in may_be_empty:\n",
        "        elif False:\n",
        "tests/contract/test_settings_that_demand.py::test_empty_variable_of_ours_is_refused_in_a_pod",
    ),
    mutant(
        "importer/commands/signatures.py",
        "drops a demand that is written before the command",
        "            if origin is core.ParameterSource.COMMANDLINE:\n",
        "            if False:\n",
        "tests/contract/test_signatures.py::test_option_in_front_of_a_command_is_refused",
    ),
    mutant(
        "sources/trust/policy.py",
        "accepts a scope without a host",
        '    if not (set(".:[") & set(host) or host == "localhost"):\n',
        "    if False:\n",
        "tests/sources/trust/test_policy.py::test_scope_that_matches_no_image_is_refused",
    ),
    mutant(
        "formats/checksum.py",
        "verifies only the first of several digests",
        "        self._expected = (checksum, *checksum.more)\n",
        "        self._expected = (checksum,)\n",
        "tests/formats/test_checksum.py::test_all_checksums_that_are_stated_are_verified",
    ),
    mutant(
        "importer/commands/signatures.py",
        "imports unsigned images where the named policy does not exist",
        '    if source["policy"] is core.ParameterSource.DEFAULT and not _is_mounted(given["policy"]):\n',
        '    if not _is_mounted(given["policy"]):\n',
        "tests/contract/test_signatures.py::test_pod_with_a_missing_file_imports_nothing",
    ),
    mutant(
        "importer/send/volume.py",
        "clones without the signature that is demanded",
        '    paths.settings.refuse_demand("clone source", reason)\n',
        "",
        "tests/contract/test_settings_that_demand.py::test_clone_source_refuses_a_demand",
    ),
    mutant(
        "cdi_worker/units.py",
        "takes a size that no disk has",
        "    if not 0 <= value < 1 << 63:\n",
        "    if False:\n",
        "tests/importer/test_units.py::test_malformed_quantity_is_refused",
    ),
    mutant(
        "sources/trust/policy.py",
        "accepts a path with links as a scope",
        "    if scope != path:\n",
        "    if False:\n",
        "tests/sources/trust/test_policy.py::test_paths_of_archives_that_match_no_image_are_refused",
    ),
    mutant(
        "importer/contract.py",
        "ignores a misspelt variable",
        "        if name not in known:\n",
        "        if False:\n",
        "tests/contract/test_settings_that_demand.py::test_misspelt_variable_is_refused",
    ),
    mutant(
        "importer/commands/signatures.py",
        "leaves out a mounted policy that it may not read",
        ("    except OSError:\n        return True\n    return True"),
        ("    except OSError:\n        return False\n    return True"),
        "tests/contract/test_settings_that_demand.py::test_mounted_policy_that_cannot_be_looked_at_is_not_left_out",
    ),
    mutant(
        "importer/upload/settings.py",
        "accepts uploads without the signature that is demanded",
        '    paths.settings.refuse_demand("upload server", reason)\n',
        "",
        "tests/contract/test_signatures.py::test_upload_server_refuses_a_demand",
    ),
    mutant(
        "importer/kubernetes/datavolume.py",
        "ignores a misspelt demand among the annotations",
        "    for name, what in signed.faults(volume.annotations, frozenset({DISK, LAYER_ANNOTATION})):\n",
        "    for name, what in ():\n",
        "tests/contract/test_settings_that_demand.py::test_misspelt_annotation_is_refused",
    ),
    mutant(
        "sources/trust/policy.py",
        "accepts a scope of a policy that matches no image",
        '    if scope != (wanted := f"{name}{at}" if is_image else name):\n',
        ('    wanted = ""\n    if False:\n'),
        "tests/sources/trust/test_policy.py::test_scope_that_matches_no_image_is_refused",
    ),
    mutant(
        "sources/trust/policy.py",
        "accepts an unknown transport",
        "        if transport not in TRANSPORTS:\n",
        "        if False:\n",
        "tests/sources/trust/test_policy.py::test_unknown_transport_is_refused",
    ),
    mutant(
        "sources/registry/source.py",
        "imports a signed image of another platform than the index says",
        "        if found and is_signed:\n",
        "        if False:\n",
        "tests/sources/trust/test_images.py::test_index_does_not_choose_the_platform_of_a_signed_image",
    ),
    mutant(
        "cdi_worker/units.py",
        "takes a size with a huge exponent",
        "    if exponent and abs(int(exponent[1:])) > 30:\n",
        "    if False:\n",
        "tests/importer/test_units.py::test_malformed_quantity_is_refused[1e-31]",
    ),
    mutant(
        "importer/commands/parameters.py",
        "drops an empty option among others in silence",
        "        return not value or any(map(_is_empty, value))",
        "        return not value",
        "tests/contract/test_settings_that_demand.py::test_empty_value_in_the_configuration_file_is_refused",
    ),
)
