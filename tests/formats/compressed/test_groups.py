"""Several members at the same time: always the bytes and the errors of the serial reader.

The number of CPUs is an argument: the machine may have two, where nothing is decompressed in parallel.
"""

from __future__ import annotations

import random
import resource
import subprocess
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import decompress, groups
from tests.support import processes, reading
from tests.support.members import END, MEMBER, block, frame, skippable

RANDOM = random.Random(4)
MIB = 1 << 20
TEXT = b"".join(RANDOM.randbytes(600) + bytes(3000) for _ in range(3000))
KINDS = ("zst", "gz")


def outcome(reader: readers.Reader) -> tuple[bytes, object]:
    """Return the bytes of a reader, and what it raised after them."""
    found, into = bytearray(), memoryview(bytearray(100_000))
    try:
        while count := reader.readinto(into):
            found += into[:count]
    except errors.Error as err:
        kept = {name: value for name, value in err.fields.items() if name != "reason"}
        return bytes(found), (type(err), kept.get("format"))
    finally:
        reader.close()
    return bytes(found), None


class Watched(groups.Groups):
    """Counts the groups that were decompressed in threads."""

    taken = 0

    def readinto(self, into: memoryview, /) -> int:
        count = super().readinto(into)
        self.taken += self._serial is None
        return count


def check(kind: str, data: bytes, threads: int = 3) -> Watched:
    """Compare with the serial reader."""
    made = Watched(kind, readers.Bytes(data), threads)
    expected = outcome(decompress.open(kind, readers.Bytes(data)))
    found = outcome(made)
    assert found[1] == expected[1]
    if expected[1] is None:
        assert found[0] == expected[0]
    else:
        # An error may come a step of the decompressor earlier or later.
        shorter = min(len(found[0]), len(expected[0]))
        assert found[0][:shorter] == expected[0][:shorter]
    return made


def members(kind: str, count: int = 60, size: int = 60_000) -> list[bytes]:
    return [MEMBER[kind](TEXT[at * 7_000 :][:size]) for at in range(count)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_members_with_known_lengths_are_decompressed_in_threads(kind: str, threads: int) -> None:
    assert check(kind, b"".join(members(kind, 400)), threads).taken > 100


@pytest.mark.parametrize("kind", KINDS)
def test_few_cpus_change_nothing(kind: str) -> None:
    data = readers.Bytes(b"".join(members(kind)))
    for cpus in (1, 2, 3):
        assert isinstance(groups.open(kind, data, cpus=cpus), decompress.Members)
    many = groups.open(kind, data, cpus=4)
    assert isinstance(many, groups.Groups)
    many.close()
    for other in ("xz", "bz2"):
        assert isinstance(groups.open(other, data, cpus=64), decompress.Members)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\x28\xb5\x2f\xfd",
        b"not compressed",
        frame(b""),
        frame(b"x"),
        frame(TEXT) * 3,
        frame(TEXT) + b"junk",
        frame(TEXT) + bytes(100),
        frame(TEXT) + frame(TEXT)[:-1],
        frame(TEXT) + frame(TEXT)[: -len(frame(TEXT)) // 2],
        frame(TEXT) + skippable(100) + frame(TEXT[:99]),
        skippable(0) * 1000 + frame(TEXT) + skippable(7),
        frame(TEXT) + skippable(100 << 10) + frame(TEXT),
        frame(TEXT) + skippable(100)[:-1],
        frame(TEXT) + frame(b"") * 3 + frame(TEXT),
        # The magic number of a frame within a frame, stored and compressed.
        frame(RANDOM.randbytes(50) + frame(TEXT[:5000]) * 9 + b"x") * 40,
        frame(frame(TEXT) * 20) * 5,
        frame(TEXT)[:-4] + b"four" + frame(TEXT),
        frame(TEXT) + frame(TEXT * 3, window_log=24) + frame(TEXT),
        frame(TEXT) + frame(RANDOM.randbytes(6 * MIB)) + frame(TEXT),
        frame(TEXT) + frame(bytes(40 * MIB)) + frame(TEXT),
    ],
)
def test_frames_of_any_kind_are_read_as_by_the_serial_reader(data: bytes) -> None:
    check("zst", data)


@pytest.mark.parametrize(
    "data",
    [
        block(TEXT[:60_000]) * 50 + END,
        block(TEXT[:60_000]) * 50 + END * 3 + bytes(512),
        block(TEXT[:60_000]) * 50 + END + b"junk",
        block(TEXT[:60_000]) * 20 + bytes(20) + block(TEXT[:60_000]) * 20,
        block(TEXT[:60_000]) * 20 + zlib.compress(TEXT, wbits=31) + block(TEXT[:60_000]),
        zlib.compress(TEXT, wbits=31) + block(TEXT[:60_000]) * 20,
        block(TEXT[:60_000]) * 20 + block(TEXT[:60_000])[:-1],
        block(TEXT[:60_000]) * 20 + block(TEXT[:60_000])[:15],
        END * 1000,
        # Wrong lengths: shorter, longer, to the next header, none.
        *(block(TEXT[:60_000]) * 20 + block(TEXT[:50_000], size) * 3 + END for size in (1, 26, 2000, 65536)),
        block(TEXT[:60_000], 2 * len(block(TEXT[:60_000]))) * 4,
        block(TEXT[:60_000]) * 20 + block(TEXT[:60_000])[:-8] + bytes(8) + END,
    ],
)
def test_blocks_of_any_kind_are_read_as_by_the_serial_reader(data: bytes) -> None:
    check("gz", data)


@given(st.data(), st.sampled_from(KINDS))
def test_damaged_members_are_read_as_by_the_serial_reader(data: st.DataObject, kind: str) -> None:
    parts = members(kind, 8, 30_000)
    extra = [skippable(9), frame(b"")] if kind == "zst" else [END, zlib.compress(b"x" * 99, wbits=31)]
    chosen = data.draw(st.lists(st.sampled_from([*parts, *extra]), min_size=1, max_size=12))
    whole = bytearray(b"".join(chosen))
    for at, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(whole) - 1), st.integers(0, 255)), max_size=3)
    ):
        whole[at] = value
    check(kind, bytes(whole[: data.draw(st.integers(0, len(whole)) | st.just(len(whole)))]), threads=2)


def test_tool_of_parallel_frames_is_read_in_threads(tmp_path) -> None:
    processes.need("pzstd")
    plain = RANDOM.randbytes(24 * MIB)
    packed = subprocess.run(
        ["pzstd", "-1", "-p", "4", "-c"], input=plain, check=True, capture_output=True
    ).stdout
    assert reading.read_all(groups.Groups("zst", readers.Bytes(packed))) == plain


def test_bomb_of_many_frames_is_limited_and_takes_little_memory() -> None:
    """Each frame has 1 GiB of zeros: none is decompressed ahead."""
    bomb = frame(bytes(256 * MIB)) * 200
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(errors.TooLarge):
        reading.read_all(groups.open("zst", readers.Bytes(bomb), limit=64 * MIB, cpus=8))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10


def test_closing_early_ends_the_threads_and_closes_the_reader() -> None:
    class Source(readers.Bytes):
        closed = False

        def close(self) -> None:
            self.closed = True

    source = Source(b"".join(members("gz", 400)))
    made = groups.Groups("gz", source)
    assert made.readinto(memoryview(bytearray(10))) == 10
    made.close()
    assert source.closed
