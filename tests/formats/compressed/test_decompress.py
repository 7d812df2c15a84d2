"""Decompressing readers: empty input, one byte short, one byte over, every split; corrupt data and bombs."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import itertools
import lzma
import random
import resource
import struct
import zlib

import hypothesis
import pytest
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import decompress
from cdi_worker.formats.zstd import zstd
from tests.support import reading

COMPRESS = {
    "gz": gzip.compress,
    "xz": functools.partial(lzma.compress, preset=0),
    "zst": lambda data: zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}),
    "bz2": bz2.compress,
}
PLAIN = random.Random(1).randbytes(700) + bytes(2000) + b"disk" * 300

every_kind = pytest.mark.parametrize("kind", COMPRESS)


def plain(kind, data, **options):
    return reading.read_all(decompress.open(kind, readers.BytesReader(data), **options))


@every_kind
def test_empty_data_is_decompressed(kind):
    assert plain(kind, COMPRESS[kind](b"")) == b""


@every_kind
def test_input_cut_anywhere_is_truncated(kind):
    data = COMPRESS[kind](PLAIN[:900])
    for length in range(len(data)):
        with pytest.raises(errors.Truncated):
            plain(kind, data[:length])


@every_kind
def test_bytes_after_the_end_are_garbage(kind):
    data = COMPRESS[kind](PLAIN)
    for extra in (b"x", b"garbage that is longer", b"\x1f", b"\xfd7zXZ", b"BZ"):
        with pytest.raises(errors.TrailingGarbage) as caught:
            plain(kind, data + extra)
        assert caught.value.fields == {"format": kind, "offset": len(data)}


@every_kind
def test_input_in_small_pieces_is_decompressed(kind):
    data = COMPRESS[kind](PLAIN) + COMPRESS[kind](b"") + COMPRESS[kind](PLAIN)
    for step in (1, 2, 3, 7, 100):
        reader = decompress.open(kind, reading.ShortReads(data, step))
        assert reading.read_all(reader, step) == PLAIN * 2


@every_kind
def test_many_members_are_joined(kind):
    data = b"".join(COMPRESS[kind](bytes([value])) for value in range(256)) * 10
    assert plain(kind, data) == bytes(range(256)) * 10


@every_kind
def test_cut_second_member_is_truncated(kind):
    data = COMPRESS[kind](PLAIN)
    with pytest.raises(errors.Truncated):
        plain(kind, data + data[:-1])


@pytest.mark.slow
@every_kind
def test_input_larger_than_the_buffer_is_decompressed(kind):
    big = random.Random(2).randbytes(3 << 20) + bytes(5 << 20)
    assert plain(kind, COMPRESS[kind](big)) == big


@every_kind
def test_output_above_limit_is_too_large(kind):
    data = COMPRESS[kind](PLAIN)
    assert plain(kind, data, limit=len(PLAIN)) == PLAIN
    with pytest.raises(errors.TooLarge, match="is larger than the reported available"):
        plain(kind, data, limit=len(PLAIN) - 1)
    with pytest.raises(errors.TrailingGarbage):
        plain(kind, data + b"x", limit=len(PLAIN))


@pytest.mark.slow
@every_kind
def test_every_flipped_bit_is_detected(kind):
    data = COMPRESS[kind](PLAIN)
    for position in range(8 * len(data)):
        bad = bytearray(data)
        bad[position // 8] ^= 1 << position % 8
        with contextlib.suppress(errors.Error):
            assert plain(kind, bytes(bad), limit=1 << 20) == PLAIN  # the bit was in a name or a time


@every_kind
def test_close_closes_the_source(kind):
    source = reading.ShortReads(b"", 1)
    decompress.open(kind, source, limit=1).close()
    assert source.closed


@pytest.mark.slow
@every_kind
def test_bomb_needs_bounded_memory(kind):
    size = 1 << 25
    data = COMPRESS[kind](bytes(size))
    buffer, count = memoryview(bytearray(4 << 20)), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = decompress.open(kind, readers.BytesReader(data))
    while got := reader.readinto(buffer):
        count += got
    assert count == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10


def test_gz_accepts_zero_padding_without_a_member_after_it():
    data = gzip.compress(PLAIN)
    for zeros in (1, 511, 3 << 20):
        assert plain("gz", data + bytes(zeros)) == PLAIN
    with pytest.raises(errors.TrailingGarbage):
        plain("gz", data + bytes(512) + data)


def test_gz_detects_wrong_length_and_checksum():
    data = gzip.compress(PLAIN)
    for position in (-1, -8):
        bad = bytearray(data)
        bad[position] ^= 1
        with pytest.raises(errors.Corrupt):
            plain("gz", bytes(bad))


def test_gz_header_with_all_fields_is_read():
    header = b"\x1f\x8b\x08\x1e" + bytes(6) + struct.pack("<H", 3) + b"abc" + b"name\0" + b"comment\0"
    header += struct.pack("<H", zlib.crc32(header) & 0xFFFF)
    data = header + gzip.compress(PLAIN, mtime=0)[10:]
    for step in (1, 5, 1000):
        assert reading.read_all(decompress.open("gz", reading.ShortReads(data, step))) == PLAIN


@pytest.mark.slow
@every_kind
def test_end_of_feed_may_fall_anywhere(kind):
    # A feed is 128 KiB: move its end through the last block, the checksum and the next member's header.
    noise = random.Random(4).randbytes(1 << 18)
    for length in range((1 << 17) - 130, (1 << 17) + 10, 1 if kind in ("gz", "zst") else 7):
        data = COMPRESS[kind](noise[:length]) + COMPRESS[kind](PLAIN)
        assert plain(kind, data) == noise[:length] + PLAIN


def test_xz_padding_is_skipped():
    data = lzma.compress(PLAIN)
    for zeros in (4, 8, 4 << 20):
        assert plain("xz", data + bytes(zeros)) == PLAIN
        assert plain("xz", data + bytes(zeros) + data) == PLAIN * 2


def test_xz_padding_must_be_a_multiple_of_four():
    data = lzma.compress(PLAIN)
    for zeros, after in itertools.product((1, 2, 3, 5), (b"", data)):
        with pytest.raises(errors.TrailingGarbage) as caught:
            plain("xz", data + bytes(zeros) + after)
        assert caught.value.fields["offset"] == len(data)


def test_zst_skippable_frames_are_skipped():
    data = zstd.compress(PLAIN)
    skippable = b"\x5a\x2a\x4d\x18\x05\0\0\0hello"
    assert plain("zst", skippable + data + skippable + data + skippable) == PLAIN * 2
    with pytest.raises(errors.Truncated):
        plain("zst", data + skippable[:-1])


def test_zst_detects_wrong_content_size():
    data = bytearray(zstd.compress(PLAIN))
    assert data[4] & 0xE0 == 0x60  # single segment, two bytes of content size, less 256
    struct.pack_into("<H", data, 5, len(PLAIN) - 256 + 1)
    with pytest.raises(errors.Corrupt):
        plain("zst", bytes(data))


def zst_window(log):
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
    return compressor.compress(PLAIN, compressor.CONTINUE) + compressor.flush()


def test_zst_refuses_large_window():
    assert plain("zst", zst_window(27)) == PLAIN
    with pytest.raises(errors.Unsupported, match="window"):
        plain("zst", zst_window(28))


def xz_dictionary(size):
    """Return the output of lzma.compress with a larger dictionary, without the memory to make one."""
    data = bytearray(lzma.compress(PLAIN))
    bits = size.bit_length() - 1
    assert data[12:18] == bytes([2, 0, 0x21, 1, data[16], 0])
    data[16] = 2 * (bits - 12)
    struct.pack_into("<I", data, 20, zlib.crc32(data[12:20]))
    return bytes(data)


def test_xz_refuses_large_dictionary():
    assert plain("xz", xz_dictionary(128 << 20)) == PLAIN
    with pytest.raises(errors.Unsupported, match="window"):
        plain("xz", xz_dictionary(256 << 20))


@pytest.mark.slow
@every_kind
@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=100)
def test_mutated_data_raises_only_our_errors(kind, data):
    good = bytearray(COMPRESS[kind](PLAIN) * 2)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
        good = good or bytearray(1)
    with contextlib.suppress(errors.Error):
        reading.read_all(
            decompress.open(
                kind, reading.ShortReads(bytes(good), data.draw(st.integers(1, 5000))), limit=1 << 24
            )
        )
