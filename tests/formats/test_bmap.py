"""Block maps, with bmaptool as the oracle in both directions."""

from __future__ import annotations

import contextlib
import hashlib
import random
import subprocess
from pathlib import Path

import hypothesis
import pytest
from hypothesis import strategies

from cdi_worker import errors
from cdi_worker.formats import bmap
from tests.fuzz import sums
from tests.support import bmaptool

BLOCK, MiB = 4096, 1 << 20
DIGEST = hashlib.sha256(b"block").digest()
BLOCKS = bmap.Map(5 * BLOCK + 512, BLOCK, ((0, BLOCK, DIGEST), (2 * BLOCK, 5 * BLOCK + 512, DIGEST)))
TEXT = bmap.write(BLOCKS)


def _image(path: Path, seed: int) -> dict[int, bytes]:
    """Write a sparse image and return its blocks with data."""
    dice = random.Random(seed)
    count = dice.randrange(1, 600)
    blocks = {at: dice.randbytes(BLOCK) for at in range(count) if dice.random() < 0.3 or at == count - 1}
    with path.open("wb") as file:
        for at, data in blocks.items():
            file.seek(at * BLOCK)
            file.write(data)
        # Not always at the end of a block.
        file.truncate(count * BLOCK - dice.choice([0, 512, 3584]))
    return blocks


def _map(path: Path, blocks: dict[int, bytes]) -> bmap.Map:
    data = path.read_bytes()
    ends = [(at * BLOCK, min((at + 1) * BLOCK, len(data))) for at in sorted(blocks)]
    return bmap.Map(len(data), BLOCK, tuple((a, b, hashlib.sha256(data[a:b]).digest()) for a, b in ends))


@pytest.mark.parametrize("seed", range(5))
def test_bmaptool_copies_by_our_map(tmp_path: Path, seed: int) -> None:
    image, to = tmp_path / "image", tmp_path / "to"
    blocks = _image(image, seed)
    bmaptool.copy(image, bmap.write(_map(image, blocks)), to)
    # A new file, whose other blocks are holes.
    assert to.read_bytes() == image.read_bytes()


def test_bmaptool_verifies_our_checksums(tmp_path: Path) -> None:
    image, to = tmp_path / "image", tmp_path / "to"
    ours = bmap.write(_map(image, _image(image, 7)))
    changed = bytearray(image.read_bytes())
    changed[-1] ^= 1
    image.write_bytes(changed)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        bmaptool.copy(image, ours, to)
    assert "checksum mismatch for blocks range" in bmaptool.message(caught.value)
    with pytest.raises(subprocess.CalledProcessError) as caught:
        bmaptool.copy(image, ours.replace(b"chksum", b"chkSum"), to)
    assert "checksum mismatch for bmap file" in bmaptool.message(caught.value)


@pytest.mark.parametrize("seed", range(5))
def test_maps_of_bmaptool_are_read(tmp_path: Path, seed: int) -> None:
    image = tmp_path / "image"
    blocks, data = _image(image, seed), image.read_bytes()
    found = bmap.parse(bmaptool.create(image))
    assert (found.size, found.block_size, found.algorithm) == (len(data), BLOCK, "sha256")
    mapped = [at for start, end, _ in found.ranges for at in range(start // BLOCK, -(-end // BLOCK))]
    assert mapped == sorted(blocks)
    for start, end, digest in found.ranges:
        assert hashlib.sha256(data[start:end]).digest() == digest


def test_map_without_checksums_is_refused(tmp_path: Path) -> None:
    image = tmp_path / "image"
    _image(image, 1)
    with pytest.raises(errors.Unsupported, match="without checksums; make it again without --no-checksum"):
        bmap.parse(bmaptool.create(image, "--no-checksum"))


@hypothesis.given(
    strategies.integers(1, 1 << 50),
    strategies.sampled_from([512, 4096, MiB]),
    strategies.lists(strategies.integers(0, 1 << 40), max_size=8, unique=True),
    strategies.sampled_from(["sha256", "sha512"]),
)
def test_what_is_written_is_read(size: int, block: int, borders: list[int], algorithm: str) -> None:
    borders = [at * block for at in sorted(borders) if at * block < size]
    ends = [*borders[1:], size]
    digest = hashlib.new(algorithm, b"x").digest()
    ranges = tuple((start, end, digest) for start, end in zip(borders, ends, strict=False))[::2]
    blocks = bmap.Map(size, block, ranges, algorithm)
    assert bmap.parse(bmap.write(blocks)) == blocks


def test_single_blocks_and_version_1_4_are_read() -> None:
    """Version 1.4 was the first name of 2.0."""
    assert bmap.parse(_changed((b">0-0<", b"> 0 <"), (b"2.0", b"1.4"))) == BLOCKS


def test_elements_of_later_versions_are_ignored() -> None:
    changed = _changed((b"2.0", b"2.7"), (b"<BlockMap>", b"<New><Range>x</Range></New><BlockMap><New/>"))
    assert bmap.parse(changed) == BLOCKS


def test_changed_map_is_refused() -> None:
    with pytest.raises(errors.Corrupt, match=r"its own checksum is [0-9a-f]{64}, calculated [0-9a-f]{64}"):
        bmap.parse(TEXT.replace(DIGEST.hex().encode(), b"0" * 64, 1))


def _changed(*changes: tuple[bytes, bytes]) -> bytes:
    """Return a map with changes and the right checksum of itself."""
    text = TEXT
    for old, new in changes:
        assert old in text
        text = text.replace(old, new, 1)
    return sums.bmap(text)


HOSTILE = {
    "other size": (b"<ImageSize> 20992", b"<ImageSize> 24577", "6 blocks of 4096 bytes"),
    "other count": (b"<BlocksCount> 6", b"<BlocksCount> 7", "7 blocks of 4096 bytes"),
    "other mapped count": (b"<MappedBlocksCount> 5", b"<MappedBlocksCount> 4", "5 blocks, not 4"),
    "empty image": (b"<ImageSize> 20992", b"<ImageSize> 0", "ImageSize is 0"),
    "no blocks": (b"<BlockSize> 4096", b"<BlockSize> 0", "BlockSize is 0"),
    "odd blocks": (b"<BlockSize> 4096", b"<BlockSize> 4095", "BlockSize is 4095"),
    "small blocks": (b"<BlockSize> 4096", b"<BlockSize> 256", "BlockSize is 256"),
    "huge blocks": (b"<BlockSize> 4096", b"<BlockSize> 2097152", "BlockSize is 2097152"),
    "negative": (b"<BlockSize> 4096", b"<BlockSize> -4096", "not a number"),
    "digits": (b"<ImageSize> 20992", b"<ImageSize> " + b"9" * 3000, "not a number of up to 18 digits"),
    "other digits": (b"<ImageSize> 20992", "<ImageSize> \u0662".encode(), "not a number"),
    "more digits": (b"<ImageSize> 20992", b"<ImageSize> " + b"9" * 100_000, "text of more than 4096"),
    "out of order": (b">0-0<", b">5-5<", "overlaps the one before it, or is out of order"),
    "overlap": (b">0-0<", b">0-2<", "overlaps"),
    "twice": (b">2-5<", b">0-0<", "overlaps"),
    "backwards": (b">2-5<", b">5-2<", "range 5-2 is not within"),
    "beyond": (b">2-5<", b">2-6<", "range 2-6 is not within the image of 20992 bytes"),
    "range of digits": (b">0-0<", b">0-" + b"9" * 3000 + b"<", "is not a range"),
    "negative range": (b">0-0<", b">-1-0<", "is not a range"),
    "no range": (b">0-0<", b"><", "'' is not a range"),
    "unknown checksum": (b"> sha256 <", b"> crc32 <", "checksum type 'crc32'; supported: sha256, sha512"),
    "weak checksum": (b"> sha256 <", b"> md5 <", "checksum type 'md5'"),
    "other checksum": (b"> sha256 <", b"> sha512 <", "is not 128 hex digits"),
    "short checksum": (DIGEST.hex().encode(), DIGEST.hex()[:-1].encode(), "is not 64 hex digits"),
    "no checksum": (b"chksum", b"other", "without checksums"),
    "old": (b'"2.0"', b'"1.3"', "version 1.3, which has no SHA-256 checksums"),
    "new": (b'"2.0"', b'"3.0"', "version '3.0'; supported: 2.0"),
    "no version": (b'version="2.0"', b"", "version ''"),
    "no size": (b"ImageSize> 20992 </ImageSize", b"A> 20992 </A", "no ImageSize before the BlockMap"),
    "no map": (b"<BlockMap>", b"<BlockMap><BlockMap>", "mismatched tag"),
    "two sizes": (b"<BlockSize>", b"<ImageSize> 20992 </ImageSize><BlockSize>", "two elements ImageSize"),
    "two maps": (b"<BlockMap>", b"<BlockMap/><BlockMap>", "two elements BlockMap"),
    "split number": (b"<BlockSize> 40", b"<BlockSize> 40<x/>", "BlockSize has an element in it"),
    "split range": (b">0-0<", b">0<x/>-0<", "Range has an element in it"),
    "other document": (b"<bmap ", b'<map xmlns="a" ', "the document is a 'a map'"),
    "entities": (b"<bmap ", b'<!DOCTYPE bmap [<!ENTITY a "aaaa">]><bmap ', "document type"),
    "deep": (b"<BlockMap>", b"<a>" * 100_000, "more than 64 levels"),
    "encoding": (b'"1.0" ?>', b'"1.0" encoding="utf-7"?>', "encoding"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_map_is_refused(name: str) -> None:
    old, new, message = HOSTILE[name]
    with pytest.raises(errors.ImageError) as caught:
        bmap.parse(_changed((old, new)))
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_large_map_is_not_parsed() -> None:
    with pytest.raises(errors.Refused, match="more than 96 MiB"):
        bmap.parse(bytes(bmap.LARGEST + 1))


@hypothesis.given(
    strategies.binary(max_size=50), strategies.integers(0, len(TEXT)), strategies.integers(0, 50)
)
def test_damaged_map_raises_our_errors_only(junk: bytes, at: int, cut: int) -> None:
    with contextlib.suppress(errors.ImageError):
        bmap.parse(TEXT[:at] + junk + TEXT[at + cut :])


def test_map_of_a_large_full_disk_is_small_enough() -> None:
    """Ranges become longer far behind, so that the map of any disk can be read again."""
    count, at, size = 0, 0, 64 << 40
    while at < size:
        length = bmap.longest(at)
        assert at % length == 0
        step = length << 18
        count, at = count + (step - (at if length > MiB else 0)) // length, step
    line = len(f'<Range chksum="{DIGEST.hex()}">{size // BLOCK}-{size // BLOCK}</Range>\n')
    assert count * line + 1000 < bmap.LARGEST
