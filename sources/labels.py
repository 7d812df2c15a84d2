"""Labels of a disk, taken from the environment variables of its container image."""

from __future__ import annotations

MARK = "KUBEVIRT_IO_"


def from_environment(variables: object) -> dict[str, str]:
    """Return the labels in the environment of a container, a list of ``K=V`` strings (contract, Labels).

    ``KUBEVIRT_IO_FOO_BAR`` becomes ``kubevirt.io/foo-bar``; a prefix becomes leading dotted parts:
    ``INSTANCETYPE_KUBEVIRT_IO_X`` becomes ``instancetype.kubevirt.io/x``.
    """
    labels = {}
    for variable in variables if isinstance(variables, list) else ():
        if not isinstance(variable, str):
            continue
        name, equals, value = variable.partition("=")
        prefix, mark, rest = name.partition(MARK)
        if equals and mark and rest:
            dotted = prefix.lower().replace("_", ".")
            labels[f"{dotted}kubevirt.io/{rest.lower().replace('_', '-')}"] = value
    return labels
