"""Validate objects against the OpenAPI schemas that Kubernetes publishes; unknown fields are errors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

#: The oldest release that the documentation names. Fields are added to its API versions, never removed.
OLDEST = "1.29"


def faults(made: dict[str, Any]) -> list[str]:
    """Return the errors of form that the API servers of the oldest and the latest release would report."""
    from kubernetes_validate import utils

    return [fault for version in (OLDEST, utils.latest_version()) for fault in _faults(made, version)]


def _faults(made: dict[str, Any], version: str) -> Iterator[str]:
    import kubernetes_validate

    try:
        kubernetes_validate.validate(made, version, strict=True)
    except kubernetes_validate.ValidationError as err:
        path = ".".join(str(step) for step in err.absolute_path)
        yield f"{version}: {path}: {err.message}"
