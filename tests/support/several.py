"""A registered source that holds several disks and no bytes of its own: each is served over HTTP in order.

    several.write(path, several.Disk("a.vmdk", server.serve("/a", page), SIZE), …)
    with several.registered():
        together.run_all(several.request(path, folder))

The file ``path`` lists the disks; beside it, ``calls`` has one line for each call that a test looks at.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import cdi_worker
from cdi_worker import errors, sources
from cdi_worker.images.image import Held

#: Registers the source in a process of its own.
BEFORE = "from tests.support import several; several.register()"


@dataclasses.dataclass(frozen=True)
class Disk:
    """A disk of the source. ``identity``: without one, an import of it starts over."""

    file: str
    url: str
    size: int | None = None
    names: tuple[str, ...] = ()
    format: str | None = None
    identity: str | None = "one"
    obstacle: str = ""


def write(path: Path, *disks: Disk) -> None:
    """List the disks of the source at ``path``."""
    path.write_text(json.dumps([dataclasses.asdict(disk) for disk in disks]))


def calls(path: Path) -> list[str]:
    """Return the calls so far of the source at ``path``."""
    log = path.with_name("calls")
    return log.read_text().splitlines() if log.exists() else []


def request(path: Path, target: Path, **options: object) -> cdi_worker.Request:
    """Return the request for the source at ``path``."""
    where = cdi_worker.Location(f"several:{path}")
    return cdi_worker.Request(source="several", location=where, target=str(target), **options)


def register() -> None:
    """Register the source for the rest of this process."""
    cdi_worker.register(cdi_worker.Kind("several", Several, schemes=("several",)))


@contextlib.contextmanager
def registered() -> Iterator[None]:
    """Register the source during the block."""
    register()
    try:
        yield
    finally:
        cdi_worker.unregister("several")


class Several(cdi_worker.Source):
    """The source."""

    def __init__(self, where: cdi_worker.Location, cancel: cdi_worker.Cancel) -> None:
        self.name = where.endpoint
        self._path = Path(where.endpoint.partition(":")[2])

    def open(self, opening: cdi_worker.Opening) -> cdi_worker.Facts:
        listed = [
            Disk(**{**each, "names": tuple(each["names"])}) for each in json.loads(self._path.read_text())
        ]
        self.disks = tuple(self._held(each) for each in listed)
        self.log("open")
        return cdi_worker.Facts(name=self.name)

    def _held(self, disk: Disk) -> Held:
        def make(together: bool, cancel: cdi_worker.Cancel) -> One:
            return One(disk, self, cancel, together=together)

        return Held(disk.names or (disk.file,), disk.file, disk.size, make, disk.obstacle)

    def log(self, call: str) -> None:
        with self._path.with_name("calls").open("a") as log:
            print(call, file=log)

    def verify(self) -> None:
        if self._path.with_name("refuse").exists():
            raise errors.DigestMismatch(url=self.name, expected="sha256:0", calculated="sha256:1")
        self.log("verify")

    def finish(self) -> cdi_worker.Provenance:
        self.log("finish")
        return cdi_worker.Provenance(info={"Version": "several"})

    def close(self) -> None:
        self.log("close")


class One(cdi_worker.Source):
    """One disk of it."""

    def __init__(self, disk: Disk, whole: Several, cancel: cdi_worker.Cancel, *, together: bool) -> None:
        self.name = disk.url
        self._disk, self._whole, self._together = disk, whole, together
        self._inner = sources.find("http").open(cdi_worker.Location(disk.url), cancel)

    def open(self, opening: cdi_worker.Opening) -> cdi_worker.Facts:
        self._whole.log(f"open {self._disk.file}")
        served, disk = self._inner.open(opening), self._disk
        return dataclasses.replace(served, identity=disk.identity, weak=False, digest="", format=disk.format)

    def stream(self, offset: int = 0) -> object:
        return self._inner.stream(offset)

    def describe(self) -> Mapping[str, object]:
        return {"served": self._disk.url}

    def verify(self) -> None:
        self._whole.log(f"verify {self._disk.file}")
        if not self._together:
            self._whole.verify()

    def finish(self) -> cdi_worker.Provenance:
        found = cdi_worker.Provenance() if self._together else self._whole.finish()
        return dataclasses.replace(found, verified={self._disk.file: "sha256:0"})

    def close(self) -> None:
        self._inner.close()
        self._whole.log(f"close {self._disk.file}")
