"""Changed areas meet allocation, and what VDDK says is understood."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from importer import errors
from sources import base, vddk, vddk_disk

MiB, GiB = 1 << 20, 1 << 30
Areas = list[tuple[int, int]]


def runs(*lengths: int, start: int = 0) -> list[base.Extent]:
    """Return runs of alternating kinds, data first."""
    found, offset = [], start
    for number, length in enumerate(lengths):
        found.append(base.Extent(offset, length, zero=bool(number % 2)))
        offset += length
    return found


def test_areas_are_cut_where_allocation_changes() -> None:
    assert list(vddk.overlay([(5, 10), (25, 5)], iter(runs(10, 10, 20)))) == [
        base.Extent(5, 5, zero=False),
        base.Extent(10, 5, zero=True),
        base.Extent(25, 5, zero=False),
    ]


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=9),
    st.lists(st.integers(1, 40), min_size=5, max_size=30),
)
def test_every_byte_of_an_area_comes_once_and_as_what_it_is(gaps: Areas, lengths: list[int]) -> None:
    areas, end = [], 0
    for gap, length in gaps:
        areas.append((end + gap, length))
        end += gap + length
    lengths.append(max(1, end - sum(lengths)))
    kinds = [extent.zero for extent in runs(*lengths) for _ in range(extent.length)]
    found = list(vddk.overlay(areas, iter(runs(*lengths))))
    bytes_of = [offset for extent in found for offset in range(extent.offset, extent.offset + extent.length)]
    assert bytes_of == [offset for start, length in areas for offset in range(start, start + length)]
    assert all(
        kinds[offset] == extent.zero
        for extent in found
        for offset in range(extent.offset, extent.offset + extent.length)
    )


@pytest.mark.parametrize("told", [runs(10, 5), runs(10, 5, start=20), []])
def test_allocation_that_is_not_told_is_an_error(told: list[base.Extent]) -> None:
    with pytest.raises(errors.SourceError, match="no extents from byte"):
        list(vddk.overlay([(12, 10)], iter(told)))


@pytest.mark.parametrize(
    ("areas", "pieces"),
    [
        ([], []),
        ([(5, 1)], [(5, 6)]),
        ([(0, MiB), (GiB, MiB)], [(0, GiB + MiB)]),
        ([(0, MiB), (GiB + MiB + 1, 1)], [(0, MiB), (GiB + MiB + 1, GiB + MiB + 2)]),
    ],
)
def test_allocation_is_asked_for_near_areas(areas: Areas, pieces: Areas) -> None:
    assert list(vddk.pieces(areas)) == pieces


def test_version_and_host_are_told() -> None:
    said = vddk_disk.Log("disk")
    said.line("nbdkit: debug: VMware VixDiskLib (7.0.3) Release build-18705163")
    said.line(
        "nbdkit: vddk[1]: debug: DISKLIB-LINK  : Opened 'vpxa-nfcssl://[a@b] test/test.vmdk@esx15.lan:902'"
        " (0xa): custom, 50331648 sectors / 24 GB."
    )
    assert said.info == {"Version": "7.0.3", "Host": "esx15.lan"}


def test_the_words_that_come_late_are_waited_for() -> None:
    said = vddk_disk.Log("disk")
    threading.Timer(0.05, said.line, ["nbdkit: vddk[1]: error: VixDiskLib_Open: Out of memory"]).start()
    found = said.explained(errors.Transient(url="disk", reason="reset"))
    assert isinstance(found, errors.Transient)
    assert str(found) == "disk: reset (VDDK: VixDiskLib_Open: Out of memory)"


WITHOUT = """
import sys
sys.modules["pyVmomi"] = None
import importer
from importer import errors
location = importer.Location("https://localhost", uuid="u", backing_file="f", vddk_libdir=sys.argv[1])
try:
    importer.run(importer.Request(source="vddk", location=location, target=f"{sys.argv[1]}/disk.img"))
except errors.MissingExtra as err:
    print(err)
"""


def test_pyvmomi_is_named_where_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libvixDiskLib.so.8").touch()
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, tmp_path],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "pip install 'cdi-worker[vddk]'" in done.stdout
