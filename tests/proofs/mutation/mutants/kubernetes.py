"""Checks of manifests and of objects in a cluster, left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "importer/kubernetes/datavolume.py",
        "accepts a name that is not a Kubernetes name",
        "    if text and (len(text) > 253 or not documents.NAME.fullmatch(text)):\n",
        "    if False:\n",
        "tests/importer/kubernetes/test_datavolume.py::test_error_in_spec_names_its_path",
    ),
    mutant(
        "importer/kubernetes/documents.py",
        "expands aliases of YAML, so that a short manifest fills memory",
        "            if isinstance(event, yaml.AliasEvent):\n",
        "            if False:\n",
        "tests/importer/kubernetes/test_datavolume.py::test_yaml_bomb_is_refused",
    ),
    mutant(
        "importer/kubernetes/documents.py",
        "reads a manifest of more levels than the stack has",
        "            elif depth > smalljson.DEEPEST:\n",
        "            elif False:\n",
        "tests/importer/kubernetes/test_datavolume.py::test_malformed_yaml_is_reported_by_line",
    ),
    mutant(
        "importer/kubernetes/datavolume.py",
        "copies one backup of KubeVirt as two checkpoints",
        '        if self.source.kind == "kubevirt" and len(stages) > 1:\n',
        "        if False:\n",
        "tests/importer/kubernetes/test_datavolume.py::test_one_backup_of_kubevirt_is_one_stage",
    ),
    mutant(
        "importer/commands/cron.py",
        "notes the digest with another object",
        '        if metadata.get("name") != self._name:\n',
        "        if False:\n",
        "tests/importer/commands/test_cron.py::test_answer_that_is_not_a_cron_is_reported",
    ),
    mutant(
        "importer/kubernetes/documents.py",
        "accepts a key of a manifest twice",
        "            if problem:\n",
        "            if False:\n",
        "tests/importer/kubernetes/test_datavolume.py::test_malformed_yaml_is_reported_by_line",
    ),
    mutant(
        "importer/kubernetes/datavolume.py",
        "accepts manifests with faults if there are several",
        ("    if faults:\n        raise errors.RequestError(*faults)\n    return volumes"),
        "    return volumes",
        "tests/importer/kubernetes/test_datavolume.py::test_faults_of_all_manifests_are_reported_by_name",
    ),
)
