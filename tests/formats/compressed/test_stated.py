"""The size that xz and zstd state: what the tools wrote, and nothing of what is damaged."""

from __future__ import annotations

import random
import subprocess
from pathlib import Path

import pytest

from cdi_worker.formats.compressed import stated

MIB = 1 << 20
OPTIONS = {
    "xz": [("xz", "-0"), ("xz", "-0", "-T2", "--block-size=256KiB"), ("xz", "-0", "--check=none")],
    "zst": [("zstd", "-1"), ("zstd", "-1", "--single-thread"), ("zstd", "-1", "--ultra", "--long=24")],
}
SIZES = (1, 200, 256, 300, 70_000, 5 * MIB + 12)


def compressed(path: Path, size: int, command: tuple[str, ...]) -> bytes:
    path.write_bytes(random.Random(size).randbytes(min(size, 9000)).ljust(size, b"x"))
    return subprocess.run([*command, "-c", path], check=True, capture_output=True).stdout


def size(kind: str, data: bytes) -> int | None:
    return stated.size(kind, data[:4096], lambda at, length: data[at : at + length], len(data))


@pytest.mark.parametrize(
    ("kind", "command"), [(kind, command) for kind, commands in OPTIONS.items() for command in commands]
)
def test_size_is_that_of_the_file(tmp_path: Path, kind: str, command: tuple[str, ...]) -> None:
    for length in SIZES:
        assert size(kind, compressed(tmp_path / "plain", length, command)) == length


def test_streams_of_xz_are_added(tmp_path: Path) -> None:
    one = compressed(tmp_path / "plain", 70_000, ("xz",))
    other = compressed(tmp_path / "plain", 300, ("xz", "-T2"))
    assert size("xz", one + bytes(8) + other + bytes(4)) == 70_300
    assert size("xz", one * 17) is None


def test_stream_without_a_size_has_none(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(bytes(MIB))
    with (tmp_path / "plain").open("rb") as plain:
        piped = subprocess.run(["zstd", "-c"], stdin=plain, check=True, capture_output=True).stdout
    assert size("zst", piped) is None
    assert size("gz", b"\x1f\x8b" + bytes(20)) is None
    assert stated.size("xz", b"", None, 100) is None


def test_damage_is_no_size_or_the_same_one(tmp_path: Path) -> None:
    data = compressed(tmp_path / "plain", 70_000, OPTIONS["xz"][1])
    dice = random.Random(5)
    for _ in range(3000):
        changed = bytearray(data[: dice.randrange(len(data) - 60, len(data) + 1)])
        for _ in range(dice.randrange(4)):
            changed[dice.randrange(max(0, len(changed) - 80), len(changed))] = dice.randrange(256)
        assert size("xz", bytes(changed)) in {None, 70_000}


def test_padding_without_end_is_not_read(tmp_path: Path) -> None:
    data = compressed(tmp_path / "plain", 300, ("xz",)) + bytes(MIB)
    reads = []

    def read(at: int, length: int) -> bytes:
        reads.append(length)
        return data[at : at + length]

    assert stated.size("xz", data[:4096], read, len(data)) is None
    assert sum(reads) < 64 << 10
    assert len(reads) < 4


def test_first_of_many_frames_is_not_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "plain"
    path.write_bytes(random.Random(1).randbytes(70_000))
    one = subprocess.run(["zstd", "-c", path], check=True, capture_output=True).stdout
    assert size("zst", one) == 70_000
    assert size("zst", one * 2) is None
    # What compresses well has a small file: the first frame alone has more content.
    for content in (b"x" * 70_000, random.Random(1).randbytes(300_000) * 3):
        path.write_bytes(content)
        for options in ((), ("--no-check",)):
            one = subprocess.run(["zstd", *options, "-c", path], check=True, capture_output=True).stdout
            assert size("zst", one) == len(content)
            assert size("zst", one * 2) is None
    # Frames too long to be read here, in the seekable format: their table is at the end.
    path.write_bytes(random.Random(1).randbytes(3 * MIB // 2) * 4)
    one = subprocess.run(["zstd", "-c", path], check=True, capture_output=True).stdout
    assert size("zst", one) == 6 * MIB
    assert len(one) < 2 * MIB
    assert size("zst", one * 2 + b"\x5e\x2a\x4d\x18\x09\0\0\0" + bytes(5) + b"\xb1\xea\x92\x8f") is None
