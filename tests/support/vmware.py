"""VMware on 127.0.0.1: vcsim with one machine and its snapshots, and a stub of the VDDK library.

The disks are raw files, one per snapshot, named as vSphere names them. The host of export
leases is in ``leases``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from cdi_worker.sources import base
from cdi_worker.sources.vmware import locations, vddk
from tests.support import leases, processes, repository, tls

#: Where tools/vmware puts what it builds.
MADE = repository.ROOT / "build/vmware"
USER, PASSWORD = "administrator@vsphere.local", "secret of vSphere, a=b"
UUID, INSTANCE_UUID = "4219c3b1-0000-4000-8000-00000000b105", "50193c1b-0000-4000-8000-0000000005ce"
#: The unit of changed block tracking, in bytes.
BLOCK = 64 << 10
CHANGE_ID = "52 de c0 d9 b9 43 9d 10-61 d5 4c 1b e9 7b 65 63"

#: A write of the guest: an offset, and the bytes or the length of a hole.
Write = tuple[int, bytes | int]


FIRST_KEY = 2000


@functools.cache
def need() -> None:
    """Skip the test unless VDDK can be there."""
    if os.uname().machine != vddk.MACHINE:
        pytest.skip("needs nbdkit's VDDK plugin, which exists for amd64 only")
    processes.need("nbdkit")


@functools.cache
def build() -> None:
    """Build vcsim and the VDDK stub, once; skip the test if a build tool is missing."""
    processes.need("go", "gcc", "apt-get")
    processes.run(repository.ROOT / "tools/vmware", timeout=300)


def differing(one: Path, other: Path) -> list[tuple[int, int]]:
    """Return the blocks of changed block tracking in which two disks differ."""
    found = []
    with one.open("rb") as old, other.open("rb") as new:
        at = 0
        while block := new.read(BLOCK):
            if old.read(BLOCK) != block:
                found.append((at, len(block)))
            at += len(block)
    return found


def hole(path: Path, offset: int, length: int) -> None:
    """Punch a hole into a file; offset and length in bytes."""
    processes.run("fallocate", "--punch-hole", f"--offset={offset}", f"--length={length}", path)


def allocated(path: Path) -> list[tuple[int, int]]:
    """Return the areas with data of a sparse file, in units of changed block tracking."""
    size = path.stat().st_size
    found: list[tuple[int, int]] = []
    with path.open("rb", buffering=0) as file:
        at = 0
        while at < size:
            try:
                data = file.seek(at, os.SEEK_DATA)
            except OSError:
                break
            at = file.seek(data, os.SEEK_HOLE)
            start, end = data // BLOCK * BLOCK, min(-(-at // BLOCK) * BLOCK, size)
            if found and start <= sum(found[-1]):
                start = found.pop()[0]
            found.append((start, end - start))
    return found


class Vcsim:
    """One virtual machine with one disk of ``size`` bytes, and more of other sizes.

    Take all snapshots before ``running``. ``exports``: it has export leases; then VDDK need not be there.
    """

    def __init__(
        self, directory: Path, size: int, *, more: Sequence[int] = (), exports: bool = False
    ) -> None:
        if not exports:
            need()
        build()
        self.directory = directory
        self.size = size
        self.count = 1 + len(more)
        self.exports = exports
        #: The version of the API, when the server starts.
        self.api = "8.0.3.0"
        #: The power state; independent disks, by number: snapshots lack them.
        self.power = "poweredOn"
        self.independent: set[int] = set()
        #: Fields of the scenario's leases (lease.go): they replace ours.
        self.lease: dict[str, Any] = {}
        #: What the host has sent, by the lease's id and the device's name there.
        self.manifests: dict[str, dict[str, dict[str, Any]]] = {}
        #: The host of the leases, while it runs.
        self.host: leases.Host | None = None
        self.saving = threading.RLock()
        self.settings: dict[str, object] = {"root": directory / "datastores", "log": directory / "vddk.log"}
        self.password = PASSWORD
        self.settings |= {"user": USER, "password": PASSWORD}
        self.answers = 0
        #: The bytes that one list of changed areas covers; 0: all.
        self.covers = 0
        self.disk_object_id = "52-2000"
        self.libdir = directory / "vddk"
        (self.libdir / "lib64").mkdir(parents=True)
        shutil.copy(MADE / "libvixDiskLib.so.8", self.libdir / "lib64")
        self._folder = directory / "datastores/LocalDS_0/vm"
        self._folder.mkdir(parents=True)
        self._changes: list[list[tuple[int, int]]] = []
        self.deleted: set[int] = set()
        #: The list of changed areas of the last snapshot, exactly as it is.
        self.listed: list[tuple[int, int]] | None = None
        self._compared: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        #: Whether changed block tracking is on: disks have change ids.
        self.tracks = True
        #: Whether vSphere knows the allocated areas (change id *).
        self.knows_allocated = True
        pair = tls.Authority(directory / "tls").issue()
        self.pair = pair
        self.authority = directory / "tls/ca.pem"
        self.thumbprint = pair.thumbprint
        self.settings["thumbprint"] = pair.digest("sha1")
        self._settings = dict(self.settings)
        for number, length in enumerate([size, *more]):
            with self.content(0, number).open("wb") as file:
                file.truncate(length)
        self.port = processes.free_port()

    def content(self, number: int, disk: int = 0) -> Path:
        """Return the raw disk at a snapshot, counted from 0; after the last one, the current disk."""
        name = f"disk{f'_{disk}' if disk else ''}{f'-{number:06d}' if number else ''}.vmdk"
        return self._folder / name

    def current(self, disk: int = 0) -> Path:
        """Return the raw disk after the last snapshot."""
        return self.content(len(self._changes), disk)

    def write(self, *writes: Write, disk: int = 0) -> None:
        """Write as the guest, after the last snapshot."""
        path = self.current(disk)
        for offset, data in writes:
            if isinstance(data, int):
                hole(path, offset, data)
                continue
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(data)

    def grow(self, size: int, disk: int = 0) -> None:
        """Grow the current disk, after the last snapshot; vSphere does not list the new space as changed."""
        if not disk:
            self.size = size
        os.truncate(self.current(disk), size)

    def take_snapshot(self, *writes: Write) -> None:
        """Write as the guest, then take a snapshot."""
        self.write(*writes)
        areas = set()
        for offset, data in writes:
            length = data if isinstance(data, int) else len(data)
            areas |= set(range(offset // BLOCK, -(-(offset + length) // BLOCK)))
        self._changes.append([(block * BLOCK, BLOCK) for block in sorted(areas)])
        for disk in range(self.count):
            now = self.content(len(self._changes) - 1, disk)
            processes.run("cp", "--sparse=always", now, self.current(disk))

    def change_id(self, number: int, disk: int = 0) -> str:
        """Return the change ID of the disk at a snapshot."""
        return f"{CHANGE_ID[:-2]}{0x63 + disk:02x}/{number + 1}"

    def snapshot(self, number: int) -> str:
        """Return the managed object ID of a snapshot."""
        return f"snapshot-{number + 11}"

    def number(self, snapshot: str) -> int:
        """Return the number of a snapshot; that of the current disk for any other name."""
        known = {self.snapshot(number): number for number in range(len(self._changes))}
        return known.get(snapshot, len(self._changes))

    def file(self, number: int, disk: int = 0) -> str:
        """Return the datastore path of the disk at a snapshot."""
        return f"[LocalDS_0] vm/{self.content(number, disk).name}"

    def location(self, **changes: Any) -> locations.Vddk:
        """Return the location of the disk; ``changes`` replace fields."""
        access = base.Access(user=USER, password=self.password)
        made = locations.Vddk(
            f"https://localhost:{self.port}/sdk",
            access,
            uuid=INSTANCE_UUID,
            backing_file=self.file(0),
            thumbprint=self.thumbprint,
            vddk_libdir=str(self.libdir),
        )
        return dataclasses.replace(made, **changes)

    def variables(self) -> dict[str, str]:
        """Return the variables of a pod that imports the disk."""
        return {
            "IMPORTER_SOURCE": "vddk",
            "IMPORTER_ENDPOINT": f"https://localhost:{self.port}/sdk",
            "IMPORTER_UUID": INSTANCE_UUID,
            "IMPORTER_BACKING_FILE": self.file(0),
            "IMPORTER_THUMBPRINT": self.thumbprint,
            "IMPORTER_ACCESS_KEY_ID": USER,
            "IMPORTER_SECRET_KEY": PASSWORD,
        }

    def machine(self, **changes: Any) -> locations.Vsphere:
        """Return the location of the machine; ``changes`` replace fields."""
        access = base.Access(user=USER, password=self.password)
        made = locations.Vsphere(
            f"https://localhost:{self.port}/sdk", access, uuid=INSTANCE_UUID, thumbprint=self.thumbprint
        )
        return dataclasses.replace(made, **changes)

    def stage(self, number: int) -> dict[str, str]:
        """Return the checkpoints of one stage of a warm migration."""
        previous = self.snapshot(number - 1) if number else ""
        return {"previous": previous, "current": self.snapshot(number)}

    def save(self) -> None:
        """Write the settings of vcsim and of the library; both read them again for each call."""
        lines = "".join(f"{name}={value}\n" for name, value in self.settings.items())
        # The host saves what it has sent.
        with self.saving:
            (self.directory / "settings.new").write_text(lines)
            (self.directory / "settings.new").replace(self.libdir / "settings")
            temporary = self.directory / "scenario.new"
            temporary.write_text(json.dumps(self._scenario()))
            temporary.replace(self.directory / "scenario.json")

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run vcsim, and the host of its leases; ``options`` are further command-line options."""
        with self._host(), self._server(*options) as process:
            yield process

    @contextlib.contextmanager
    def _host(self) -> Iterator[None]:
        if not self.exports:
            yield
            return
        with leases.Host(self) as host:
            self.host = host
            try:
                yield
            finally:
                self.host = None

    @contextlib.contextmanager
    def _server(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        self.save()
        argv: list[str | Path] = [MADE / "vcsim", "-listen", f"127.0.0.1:{self.port}", "-user", USER]
        argv += ["-password", self.password, "-certificate", self.pair.certificate, "-key", self.pair.key]
        argv += ["-scenario", self.directory / "scenario.json", *options]
        log = self.directory / "vcsim.log"
        with processes.running(
            argv,
            log=log,
            ready=lambda: processes.is_listening(self.port),
            env={**os.environ, "TMPDIR": str(self.directory)},
        ) as process:
            yield process

    def reset(self) -> None:
        """Undo what a test has changed, for the next one on the same server."""
        self.settings = dict(self._settings)
        self.deleted, self.listed, self.knows_allocated = set(), None, True
        self.answers = self.covers = 0
        self.power, self.lease, self.manifests, self.tracks = "poweredOn", {}, {}, True
        self.independent = set()
        (self.directory / "vddk.log").unlink(missing_ok=True)
        (self.directory / "calls.log").unlink(missing_ok=True)
        if self.host:
            self.host.reset()
        self.save()

    def calls(self, *names: str) -> list[dict[str, Any]]:
        """Return the calls of vSphere that lease.go records, of these names or all, in their order."""
        log = self.directory / "calls.log"
        lines = log.read_text().splitlines() if log.exists() else []
        found: list[dict[str, Any]] = [json.loads(line) for line in lines]
        return [each for each in found if not names or each["call"] in names]

    def library_calls(self) -> list[str]:
        """Return the calls made to the library so far."""
        log = self.directory / "vddk.log"
        return log.read_text().splitlines() if log.exists() else []

    def _scenario(self) -> dict[str, Any]:
        count = len(self._changes)
        snapshots = [
            {
                "ID": self.snapshot(number),
                "Name": f"stage {number}",
                "Disks": [
                    self._disk(number, disk) for disk in range(self.count) if disk not in self.independent
                ],
            }
            for number in range(count)
            if number not in self.deleted
        ]
        changes = {
            self.snapshot(now): {
                str(FIRST_KEY + disk): self._changed(now, disk) for disk in range(self.count)
            }
            for now in range(count)
        }
        if self.listed is not None:
            changes[self.snapshot(count - 1)][str(FIRST_KEY)][self.change_id(count - 2)] = self.listed
        return {
            "UUID": UUID,
            "InstanceUUID": INSTANCE_UUID,
            "API": self.api,
            "PowerState": self.power,
            "Disks": [self._disk(count, disk) for disk in range(self.count)],
            "Snapshots": snapshots,
            "Changes": changes,
            "Answers": self.answers,
            "Covers": self.covers,
            "Lease": self._lease(),
        }

    def _changed(self, now: int, disk: int) -> dict[str, list[tuple[int, int]]]:
        found = {}
        for then in range(now):
            if disk:
                areas = set(self._differing(then, now, disk))
            else:
                areas = {area for step in self._changes[then + 1 : now + 1] for area in step}
            found[self.change_id(then, disk)] = sorted(areas)
        if self.knows_allocated:
            found["*"] = allocated(self.content(now, disk))
        return found

    def _differing(self, then: int, now: int, disk: int) -> list[tuple[int, int]]:
        # A snapshot does not change.
        key = (then, now, disk)
        if key not in self._compared:
            self._compared[key] = differing(self.content(then, disk), self.content(now, disk))
        return self._compared[key]

    def _disk(self, number: int, disk: int) -> dict[str, Any]:
        controller, unit, _ = leases.place(disk)
        return {
            "Key": FIRST_KEY + disk,
            "Controller": controller,
            "Unit": unit,
            "Label": f"Hard disk {disk + 1}",
            "Mode": "independent_persistent" if disk in self.independent else "persistent",
            "ObjectID": self.disk_object_id if not disk else f"52-{FIRST_KEY + disk}",
            "File": self.file(number, disk),
            "ChangeID": self.change_id(number, disk) if self.tracks else "",
            "Parents": [self.file(each, disk) for each in reversed(range(number))],
            "Capacity": self.content(number, disk).stat().st_size,
        }

    def _lease(self) -> dict[str, Any]:
        made: dict[str, Any] = {"Timeout": 300.0}
        if self.host:
            made |= {"Devices": self.host.devices(), "Behind": self.host.url("")}
            made["Manifests"] = {id_: list(sent.values()) for id_, sent in self.manifests.items()}
        return made | self.lease
