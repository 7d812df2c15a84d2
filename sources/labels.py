"""Labels that a container image carries for its disk, in its environment variables."""

from __future__ import annotations

from collections.abc import Iterable

MARK = "KUBEVIRT_IO_"


def from_environment(variables: Iterable[object]) -> dict[str, str]:
    """Return the labels in ``K=V`` strings of a container's environment (contract, Labels).

    ``KUBEVIRT_IO_FOO_BAR`` is ``kubevirt.io/foo-bar``; what stands before is a prefix in dotted
    parts: ``INSTANCETYPE_KUBEVIRT_IO_X`` is ``instancetype.kubevirt.io/x``.
    """
    labels = {}
    for variable in variables:
        if not isinstance(variable, str):
            continue
        name, equals, value = variable.partition("=")
        prefix, mark, rest = name.partition(MARK)
        if equals and mark and rest:
            dotted = prefix.lower().replace("_", ".")
            labels[f"{dotted}kubevirt.io/{rest.lower().replace('_', '-')}"] = value
    return labels
