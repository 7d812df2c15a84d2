"""Look through nested compressions, in a sample and in a stream."""

from __future__ import annotations

import bz2
import functools
import gzip
import itertools
import lzma
import random

import pytest

from cdi_worker import errors
from cdi_worker.formats import detect, readers
from cdi_worker.formats.compressed import layers
from tests.support import reading

NOISE = random.Random(1).randbytes(1 << 20)
QCOW2 = b"QFI\xfb\0\0\0\x03" + NOISE
COMPRESS = {"gz": gzip.compress, "xz": functools.partial(lzma.compress, preset=0), "bz2": bz2.compress}


@functools.cache
def packed(*compressions: str) -> bytes:
    """Return the image, compressed by the last one first."""
    return COMPRESS[compressions[0]](packed(*compressions[1:])) if compressions else QCOW2


def test_peek_keeps_all_bytes():
    for size, data in itertools.product((0, 1, 5, 10), (b"", b"a", b"abcde", b"abcdefghij")):
        reader = readers.Peek(readers.BytesReader(data), size)
        assert reader.head == data[:size]
        assert reading.read_all(reader, 3) == data


@pytest.mark.parametrize("compressions", [(), ("gz",), ("xz", "gz"), ("bz2", "xz", "gz")])
def test_stream_is_unpacked_to_its_content(compressions):
    content, reader = layers.open(readers.BytesReader(packed(*compressions)))
    assert content == layers.Content(compressions, "qcow2", QCOW2[: detect.HEAD])
    assert reading.read_all(reader) == QCOW2


@pytest.mark.parametrize("compressions", [("gz",), ("xz",), ("xz", "gz")])
def test_sample_shows_compression_and_content(compressions):
    for size in (1000, detect.HEAD, 2 << 20)[len(compressions) - 1 :]:
        content = layers.look(packed(*compressions)[:size])
        assert (content.compressions, content.format) == (compressions, "qcow2")
        assert content.head
        assert QCOW2.startswith(content.head)


def test_sample_too_small_is_unknown():
    assert layers.look(packed("bz2")[: detect.HEAD]).format == layers.UNKNOWN
    assert layers.look(packed("gz")[:10]).format == layers.UNKNOWN


def test_sample_output_is_bounded():
    content = layers.look(gzip.compress(gzip.compress(bytes(50 << 20))))
    assert content == layers.Content(("gz", "gz"), "raw", bytes(detect.HEAD))


def test_compressed_empty_file_is_empty():
    content, reader = layers.open(readers.BytesReader(gzip.compress(b"")))
    assert (content.format, reading.read_all(reader)) == ("empty", b"")


@pytest.mark.parametrize("unpack", [layers.look, lambda data: layers.open(readers.BytesReader(data))])
def test_four_layers_are_refused(unpack):
    data = QCOW2[:1000]
    for _ in range(4):
        data = gzip.compress(data)
    with pytest.raises(errors.Refused, match="nesting"):
        unpack(data)


@pytest.mark.parametrize("unpack", [layers.look, lambda data: layers.open(readers.BytesReader(data))])
def test_corrupt_data_is_detected(unpack):
    with pytest.raises(errors.Corrupt):
        unpack(b"\x1f\x8b\x08" + bytes(7) + b"\xff" * 1000)


def test_limit_applies_to_every_layer():
    data = gzip.compress(gzip.compress(bytes(2 << 20)))
    _, reader = layers.open(readers.BytesReader(data), limit=1 << 20)
    with pytest.raises(errors.TooLarge):
        reading.read_all(reader)
