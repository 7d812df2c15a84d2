"""qemu-img, one function per use.

It never guesses: every image is named by a node that spells out its driver, as JSON, so that no file
name can add options or choose a protocol. It runs as ``process`` runs every program: in an empty
directory, limited, cancelled and watched. Works with qemu 7.2 and 10.0.

The virtual size is qemu's. For ``vhd`` that is the geometry (cylinders, heads, sectors) in the footer
unless the creator is one of those that mean the size field beside it (qemu, block/vpc.c): what
upstream's plain ``qemu-img convert`` gives.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process

#: A node of qemu's block layer (``BlockdevOptions`` of its QMP reference).
Node = dict[str, object]

# Names that differ from those of ``formats.detect``.
_DRIVERS = {"vhd": "vpc", "iso": "raw"}

# Converts with 16 coroutines were seen at 0.6 GiB, mostly stacks: up to 64 threads of 8 MiB each.
_ADDRESS_SPACE = 2 << 30

_JSON = "json:"
_PERCENT = re.compile(rb"\(([0-9.]+)/100%\)")

_FAILURES = {
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Follow:
    """How a long run is followed: ``advance`` gets virtual bytes, ``cancel`` and ``watch`` end it."""

    advance: Callable[[int], None] = lambda _count: None
    cancel: cancelling.Cancel = cancelling.NEVER
    watch: process.Watch | None = None


def local(path: str | os.PathLike[str], kind: str) -> Node:
    """Name an image in a file or on a block device. ``kind``: as ``formats.detect`` calls it."""
    path = pathlib.Path(path).absolute()
    driver = "host_device" if path.is_block_device() else "file"
    return _image(kind, {"driver": driver, "filename": str(path)})


def exported(socket: str | os.PathLike[str], kind: str) -> Node:
    """Name an image behind an NBD server on a unix socket."""
    return _image(kind, {"driver": "nbd", "server": {"type": "unix", "path": os.fspath(socket)}})


def _image(kind: str, file: Node) -> Node:
    if (driver := _DRIVERS.get(kind, kind)) == "raw":
        return {"driver": driver, "file": file}
    # No backing file, whatever the header says: safety refuses such images, this does not rely on it.
    return {"driver": driver, "backing": None, "file": file}


def virtual_size(source: Node, follow: Follow = Follow()) -> int:
    """Return the size of the disk in bytes, a multiple of 512.

    Raises ``errors.Unsupported`` when qemu-img cannot open it.
    """
    said = bytearray()
    try:
        _run(["info", "--output=json", _json(source)], said.extend, follow)
    except errors.ToolFailed as err:
        if "could not open" not in str(err):
            raise
        raise errors.Unsupported(reason=f"{source['driver']}: {err.fields['reason']}") from err
    return int(json.loads(said)["virtual-size"])


@dataclasses.dataclass(frozen=True, slots=True)
class Writing:
    """How a target is written.

    ``start``: the bytes before it stay untouched (``head`` returns them). ``fresh``: the target is known
    to read as zeros. ``direct``: past the page cache. ``sparse``: zeros are not written as data.
    """

    start: int = 0
    fresh: bool = False
    direct: bool = False
    sparse: bool = True

    def flags(self) -> Iterable[str]:
        yield f"-t{'none' if self.direct else 'writeback'}"
        if self.fresh:
            yield "--target-is-zero"
        if not self.sparse:
            yield "-S0"


def convert(
    source: Node,
    target: str | os.PathLike[str],
    size: int,
    writing: Writing = Writing(),
    follow: Follow = Follow(),
) -> None:
    """Write a disk of virtual ``size`` onto an existing file or block device of at least that size.

    Nothing is synced; the caller holds the target open and syncs it. Raises ``errors.TargetError`` when the
    target is full, else ``errors.ToolFailed``.
    """
    if writing.start >= size:
        return
    into = local(target, "raw")
    if writing.start:
        source, into = (
            {"driver": "raw", "offset": writing.start, "file": source},
            {**into, "offset": writing.start},
        )
    # Sixteen reads in flight, written as they come: 2 MiB each of qemu's memory.
    flags = ["-p", "-n", "-m16", "-W", "-Oraw", *writing.flags()]
    try:
        _run(["convert", *flags, _json(source), _json(into)], _Percent(size, follow.advance).take, follow)
    except errors.ToolFailed as err:
        raise _target_error(target, err) from err


def head(source: Node, length: int, follow: Follow = Follow()) -> bytes:
    """Return the first ``length`` bytes (a multiple of 512) of a disk."""
    memory = os.memfd_create("head")
    try:
        os.truncate(memory, length)
        window: Node = {"driver": "raw", "offset": 0, "size": length, "file": source}
        into: Node = {"driver": "raw", "file": {"driver": "file", "filename": f"/proc/self/fd/{memory}"}}
        argv = ["convert", "-n", "--target-is-zero", "-Oraw", _json(window), _json(into)]
        _run(argv, lambda _said: None, follow, pass_fds=(memory,))
        return os.pread(memory, length, 0)
    finally:
        os.close(memory)


def commit(
    overlay: str | os.PathLike[str],
    target: str | os.PathLike[str],
    size: int,
    *,
    direct: bool = False,
    follow: Follow = Follow(),
) -> None:
    """Write what a qcow2 ``overlay`` changes onto the raw ``target``, whatever backing file it names.

    The backing is given here instead of being put into the overlay's header first (``rebase -u``).
    ``-d`` keeps the overlay as it is.
    """
    node = {**local(overlay, "qcow2"), "backing": local(target, "raw")}
    try:
        flags = ["-p", "-d", *Writing(direct=direct).flags()]
        _run(["commit", *flags, _json(node)], _Percent(size, follow.advance).take, follow)
    except errors.ToolFailed as err:
        raise _target_error(target, err) from err


def _run(
    arguments: list[str], on_output: Callable[[bytes], None], follow: Follow, pass_fds: tuple[int, ...] = ()
) -> None:
    argv = ("qemu-img", *arguments)
    command = process.Command(argv, package="qemu-utils", address_space=_ADDRESS_SPACE, pass_fds=pass_fds)
    try:
        process.run(command, on_output, cancel=follow.cancel, watch=follow.watch)
    except errors.ToolFailed as err:
        reason = (
            str(err.fields["reason"]).replace("qemu-img: ", "").replace("Could not open", "could not open")
        )
        for argument in arguments:
            if argument.startswith(_JSON):
                reason = reason.replace(f"'{argument}'", _name(argument))
        raise errors.ToolFailed(**{**err.fields, "reason": reason}) from err


def _json(node: Node) -> str:
    return _JSON + json.dumps(node)


def _name(argument: str) -> str:
    """Return for people what qemu-img's messages call by the whole of its JSON."""
    node = json.loads(argument.removeprefix(_JSON))
    while isinstance(node.get("file"), dict):
        node = node["file"]
    return str(node.get("filename", "the image"))


def _target_error(target: object, err: errors.ToolFailed) -> errors.Error:
    reason = str(err.fields["reason"])
    for said, number in _FAILURES.items():
        if said in reason:
            return errors.target_error(target, OSError(number, said))
    if "error while writing" in reason:
        return errors.TargetError(path=target, reason=reason)
    return err


class _Percent:
    """Turn ``(12.34/100%)`` and carriage returns on standard output into bytes."""

    def __init__(self, size: int, advance: Callable[[int], None]) -> None:
        self._size = size
        self._advance = advance
        self._done = 0
        self._rest = b""

    def take(self, chunk: bytes) -> None:
        *lines, self._rest = (self._rest + chunk).replace(b"\n", b"\r").split(b"\r")
        for line in lines:
            if percent := _PERCENT.match(line.strip()):
                done = min(self._size, int(float(percent[1]) * self._size / 100))
                # A second pass of qemu starts at 0 again; progress never falls.
                if done > self._done:
                    self._advance(done - self._done)
                    self._done = done
