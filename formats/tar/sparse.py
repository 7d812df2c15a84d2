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

from cdi_worker.formats import readers
from cdi_worker.formats.tar import headers

#: Maximum extents of one file; 64 MiB of memory.
MAX_EXTENTS = 4 << 20

_VERSION = (b"GNU.sparse.major", b"GNU.sparse.minor")
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
    room, more = 4, block[482]
    while more:
        room += 21
        _check_count(room)  # the blocks may be empty, without end
        block = take(headers.BLOCK)
        _add(extents, block[:504])
        more = block[504]
    return extents, size


def of(
    raw: headers.Raw, records: dict[bytes, bytes], extended: bytes, stored: int, take: Take
) -> tuple[Map, int, int]:
    """Parse the map of a sparse file in any format, and check it.

    ``raw``, ``records``, ``extended``: its header and the extended header before it. ``stored``: bytes of the
    entry. Return the map, the size of the file and the length of its data in the archive. Raises
    ``errors.Corrupt``, and ``errors.Refused`` for an unknown format.
    """
    if raw.type == headers.SPARSE:
        extents, size = gnu(raw.block, take)
    else:
        key = b"GNU.sparse.realsize"
        size = headers.decimal(records, key if key in records else b"GNU.sparse.size")
        version = tuple(records.get(key) for key in _VERSION)
        if version == (b"1", b"0"):
            extents, taken = pax(stored, take)
            stored -= taken
        elif version == (None, None):
            extents = listed(records, extended)
        else:
            reason = "a sparse file has an unknown format; use tar --sparse-version=1.0"
            raise headers.refused("sparse", reason)
    end = total = 0
    for offset, length in pairs(extents):
        if offset < end:
            raise headers.corrupt("the extents of a sparse file overlap")
        end = offset + length
        total += length
    if end > size or size >= 1 << 63 or total != stored:
        raise headers.corrupt("the map of a sparse file contradicts its size")
    return extents, size, stored


def pax(stored: int, take: Take) -> tuple[Map, int]:
    """Parse a map in pax format 1.0: decimal numbers in lines before the data, padded to a block.

    GNU tar manual, "PAX Format, Version 1.0". ``stored``: bytes of the entry, including the map. Return the
    map and its length in bytes.
    """
    numbers = _numbers(stored, take)
    count, length = next(numbers)
    _check_count(count)
    extents = array.array("Q")
    for value, digits in itertools.islice(numbers, 2 * count):
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


def pairs(extents: Map) -> Iterator[tuple[int, int]]:
    """Yield (offset, length) of each extent."""
    values = iter(extents)
    return zip(values, values, strict=True)


def runs(
    reader: readers.Reader, extents: Map, size: int, buffers: Iterator[memoryview]
) -> Iterator[int | memoryview]:
    """Yield a file of ``size`` bytes as runs: the lengths of its holes, and the data read by ``reader``."""
    at = 0
    for offset, length in pairs(extents):
        if offset > at:
            yield offset - at
        at, end = offset, offset + length
        while at < end:
            buffer = next(buffers)[: end - at]
            count = reader.readinto(buffer)
            yield buffer[:count]
            at += count
    if size > at:
        yield size - at


def _add(extents: Map, slots: bytes) -> None:
    for at in range(0, len(slots), _SLOT):
        if not slots[at]:
            break
        for field in (slots[at : at + 12], slots[at + 12 : at + _SLOT]):
            value = headers.number(field)
            if not 0 <= value < 1 << 63:
                raise headers.corrupt(f"a sparse file has an extent with the offset or length {value}")
            extents.append(value)


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


def _numbers(stored: int, take: Take) -> Iterator[tuple[int, int]]:
    """Yield each number and the length of its line in bytes."""
    rest = b""
    for _ in range(stored // headers.BLOCK):
        *lines, rest = (rest + take(headers.BLOCK)).split(b"\n")
        for line in lines:
            if not _DECIMAL.fullmatch(line):
                raise headers.corrupt("a sparse map is malformed")
            yield int(line), len(line) + 1
        if len(rest) > headers.BLOCK:
            break  # no number is that long; reading on would use unbounded memory
    raise headers.corrupt("a sparse map is malformed")


def _check_count(count: int) -> None:
    if count > MAX_EXTENTS:
        raise headers.refused("sparse", f"a file has more than {MAX_EXTENTS} extents")
