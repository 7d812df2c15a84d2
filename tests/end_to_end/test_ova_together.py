"""The disks of an OVA become usable together, and the same command succeeds after a fault or a kill."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import sys
import threading
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import together
from tests.support import disks as disks_module
from tests.support import forked, misbehave, oracle, ovas, processes, worker
from tests.support.ovas import Disk

NAMES = ("a", "b", "c")
VARIANT = "vmdk-stream"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disks"
    made.mkdir()
    return made


def package(disks: disks_module.Disks, listed: str = "first") -> bytes:
    image = disks.image(VARIANT).read_bytes()
    return ovas.ova(*(Disk(image, f"{name}.vmdk") for name in NAMES), listed=listed)


def damaged(data: bytes, disk: bytes) -> bytes:
    """Return a package with a changed byte near the end of its second disk."""
    at = data.index(disk, data.index(disk) + 1) + len(disk) - 1
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def check(folder: Path, disks: disks_module.Disks) -> None:
    assert sorted(os.listdir(folder)) == [f"{name}.img" for name in NAMES]
    for name in NAMES:
        oracle.same(folder / f"{name}.img", disks.expected(VARIANT))


class Route:
    """Serves a package by ranges, as a stream, as a file or through a pipe; ``run`` imports it."""

    def __init__(self, kind: str, server: misbehave.Server, folder: Path) -> None:
        self.kind, self._server, self._folder = kind, server, folder
        self._path = folder.parent / "vm.ova"
        self._data = b""
        if kind == "pipe":
            os.mkfifo(self._path)

    def serve(self, data: bytes) -> None:
        self._data = data
        if self.kind in {"ranges", "stream"}:
            self._server.serve("/vm.ova", misbehave.Page(data, ranges=self.kind == "ranges"))
        elif self.kind == "file":
            self._path.write_bytes(data)

    @property
    def source(self) -> str:
        return self._server.url("/vm.ova") if self.kind in {"ranges", "stream"} else str(self._path)

    def feed(self) -> None:
        if self.kind == "pipe":
            threading.Thread(target=self._feed, daemon=True).start()

    def _feed(self) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._path.write_bytes(self._data)

    def run(self, *options: str) -> worker.Completed:
        self.feed()
        return worker.call("import", "--all", self.source, self._folder, *options)


@pytest.fixture
def route(request: pytest.FixtureRequest, server: misbehave.Server, folder: Path) -> Route:
    """Return the route of the test's parameter; by ranges if it has none."""
    return Route(getattr(request, "param", "ranges"), server, folder)


@pytest.mark.parametrize(("route", "listed"), [("stream", "first"), ("pipe", "last")], indirect=["route"])
def test_same_command_succeeds_when_a_damaged_disk_is_mended(
    route: Route, disks: disks_module.Disks, folder: Path, listed: str
) -> None:
    data = package(disks, listed)
    route.serve(damaged(data, disks.image(VARIANT).read_bytes()))
    assert route.run().status != 0
    assert os.listdir(folder) == [], "no disk is usable without the others"
    route.serve(data)
    done = route.run()
    assert done.status == 0, done.errors
    check(folder, disks)


def test_disk_without_a_file_is_refused_before_the_first_byte(
    route: Route, server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    """A header shows that it is missing."""
    image = disks.image(VARIANT).read_bytes() + bytes(8 << 20)
    found = ovas.descriptor([Disk(image, "a.vmdk"), Disk(image, "b.vmdk")])
    data = ovas.packed(("vm.ovf", found), ("a.vmdk", image))
    route.serve(data)
    done = route.run()
    assert "the archive has no file 'b.vmdk'" in done.error_message
    assert server.sent("/vm.ova") < 2 << 20


def test_disk_that_the_manifest_does_not_list_is_refused_before_the_first_byte(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    image = disks.image(VARIANT).read_bytes()
    found = ovas.descriptor([Disk(image, "a.vmdk"), Disk(image, "b.vmdk")])
    stated = ovas.manifest([("vm.ovf", found), ("a.vmdk", image)])
    data = ovas.packed(("vm.ovf", found), ("vm.mf", stated), ("a.vmdk", image), ("b.vmdk", image))
    url = server.serve("/vm.ova", misbehave.Page(data, ranges=False))
    begun: list[str] = []
    wanted = cdi_worker.Request(source="http", location=cdi_worker.Location(url), target=str(folder))
    with pytest.raises(errors.Refused, match=r"no checksum of 'b\.vmdk'"):
        together.run_all(wanted, _Phases(begun))
    assert "transfer" not in begun


class _Phases(cdi_worker.NullProgress):
    def __init__(self, found: list[str]) -> None:
        self._found = found

    def phase(self, name: str, total: int | None) -> None:
        self._found.append(name)


#: Kills the worker before it gives a disk its name: the first argument is the number of the disk.
KILLER = """
import os, signal, sys
left = int(sys.argv.pop(1))
inner = os.replace
def killing(path, *arguments, **more):
    global left
    if str(path).endswith(".part"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return inner(path, *arguments, **more)
os.replace = killing
from cdi_worker.importer import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def killed(route: Route, folder: Path, number: int) -> None:
    """Run the command, which SIGKILL ends."""
    route.feed()
    argv = [sys.executable, "-c", KILLER, str(number), "import", "--all", route.source, str(folder)]
    done = forked.run(argv, env=forked.ENVIRONMENT)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("route", "number"),
    # Before the first, the second and the last of three disks becomes usable.
    [("ranges", 1), ("stream", 2), ("file", 3), ("pipe", 2)],
    indirect=["route"],
)
def test_same_command_succeeds_after_a_kill_between_the_renames(
    route: Route, disks: disks_module.Disks, folder: Path, number: int
) -> None:
    route.serve(package(disks))
    killed(route, folder, number)
    usable = sorted(name for name in os.listdir(folder) if name.endswith(".img"))
    assert len(usable) == number - 1
    for name in usable:
        oracle.same(folder / name, disks.expected(VARIANT))
    done = route.run()
    assert done.status == 0, done.errors
    check(folder, disks)


def test_kill_while_the_second_disk_is_written_leaves_no_usable_disk(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    data = package(disks)
    url = server.serve("/vm.ova", misbehave.Page(data, ranges=False, drip=(64 << 10, 0.05)))
    with worker.started("import", "--all", url, folder) as first:
        processes.wait_for((folder / "b.img.part").exists, "the second disk")
        first.kill()
        first.wait(processes.PATIENCE)
    assert not [name for name in os.listdir(folder) if name.endswith(".img")]
    server.serve("/vm.ova", misbehave.Page(data, ranges=False))
    done = worker.call("import", "--all", url, folder)
    assert done.status == 0, done.errors
    check(folder, disks)


@pytest.mark.parametrize("etag", [None, '"one"'], ids=["weak", "strong"])
def test_finished_disks_are_kept_of_a_changed_package_with_a_strong_identity_only(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path, etag: str | None
) -> None:
    """A package that has had two states under one date may have had the second one all along."""
    good = misbehave.Page(package(disks, "not"), etag=etag)
    url = server.serve("/vm.ova", dataclasses.replace(good, drip=(64 << 10, 0.05)))
    with worker.started("import", "--all", url, folder) as first:
        processes.wait_for((folder / "b.img.part").exists, "the second disk")
        other = {"etag": '"two"'} if etag else {"modified": "Mon, 02 Nov 2026 11:00:00 GMT"}
        server.serve("/vm.ova", dataclasses.replace(good, **other))
        assert first.wait(processes.PATIENCE) != 0
    kept = [name for name in os.listdir(folder) if name.startswith("a.img")]
    assert bool(kept) is bool(etag), kept
    server.serve("/vm.ova", good)
    done = worker.call("import", "--all", url, folder)
    assert done.status == 0, done.errors
    check(folder, disks)


def test_same_command_succeeds_after_several_kills_and_failures(
    route: Route, server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    """The record of the first kill is still known after runs that changed nothing."""
    data = package(disks)
    route.serve(data)
    killed(route, folder, 2)
    route.serve(damaged(data, disks.image(VARIANT).read_bytes()))
    assert route.run().status != 0
    other = server.serve("/other", misbehave.Page(disks.raw().read_bytes()))
    assert "exists" in worker.call("import", other, folder / "a.img").error_message
    route.serve(data)
    killed(route, folder, 1)
    killed(route, folder, 3)
    done = route.run()
    assert done.status == 0, done.errors
    check(folder, disks)


@pytest.mark.parametrize("change", ["touched", "replaced"])
def test_file_that_was_changed_after_the_kill_is_not_replaced(
    route: Route, disks: disks_module.Disks, folder: Path, change: str
) -> None:
    route.serve(package(disks))
    killed(route, folder, 2)
    disk = folder / "a.img"
    if change == "replaced":
        disk.unlink()
    with disk.open("ab" if change == "replaced" else "r+b") as stream:
        stream.write(b"of a virtual machine")
    before = disk.read_bytes()
    done = route.run()
    assert "a.img: exists" in done.error_message
    assert disk.read_bytes() == before
    assert route.run("--force").status == 0
    check(folder, disks)


def test_another_command_does_not_replace_what_a_kill_left(
    route: Route, server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    route.serve(package(disks))
    killed(route, folder, 2)
    before = (folder / "a.img").read_bytes()
    url = server.serve("/other", misbehave.Page(package(disks)))
    assert "a.img: exists" in worker.call("import", "--all", url, folder).error_message
    server.serve("/other", misbehave.Page(disks.raw().read_bytes()))
    assert "a.img: exists" in worker.call("import", url, folder / "a.img").error_message
    assert (folder / "a.img").read_bytes() == before


def test_existing_disk_is_kept_if_another_of_the_package_is_wrong(
    route: Route, disks: disks_module.Disks, folder: Path
) -> None:
    (folder / "a.img").write_bytes(b"old")
    route.serve(damaged(package(disks), disks.image(VARIANT).read_bytes()))
    assert route.run("--force").status != 0
    assert (folder / "a.img").read_bytes() == b"old"
    assert os.listdir(folder) == ["a.img"]


def test_more_than_twenty_disks_of_a_stream_are_imported(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    image = disks.image("vmdk-stream").read_bytes()
    each = [Disk(image, f"{number}.vmdk") for number in range(40)]
    url = server.serve("/vm.ova", misbehave.Page(ovas.ova(*each, listed="last"), ranges=False))
    done = worker.call("import", "--all", url, folder)
    assert done.status == 0, done.errors
    assert len(os.listdir(folder)) == 40


def test_ranges_that_are_not_right_become_one_stream(
    server: misbehave.Server, disks: disks_module.Disks, folder: Path
) -> None:
    """The server offers ranges, and answers the later ones with the whole."""
    page = misbehave.Page(package(disks, "last"))
    url = server.serve("/vm.ova", (page, 1), dataclasses.replace(page, ranges=False))
    done = worker.call("import", "--all", url, folder)
    assert done.status == 0, done.errors
    check(folder, disks)
