"""Kubernetes quantities, and the contract's arithmetic of volume sizes."""

from __future__ import annotations

import contextlib
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import units
from tests.support import worker


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
        "1e-31",
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
    with pytest.raises(ValueError, match=r"is not a quantity such as|is out of range"):
        units.parse_quantity(text)


@given(st.text(max_size=12))
def test_any_text_is_a_quantity_or_refused(text: str) -> None:
    with contextlib.suppress(ValueError):
        assert 0 <= units.parse_quantity(text) < 1 << 63


@pytest.mark.parametrize(
    ("available", "overhead", "usable"),
    [
        (1 << 30, "0", 1 << 30),
        (1 << 30, "0.06", 966 << 20),
        ((1 << 30) + 1, "0", 1 << 30),
        ((1 << 20) - 1, "0", 0),
        (1 << 30, "0.5", 682 << 20),
        # 1 MiB is 1111490.56 with this overhead: CDI rounds the quotient up.
        (1_111_490, "0.06", 1 << 20),
        (1_111_489, "0.06", 0),
    ],
)
def test_usable_space_subtracts_the_overhead(available: int, overhead: str, usable: int) -> None:
    assert units.usable_space(available, Fraction(overhead)) == usable


@given(st.integers(0, 1 << 62))
def test_no_overhead_is_a_number_too(available: int) -> None:
    assert units.usable_space(available, 0) == units.usable_space(available, Fraction(0))
    assert units.volume_size(available, 0) == units.volume_size(available, Fraction(0))


@given(st.integers(1, 1 << 50), st.fractions(0, Fraction(99, 100), max_denominator=1000))
def test_volume_of_the_suggested_size_is_sufficient(size: int, overhead: Fraction) -> None:
    volume = units.volume_size(size, overhead)
    assert volume % units.MIB == 0
    assert units.usable_space(volume, overhead) >= size


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("10GB", "write 10Gi for powers of 1024, 10G for powers of 1000"),
        ("10g", "write 10Gi for powers of 1024, 10G for powers of 1000"),
        ("10GiB", "write 10Gi for powers of 1024"),
        ("1.5 KB", "write 1.5Ki for powers of 1024, 1.5k for powers of 1000"),
        ("ten", ""),
    ],
)
def test_size_as_other_tools_write_it_has_a_hint(text: str, hint: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity such as") as caught:
        units.parse_quantity(text)
    assert str(caught.value).endswith(f"; {hint}" if hint else "1e9")


def test_size_is_not_rounded_to_1024_of_a_unit() -> None:
    sizes = [(1 << 20) - 1, (1 << 30) - 1, (1 << 40) - 1, 1023 << 20]
    assert [units.format_size(size) for size in sizes] == ["1.0 MiB", "1.0 GiB", "1.0 TiB", "1023.0 MiB"]
    assert units.format_exactly(10**10) == "10000000000 bytes (9.3 GiB)"


@pytest.mark.parametrize(
    ("text", "size", "shown"),
    [
        ("10M", 10_000_384, "10000384 bytes (9.5 MiB)"),
        ("10Mi", 10 << 20, "10485760 bytes (10.0 MiB)"),
        ("1e7", 10_000_384, "10000384 bytes (9.5 MiB)"),
    ],
)
def test_commands_agree_on_a_size(tmp_path: Path, text: str, size: int, shown: str) -> None:
    """blank, --size, inspect and messages: the same units, rounded up to sectors."""
    image, disk = tmp_path / "image", tmp_path / "disk.img"
    image.write_bytes(b"x" * 4096)
    for command in (("blank", disk, text), ("import", image, disk, "--size", text)):
        done = worker.call(*command, "--force")
        assert (done.status, disk.stat().st_size) == (0, size), done.errors
        assert f"disk  {shown}" in done.output
    assert f"virtual size  {shown}" in worker.call("inspect", disk).output
    done = worker.call("import", disk, tmp_path / "small.img", "--size", "1Mi")
    assert f"the disk needs {shown}" in done.error_message
    assert len(worker.run("import", image, "-", "--size", text).output) == size


def test_sizes_are_formatted_with_units() -> None:
    assert [units.format_size(size) for size in (0, 1023, 1536, 10 << 30, 3 << 50)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "10.0 GiB",
        "3072.0 TiB",
    ]
