"""Read and write block maps of bmaptool, version 2.0: the mapped ranges of a disk with their checksums.

What a map does not list is not data: it reads as zeros. The format is described in bmaptool's BmapCreate.py.
Version 1.4 is the same; earlier ones have SHA-1 checksums or none.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterator, Mapping
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import smallxml, spans

#: Bytes of a map. A full disk of 64 TiB has 80 MiB (``longest``), a disk of 100 GiB has 10 MiB.
LARGEST: Final = 96 << 20
#: Bytes of a block in the maps that are written: bmaptool's default.
BLOCK: Final = 4096
ALGORITHM: Final = "sha256"
#: With the number of hex digits.
_ALGORITHMS: Final = {"sha256": 64, "sha512": 128}
#: bmaptool copies 1 MiB at a time, and fails for larger blocks.
_SMALLEST_BLOCK, _LARGEST_BLOCK = 512, 1 << 20
_FORM: Final = "block map"
_FIELDS: Final = (
    "ImageSize",
    "BlockSize",
    "BlocksCount",
    "MappedBlocksCount",
    "ChecksumType",
    "BmapFileChecksum",
)
#: Characters of an element, or between two. A SHA-512 checksum has 128.
_LONGEST_TEXT: Final = 4096
_IN_MAP: Final = ["bmap", "BlockMap"]
_NUMBER = re.compile(r"[0-9]{1,18}")
_RANGE = re.compile(r"([0-9]{1,18})(?:\s*-\s*([0-9]{1,18}))?")
_HEX = re.compile(r"[0-9A-Fa-f]*")
_VERSION = re.compile(r"1\.4|2\.[0-9]{1,9}")

#: Start and end in bytes, and the digest of the bytes between.
Range = tuple[int, int, bytes]


@dataclasses.dataclass(frozen=True, slots=True)
class Map:
    """The mapped ranges of a disk of ``size`` bytes, in order. They do not overlap.

    Each starts at a multiple of ``block_size``, and ends at one or at ``size``. ``algorithm``: the digests',
    by its name in hashlib.
    """

    size: int
    block_size: int
    ranges: tuple[Range, ...]
    algorithm: str = ALGORITHM

    def holes(self) -> Iterator[spans.Span]:
        """Yield start and end of what is not mapped, in order."""
        return spans.gaps(((start, end) for start, end, _ in self.ranges), 0, self.size)

    @property
    def mapped(self) -> int:
        """Bytes of all ranges."""
        return sum(end - start for start, end, _ in self.ranges)

    @property
    def mapped_blocks(self) -> int:
        """Blocks of all ranges."""
        block = self.block_size
        return sum(-(-end // block) - start // block for start, end, _ in self.ranges)


def longest(offset: int) -> int:
    """Return the longest range that is written at ``offset``, in bytes: a power of two.

    1 MiB, so that a difference has a place. Far behind in a large disk more, so that a map and the memory for
    it stay small at any size: 16 MiB behind 256 GiB, 256 MiB behind 4 TiB.
    """
    length = 1 << 20
    while offset >= length << 18:
        length <<= 4
    return length


def write(blocks: Map) -> bytes:
    """Return the file of a map."""
    count = -(-blocks.size // blocks.block_size)
    zeros = "0" * _ALGORITHMS[blocks.algorithm]
    text = f"""<?xml version="1.0" ?>
<!-- The mapped ranges of a disk, with their checksums. For bmaptool, and for cdi-worker. -->
<bmap version="2.0">
    <ImageSize> {blocks.size} </ImageSize>
    <BlockSize> {blocks.block_size} </BlockSize>
    <BlocksCount> {count} </BlocksCount>
    <MappedBlocksCount> {blocks.mapped_blocks} </MappedBlocksCount>
    <ChecksumType> {blocks.algorithm} </ChecksumType>
    <BmapFileChecksum> {zeros} </BmapFileChecksum>
    <BlockMap>
{"".join(_lines(blocks))}    </BlockMap>
</bmap>
""".encode()
    return text.replace(zeros.encode(), _digest(blocks.algorithm, text).encode(), 1)


def _lines(blocks: Map) -> Iterator[str]:
    for start, end, digest in blocks.ranges:
        first, last = start // blocks.block_size, (end - 1) // blocks.block_size
        yield f'<Range chksum="{digest.hex()}">{first}-{last}</Range>\n'


def _digest(algorithm: str, data: bytes) -> str:
    return hashlib.new(algorithm, data).hexdigest()


def parse(data: bytes) -> Map:
    """Return a map of at most ``LARGEST`` bytes. The caller bounds what it reads.

    Raises ``errors.Corrupt``, ``errors.Refused``, and ``errors.Unsupported`` for one without SHA-2 checksums.
    """
    reading = _Reading()
    if len(data) > LARGEST:
        raise _refused("size", f"it has more than {LARGEST >> 20} MiB")
    smallxml.parse(data, _FORM, _refused, start=reading.start, text=reading.text, end=reading.end)
    blocks = reading.map()
    stated = reading.fields["BmapFileChecksum"].lower()
    # As bmaptool does, which replaces the first occurrence.
    zeros = b"0" * len(stated)
    calculated = _digest(
        blocks.algorithm, data.replace(reading.fields["BmapFileChecksum"].encode(), zeros, 1)
    )
    if calculated != stated:
        raise _corrupt(f"its own checksum is {stated}, calculated {calculated}")
    return blocks


def _refused(rule: str, reason: str) -> errors.Refused:
    return errors.Refused(format=_FORM, rule=rule, reason=reason)


def _corrupt(reason: str) -> errors.Corrupt:
    return errors.Corrupt(format=_FORM, reason=reason)


class _Reading:
    """Collects the ranges of a map. Elements that bmaptool does not know are for later versions."""

    def __init__(self) -> None:
        self.fields: dict[str, str] = {}
        self._blocks: Map | None = None
        self._ranges: list[Range] = []
        self._digest = ""
        self._text = ""

    def start(self, name: str, attributes: Mapping[str, str], path: list[str]) -> None:
        """Take a start tag."""
        self._text = ""
        if name == "Range" and path == _IN_MAP:
            self._digest = attributes.get("chksum", "")
        elif not path:
            _check_version(name, attributes.get("version", ""))
        elif path[-1] in _FIELDS or path[-1] == "Range":
            raise _corrupt(f"{path[-1]} has an element in it")
        elif len(path) == 1 and name == "BlockMap":
            if self._blocks:
                raise _corrupt("it has two elements BlockMap")
            self._blocks = self._head()

    def text(self, text: str, _path: list[str]) -> None:
        """Take text."""
        self._text += text
        if len(self._text) > _LONGEST_TEXT:
            raise _corrupt(f"it has text of more than {_LONGEST_TEXT} characters")

    def end(self, path: list[str]) -> None:
        """Take an end tag."""
        name = path[-1]
        if name == "Range" and path[:-1] == _IN_MAP:
            self._ranges.append(self._range())
        elif len(path) == 2 and name in _FIELDS:
            if name in self.fields:
                raise _corrupt(f"it has two elements {name}")
            self.fields[name] = self._text.strip()

    def map(self) -> Map:
        """Return the map when all is read."""
        if self._blocks is None:
            raise _corrupt("it has no BlockMap")
        blocks = dataclasses.replace(self._blocks, ranges=tuple(self._ranges))
        if blocks.mapped_blocks != self._number("MappedBlocksCount"):
            count = self.fields["MappedBlocksCount"]
            raise _corrupt(f"its ranges have {blocks.mapped_blocks} blocks, not {count} (MappedBlocksCount)")
        return blocks

    def _head(self) -> Map:
        """Return what stands before the ranges, as a map without any."""
        if missing := [name for name in _FIELDS if name not in self.fields]:
            raise _corrupt(f"it has no {missing[0]} before the BlockMap")
        size, block, count = map(self._number, _FIELDS[:3])
        if not _SMALLEST_BLOCK <= block <= _LARGEST_BLOCK or block & (block - 1):
            raise _corrupt(f"BlockSize is {block}, not a power of two from 512 to 1048576")
        if size == 0:
            raise _corrupt("ImageSize is 0")
        if count != -(-size // block):
            raise _corrupt(f"{count} blocks of {block} bytes (BlocksCount) are not {size} bytes (ImageSize)")
        algorithm = self.fields["ChecksumType"]
        if algorithm not in _ALGORITHMS:
            reason = (
                f"block map with the checksum type {algorithm[:80]!r}; supported: {', '.join(_ALGORITHMS)}"
            )
            raise errors.Unsupported(reason=reason)
        self._number("MappedBlocksCount")
        _hex(self.fields["BmapFileChecksum"], algorithm)
        return Map(size, block, (), algorithm)

    def _range(self) -> Range:
        blocks = self._blocks or self._head()
        match = _RANGE.fullmatch(self._text.strip())
        if not match:
            raise _corrupt(f"{self._text.strip()[:80]!r} is not a range of blocks")
        first, last = int(match[1]), int(match[2] or match[1])
        block, size = blocks.block_size, blocks.size
        if last < first or last * block >= size:
            raise _corrupt(f"range {first}-{last} is not within the image of {size} bytes")
        if self._ranges and first * block < self._ranges[-1][1]:
            raise _corrupt(f"range {first}-{last} overlaps the one before it, or is out of order")
        if not self._digest:
            raise errors.Unsupported(
                reason="block map without checksums; make it again without --no-checksum"
            )
        return first * block, min((last + 1) * block, size), _hex(self._digest, blocks.algorithm)

    def _number(self, name: str) -> int:
        if not _NUMBER.fullmatch(self.fields[name]):
            raise _corrupt(f"{name} is {self.fields[name][:80]!r}, not a number of up to 18 digits")
        return int(self.fields[name])


def _hex(text: str, algorithm: str) -> bytes:
    if len(text) != _ALGORITHMS[algorithm] or not _HEX.fullmatch(text):
        raise _corrupt(
            f"the checksum {text[:200]!r} is not {_ALGORITHMS[algorithm]} hex digits ({algorithm})"
        )
    return bytes.fromhex(text)


def _check_version(name: str, version: str) -> None:
    if name != "bmap":
        raise _corrupt(f"the document is a {name[:80]!r}")
    if re.fullmatch(r"1\.[0-35-9]", version):
        reason = f"block map of version {version}, which has no SHA-256 checksums"
        raise errors.Unsupported(reason=f"{reason}; make it again with bmaptool 3.1 or later")
    if not _VERSION.fullmatch(version):
        raise errors.Unsupported(reason=f"block map of version {version[:80]!r}; supported: 2.0")
