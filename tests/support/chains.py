"""Chains of qcow2 files as QEMU makes them, and the disk that qemu-img reads of them."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path

from tests.support import disks, processes


@dataclasses.dataclass
class Chain:
    """Files in ``directory``, the oldest first. The names in their headers lead to the directory."""

    directory: Path
    files: list[Path] = dataclasses.field(default_factory=list)
    forms: list[str] = dataclasses.field(default_factory=list)

    @property
    def top(self) -> Path:
        return self.files[-1]

    @property
    def target(self) -> Path:
        """Return the path of a file to import to."""
        return self.directory.parent / "disk.img"

    def base(self, size: int | str, *writes: str, options: str = "", form: str = "qcow2") -> Path:
        """Add the first file."""
        path = self.directory / f"base.{form}"
        more = ("-o", options) if options else ()
        processes.run("qemu-img", "create", "-q", "-f", form, *more, path, str(size))
        return self._add(path, form, writes)

    def overlay(self, *writes: str, size: int | str | None = None, options: str = "") -> Path:
        """Add a file over the last one; ``writes`` are commands of qemu-io."""
        path = self.directory / f"layer-{len(self.files)}.qcow2"
        more = ("-o", options) if options else ()
        backing = ("-b", self.top, "-F", self.forms[-1])
        sizes = () if size is None else (str(size),)
        processes.run("qemu-img", "create", "-q", "-f", "qcow2", *more, *backing, path, *sizes)
        return self._add(path, "qcow2", writes)

    def unnamed(self, path: Path) -> None:
        """Remove the name of the backing file, as a push backup has none."""
        processes.run("qemu-img", "rebase", "-q", "-u", "-f", "qcow2", "-b", "", path)

    def disk(self) -> Path:
        """Return the raw disk that qemu-img reads; call it before the names are removed."""
        raw = self.directory / f"expected-{len(self.files)}.raw"
        disks.to_raw(self.top, "qcow2", raw)
        return raw

    def _add(self, path: Path, form: str, writes: tuple[str, ...]) -> Path:
        if writes:
            commands = [word for write in writes for word in ("-c", write)]
            processes.run("qemu-io", "-f", form, *commands, path)
        self.files.append(path)
        self.forms.append(form)
        return path


def rename_backing(path: Path, name: bytes) -> None:
    """Write another name of the backing file into a header, past qemu-img's checks."""
    data = bytearray(path.read_bytes())
    at = 32 << 10  # within the first cluster, behind the extensions
    data[at : at + len(name)] = name
    struct.pack_into(">QI", data, 8, at, len(name))
    path.write_bytes(data)
