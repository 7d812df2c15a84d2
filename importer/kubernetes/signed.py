"""Our annotations of a DataVolume that demand a signature: what they are in a pod, and on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple

from cdi_worker import errors
from cdi_worker.importer import contract

#: Of all annotations of ours.
PREFIX: Final = "cdi-worker/"


class Annotation(NamedTuple):
    """An annotation. ``field``: of the demand. ``entry``: the key in the ConfigMap that it names.

    ``*``: all keys of the ConfigMap. Empty: its value is not a name, but the demand itself.
    """

    field: str
    entry: str = ""


ANNOTATIONS: Final[Mapping[str, Annotation]] = {
    f"{PREFIX}signed-by": Annotation("signed_by", "*"),
    f"{PREFIX}checksum-file": Annotation("checksum_file"),
    f"{PREFIX}map": Annotation("map"),
    f"{PREFIX}certificate-identity": Annotation("identity"),
    f"{PREFIX}certificate-oidc-issuer": Annotation("issuer"),
    f"{PREFIX}trusted-root": Annotation("trusted_root", "trusted_root.json"),
    f"{PREFIX}signature-annotation": Annotation("annotations"),
    f"{PREFIX}signature-policy": Annotation("policy", "policy.json"),
}


def given(annotations: Mapping[str, str]) -> Iterator[tuple[str, Annotation, str]]:
    """Yield the name, the meaning and the value of the annotations that demand a signature."""
    for name, meaning in ANNOTATIONS.items():
        if name in annotations:
            yield name, meaning, annotations[name]


def demand(annotations: Mapping[str, str], keep: Callable[[str, str, str], str]) -> dict[str, Any]:
    """Return what the annotations demand, by the fields of ``trust.Demand``.

    ``keep``: writes a file with an entry of a ConfigMap, given where it is named, its name and the entry.
    """
    values: dict[str, Any] = {}
    for name, meaning, value in given(annotations):
        if meaning.entry:
            values[meaning.field] = keep(f"metadata.annotations[{name}]", value, meaning.entry)
        elif meaning.field != "annotations":
            values[meaning.field] = value
        elif not [*faults({name: value}, frozenset())]:
            values[meaning.field] = pairs(value)
    return values


def faults(annotations: Mapping[str, str], others: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield the name and the fault of malformed annotations of ours; ``others``: those for other purposes.

    One that is not known may be a demand with a wrong name, which must not be skipped.
    """
    for name in annotations:
        if name.startswith(PREFIX) and name not in ANNOTATIONS and name not in others:
            known = sorted(others | set(ANNOTATIONS))
            yield name, f"unknown; {errors.supported(name, known)}"
        elif name.startswith(PREFIX) and not annotations[name].strip():
            yield name, "is empty"
    for name, meaning, value in given(annotations):
        if meaning.field == "annotations" and value.strip():
            try:
                pairs(value)
            except errors.RequestError as err:
                yield name, str(err)


def pairs(value: str) -> tuple[tuple[str, str], ...]:
    """Return the signed annotations that are demanded, one in each line."""
    return tuple(contract.parse_annotation(line) for line in value.splitlines() if line.strip())
