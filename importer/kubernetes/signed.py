"""The annotations of a DataVolume that require a signature."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from cdi_worker import errors

#: The prefix of our annotations.
PREFIX: Final = "cdi-worker/"
#: Names a ConfigMap, all of whose entries are public keys. The other annotation is a value.
SIGNED_BY: Final = f"{PREFIX}signed-by"
#: The annotations, and the fields of ``trust.Demand``.
ANNOTATIONS: Final[Mapping[str, str]] = {
    SIGNED_BY: "signed_by",
    f"{PREFIX}checksum-file": "checksum_file",
}


def demand(annotations: Mapping[str, str], keys: Callable[[str, str], str]) -> dict[str, Any]:
    """Return what the annotations demand, by the fields of ``trust.Demand``.

    ``keys``: writes a file with the public keys in a ConfigMap, given where that is named, and its name.
    """
    values = {field: annotations[name] for name, field in ANNOTATIONS.items() if name in annotations}
    if SIGNED_BY in annotations:
        values["signed_by"] = keys(f"metadata.annotations[{SIGNED_BY}]", annotations[SIGNED_BY])
    return values


def faults(annotations: Mapping[str, str], others: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the names and faults of our malformed annotations; ``others``: those for other features.

    An unknown one may be a misspelled requirement, which must not be skipped.
    """
    for name in annotations:
        if name.startswith(PREFIX) and name not in ANNOTATIONS and name not in others:
            known = sorted(others | set(ANNOTATIONS))
            yield name, f"unknown; {errors.supported(name, known)}"
        elif name.startswith(PREFIX) and not annotations[name].strip():
            yield name, "is empty"
