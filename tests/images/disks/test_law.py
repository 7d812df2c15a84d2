"""Every kind of disk delivers each missing range once, to every kind of sink, or fails and leaves no thread.

Each kind of disk has a maker in ``MAKERS``; a class of ``images.disks`` without one fails a test here.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import pkgutil
import random
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from cdi_worker import errors
from cdi_worker.formats import safety, views
from cdi_worker.formats.qcow2 import chain as qcow2_chain
from cdi_worker.formats.qcow2 import layers
from cdi_worker.images import disks as package
from cdi_worker.images import extents, targets
from cdi_worker.images.disks import base, following, raw, tables
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.images.sinks import compared, delivery
from cdi_worker.scratch import journal
from tests.support import devices, pairs, placing, processes

MiB = 1 << 20
SIZE = 6 * MiB + 512


class Made(NamedTuple):
    """A disk, what it reads as, and the ranges (start, end) that it covers."""

    disk: base.Disk
    expected: bytes
    covered: list[tuple[int, int]]


class Files(NamedTuple):
    """A raw disk and a qcow2 image of it; a chain of two images and its disk."""

    raw: bytes
    qcow2: bytes
    base: bytes
    layer: bytes
    joined: bytes


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("law")
    dice = random.Random(5)
    data = bytearray(SIZE)
    for _ in range(12):
        start = dice.randrange(0, SIZE - 200_000, 512)
        length = dice.choice([512, 4096, 65536, 131072])
        data[start : start + length] = dice.randbytes(length)
    (folder / "raw").write_bytes(data)
    convert = ("qemu-img", "convert", "-f", "raw", "-O", "qcow2")
    processes.run(*convert, folder / "raw", folder / "base.qcow2")
    processes.run(*convert, "-c", folder / "raw", folder / "packed.qcow2")
    processes.run(
        *("qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2"),
        folder / "layer.qcow2",
    )
    writes = ("-c", "write -q -P 7 1M 300k", "-c", "write -q -z 3M 128k")
    processes.run("qemu-io", "-f", "qcow2", *writes, folder / "layer.qcow2")
    processes.run("qemu-img", "convert", "-O", "raw", folder / "layer.qcow2", folder / "joined")
    names = ("raw", "packed.qcow2", "base.qcow2", "layer.qcow2", "joined")
    return Files(*((folder / name).read_bytes() for name in names))


def ranges(data: bytes, scope: cancelling.Cancel) -> raw.OpenRanges:
    options = fetch.FetchOptions(connections=3, chunk=256 << 10)

    def opened(advance: base.Advance) -> fetch.Fetcher:
        return fetch.Fetcher(placing.Bytes(data), len(data), options, scope=scope, advance=advance)

    return opened


def whole(expected: bytes) -> list[tuple[int, int]]:
    return [(0, len(expected))]


def listed(data: bytes) -> list[extents.Extent]:
    """Return what a source lists: data, and zeros in parts of 128 KiB."""
    step = 128 << 10
    parts = [(at, data[at : at + step]) for at in range(0, len(data), step)]
    return [extents.Extent(at, len(part), zero=not any(part)) for at, part in parts]


def blank(files: Files, scope: cancelling.Cancel) -> Made:
    return Made(raw.BlankDisk(SIZE), bytes(SIZE), [(0, SIZE)])


def by_ranges(files: Files, scope: cancelling.Cancel) -> Made:
    return Made(raw.whole(ranges(files.raw, scope), SIZE), files.raw, whole(files.raw))


def by_extents(files: Files, scope: cancelling.Cancel) -> Made:
    disk = raw.ExtentsDisk(ranges(files.raw, scope), SIZE, lambda: listed(files.raw))
    return Made(disk, files.raw, whole(files.raw))


def changed_extents(files: Files, scope: cancelling.Cancel) -> Made:
    changed = listed(files.raw)[5:40:3]
    disk = raw.ExtentsDisk(ranges(files.raw, scope), SIZE, lambda: changed, covers_all=False)
    return Made(disk, files.raw, [(each.offset, each.offset + each.length) for each in changed])


def stream(files: Files, scope: cancelling.Cancel) -> Made:
    opened = contextlib.nullcontext(placing.Ordered(files.raw))
    return Made(raw.StreamDisk(lambda _: opened, scope, footer=True), files.raw, whole(files.raw))


def runs(files: Files, scope: cancelling.Cancel) -> Made:
    def each() -> Iterator[base.Run]:
        for part in listed(files.raw):
            if part.zero:
                yield part.length
            else:
                yield memoryview(files.raw)[part.offset : part.offset + part.length]

    return Made(raw.RunsDisk(lambda _: contextlib.nullcontext(each()), scope), files.raw, whole(files.raw))


def by_tables(files: Files, scope: cancelling.Cancel) -> Made:
    found = placing.image_of(files.qcow2)
    disk = tables.MappedDisk([ranges(files.qcow2, scope)], lambda _: found, SIZE)
    return Made(disk, files.raw, whole(files.raw))


def follows(files: Files, scope: cancelling.Cancel) -> Made:
    return Made(placing.following_of(files.qcow2, scope=scope), files.raw, whole(files.raw))


def member(name: str, data: bytes) -> qcow2_chain.ChainFile:
    def read(offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    found = safety.check("qcow2", data[: 64 << 10], read=read, size=len(data), layer=True)
    return qcow2_chain.ChainFile(name, name, len(data), found)


def chain_disk(
    each: list[raw.OpenRanges], files: list[qcow2_chain.ChainFile], *, covers_all: bool = True
) -> base.Disk:
    def opened(reads: Sequence[views.Read]) -> tables.DiskTables:
        return layers.ChainTables(files, reads, is_base=covers_all, ended=lambda _: None)

    return tables.MappedDisk(each, opened, SIZE, covers_all=covers_all)


def chain(files: Files, scope: cancelling.Cancel) -> Made:
    members = [member("base", files.base), member("layer", files.layer)]
    each = [ranges(files.base, scope), ranges(files.layer, scope)]
    return Made(chain_disk(each, members), files.joined, whole(files.joined))


def chain_of_changes(files: Files, scope: cancelling.Cancel) -> Made:
    members, each = [member("layer", files.layer)], [ranges(files.layer, scope)]
    disk = chain_disk(each, members, covers_all=False)
    cluster = 64 << 10
    written = [(MiB, MiB + 5 * cluster), (3 * MiB, 3 * MiB + 2 * cluster)]
    return Made(disk, files.joined, written)


#: What makes a disk of each class: at least one for each.
MAKERS: dict[str, tuple[type[base.Disk], Callable[[Files, cancelling.Cancel], Made]]] = {
    "blank": (raw.BlankDisk, blank),
    "ranges": (raw.ExtentsDisk, by_ranges),
    "extents": (raw.ExtentsDisk, by_extents),
    "changed extents": (raw.ExtentsDisk, changed_extents),
    "stream": (raw.StreamDisk, stream),
    "runs": (raw.RunsDisk, runs),
    "tables": (tables.MappedDisk, by_tables),
    "following": (following.FollowingDisk, follows),
    "chain": (tables.MappedDisk, chain),
    "chain of changes": (tables.MappedDisk, chain_of_changes),
}


#: Disks of changes only, and those that are delivered once.
CHANGES = {"changed extents", "chain of changes"}
ONCE = {"stream", "runs", "following"}
every = pytest.mark.parametrize("kind", MAKERS)
WHOLE = [name for name in MAKERS if name not in CHANGES]
every_whole = pytest.mark.parametrize("kind", WHOLE)
#: Each on one kind of target.
each_somewhere = pytest.mark.parametrize(
    ("kind", "place"), pairs.dealt(WHOLE, ["file", "block512", "block4096"]), indirect=["place"]
)
every_again = pytest.mark.parametrize("kind", [name for name in MAKERS if name not in ONCE])


def make(kind: str, files: Files, scope: cancelling.Cancel | None = None) -> Made:
    _, maker = MAKERS[kind]
    made = maker(files, scope or cancelling.Cancel())
    assert made.disk.covers_all == (kind not in CHANGES)
    assert made.disk.repeats == (kind not in ONCE)
    return made


def test_every_kind_of_disk_is_here() -> None:
    names = [f"{package.__name__}.{each.name}" for each in pkgutil.iter_modules(package.__path__)]
    modules = map(importlib.import_module, names)
    found = {
        kind
        for module in modules
        for _, kind in inspect.getmembers(module, inspect.isclass)
        if issubclass(kind, base.Disk) and not inspect.isabstract(kind)
    }
    assert found == {kind for kind, _ in MAKERS.values()}


class Exact(placing.Dirty):
    """A disk in memory, full of 0xFF: a range that comes twice fails, and a late call does too."""

    def __init__(self, size: int) -> None:
        super().__init__(-(-size // 512) * 512)
        self.over = False

    def write(self, offset: int, data: memoryview, /) -> None:
        assert not self.over, "after the delivery"
        super().write(offset, data)

    def zero(self, offset: int, length: int, /) -> None:
        assert not self.over, "after the delivery"
        super().zero(offset, length)


class Some:
    """What is missing: sectors that a dice has chosen."""

    def __init__(self, seed: int, size: int) -> None:
        dice, at = random.Random(seed), 0
        self.parts: list[tuple[int, int]] = []
        while at < size:
            end = min(size, at + dice.choice([512, 65536, MiB]))
            if dice.random() < 0.5:
                self.parts.append((at, end))
            at = end

    def __call__(self, spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        found = ((max(start, first), min(end, after)) for start, end in spans for first, after in self.parts)
        return [(first, after) for first, after in found if first < after]


def delivered(disk: base.Disk, sink: base.Sink, missing: base.Missing = base.EVERYTHING) -> int:
    """Deliver with zeros detected; return the bytes that the sink has got."""
    counting = delivery.DeliverySink(sink)
    assert disk.deliver(counting, missing, base.DeliveryMeter()) == SIZE
    return counting.delivered


@every
def test_each_byte_is_delivered_once(kind: str, files: Files) -> None:
    before = set(threading.enumerate())
    made = make(kind, files)
    sink = Exact(SIZE)
    count = delivered(made.disk, sink)
    sink.over = True
    wanted = bytearray(b"\xff") * len(sink.data)
    for start, end in made.covered:
        wanted[start:end] = made.expected[start:end]
    assert sink.data == wanted
    assert count == sum(end - start for start, end in made.covered)
    if not made.disk.covers_all:
        assert made.disk.declared == count
    assert set(threading.enumerate()) <= before


@every_again
def test_only_what_is_missing_is_delivered_and_again(kind: str, files: Files) -> None:
    made = make(kind, files)
    for seed in (0, 0, 1, 2):
        some = Some(seed, SIZE)
        sink = placing.Dirty(SIZE // 512 * 512)
        sink._cover = lambda offset, length: None  # type: ignore[method-assign]  # a cluster is whole
        delivered(made.disk, sink, some)
        for start, end in made.covered:
            for first, after in some([(start, end)]):
                assert sink.data[first:after] == made.expected[first:after]


class Failing(Exact):
    """Fails at each call ``after`` so many."""

    def __init__(self, size: int, after: int) -> None:
        super().__init__(size)
        self.calls = 0
        self._after = after

    def _cover(self, offset: int, length: int) -> None:
        super()._cover(offset, length)
        self.calls += 1
        if self.calls > self._after:
            raise errors.TargetError(path="disk", reason="broken")


@every
def test_failing_sink_ends_all(kind: str, files: Files) -> None:
    before = set(threading.enumerate())
    for after in (0, 3, 11):
        made, sink = make(kind, files), Failing(SIZE, after)
        with contextlib.suppress(errors.TargetError):
            delivered(made.disk, sink)
            assert sink.calls <= after, "the failure is lost"
        sink.over = True
        assert set(threading.enumerate()) <= before, after


@every
def test_cancel_ends_all(kind: str, files: Files) -> None:
    before = set(threading.enumerate())
    scope = cancelling.Cancel()

    class Cancelling(Exact):
        def _cover(self, offset: int, length: int) -> None:
            super()._cover(offset, length)
            scope.set()

    sink = Cancelling(SIZE)
    made = make(kind, files, scope)
    with contextlib.suppress(errors.Cancelled):
        delivered(made.disk, sink)
        # One call may have been the last.
        assert all(sink.covered[start // 512 : end // 512] != 0 for start, end in made.covered)
    sink.over = True
    assert set(threading.enumerate()) <= before


@pytest.fixture
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file, or a device full of 0xFF."""
    if request.param == "file":
        yield tmp_path / "disk.img"
        return
    with devices.loop(tmp_path, 8 * MiB, sector=int(request.param[5:])) as device:
        yield device


def read(path: Path) -> bytes:
    with path.open("rb") as stored:
        return stored.read(SIZE)


@each_somewhere
def test_target_holds_the_disk(kind: str, files: Files, place: Path) -> None:
    made = make(kind, files)
    with targets.open(place, made.disk.size) as out:
        delivered(made.disk, out)
        out.commit()
    assert read(place) == made.expected


@each_somewhere
def test_update_writes_only_what_differs(kind: str, files: Files, place: Path) -> None:
    made = make(kind, files)
    old = bytearray(made.expected)
    old[MiB + 512 : MiB + 1024] = b"x" * 512
    old[5 * MiB : 5 * MiB + 4096] = b"\0" * 4096
    place.write_bytes(old) if not place.is_block_device() else _fill(place, bytes(old))
    with targets.open(place, made.disk.size, targets.TargetOptions(mode="update")) as out:
        sink = compared.UpdatingSink(out)
        delivered(made.disk, sink)
        out.commit()
    assert read(place) == made.expected
    assert sink.changes.compared == SIZE
    assert sink.changes.written < MiB


def _fill(device: Path, data: bytes) -> None:
    with device.open("r+b") as stored:
        stored.write(data)


@every_whole
def test_stream_over_what_is_there_writes_what_differs(kind: str, files: Files, tmp_path: Path) -> None:
    """Storage holds other bytes in one unit that the journal claims."""
    made = make(kind, files)
    old = bytearray(made.expected[: 4 * MiB].ljust(SIZE, b"\xff"))
    old[3 * MiB : 3 * MiB + 512] = b"y" * 512
    (tmp_path / "disk.part").write_bytes(old)
    noted = journal.Journal.in_memory(SIZE)
    noted.zeroed([(0, 4 * MiB)])
    with targets.open(tmp_path / "disk", SIZE, targets.TargetOptions(resume=True)) as out:
        sink = compared.ContinuingSink(out.storage, noted, out)
        delivered(made.disk, sink)
        out.commit()
    assert (tmp_path / "disk").read_bytes() == made.expected
    assert 0 < sink.differed <= 64 << 10
