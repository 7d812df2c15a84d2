"""A machine whose backups are pulled: a qcow2 image with QEMU's bitmaps, and the requests of the stages."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cdi_worker
from cdi_worker.sources.kubevirt import locations
from tests.support import kubevirt, processes, tls

MIB = 1 << 20
SIZE = 16 * MIB
#: What the guest writes before the second backup: data and zeros, overlapping, at both ends.
FIRST = ("write -P 1 0 64k", "write -P 2 1000k 300k", "write -z 4M 1M", "write -P 3 15M 1M")
SECOND = ("write -P 4 512 512", "discard 1M 64k", "write -z 0 4k", "write -z 15M 64k")


@dataclasses.dataclass
class Setup:
    """An export server, and the directory of the machine's image."""

    server: kubevirt.Server
    authority: tls.Authority
    directory: Path
    checkpoints: list[str] = dataclasses.field(default_factory=list)

    @property
    def disk(self) -> Path:
        """Return the path of a file to import to."""
        return self.directory / "disk.img"

    @functools.cached_property
    def image(self) -> Path:
        """Make the machine's image."""
        image = self.directory / "overlay.qcow2"
        processes.run("qemu-img", "convert", "-f", "raw", "-O", "qcow2", self.directory / "first.raw", image)
        return image

    def checkpoint(self, *writes: str) -> str:
        """Let the guest write; then begin a bitmap, and keep the disk as it is now."""
        if writes:
            commands = [word for write in writes for word in ("-c", write)]
            processes.run("qemu-io", "-f", "qcow2", *commands, self.image)
        name = f"tracker-{len(self.checkpoints)}"
        processes.run("qemu-img", "bitmap", "--add", self.image, name)
        self.checkpoints.append(name)
        processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", self.image, self.content(name))
        return name

    def content(self, checkpoint: str) -> Path:
        """Return the raw disk at a checkpoint."""
        return self.directory / f"{checkpoint}.raw"

    @contextlib.contextmanager
    def backup(self, since: str = "") -> Iterator[None]:
        """Serve the disk ``root`` as it is now, with the changes since a checkpoint."""
        with kubevirt.exported(self.directory, self.image, since) as disk:
            self.server.backups["root"] = disk
            try:
                yield
            finally:
                del self.server.backups["root"]

    def location(self, *path: str, **fields: Any) -> locations.KubeVirt:
        """Return the location of a path below the export."""
        access = cdi_worker.Access(ca_files=(str(self.authority.certificate),))
        return locations.KubeVirt(self.server.url(*path), access, **{"token": kubevirt.TOKEN, **fields})

    def request(self, target: Path, *path: str, **fields: Any) -> cdi_worker.Request:
        """Return the request for a path below the export, of a disk in a backup if there is none."""
        return cdi_worker.Request(
            existing="replace",
            source="kubevirt",
            location=self.location(*(path or ("exports", "root", "map")), **fields),
            target=str(target),
            connect_patience=2.0,
            fetch=cdi_worker.FetchOptions(connections=3, chunk=MIB, no_progress=3),
        )


@contextlib.contextmanager
def running(directory: Path) -> Iterator[Setup]:
    """Run a server with a machine that has data, zeros and holes."""
    processes.need("qemu-img", "qemu-io")
    authority = tls.Authority(directory / "tls")
    with (directory / "first.raw").open("wb") as file:
        file.truncate(SIZE)
        for offset, length in ((0, 100_000), (MIB, 3 * MIB), (SIZE // 2, SIZE // 8), (SIZE - 700, 700)):
            file.seek(offset)
            file.write(random.Random(offset).randbytes(length))
    with kubevirt.Server(authority.issue()) as server:
        yield Setup(server, authority, directory)
