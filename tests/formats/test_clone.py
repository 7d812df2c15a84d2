"""The clone stream between two workers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import clone, readers
from tests.support import reading

NOISE = random.Random(1).randbytes(300_000)
TEXT = b"text " * 60_000
RUNS: list[int | bytes] = [70_000, TEXT, NOISE, 1 << 40, NOISE[:1], 512]


def buffers(size: int) -> Iterator[memoryview]:
    return itertools.repeat(memoryview(bytearray(size)))


def encode(runs: list[int | bytes]) -> bytes:
    encoder = clone.Encoder()
    stream = clone.MAGIC
    for run in runs:
        stream += encoder.zeros(run) if isinstance(run, int) else b"".join(encoder.data(memoryview(run)))
    return stream + encoder.end()


def decode(stream: bytes) -> list[int | bytes]:
    decoder = clone.Decoder(readers.BytesReader(stream), buffers)
    return [run if isinstance(run, int) else bytes(run) for run in decoder]


def test_stream_decodes_to_the_same_runs() -> None:
    stream = encode(RUNS)
    assert decode(stream) == RUNS
    assert len(stream) < len(NOISE) + len(TEXT) // 10 + 1000


@given(st.lists(st.one_of(st.integers(1, 1 << 50), st.binary(min_size=1, max_size=300))))
def test_any_runs_decode_to_the_same(runs: list[int | bytes]) -> None:
    assert decode(encode(runs)) == runs


def test_copied_encoder_continues_identically() -> None:
    encoder = clone.Encoder()
    encoder.data(memoryview(NOISE))
    other = encoder.copy()
    for one in (encoder, other):
        one.zeros(5)
    assert encoder.data(memoryview(TEXT)) == other.data(memoryview(TEXT))
    assert encoder.end() == other.end()


@pytest.mark.parametrize("size", [1, 1000, 1 << 20])
def test_reader_returns_the_bytes_of_all_runs(size: int) -> None:
    runs: list[int | bytes] = [5000, TEXT[:5000], 100, NOISE[:3000]]
    reader = readers.RunsReader(iter(clone.Decoder(readers.BytesReader(encode(runs)), buffers)))
    assert reading.read_all(reader, size) == b"".join(
        bytes(run) if isinstance(run, int) else run for run in runs
    )


def test_stream_without_runs_is_empty() -> None:
    assert decode(encode([])) == []


def test_cut_stream_is_truncated() -> None:
    stream = encode([100, b"some data", 5, b"x" * 500])
    for end in range(len(stream)):
        with pytest.raises(errors.Truncated):
            decode(stream[:end])


@pytest.mark.parametrize("at", [0, 16, 24, 40, 48, 52, -1, -40])
def test_changed_byte_is_corrupt(at: int) -> None:
    changed = bytearray(encode([100, NOISE[:1000], 5, NOISE]))
    changed[at] ^= 0x01
    with pytest.raises(errors.Corrupt):
        decode(bytes(changed))


def test_record_that_is_too_long_is_corrupt() -> None:
    for stored, length in ((clone.LONGEST + 1, 1), (1, clone.LONGEST + 1), (0, 0), (1, 1 << 63)):
        header = clone._HEADER.pack(1, stored, length)
        with pytest.raises(errors.Corrupt):
            decode(clone.MAGIC + header + bytes(100))


def test_disk_larger_than_any_file_is_corrupt() -> None:
    encoder = clone.Encoder()
    data = clone.MAGIC + encoder.zeros((1 << 63) - 2) + encoder.zeros(2) + encoder.zeros(1)
    with pytest.raises(errors.Corrupt, match="an invalid length of 2 bytes"):
        decode(data)


def test_bytes_behind_the_end_are_corrupt() -> None:
    with pytest.raises(errors.Corrupt, match="data after the last record"):
        decode(encode([100, NOISE[:1000]]) + b"x")


# -- file systems


def encode_folder(disk: clone.FolderDisk, runs: list[int | bytes]) -> bytes:
    encoder = clone.Encoder()
    stream = clone.MAGIC + encoder.disk(disk)
    for run in runs:
        stream += encoder.zeros(run) if isinstance(run, int) else b"".join(encoder.data(memoryview(run)))
    return stream + encoder.end()


def decode_folder(stream: bytes) -> tuple[clone.FolderDisk, list[int | bytes], bytes | None]:
    folder = clone.FolderDecoder(readers.BytesReader(stream), buffers)
    runs = [run if isinstance(run, int) else bytes(run) for run in folder.runs()]
    rest = folder.archive()
    archive = None if rest is None else reading.read_all(rest, 1000)
    folder.finish()
    return folder.disk, runs, archive


@pytest.mark.parametrize(
    ("runs", "archive"),
    [([], []), ([], [TEXT[:5000], 512, NOISE[:700]]), ([70_000], []), ([NOISE, 5, TEXT], [TEXT[:500], 5])],
)
def test_folder_is_a_disk_and_an_archive(runs: list[int | bytes], archive: list[int | bytes]) -> None:
    size = sum(run if isinstance(run, int) else len(run) for run in runs)
    disk = clone.FolderDisk(size, 0o640, 1_700_000_000, preallocated=True)
    content = b"".join(bytes(run) if isinstance(run, int) else run for run in archive)
    assert decode_folder(encode_folder(disk, runs + archive)) == (disk, runs, content if archive else None)


def test_cut_folder_is_truncated() -> None:
    stream = encode_folder(clone.FolderDisk(600), [100, b"x" * 500, b"archive"])
    for end in range(len(stream)):
        with pytest.raises(errors.Truncated):
            decode_folder(stream[:end])


def test_every_bit_of_a_folder_is_verified() -> None:
    stream = encode_folder(clone.FolderDisk(9, 0o600, 1), [4, b"datum", b"archive"])
    for at in range(len(stream)):
        changed = bytearray(stream)
        changed[at] ^= 64
        with pytest.raises((errors.Corrupt, errors.Truncated)):
            decode_folder(bytes(changed))


@pytest.mark.parametrize(
    ("size", "runs"),
    [(5, [6]), (5, [b"123456"]), (5, [4]), (5, []), (5, [4, b"12"])],
)
def test_disk_of_another_size_is_refused(size: int, runs: list[int | bytes]) -> None:
    with pytest.raises(errors.Corrupt, match="does not end after 5 bytes"):
        decode_folder(encode_folder(clone.FolderDisk(size), runs))


def test_streams_of_devices_and_folders_are_not_confused() -> None:
    with pytest.raises(errors.Corrupt, match="record of the disk is missing"):
        decode_folder(encode([5]))
    with pytest.raises(errors.Corrupt, match="unknown record kind"):
        decode(encode_folder(clone.FolderDisk(5), [5]))


def test_facts_of_a_disk_are_bounded() -> None:
    """They are passed to chmod and utime; the set-user-ID bit is never restored."""
    disk, _, _ = decode_folder(encode_folder(clone.FolderDisk(0, 0o104755, (1 << 64) - 1), []))
    assert disk == clone.FolderDisk(0, 0o755, 1 << 40)


@pytest.mark.parametrize("kept", [(0, 0), (0, 8192), (4096, 8192), (4096, 16384)])
def test_part_that_the_receiver_has_not_stated_is_corrupt(kept: tuple[int, int]) -> None:
    encoder = clone.Encoder()
    parts = [clone.MAGIC, encoder.zeros(4096), encoder.kept(8192), encoder.end()]
    stream = b"".join(parts)
    with pytest.raises(errors.Corrupt, match="leaves out 8192 bytes from byte 4096"):
        list(clone.Decoder(readers.BytesReader(stream), buffers, kept))
    there = clone.Decoder(readers.BytesReader(stream), buffers, (4096, 12288))
    assert list(there) == [4096, clone.Kept(8192)]
