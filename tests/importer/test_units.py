"""Kubernetes quantities, and the contract's arithmetic of volume sizes."""

from __future__ import annotations

import contextlib
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors, units


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("1", 1),
        ("10Gi", 10 << 30),
        ("500M", 500_000_000),
        ("1e9", 10**9),
        ("1E9", 10**9),
        ("1E", 10**18),
        ("1.5Gi", 3 << 29),
        (".5Ki", 512),
        ("5.", 5),
        ("+1k", 1000),
        ("1e-3", 1),
        ("100m", 1),
        ("1500m", 2),
        ("7Ei", 7 << 60),
    ],
)
def test_quantity_is_parsed(text: str, size: int) -> None:
    assert units.parse_quantity(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        " 1",
        "1 Gi",
        "1gi",
        "1GB",
        "Gi",
        "-1",
        "1e",
        "1e99999",
        "0x10",
        "1Gi\n",
        "8Ei",
        "1_0",
        "\u0661",
        "9" * 5000,
        "1e" + "9" * 5000,
    ],
)
def test_malformed_quantity_is_refused(text: str) -> None:
    with pytest.raises(errors.RequestError):
        units.parse_quantity(text)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_refused(text: str) -> None:
    with contextlib.suppress(errors.RequestError):
        assert 0 <= units.parse_quantity(text) < 1 << 63


@pytest.mark.parametrize(
    ("available", "overhead", "usable"),
    [
        (1 << 30, "0", 1 << 30),
        (1 << 30, "0.06", 966 << 20),
        ((1 << 30) + 1, "0", 1 << 30),
        ((1 << 20) - 1, "0", 0),
        (1 << 30, "0.5", 682 << 20),
    ],
)
def test_usable_space_subtracts_the_overhead(available: int, overhead: str, usable: int) -> None:
    assert units.usable_space(available, Fraction(overhead)) == usable


@given(st.integers(1, 1 << 50), st.fractions(0, Fraction(99, 100), max_denominator=1000))
def test_volume_of_the_suggested_size_is_sufficient(size: int, overhead: Fraction) -> None:
    volume = units.volume_size(size, overhead)
    assert volume % units.MIB == 0
    assert units.usable_space(volume, overhead) >= size


def test_sizes_are_formatted_with_units() -> None:
    assert [units.format_size(size) for size in (0, 1023, 1536, 10 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "10.0 GiB",
        "3072.0 TiB",
    ]
