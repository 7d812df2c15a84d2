"""Labels from the environment of a container (contract, Labels)."""

from __future__ import annotations

import pytest

from cdi_worker.sources import labels


@pytest.mark.parametrize(
    ("variable", "label"),
    [
        ("KUBEVIRT_IO_FOO_BAR", "kubevirt.io/foo-bar"),
        ("KUBEVIRT_IO_X", "kubevirt.io/x"),
        ("INSTANCETYPE_KUBEVIRT_IO_DEFAULT_PREFERENCE", "instancetype.kubevirt.io/default-preference"),
        ("A_B_KUBEVIRT_IO_C_D_E", "a.b.kubevirt.io/c-d-e"),
    ],
)
def test_variable_becomes_a_label(variable: str, label: str) -> None:
    assert labels.from_environment([f"{variable}=Some Value=1"]) == {label: "Some Value=1"}


@pytest.mark.parametrize(
    "variable",
    ["PATH=/bin", "KUBEVIRT_IO=x", "KUBEVIRT_IO_=x", "KUBEVIRT_IO_X", "HOME=KUBEVIRT_IO_X", "", None, 7],
)
def test_other_variable_is_not_a_label(variable: object) -> None:
    assert labels.from_environment([variable, "KUBEVIRT_IO_GOOD=1"]) == {"kubevirt.io/good": "1"}
