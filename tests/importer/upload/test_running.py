"""When an upload is accepted: complete, verified, safe and small enough, and before anything is usable."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import execute, plan, progress, request
from cdi_worker.importer.request import Room
from cdi_worker.importer.result import Result
from cdi_worker.importer.upload import headers, running
from cdi_worker.sources import base, upload
from tests.support import clones, devices, disks, oracle, processes

MIB = 1 << 20
ROUTES = {
    "raw": plan.Route.STREAM,
    "raw.gz": plan.Route.STREAM,
    "qcow2": plan.Route.PLACE,
    "vhdx-log": plan.Route.SPOOL,
    "archive": plan.Route.UNPACK,
    "block": plan.Route.STREAM,
    "block, ours": plan.Route.EXTENTS,
    "filesystem": plan.Route.UNPACK,
    "filesystem, ours": plan.Route.UNPACK,
}


class Content(readers.BytesReader):
    """The content of one request."""

    def interrupt(self) -> None: ...


@dataclasses.dataclass
class Case:
    """An upload, and its state each time it was accepted."""

    order: running.Order
    data: bytes
    disk: Path
    states: list[tuple[bool, int, bool]] = dataclasses.field(default_factory=list)

    def accepted(self, body: upload.Body) -> None:
        converting = Path(f"{self.disk}.part").exists()
        self.states.append((body.is_complete, body.received, converting))
        oracle.unusable(self.disk)

    def run(self, length: int | None = None) -> Result:
        """Upload all bytes, or the first ``length``."""
        body = upload.Body()
        data = self.data[:length]

        def run() -> None:
            body.lend(Content(data))
            body.end()

        client = threading.Thread(target=run)
        client.start()
        try:
            reads = cancelling.Reads(cancelling.Cancel())
            return execute.run_source(
                self.order.source(body, len(self.data), reads, lambda _kept: None),
                self.order.request,
                progress.NullProgress(),
                reads,
                accepted=lambda: self.accepted(body),
            )
        finally:
            body.end()
            client.join()


Make = Callable[..., Case]


@pytest.fixture
def make(tmp_path: Path, scratch: Path, folder: Path, disks: disks.Disks) -> Iterator[Make]:
    """Return a factory of cases by their name in ROUTES."""
    (tmp_path / "target").mkdir()
    with devices.loop(tmp_path, 32 * MIB) as block:

        def make_case(kind: str, *, device: bool = False, **request_headers: str) -> Case:
            target = block if device else tmp_path / "target" / "disk.img"
            settings = request.Request(
                source="upload",
                location=base.Location("upload"),
                target=str(target),
                scratch=str(scratch),
            )
            name, _, ours = kind.partition(", ")
            if name in {"block", "filesystem"}:
                data = clones.body(folder, name, ours=bool(ours))
                request_headers[headers.CONTENT_TYPE] = (
                    headers.BLOCK if name == "block" else headers.FILESYSTEM
                )
                request_headers |= {headers.CHOICE: headers.EXTENTS} if ours else {}
            else:
                form, _, compression = name.partition(".")
                path = disks.tar() if name == "archive" else disks.wrapped(form, compression or None)
                data = path.read_bytes()
            return Case(running.order(settings, request_headers, archive=name == "archive"), data, target)

        yield make_case


@pytest.mark.parametrize("kind", ["raw", "qcow2", "block, ours", "filesystem", "filesystem, ours"])
def test_accepted_once_before_the_device_is_usable(make: Make, kind: str) -> None:
    case = make(kind, device=True)
    route = case.run().plan.route
    assert route is (plan.Route.EXTRACT if ROUTES[kind] is plan.Route.UNPACK else ROUTES[kind])
    ((complete, received, _),) = case.states
    assert (complete, received) == (True, len(case.data))


@pytest.mark.parametrize("kind", ROUTES)
def test_accepted_once_before_the_file_is_usable(make: Make, kind: str) -> None:
    case = make(kind)
    route = case.run().plan.route
    assert route is ROUTES[kind]
    ((complete, received, converting),) = case.states
    assert (complete, received) == (True, len(case.data))
    assert converting is (route not in {plan.Route.SPOOL, plan.Route.UNPACK})


def test_archive_is_refused_for_a_device(make: Make) -> None:
    with pytest.raises(errors.RequestError, match="needs a volume with a file system, not a block device"):
        make("archive", device=True)


@pytest.mark.parametrize("kind", ROUTES)
def test_never_accepted_with_a_wrong_checksum(make: Make, kind: str) -> None:
    case = make(kind, **{headers.CHECKSUM: f"sha256:{'0' * 64}"})
    with pytest.raises(errors.ChecksumMismatch):
        case.run()
    assert not case.states
    oracle.unusable(case.disk)


@pytest.mark.parametrize("kind", ROUTES)
def test_never_accepted_when_cut_short(make: Make, kind: str) -> None:
    case = make(kind)
    with pytest.raises(errors.Error):
        case.run(len(case.data) - 700)
    assert not case.states
    oracle.unusable(case.disk)


def test_never_accepted_when_the_disk_does_not_fit(make: Make) -> None:
    for kind in ("raw", "vhdx-log", "block", "block, ours", "filesystem, ours"):
        case = make(kind)
        request = dataclasses.replace(case.order.request, room=Room(size=MIB))
        case.order = dataclasses.replace(case.order, request=request)
        with pytest.raises(errors.TooLarge):
            case.run()
        assert not case.states


def test_never_accepted_when_the_disk_does_not_fit_which_its_first_bytes_do_not_show(
    make: Make, tmp_path: Path
) -> None:
    """The size is behind a long log."""
    image = tmp_path / "image"
    processes.run("qemu-img", "create", "-q", "-f", "vhdx", "-o", "log_size=32M", image, "24M")
    case = make("vhdx-log")
    request = dataclasses.replace(case.order.request, room=Room(size=MIB))
    case.order, case.data = dataclasses.replace(case.order, request=request), image.read_bytes()
    with pytest.raises(errors.TooLarge):
        case.run()
    assert not case.states
    oracle.unusable(case.disk)


def test_cloned_disk_larger_than_the_device_is_refused_at_once(make: Make, folder: Path) -> None:
    (folder / "disk.img").write_bytes(b"x" * (40 * MIB))
    case = make("filesystem, ours", device=True)
    with pytest.raises(errors.TooLarge) as refused:
        case.run()
    assert refused.value.fields["virtual_size"] == 40 * MIB
    assert set(case.disk.read_bytes()[2 * MIB :]) == {*devices.DIRT}


def test_plan_of_a_clone_is_logged(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        make("block, ours").run()
    assert "plan extents: raw disk, the stream marks its holes" in caplog.text


@pytest.mark.parametrize("ours", ["", ", ours"])
def test_device_that_ends_like_a_fixed_vhd_is_cloned_whole(
    make: Make, disks: disks.Disks, folder: Path, ours: str
) -> None:
    """A guest may write such a last sector; the format of a clone is not detected."""
    (folder / "disk.img").write_bytes(disks.image("vhd-fixed").read_bytes())
    case = make(f"block{ours}")
    case.run()
    oracle.same(case.disk, folder / "disk.img")


@pytest.mark.parametrize("text", ["", " "])
def test_empty_checksum_of_a_client_is_refused(tmp_path: Path, text: str) -> None:
    """A client's variable is not set: what it demands must not be dropped."""
    settings = request.Request(source="upload", location=base.Location("upload"), target=str(tmp_path / "d"))
    with pytest.raises(errors.RequestError, match="invalid checksum"):
        running.order(settings, {headers.CHECKSUM: text}, archive=False)
    assert running.order(settings, {}, archive=False).request.checksum is None
