"""The kustomize component, applied to the operator's deployment as in CDI's releases."""

from __future__ import annotations

import re
from typing import Any

import yaml

from tests.support import kubernetes_schemas, repository

DEPLOY = repository.ROOT / "deploy"
#: The releases of CDI with these variables in the Deployment of their cdi-operator.yaml.
RELEASES = ("1.65", "1.66")
VARIABLES = (
    "DEPLOY_CLUSTER_RESOURCES", "OPERATOR_VERSION", "CONTROLLER_IMAGE", "IMPORTER_IMAGE", "CLONER_IMAGE",
    "OVIRT_POPULATOR_IMAGE", "APISERVER_IMAGE", "UPLOAD_SERVER_IMAGE", "UPLOAD_PROXY_IMAGE", "VERBOSITY",
    "PULL_POLICY", "MONITORING_NAMESPACE",
)  # fmt: skip


def load(name: str) -> Any:
    """Return a YAML document below ``deploy``."""
    return yaml.safe_load((DEPLOY / name).read_text())


def set_field(value: Any, path: list[str], new: str) -> None:
    """Set a field as kustomize's replacements do: ``[name=x]`` selects an item of a list."""
    step, *rest = path
    key: Any = step
    if found := re.fullmatch(r"\[name=(.+)\]", step):
        key = next(index for index, item in enumerate(value) if item["name"] == found[1])
    if rest:
        set_field(value[key], rest, new)
    else:
        assert key in value
        value[key] = new


def test_component_replaces_only_worker_images() -> None:
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
                set_field(operator, path.split("."), image)
    assert kubernetes_schemas.faults(operator) == []
    replaced_variables = {item["name"] for item in container["env"] if item["value"] == image}
    assert replaced_variables == {
        "IMPORTER_IMAGE",
        "UPLOAD_SERVER_IMAGE",
        "CLONER_IMAGE",
        "OVIRT_POPULATOR_IMAGE",
    }


def test_component_adds_no_objects_to_the_cluster() -> None:
    """The only resource is local to kustomize; there is no service account or role."""
    assert load("worker/kustomization.yaml")["resources"] == ["image.yaml"]
    assert load("worker/image.yaml")["metadata"]["annotations"] == {
        "config.kubernetes.io/local-config": "true"
    }


def test_releases_are_those_of_the_pages() -> None:
    """One of them is installed; the commands that go back name the same."""
    assert re.findall(r"CDI (1\.\d+) and (1\.\d+)", (DEPLOY / "README.md").read_text()) == [RELEASES]
    page = (repository.ROOT / "docs/pods/kubernetes.md").read_text()
    named = set(re.findall(r"\bv(1\.\d+)\.\d+\b", (DEPLOY / "kustomization.yaml").read_text() + page))
    assert named == {RELEASES[-1]}
