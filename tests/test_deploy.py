"""The kustomize component, applied to the operator's deployment as CDI's releases have it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from tests.support import kubernetes_models

DEPLOY = Path(__file__).parents[1] / "deploy"
#: The variables of cdi-operator in release 1.65.
VARIABLES = (
    "CONTROLLER_IMAGE", "IMPORTER_IMAGE", "CLONER_IMAGE", "OVIRT_POPULATOR_IMAGE", "APISERVER_IMAGE",
    "UPLOAD_SERVER_IMAGE", "UPLOAD_PROXY_IMAGE", "VERBOSITY", "PULL_POLICY",
)  # fmt: skip


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def replaced(value: Any, path: list[str], new: str) -> None:
    """Set one field as kustomize's replacements do: ``[name=x]`` chooses from a list."""
    step, *rest = path
    chosen: Any = step
    if found := re.fullmatch(r"\[name=(.+)\]", step):
        chosen = next(index for index, item in enumerate(value) if item["name"] == found[1])
    if rest:
        replaced(value[chosen], rest, new)
    else:
        assert chosen in value
        value[chosen] = new


def test_worker_images_and_no_others() -> None:
    container = {"name": "cdi-operator", "env": [{"name": name, "value": "theirs"} for name in VARIABLES]}
    labels = {"name": "cdi-operator"}
    operator = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "cdi-operator", "namespace": "cdi"},
        "spec": {
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": {"containers": [container]}},
        },
    }
    image = load("worker/image.yaml")["data"]["image"]
    for replacement in load("worker/kustomization.yaml")["replacements"]:
        for target in replacement["targets"]:
            assert target["select"] == {"kind": "Deployment", "name": operator["metadata"]["name"]}
            for path in target["fieldPaths"]:
                replaced(operator, path.split("."), image)
    assert kubernetes_models.faults(operator) == []
    ours = {item["name"] for item in container["env"] if item["value"] == image}
    assert ours == {"IMPORTER_IMAGE", "UPLOAD_SERVER_IMAGE", "CLONER_IMAGE"}


def test_nothing_of_ours_goes_to_the_cluster() -> None:
    """No account, no role: the one object is local to kustomize."""
    assert load("worker/kustomization.yaml")["resources"] == ["image.yaml"]
    assert load("worker/image.yaml")["metadata"]["annotations"] == {
        "config.kubernetes.io/local-config": "true"
    }
