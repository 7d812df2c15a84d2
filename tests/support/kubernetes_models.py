"""Validate objects against the models of the Kubernetes client: unknown, missing and mistyped fields."""

from __future__ import annotations

import functools
import re
from typing import Any

#: Object kinds and their models.
KINDS = {
    "PersistentVolumeClaim": "V1PersistentVolumeClaim",
    "Job": "V1Job",
    "Service": "V1Service",
    "Secret": "V1Secret",
    "ConfigMap": "V1ConfigMap",
    "Deployment": "V1Deployment",
}
SIMPLE = {"str": str, "bytes": str, "int": int, "bool": bool, "float": (int, float), "datetime": str}


@functools.cache
def _models() -> Any:
    import kubernetes.client.models

    return kubernetes.client.models


def faults(made: dict[str, Any]) -> list[str]:
    """Return the errors of form that the API server would report for an object."""
    return list(_check(made, KINDS[made["kind"]], made["kind"]))


def _check(value: Any, kind: str, path: str) -> Any:
    if found := re.fullmatch(r"[Ll]ist\[(.+)\]", kind):
        if not isinstance(value, list):
            yield f"{path}: {value!r} is no list"
            return
        for index, item in enumerate(value):
            yield from _check(item, found[1], f"{path}[{index}]")
    elif found := re.fullmatch(r"[Dd]ict[(\[](\w+), (.+)[)\]]", kind):
        for key, item in value.items():
            yield from _check(key, found[1], f"{path}: key {key!r}")
            yield from _check(item, found[2], f"{path}.{key}")
    elif kind in SIMPLE:
        if not isinstance(value, SIMPLE[kind]) or (kind == "int" and isinstance(value, bool)):
            yield f"{path}: {value!r} is no {kind}"
    elif kind != "object":
        yield from _check_model(value, getattr(_models(), kind), path)


def _check_model(value: Any, model: Any, path: str) -> Any:
    names = {json: python for python, json in model.attribute_map.items()}
    given = {}
    for name, item in value.items():
        if name not in names:
            yield f"{path}.{name}: unknown field of {model.__name__}"
            continue
        yield from _check(item, model.openapi_types[names[name]], f"{path}.{name}")
        given[names[name]] = item
    try:
        # The constructor raises if a required field is missing.
        model(**given)
    except ValueError as err:
        yield f"{path}: {err}"
