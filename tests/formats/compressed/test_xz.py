"""Blocks of xz in several threads: what one thread returns, and nothing of what is damaged."""

from __future__ import annotations

import contextlib
import functools
import itertools
import lzma
import random
import resource
import subprocess
import threading
import zlib

import hypothesis
import pytest
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import decompress, layers, xz
from tests.support import reading

KIB = 1 << 10
PLAIN = random.Random(3).randbytes(150 * KIB) + bytes(300 * KIB) + b"disk" * (40 * KIB)


@functools.cache
def blocks(data: bytes = PLAIN, size: str = "64KiB", check: str = "crc64") -> bytes:
    """Return data in blocks whose headers have their sizes."""
    argv = ["xz", "-0", "--threads=2", f"--block-size={size}", f"--check={check}", "--stdout"]
    return subprocess.run(argv, input=data, stdout=subprocess.PIPE, check=True).stdout


def plain(data: bytes, step: int = 1 << 20) -> bytes:
    return reading.read_all(decompress.open("xz", reading.ShortReads(data, step)), step)


@pytest.mark.parametrize("check", ["none", "crc32", "crc64", "sha256"])
@pytest.mark.parametrize(("size", "step"), [("4KiB", 1000), ("64KiB", 1), ("64KiB", 1 << 20), ("1GiB", 4096)])
def test_blocks_are_joined(check: str, size: str, step: int) -> None:
    assert plain(blocks(PLAIN, size, check), step) == PLAIN


def test_streams_of_every_kind_are_joined() -> None:
    streams = [blocks(), bytes(8), lzma.compress(PLAIN), lzma.compress(b""), blocks(b""), blocks(), bytes(4)]
    assert plain(b"".join(streams)) == PLAIN * 3


@pytest.mark.parametrize("memory", [1, 1 << 20, 1 << 30])
def test_blocks_that_need_more_memory_are_read_alone(memory: int) -> None:
    """The result is that of threads; a dictionary that does not fit is refused."""
    source = decompress.Members(decompress.KINDS["xz"], readers.BytesReader(blocks(PLAIN * 4, "400KiB")))
    stream = xz.Stream(source.take, memory)
    if memory == 1:
        with pytest.raises(lzma.LZMAError, match=r"[Mm]emory"):
            stream.decompress(b"", max_length=10)
        return
    found = bytearray()
    while not stream.eof:
        found += stream.decompress(b"", max_length=1000)
    assert found == PLAIN * 4


def test_start_is_known_before_the_first_block_is_whole() -> None:
    head = layers.look(blocks()[: 32 * KIB]).head
    assert len(head) > 16 * KIB
    assert PLAIN.startswith(head)


def test_input_cut_anywhere_is_truncated() -> None:
    data = blocks()
    for length in (*range(1, 300), *range(300, len(data), 997), *range(len(data) - 300, len(data))):
        with pytest.raises(errors.Truncated):
            plain(data[:length])


def test_bytes_after_the_end_are_garbage() -> None:
    for extra in (b"x", b"garbage that is longer", b"\xfd7zXZ", bytes(3)):
        with pytest.raises(errors.TrailingGarbage) as caught:
            plain(blocks() + extra)
        assert caught.value.fields == {"format": "xz", "offset": len(blocks())}


def test_flipped_bits_are_detected() -> None:
    data = blocks(PLAIN[: 8 * KIB] + bytes(9 * KIB), "4KiB")
    for position in range(len(data)):
        bad = bytearray(data)
        bad[position] ^= 1 << position % 8
        with pytest.raises(errors.Error):
            plain(bytes(bad))


def parts(data: bytes) -> tuple[bytes, list[bytes], bytes]:
    """Return the header of a stream, its blocks, and its index with the footer."""
    index = (int.from_bytes(data[-8:-4], "little") + 1) * 4 + 12
    at, found = 12, []
    while at < len(data) - index:
        header = data[at : at + 4 * data[at] + 4]
        length = len(header) + -(-xz._sizes(header)[0] // 4) * 4 + 8
        found.append(data[at : at + length])
        at += length
    return data[:12], found, data[at:]


def test_index_must_be_that_of_the_blocks() -> None:
    head, found, end = parts(blocks())
    assert plain(head + b"".join(found) + end) == PLAIN
    assert len({len(block) for block in found}) > 1
    for wrong in ([found[-1], *found[:-1]], found[:-1], [*found, found[-1]], found[1:]):
        with pytest.raises((errors.Corrupt, errors.Truncated)):
            plain(head + b"".join(wrong) + end)


@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("field", ["packed", "plain"])
@pytest.mark.parametrize("by", [-1, 1, 1 << 14, 1 << 40])
def test_sizes_of_a_header_must_be_true(number: int, field: str, by: int) -> None:
    """Sizes that are too large are an error before they are memory."""
    head, found, end = parts(blocks())
    block = found[number]
    length = 4 * block[0] + 4
    packed, content = xz._sizes(block[:length])
    numbers = (packed + by, content) if field == "packed" else (packed, content + by)
    filters = block[block.index(b"\x21\x01") : block.index(b"\x21\x01") + 3]
    header = block[1:2] + b"".join(map(xz._number, numbers)) + filters
    header += bytes(-(len(header) + 1) % 4)
    header = bytes([(len(header) + 1) // 4]) + header
    found[number] = header + zlib.crc32(header).to_bytes(4, "little") + block[length:]
    with pytest.raises((errors.Corrupt, errors.Truncated)):
        plain(head + b"".join(found) + end)


def test_sizes_of_some_blocks_are_not_enough() -> None:
    head, found, end = parts(blocks())
    without = lzma.compress(PLAIN)[12:]
    with pytest.raises(errors.Unsupported, match="sizes of some blocks"):
        plain(head + found[0] + without + end)


def test_check_of_an_unknown_type_is_refused() -> None:
    flags = b"\x00\x0b"
    head = b"\xfd7zXZ\x00" + flags + zlib.crc32(flags).to_bytes(4, "little")
    with pytest.raises(errors.Unsupported, match="checks of an unknown type"):
        plain(head + blocks()[12:])


def test_blocks_without_content_are_limited() -> None:
    empty = blocks(b"x")
    head, (block,), _ = parts(empty)
    length = 4 * block[0] + 4
    filters = block[block.index(b"\x21\x01") : block.index(b"\x21\x01") + 3]
    # An LZMA2 stream that ends at once.
    header = b"\xc0" + xz._number(1) + xz._number(0) + filters
    header += bytes(-(len(header) + 1) % 4)
    header = bytes([(len(header) + 1) // 4]) + header
    none = header + zlib.crc32(header).to_bytes(4, "little") + bytes(4 + 8)
    assert len(header) + 4 <= length + 4
    assert plain(head + none + xz._tail(1, xz._number(len(none) - 3) + b"\0", head[6:8])) == b""
    endless = itertools.chain([head], itertools.repeat(none * (1 << 12)))

    class Endless:
        def readinto(self, into: memoryview, /) -> int:
            return readers.BytesReader(next(endless)).readinto(into)

        def close(self) -> None: ...

    with pytest.raises(errors.Refused, match="no content"):
        reading.read_all(decompress.open("xz", Endless()))


def test_longest_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is kept until the end of the stream."""
    _, found, _ = parts(blocks())
    monkeypatch.setattr(xz, "_INDEX", 8 * len(found))
    assert plain(blocks()) == PLAIN
    monkeypatch.setattr(xz, "_INDEX", 4 * len(found))
    with pytest.raises(errors.Unsupported, match="compress it in larger blocks"):
        plain(blocks())


def test_closing_early_ends_the_threads() -> None:
    source = reading.ShortReads(blocks(bytes(64 << 20), "4MiB"), 1 << 20)
    before = set(threading.enumerate())
    reader = decompress.open("xz", source)
    for _ in range(6):
        assert reader.readinto(memoryview(bytearray(1 << 20)))
    assert set(threading.enumerate()) > before
    reader.close()
    assert set(threading.enumerate()) <= before
    assert source.closed


@pytest.mark.slow
@pytest.mark.parametrize("size", ["16MiB", "256MiB"])
def test_blocks_need_bounded_memory(size: str) -> None:
    """Threads keep at most three blocks; a block that is too large for that is read alone."""
    data = blocks(bytes(600 << 20), size)
    buffer, count = memoryview(bytearray(4 << 20)), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = decompress.open("xz", readers.BytesReader(data))
    while got := reader.readinto(buffer):
        count += got
    assert count == 600 << 20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < (160 << 10 if size == "16MiB" else 40 << 10)


@pytest.mark.slow
@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=200)
def test_mutated_blocks_raise_only_our_errors(data: st.DataObject) -> None:
    good = bytearray(blocks(PLAIN[-20 * KIB :] + PLAIN[: 8 * KIB], "4KiB") * 2)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
        good = good or bytearray(1)
    with contextlib.suppress(errors.Error):
        reading.read_all(decompress.open("xz", readers.BytesReader(bytes(good)), limit=1 << 24))
