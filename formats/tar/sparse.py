"""Sparse files in a tar: which parts of the file are in the archive.

A map is an array of offset, length, offset, … in bytes: 16 bytes of memory for a run, where a list of
tuples takes ten times as much.
"""

from __future__ import annotations

import array
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

from cdi_worker import errors
from cdi_worker.formats.tar import headers

#: Of one file; 64 MiB of memory.
MAX_RUNS = 4 << 20

_DECIMAL = re.compile(rb"[0-9]{1,19}")
_SLOT = 24

Take = Callable[[int], bytes]
Map: TypeAlias = "array.array[int]"  # Python 3.11 has no array.array[int]


def gnu(block: bytes, take: Take) -> tuple[Map, int]:
    """Read a map in GNU's own format: 4 runs in the header ``block``, 21 in each block after it.

    ``take`` returns the next bytes of the archive. Return the map and the size of the file.
    """
    size = headers.number(block[483:495])
    runs = array.array("Q")
    slots, more = block[386:482], block[482]
    _add(runs, slots)
    while more:
        block = take(headers.BLOCK)
        slots, more = block[:504], block[504]
        _add(runs, slots)
        _check_count(len(runs) // 2)
    return runs, size


def pax(stored: int, take: Take) -> tuple[Map, int]:
    """Read a map of pax 1.0: decimal lines before the data, padded to a block.

    ``stored``: bytes of the entry, map included. Return the map and the bytes that it took.
    """
    lines = _lines(stored, take)
    count, length = _line(lines)
    _check_count(count)
    runs = array.array("Q")
    for _ in range(2 * count):
        value, digits = _line(lines)
        runs.append(value)
        length += digits
    return runs, -(-length // headers.BLOCK) * headers.BLOCK


def check(runs: Map, size: int, stored: int) -> None:
    """Check that a map is in order, within the file, and what is stored. Raises ``errors.Corrupt``."""
    end = total = 0
    for offset, length in pairs(runs):
        if offset < end:
            raise headers.corrupt("the runs of a sparse file overlap")
        end = offset + length
        total += length
    if end > size or total != stored:
        raise headers.corrupt("the map of a sparse file contradicts its size")


def pairs(runs: Map) -> Iterator[tuple[int, int]]:
    """Yield offset and length of each run."""
    values = iter(runs)
    return zip(values, values, strict=True)


def _add(runs: Map, slots: bytes) -> None:
    for at in range(0, len(slots), _SLOT):
        if not slots[at]:
            break
        runs.append(_positive(slots[at : at + 12]))
        runs.append(_positive(slots[at + 12 : at + _SLOT]))


def _positive(field: bytes) -> int:
    value = headers.number(field)
    if not 0 <= value < 1 << 63:
        raise headers.corrupt(f"a sparse file has a run at or of {value} bytes")
    return value


def _lines(stored: int, take: Take) -> Iterator[bytes]:
    rest = b""
    for _ in range(stored // headers.BLOCK):
        *lines, rest = (rest + take(headers.BLOCK)).split(b"\n")
        yield from lines
        if len(rest) > headers.BLOCK:
            return  # no number is that long, and a line without an end takes all memory


def _line(lines: Iterator[bytes]) -> tuple[int, int]:
    """Return the next number and the bytes that it took."""
    line = next(lines, b"")
    if not _DECIMAL.fullmatch(line):
        raise headers.corrupt("a sparse map is malformed")
    return int(line), len(line) + 1


def _check_count(count: int) -> None:
    if count > MAX_RUNS:
        raise errors.Refused(format="tar", rule="sparse", reason=f"a file has more than {MAX_RUNS} runs")
