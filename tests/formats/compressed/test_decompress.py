"""Each reader at its borders: empty, one byte short, one byte over, every split; then lies and bombs."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import lzma
import random
import resource
import struct
import subprocess
import sys
import zlib

import hypothesis
import pytest
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import decompress
from tests.support import reading

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

COMPRESS = {
    "gz": gzip.compress,
    "xz": lzma.compress,
    "zst": lambda data: zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1}),
    "bz2": bz2.compress,
}
PLAIN = random.Random(1).randbytes(700) + bytes(2000) + b"disk" * 300

every_kind = pytest.mark.parametrize("kind", COMPRESS)


def plain(kind, data, **options):
    return reading.drained(decompress.open(kind, readers.Bytes(data), **options))


@every_kind
def test_whole(kind):
    assert plain(kind, COMPRESS[kind](PLAIN)) == PLAIN


@every_kind
def test_nothing_compressed(kind):
    assert plain(kind, COMPRESS[kind](b"")) == b""


@every_kind
def test_empty_input_is_truncated(kind):
    with pytest.raises(errors.Truncated):
        plain(kind, b"")


@every_kind
def test_every_shorter_input_is_truncated(kind):
    data = COMPRESS[kind](PLAIN[:900])
    for length in range(len(data)):
        with pytest.raises(errors.Truncated):
            plain(kind, data[:length])


@every_kind
@pytest.mark.parametrize("extra", [b"x", b"garbage that is longer", b"\x1f", b"\xfd7zXZ", b"BZ"])
def test_more_is_garbage(kind, extra):
    data = COMPRESS[kind](PLAIN)
    with pytest.raises(errors.TrailingGarbage) as caught:
        plain(kind, data + extra)
    assert caught.value.fields == {"format": kind, "offset": len(data)}


@every_kind
@pytest.mark.parametrize("step", [1, 2, 3, 7, 100])
def test_small_pieces(kind, step):
    data = COMPRESS[kind](PLAIN) + COMPRESS[kind](b"") + COMPRESS[kind](PLAIN)
    reader = decompress.open(kind, reading.Portions(data, step))
    assert reading.drained(reader, step) == PLAIN * 2


@every_kind
def test_many_members(kind):
    data = b"".join(COMPRESS[kind](bytes([value])) for value in range(256)) * 40
    assert plain(kind, data) == bytes(range(256)) * 40


@every_kind
def test_second_member_cut(kind):
    data = COMPRESS[kind](PLAIN)
    with pytest.raises(errors.Truncated):
        plain(kind, data + data[:-1])


@every_kind
def test_more_than_one_input_buffer(kind):
    big = random.Random(2).randbytes(3 << 20) + bytes(5 << 20)
    assert plain(kind, COMPRESS[kind](big)) == big


@every_kind
def test_limit(kind):
    data = COMPRESS[kind](PLAIN)
    assert plain(kind, data, limit=len(PLAIN)) == PLAIN
    with pytest.raises(errors.TooLarge, match="is larger than the reported available"):
        plain(kind, data, limit=len(PLAIN) - 1)


@every_kind
def test_limit_does_not_hide_the_end(kind):
    data = COMPRESS[kind](PLAIN)
    with pytest.raises(errors.TrailingGarbage):
        plain(kind, data + b"x", limit=len(PLAIN))


@every_kind
def test_every_flipped_bit_is_told(kind):
    data = COMPRESS[kind](PLAIN)
    for position in range(8 * len(data)):
        bad = bytearray(data)
        bad[position // 8] ^= 1 << position % 8
        with contextlib.suppress(errors.Error):
            assert plain(kind, bytes(bad), limit=1 << 20) == PLAIN  # in a name or a time


@every_kind
def test_close_reaches_the_source(kind):
    source = reading.Portions(b"", 1)
    decompress.open(kind, source, limit=1).close()
    assert source.closed


@every_kind
def test_bomb_in_bounded_memory(kind):
    size = 1 << 28
    data = COMPRESS[kind](bytes(size))
    buffer, count = memoryview(bytearray(4 << 20)), 0
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reader = decompress.open(kind, readers.Bytes(data))
    while got := reader.readinto(buffer):
        count += got
    assert count == size
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20 << 10


@pytest.mark.parametrize("zeros", [1, 511, 3 << 20])
def test_gz_zeros_at_the_end_are_padding(zeros):
    assert plain("gz", gzip.compress(PLAIN) + bytes(zeros)) == PLAIN


def test_gz_member_after_zeros_is_garbage():
    data = gzip.compress(PLAIN)
    with pytest.raises(errors.TrailingGarbage):
        plain("gz", data + bytes(512) + data)


def test_gz_wrong_length_and_wrong_checksum():
    data = gzip.compress(PLAIN)
    for position in (-1, -8):
        bad = bytearray(data)
        bad[position] ^= 1
        with pytest.raises(errors.Corrupt):
            plain("gz", bytes(bad))


@pytest.mark.parametrize("step", [1, 5, 1000])
def test_gz_header_with_every_field(step):
    header = b"\x1f\x8b\x08\x1e" + bytes(6) + struct.pack("<H", 3) + b"abc" + b"name\0" + b"comment\0"
    header += struct.pack("<H", zlib.crc32(header) & 0xFFFF)
    data = header + gzip.compress(PLAIN, mtime=0)[10:]
    assert reading.drained(decompress.open("gz", reading.Portions(data, step))) == PLAIN


@every_kind
def test_every_border_between_two_feeds(kind):
    # A feed is 128 KiB: move its end through the last block, the check and the next member's header.
    noise = random.Random(4).randbytes(1 << 18)
    for length in range((1 << 17) - 130, (1 << 17) + 10, 1 if kind in ("gz", "zst") else 7):
        data = COMPRESS[kind](noise[:length]) + COMPRESS[kind](PLAIN)
        assert plain(kind, data) == noise[:length] + PLAIN


@pytest.mark.parametrize("zeros", [4, 8, 4 << 20])
def test_xz_padding(zeros):
    data = lzma.compress(PLAIN)
    assert plain("xz", data + bytes(zeros)) == PLAIN
    assert plain("xz", data + bytes(zeros) + data) == PLAIN * 2


@pytest.mark.parametrize("zeros", [1, 2, 3, 5])
def test_xz_odd_padding(zeros):
    data = lzma.compress(PLAIN)
    for after in (b"", data):
        with pytest.raises(errors.TrailingGarbage) as caught:
            plain("xz", data + bytes(zeros) + after)
        assert caught.value.fields["offset"] == len(data)


def test_zst_skippable_frames():
    data = zstd.compress(PLAIN)
    skippable = b"\x5a\x2a\x4d\x18\x05\0\0\0hello"
    assert plain("zst", skippable + data + skippable + data + skippable) == PLAIN * 2
    with pytest.raises(errors.Truncated):
        plain("zst", data + skippable[:-1])


def test_zst_frame_of_another_size_than_promised():
    data = bytearray(zstd.compress(PLAIN))
    assert data[4] & 0xE0 == 0x60  # single segment, two bytes of content size, less 256
    struct.pack_into("<H", data, 5, len(PLAIN) - 256 + 1)
    with pytest.raises(errors.Corrupt):
        plain("zst", bytes(data))


def zst_window(log):
    compressor = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
    return compressor.compress(PLAIN, compressor.CONTINUE) + compressor.flush()


def test_zst_window_is_bounded():
    assert plain("zst", zst_window(27)) == PLAIN
    with pytest.raises(errors.Unsupported, match="window"):
        plain("zst", zst_window(28))


def xz_dictionary(size):
    """As lzma.compress with a larger dictionary, but without the memory to make one."""
    data = bytearray(lzma.compress(PLAIN))
    bits = size.bit_length() - 1
    assert data[12:18] == bytes([2, 0, 0x21, 1, data[16], 0])
    data[16] = 2 * (bits - 12)
    struct.pack_into("<I", data, 20, zlib.crc32(data[12:20]))
    return bytes(data)


def test_xz_window_is_bounded():
    assert plain("xz", xz_dictionary(128 << 20)) == PLAIN
    with pytest.raises(errors.Unsupported, match="window"):
        plain("xz", xz_dictionary(256 << 20))


@pytest.fixture
def xz_multi_block():
    """Blocks with their sizes in the headers, by the threaded encoder of xz(1)."""
    command = ["xz", "--threads=2", "--block-size=65536", "--stdout"]
    data = random.Random(3).randbytes(300_000)
    return subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout


def test_xz_tool_reads_what_has_several_blocks(xz_multi_block):
    seen = []

    def tool(reader):
        seen.append(reading.drained(reader))
        return readers.Bytes(PLAIN)

    assert reading.drained(decompress.open("xz", readers.Bytes(xz_multi_block), tool=tool)) == PLAIN
    assert seen == [xz_multi_block]


def test_xz_tool_is_left_alone_otherwise():
    assert plain("xz", lzma.compress(PLAIN), tool=pytest.fail) == PLAIN
    assert plain("xz", lzma.compress(b""), tool=pytest.fail) == b""
    assert plain("gz", gzip.compress(PLAIN), tool=pytest.fail) == PLAIN
    with pytest.raises(errors.Truncated):
        plain("xz", b"\xfd7zXZ\0", tool=pytest.fail)


@every_kind
@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=100)
def test_mutations_give_errors_of_ours_only(kind, data):
    good = bytearray(COMPRESS[kind](PLAIN) * 2)
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(good) - 1))
        good[at : at + data.draw(st.integers(0, 9))] = data.draw(st.binary(max_size=9))
        good = good or bytearray(1)
    with contextlib.suppress(errors.Error):
        reading.drained(
            decompress.open(
                kind, reading.Portions(bytes(good), data.draw(st.integers(1, 5000))), limit=1 << 24
            )
        )
