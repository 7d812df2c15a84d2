"""Validate objects against the schemas that Kubernetes and Kueue publish; unknown fields are errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: The oldest release that the documentation names. Fields are added to its API versions, never removed.
OLDEST = "1.29"
#: Made by tools/schemas. The rules between fields (x-kubernetes-validations) are not in it.
KUEUE = Path(__file__).with_name("kueue.json")
KUEUE_VERSION = "kueue.x-k8s.io/v1beta1"


def faults(made: dict[str, Any]) -> list[str]:
    """Return the errors of form that the API servers of the oldest and the latest release would report."""
    if made["apiVersion"] == KUEUE_VERSION:
        return list(_kueue_faults(made))
    from kubernetes_validate import utils

    return [fault for version in (OLDEST, utils.latest_version()) for fault in _faults(made, version)]


def _faults(made: dict[str, Any], version: str) -> Iterator[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(made, version, strict=True)
    except kubernetes_validate.ValidationError as err:
        path = ".".join(str(step) for step in err.absolute_path)
        yield f"{version}: {path}: {err.message}"


def _kueue_faults(made: dict[str, Any]) -> Iterator[str]:
    import jsonschema

    schema = json.loads(KUEUE.read_bytes())["kinds"][made["kind"]]
    for err in jsonschema.Draft202012Validator(schema).iter_errors(made):
        yield f"{KUEUE_VERSION}: {err.json_path}: {err.message}"
