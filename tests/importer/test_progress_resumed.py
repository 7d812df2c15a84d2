"""What a worker shows of its progress when it continues what an earlier attempt has begun."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import io
import json
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cdi_worker
from cdi_worker import errors
from cdi_worker.formats import clone as clone_format
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.importer import execute, metrics, progress
from cdi_worker.importer.send import file as send_file
from cdi_worker.sources import clone, upload
from tests.support import disks as disks_module
from tests.support import misbehave, processes

MiB = 1 << 20
#: The disk: noise, and holes between it.
SIZE = 48 * MiB
PERCENT = "kubevirt_cdi_import_progress"


class Several(progress.Progress):
    """Passes progress on to several reporters."""

    def __init__(self, *reporters: progress.Progress) -> None:
        for name in vars(progress.Progress):
            if not name.startswith("_"):
                setattr(self, name, functools.partial(self._pass_on, name))
        self._reporters = reporters

    def _pass_on(self, name: str, *args: object) -> None:
        for each in self._reporters:
            getattr(each, name)(*args)


class Shown(metrics.Metrics):
    """Record the percentage in the metrics after every change, and what log lines show of a phase."""

    def __init__(self) -> None:
        super().__init__(PERCENT, "uid")
        self._recording = threading.Lock()
        self.series: list[float] = []
        self.first: progress.Numbers | None = None
        self.text, self.json = io.StringIO(), io.StringIO()
        self.lines = [progress.Lines(self.text), progress.Lines(self.json, as_json=True)]

    def changed(self, *, new_phase: bool) -> None:
        """Record what a scrape would return now."""
        # One thread at a time: it may not be overtaken between reading the page and recording it.
        with self._recording:
            self._record()

    def _record(self) -> None:
        found = [sample.value for family in self.collect() for sample in family.samples
                 if family.name == PERCENT]  # fmt: skip
        self.series += found
        if self.name in progress.SHARES:
            self.first = self.first or self.numbers()


class Stopping(progress.Meter):
    """Set ``cancel`` when ``count`` bytes have been read."""

    def __init__(self, count: int, cancel: threading.Event) -> None:
        super().__init__()
        self._after, self._cancel = count, cancel

    def read(self, count: int) -> None:
        super().read(count)
        if self._read >= self._after:
            self._cancel.set()


def disk(path: Path) -> Path:
    """Make a disk with extents of noise."""
    noise = random.Random(5)
    with path.open("wb") as stream:
        for start in range(0, SIZE, 8 * MiB):
            stream.seek(start)
            stream.write(noise.randbytes(5 * MiB))
        stream.truncate(SIZE)
    return path


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return disk(tmp_path_factory.mktemp("disk") / "disk.raw")


def image_of(raw: Path, form: str) -> Path:
    """Return the disk in a format, which is made once."""
    path = raw.with_suffix(f".{form}")
    if not path.exists():
        disks_module.convert(raw, path, disks_module.FORMATS[form])
    return path


@pytest.mark.parametrize(
    ("form", "share"),
    # The other formats take the route of qcow2; the log of a VHDX is read from scratch.
    [("raw", 0.65), ("qcow2", 0.4), ("qcow2-zstd", 0.65), ("vhdx-log", 0.3), ("vhdx-log", 0.65)],
)
def test_resumed_import_begins_with_what_is_kept(
    server: misbehave.Server, raw: Path, tmp_path: Path, form: str, share: float
) -> None:
    """No reporter shows less than before, and 100 only at the end."""
    (scratch := tmp_path / "scratch").mkdir()
    page = misbehave.Page(image_of(raw, form).read_bytes())
    slow = dataclasses.replace(page, drip=(256 << 10, 0.02))
    wanted = cdi_worker.Request(
        source="http",
        location=cdi_worker.Location(server.serve("/disk", slow)),
        target=str(tmp_path / "disk.img"),
        # Formats that qemu-img reads are downloaded into scratch then.
        checksum=f"sha256:{hashlib.sha256(page.body).hexdigest()}" if form == "vhdx-log" else None,
        scratch=str(scratch),
        journal_interval=0.0,
        fetch=fetch.FetchOptions(connections=2, chunk=MiB, no_progress=20),
    )
    cancel = threading.Event()
    stopped = Stopping(int(share * len(page.body)), cancel)
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(wanted, progress=stopped, cancel=cancel)

    server.serve("/disk", page)
    shown = Shown()
    done = cdi_worker.run(wanted, progress=Several(shown, *shown.lines))
    assert (tmp_path / "disk.img").read_bytes() == raw.read_bytes()
    assert done.resumed > 0
    check(shown, done)
    # What the first attempt showed, but for pieces on their way and units that were not complete.
    assert shown.series[0] >= stopped.percent - 100 * 6 * MiB / len(page.body)


def check(shown: Shown, done: cdi_worker.Result) -> None:
    assert shown.series == sorted(shown.series)
    assert 0 < shown.series[0] < 100
    assert all(value < 100 for value in shown.series[:-1])
    first = shown.first
    assert first is not None
    assert first.total
    assert first.done > 0
    end = progress.SHARES[first.phase][1]
    assert first.percent == pytest.approx(end * first.done / first.total, abs=0.1)
    if first.total == SIZE:
        assert first.done == done.resumed
    lines = [json.loads(line) for line in shown.json.getvalue().splitlines()]
    # With ``resume`` a line is printed that still has the phase before.
    moving = [line for line in lines if line["phase"] != "connect"]
    assert moving[0]["percent"] == pytest.approx(first.percent, abs=0.1)
    assert moving[0]["bytes"] == first.done
    for series in (
        [line["percent"] for line in moving],
        [float(found) for found in re.findall(r"^ *([\d.]+)%", shown.text.getvalue(), re.MULTILINE)],
    ):
        assert series == sorted(series)
        assert 100.0 not in series[:-1]


_STEPS = st.lists(
    st.tuples(st.sampled_from(["advance", "skip", "keep"]), st.integers(0, 1000)), min_size=1, max_size=30
)


@given(moved=st.integers(0, 4000), skipped=st.integers(0, 4000), total=st.integers(1, 9000), steps=_STEPS)
def test_percentage_never_falls_whatever_is_kept(
    moved: int, skipped: int, total: int, steps: list[tuple[str, int]]
) -> None:
    """It begins with what the earlier attempt counted, also before it is known again what that was."""
    meter = progress.Meter()
    seen: list[float] = []
    continued = progress.Continued(meter, moved, skipped)
    meter.phase("connect", None)
    continued.begin("transfer", total, is_resumed=True)
    left = max(0, total - skipped)
    expected = 99.9 * min(1.0, moved / left) if left else 0.0
    assert meter.numbers().percent == pytest.approx(expected)
    for name, count in steps:
        seen.append(meter.numbers().percent)
        getattr(continued, name)(count)
    seen.append(meter.numbers().percent)
    assert seen == sorted(seen)
    assert seen[-1] < 100
    meter.done()
    assert meter.numbers().percent == 100


def test_what_is_kept_counts_as_done_but_not_as_speed() -> None:
    meter = progress.Meter()
    meter.resume(80 * MiB, 100 * MiB)
    meter.keep(40 * MiB)
    meter.phase("transfer", 100 * MiB)
    meter.keep(40 * MiB)
    assert (meter.numbers().done, meter.numbers().speed) == (80 * MiB, 0)
    meter.advance(MiB)
    assert 0 < meter.numbers().speed <= MiB


@given(announced=st.integers(0, 1000), counts=st.lists(st.integers(-100, 500), max_size=20))
def test_what_was_counted_in_advance_is_not_counted_twice(announced: int, counts: list[int]) -> None:
    count = progress.Exceeding(announced)
    passed = announced + sum(map(count.add, counts))
    assert passed == count.passed == max(announced, sum(counts))


def test_continued_upload_begins_with_what_the_server_has(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(bytes(4 * MiB))
    shown = Shown()
    with send_file.ImageFile(str(path), Several(shown, *shown.lines)) as file:
        file.begin(3 * MiB)
        for _ in file.chunks(3 * MiB):
            pass
    assert shown.series[0] == pytest.approx(0.75 * 99.9, abs=0.01)
    assert shown.series == sorted(shown.series)
    lines = [json.loads(line) for line in shown.json.getvalue().splitlines()]
    assert next(line["bytes"] for line in lines if line["phase"] == "transfer") == 3 * MiB


class Content(readers.BytesReader):
    """The content of a request; ``end`` is called at its end."""

    def __init__(self, data: bytes, end: Callable[[], object]) -> None:
        super().__init__(data)
        self._end = end

    def readinto(self, into: memoryview, /) -> int:
        count = super().readinto(into)
        if not count:
            self._end()
        return count

    def interrupt(self) -> None: ...


def receive(target: Path, data: bytes, shown: progress.Meter, cut_at: int = 0) -> tuple[int, int]:
    """Receive a clone of SIZE bytes, and cancel it when so many are written; return what is kept."""
    body, kept, cancel = upload.Body(), list[tuple[int, int]](), cancelling.Cancel()

    def end() -> None:
        if cut_at:
            processes.wait_for(lambda: shown.count >= cut_at, "what was sent")
            cancel.set()

    content = Content(data, end)
    client = threading.Thread(target=lambda: (body.lend(content), body.end()))
    with cancelling.Reads(cancel) as reads:
        source = clone.CloneSource(
            body,
            reads,
            is_tar=False,
            ours=True,
            content=clone.SentDisk("a" * 32, SIZE),
            keep=kept.append,
        )
        wanted = cdi_worker.Request(
            source="upload", location=cdi_worker.Location("upload"), target=str(target)
        )
        client.start()
        try:
            execute.run_source(source, wanted, shown, reads)
        finally:
            body.end()
            client.join()
    return kept[0]


def test_holes_of_a_resumed_clone_are_subtracted_on_both_sides(tmp_path: Path) -> None:
    """Its sender leaves out what is kept, with its holes: no other ones stand for them."""
    noise = memoryview(random.Random(6).randbytes(4 * MiB))
    half = SIZE // 2

    def encoded(encoder: clone_format.Encoder) -> bytes:
        return b"".join((*encoder.data(noise), encoder.zeros(half - 2 * len(noise)), *encoder.data(noise)))

    first, second = clone_format.Encoder(), clone_format.Encoder()
    with pytest.raises(errors.Cancelled):
        receive(tmp_path / "disk", clone_format.MAGIC + encoded(first), progress.Meter(), 2 * len(noise))
    rest = clone_format.MAGIC + second.kept(half) + encoded(second) + second.end()
    shown = Shown()
    assert receive(tmp_path / "disk", rest, shown) == (0, half)
    assert shown.series == sorted(shown.series)
    # Of 16 MiB of data, the last piece of 4 MiB ends at 99.9 %.
    assert shown.series[-2:] == [pytest.approx(99.9), 100]
