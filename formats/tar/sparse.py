"""Parse the maps of sparse files in a tar archive: which extents of a file are in the archive.

A map is an array of offset, length, offset, … in bytes: 16 bytes of memory per extent, a tenth of a list of
tuples.
"""

from __future__ import annotations

import array
import itertools
import re
from collections.abc import Callable, Iterator
from typing import TypeAlias

from cdi_worker import errors
from cdi_worker.formats.tar import headers

#: Maximum extents of one file; 64 MiB of memory.
MAX_EXTENTS = 4 << 20

_DECIMAL = re.compile(rb"[0-9]{1,19}")
_SLOT = 24

Take = Callable[[int], bytes]
Map: TypeAlias = "array.array[int]"  # quoted: array.array is not generic at run time in Python 3.11


def gnu(block: bytes, take: Take) -> tuple[Map, int]:
    """Parse a map in old GNU format: 4 extents in the header ``block``, 21 in each block after it.

    GNU tar manual, "Old GNU Format": ``sp`` is at byte 386, ``isextended`` at 482, ``realsize`` at 483.
    ``take`` returns the next bytes of the archive. Return the map and the size of the file.
    """
    size = headers.number(block[483:495])
    extents = array.array("Q")
    _add(extents, block[386:482])
    for more in continued(block, take):
        _add(extents, more[:504])
    return extents, size


def continued(block: bytes, take: Take) -> Iterator[bytes]:
    """Yield the blocks of a map in old GNU format that follow its header ``block``.

    Raises ``errors.Refused`` for a map with room for too many extents, which need not be in it.
    """
    count, more = 4, block[482]
    while more:
        count += 21
        _check_count(count)
        block = take(headers.BLOCK)
        yield block
        more = block[504]


def pax(stored: int, take: Take) -> tuple[Map, int]:
    """Parse a map in pax format 1.0: decimal numbers in lines before the data, padded to a block.

    GNU tar manual, "PAX Format, Version 1.0". ``stored``: bytes of the entry, including the map. Return the
    map and its length in bytes.
    """
    lines = _lines(stored, take)
    count, length = _line(lines)
    _check_count(count)
    extents = array.array("Q")
    for _ in range(2 * count):
        value, digits = _line(lines)
        extents.append(value)
        length += digits
    return extents, -(-length // headers.BLOCK) * headers.BLOCK


def listed(records: dict[bytes, bytes], header: bytes) -> Map:
    """Parse a map in pax format 0.1 or 0.0: in the ``records`` of the extended ``header``.

    GNU tar manual, "PAX Format, Versions 0.0 and 0.1": 0.1 has one record GNU.sparse.map,
    "offset,length,…"; 0.0 repeats GNU.sparse.offset and GNU.sparse.numbytes.
    """
    text = records.get(b"GNU.sparse.map")
    extents = array.array("Q")
    for value in _repeated(header) if text is None else _members(text):
        if not _DECIMAL.fullmatch(value):
            raise headers.corrupt("a sparse map is malformed")
        extents.append(int(value))
    if records.get(b"GNU.sparse.numblocks") != b"%d" % (len(extents) // 2) or len(extents) % 2:
        raise headers.corrupt("a sparse map has another length than stated")
    return extents


def check(extents: Map, size: int, stored: int) -> None:
    """Check that extents are ascending, within the file, and ``stored`` bytes in all.

    Raises ``errors.Corrupt``.
    """
    end = total = 0
    for offset, length in pairs(extents):
        if offset < end:
            raise headers.corrupt("the extents of a sparse file overlap")
        end = offset + length
        total += length
    if end > size or size >= 1 << 63 or total != stored:
        raise headers.corrupt("the map of a sparse file contradicts its size")


def pairs(extents: Map) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each extent."""
    values = iter(extents)
    return zip(values, values, strict=True)


def _add(extents: Map, slots: bytes) -> None:
    for at in range(0, len(slots), _SLOT):
        if not slots[at]:
            break
        extents.append(_positive(slots[at : at + 12]))
        extents.append(_positive(slots[at + 12 : at + _SLOT]))


def _positive(field: bytes) -> int:
    value = headers.number(field)
    if not 0 <= value < 1 << 63:
        raise headers.corrupt(f"a sparse file has an extent with the offset or length {value}")
    return value


def _members(text: bytes) -> Iterator[bytes]:
    """Split at commas; a list of all members of a long map would use ten times its memory."""
    at = 0
    while (comma := text.find(b",", at)) >= 0:
        yield text[at:comma]
        at = comma + 1
    yield text[at:]


def _repeated(header: bytes) -> Iterator[bytes]:
    keys = itertools.cycle((b"GNU.sparse.offset", b"GNU.sparse.numbytes"))
    for key, value in headers.pairs(header):
        if key in headers.REPEATED:
            if key != next(keys):
                raise headers.corrupt("a sparse map is malformed")
            yield value


def _lines(stored: int, take: Take) -> Iterator[bytes]:
    rest = b""
    for _ in range(stored // headers.BLOCK):
        *lines, rest = (rest + take(headers.BLOCK)).split(b"\n")
        yield from lines
        if len(rest) > headers.BLOCK:
            return  # malformed: no number is that long; reading on would use unbounded memory


def _line(lines: Iterator[bytes]) -> tuple[int, int]:
    """Return the next number and the length of its line in bytes."""
    line = next(lines, b"")
    if not _DECIMAL.fullmatch(line):
        raise headers.corrupt("a sparse map is malformed")
    return int(line), len(line) + 1


def _check_count(count: int) -> None:
    if count > MAX_EXTENTS:
        raise errors.Refused(
            format="tar", rule="sparse", reason=f"a file has more than {MAX_EXTENTS} extents"
        )
