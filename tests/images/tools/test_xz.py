"""The xz tool behaves like the other decompressing readers."""

from __future__ import annotations

import io
import lzma
import threading
import time

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import xz
from tests.support import reading

PLAIN = bytes(range(256)) * 4096 + bytes(3_000_000)
PACKED = lzma.compress(PLAIN, preset=0)


class Source:
    """Ordered bytes from memory, at most ``step`` at a time, failing at ``fail_at``."""

    def __init__(self, content: bytes, *, step: int = 1 << 20, fail_at: int | None = None) -> None:
        self._file = io.BytesIO(content)
        self._step = step
        self._fail_at = fail_at
        self.closed = False

    def readinto(self, into: memoryview, /) -> int:
        if self._fail_at is not None and self._file.tell() >= self._fail_at:
            raise errors.TransferFailed(url="mem:", offset=self._file.tell(), reason="gone")
        return self._file.readinto(into[: self._step])

    def close(self) -> None:
        self.closed = True


def unpack(source: Source, **keywords: int) -> bytes:
    reader = xz.XzReader(source, cancelling.Cancel(), **keywords)
    try:
        return reading.read_all(reader)
    finally:
        reader.close()
        assert source.closed


@pytest.mark.parametrize("step", [1, 1000, 1 << 20])
def test_data_is_decompressed(step: int) -> None:
    assert unpack(Source(PACKED, step=step)) == PLAIN


def test_streams_with_padding_are_joined() -> None:
    assert unpack(Source(PACKED + bytes(8) + PACKED)) == PLAIN + PLAIN


@pytest.mark.parametrize("cut", [1, 4, 100, len(PACKED) - 20])
def test_cut_input_is_truncated(cut: int) -> None:
    with pytest.raises(errors.Truncated):
        unpack(Source(PACKED[:-cut]))


MIDDLE = len(PACKED) // 2
CHANGED = PACKED[:MIDDLE] + bytes([PACKED[MIDDLE] ^ 0x55]) + PACKED[MIDDLE + 1 :]


@pytest.mark.parametrize("packed", [PACKED + b"x", PACKED + b"a whole lot of garbage", CHANGED])
def test_garbage_and_changed_bytes_are_corrupt(packed: bytes) -> None:
    with pytest.raises(errors.Corrupt):
        unpack(Source(packed))


def test_error_of_the_source_is_raised() -> None:
    with pytest.raises(errors.TransferFailed, match="gone"):
        unpack(Source(PACKED, step=50, fail_at=100))


def test_large_dictionary_is_refused() -> None:
    filters = [{"id": lzma.FILTER_LZMA2, "dict_size": 64 << 20}]
    packed = lzma.compress(b"small", filters=filters)
    with pytest.raises(errors.Unsupported, match="dictionary"):
        unpack(Source(packed), memory=32 << 20)


def test_reader_can_be_closed_early() -> None:
    source = Source(lzma.compress(bytes(50_000_000), preset=0))
    before = set(threading.enumerate())
    reader = xz.XzReader(source, cancelling.Cancel())
    assert reader.readinto(memoryview(bytearray(10)))
    start = time.monotonic()
    reader.close()
    assert time.monotonic() - start < 20
    assert set(threading.enumerate()) <= before
    assert source.closed
