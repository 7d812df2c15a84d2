"""VMware on 127.0.0.1: vcsim with one machine and its snapshots, and a stub of the VDDK library.

The disks are raw files, one per snapshot, named as vSphere names them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cdi_worker.sources import base
from cdi_worker.sources.vmware import locations, source
from tests.support import processes, repository, tls

#: Where tools/vmware puts what it builds.
MADE = repository.ROOT / "build/vmware"
USER, PASSWORD = "administrator@vsphere.local", "secret of vSphere, a=b"
UUID, INSTANCE_UUID = "4219c3b1-0000-4000-8000-00000000b105", "50193c1b-0000-4000-8000-0000000005ce"
#: The unit of changed block tracking, in bytes.
BLOCK = 64 << 10
CHANGE_ID = "52 de c0 d9 b9 43 9d 10-61 d5 4c 1b e9 7b 65 63"

#: A write of the guest: an offset, and the bytes or the length of a hole.
Write = tuple[int, bytes | int]


@functools.cache
def need() -> None:
    """Build vcsim and the VDDK stub, once; skip the test if a build tool is missing."""
    if os.uname().machine != source.MACHINE:
        pytest.skip("needs nbdkit's VDDK plugin, which exists for amd64 only")
    processes.need("go", "gcc", "nbdkit", "apt-get")
    processes.run(repository.ROOT / "tools/vmware", timeout=300)


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
    """One virtual machine with one disk of ``size`` bytes.

    Take all snapshots before ``running``.
    """

    def __init__(self, directory: Path, size: int) -> None:
        need()
        self.directory = directory
        self.size = size
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
        #: Whether vSphere knows the allocated areas (change id *).
        self.knows_allocated = True
        pair = tls.Authority(directory / "tls").issue()
        self.pair = pair
        self.authority = directory / "tls/ca.pem"
        self.thumbprint = pair.thumbprint
        self.settings["thumbprint"] = self.thumbprint
        self._settings = dict(self.settings)
        with self.content(0).open("wb") as file:
            file.truncate(size)
        self.port = processes.free_port()

    def content(self, number: int) -> Path:
        """Return the raw disk at a snapshot, counted from 0; after the last one, the current disk."""
        return self._folder / f"disk{f'-{number:06d}' if number else ''}.vmdk"

    def write(self, *writes: Write) -> None:
        """Write as the guest, after the last snapshot."""
        path = self.content(len(self._changes))
        for offset, data in writes:
            if isinstance(data, int):
                hole(path, offset, data)
                continue
            with path.open("r+b") as file:
                file.seek(offset)
                file.write(data)

    def grow(self, size: int) -> None:
        """Grow the current disk, after the last snapshot; vSphere does not list the new space as changed."""
        self.size = size
        os.truncate(self.content(len(self._changes)), size)

    def take_snapshot(self, *writes: Write) -> None:
        """Write as the guest, then take a snapshot."""
        self.write(*writes)
        areas = set()
        for offset, data in writes:
            length = data if isinstance(data, int) else len(data)
            areas |= set(range(offset // BLOCK, -(-(offset + length) // BLOCK)))
        self._changes.append([(block * BLOCK, BLOCK) for block in sorted(areas)])
        now, after = self.content(len(self._changes) - 1), self.content(len(self._changes))
        processes.run("cp", "--sparse=always", now, after)

    def change_id(self, number: int) -> str:
        """Return the change ID of the disk at a snapshot."""
        return f"{CHANGE_ID}/{number + 1}"

    def snapshot(self, number: int) -> str:
        """Return the managed object ID of a snapshot."""
        return f"snapshot-{number + 11}"

    def file(self, number: int) -> str:
        """Return the datastore path of the disk at a snapshot."""
        return f"[LocalDS_0] vm/{self.content(number).name}"

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

    def stage(self, number: int) -> dict[str, str]:
        """Return the checkpoints of one stage of a warm migration."""
        previous = self.snapshot(number - 1) if number else ""
        return {"previous": previous, "current": self.snapshot(number)}

    def save(self) -> None:
        """Write the settings of vcsim and of the library; both read them again for each call."""
        lines = "".join(f"{name}={value}\n" for name, value in self.settings.items())
        (self.directory / "settings.new").write_text(lines)
        (self.directory / "settings.new").replace(self.libdir / "settings")
        temporary = self.directory / "scenario.new"
        temporary.write_text(json.dumps(self._scenario()))
        temporary.replace(self.directory / "scenario.json")

    @contextlib.contextmanager
    def running(self, *options: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run vcsim; ``options`` are further command-line options."""
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
        (self.directory / "vddk.log").unlink(missing_ok=True)
        self.save()

    def library_calls(self) -> list[str]:
        """Return the calls made to the library so far."""
        log = self.directory / "vddk.log"
        return log.read_text().splitlines() if log.exists() else []

    def _scenario(self) -> dict[str, Any]:
        count = len(self._changes)
        snapshots = [
            {"ID": self.snapshot(number), "Name": f"stage {number}", "Disk": self._disk(number)}
            for number in range(count)
            if number not in self.deleted
        ]
        changes: dict[str, dict[str, list[tuple[int, int]]]] = {}
        for now in range(count):
            changes[self.snapshot(now)] = {
                self.change_id(then): sorted(
                    {area for step in self._changes[then + 1 : now + 1] for area in step}
                )
                for then in range(now)
            }
            if self.knows_allocated:
                changes[self.snapshot(now)]["*"] = allocated(self.content(now))
        if self.listed is not None:
            changes[self.snapshot(count - 1)][self.change_id(count - 2)] = self.listed
        return {
            "UUID": UUID,
            "InstanceUUID": INSTANCE_UUID,
            "PowerState": "poweredOn",
            "Capacity": self.size,
            "DiskObjectID": self.disk_object_id,
            "Disk": self._disk(count),
            "Snapshots": snapshots,
            "Changes": changes,
            "Answers": self.answers,
            "Covers": self.covers,
        }

    def _disk(self, number: int) -> dict[str, Any]:
        parents = [self.file(each) for each in reversed(range(number))]
        capacity = self.content(number).stat().st_size
        return {
            "File": self.file(number),
            "ChangeID": self.change_id(number),
            "Parents": parents,
            "Capacity": capacity,
        }
