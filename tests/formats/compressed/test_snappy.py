"""The snappy framing format, with streams made by hand from its specification."""

from __future__ import annotations

import random
import struct

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats.compressed import snappy
from tests.support import reading

NOISE = random.Random(11).randbytes(70_000)
TEXT = b"the quick brown fox jumps over the lazy dog. " * 1000


def masked(data: bytes) -> bytes:
    """Return the masked checksum of the format (section 3)."""
    value = google_crc32c.value(data)
    return struct.pack("<I", ((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def chunk(kind: int, data: bytes) -> bytes:
    return bytes([kind]) + len(data).to_bytes(3, "little") + data


def plain(data: bytes) -> bytes:
    return chunk(0x01, masked(data) + data)


def literal(data: bytes) -> bytes:
    """Return a compressed chunk of a single literal of at most 60 bytes."""
    return chunk(0x00, masked(data) + bytes([len(data), (len(data) - 1) << 2]) + data)


def decompress(data: bytes, *, step: int = 1 << 20, size: int = 1 << 20) -> bytes:
    return reading.read_all(snappy.SnappyReader(reading.ShortReads(data, step)), size)


def test_chunks_are_joined() -> None:
    stream = snappy.IDENTIFIER + plain(b"one ") + literal(b"two ") + plain(b"three")
    assert decompress(stream) == b"one two three"


def test_padding_and_skippable_chunks_are_skipped() -> None:
    stream = b"".join(
        [
            snappy.IDENTIFIER,
            chunk(0xFE, b"padding"),
            plain(b"a"),
            snappy.IDENTIFIER,
            chunk(0x80, b"x" * 70_000),
            chunk(0xFD, b""),
            literal(b"b"),
            chunk(0xFE, bytes(3_000_000)),
            plain(b"c"),
        ]
    )
    for step in (1 << 20, 1000):
        assert decompress(stream, step=step) == b"abc"


def test_stream_without_data_is_empty() -> None:
    assert decompress(snappy.IDENTIFIER) == b""


BROKEN = {
    "empty": (b"", errors.Truncated),
    "no identifier": (plain(b"a"), errors.Corrupt),
    "wrong identifier": (b"\xff\x06\x00\x00sNaPpX", errors.Corrupt),
    "identifier too long": (b"\xff\x07\x00\x00sNaPpYx", errors.Corrupt),
    "reserved": (snappy.IDENTIFIER + chunk(0x02, b"x"), errors.Corrupt),
    "checksum": (snappy.IDENTIFIER + chunk(0x01, b"1234abc"), errors.Corrupt),
    "too short": (snappy.IDENTIFIER + chunk(0x01, b"123"), errors.Corrupt),
    "too long": (snappy.IDENTIFIER + plain(b"x" * 65_537), errors.Corrupt),
    "too large inside": (snappy.IDENTIFIER + chunk(0x00, b"1234\xff\xff\xff\xff\x0f"), errors.Corrupt),
    "garbage after": (snappy.IDENTIFIER + plain(b"a") + b"garbage", errors.Corrupt),
}


@pytest.mark.parametrize("name", BROKEN)
def test_malformed_stream_is_refused(name: str) -> None:
    stream, error = BROKEN[name]
    for size in (1, 1 << 20):
        with pytest.raises(error):
            decompress(stream, size=size)


def test_cut_inside_a_chunk_is_truncated() -> None:
    whole = snappy.IDENTIFIER + plain(b"one") + literal(b"two")
    boundaries = {10, 10 + len(plain(b"one")), len(whole)}
    for end in range(1, len(whole)):
        if end not in boundaries:
            with pytest.raises(errors.Truncated):
                decompress(whole[:end])


@pytest.mark.parametrize("size", [1, 1000, 65_536, 200_000])
def test_written_frames_read_back(size: int) -> None:
    data = NOISE + bytes(snappy.PIECE + 100) + TEXT if size > 1 else TEXT[:5000] + bytes(100)
    pieces = [memoryview(data)[start : start + snappy.PIECE] for start in range(0, len(data), snappy.PIECE)]
    stream = b"".join(snappy.frames(pieces))
    assert stream.count(snappy.IDENTIFIER) == 1
    assert decompress(stream, size=size) == data
    assert decompress(stream, step=4097, size=size) == data


def test_zeros_are_compressed_well() -> None:
    stream = b"".join(snappy.frames([memoryview(bytes(snappy.PIECE))] * 8))
    assert len(stream) < 8 * snappy.PIECE // 20
    assert decompress(stream) == bytes(8 * snappy.PIECE)


def test_zero_chunk_is_the_one_of_golang_snappy() -> None:
    """golang/snappy: one literal byte, 1023 copies of 64 bytes at offset 1, and the rest."""
    body = b"\x80\x80\x04" + b"\x00\x00" + b"\xfe\x01\x00" * 1023 + b"\xfa\x01\x00"
    assert snappy.zero_chunk() == chunk(0x00, masked(bytes(65_536)) + body)


@given(st.lists(st.binary(max_size=40), max_size=20), st.integers(1, 50), st.integers(1, 200))
def test_chunks_of_any_size_are_joined(parts: list[bytes], step: int, size: int) -> None:
    stream = snappy.IDENTIFIER + b"".join(
        (literal if index % 2 else plain)(part) for index, part in enumerate(parts) if part
    )
    assert decompress(stream, step=step, size=size) == b"".join(parts)
