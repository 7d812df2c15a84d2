"""Run qemu-img, one function per use. Works with qemu 7.2 and 10.0.

qemu-img never probes a format: every image is given as a JSON node with its driver, so that a file name can
neither add options nor select a protocol.

The virtual size is qemu's. For ``vhd``, which has two sizes in its footer, the caller selects one: qemu's
choice depends on its version (block/vpc.c) and may cut off data.
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
from cdi_worker.formats import smalljson
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process

#: The program, and the Debian package with it.
PROGRAM = "qemu-img", "qemu-utils"
#: A node of qemu's block layer (``BlockdevOptions`` in the QMP reference).
Node = dict[str, object]

# Drivers with another name than in ``formats.detect``.
_DRIVERS = {"vhd": "vpc", "iso": "raw"}

# A convert with 16 coroutines was measured at 0.6 GiB, mostly stacks: up to 64 threads of 8 MiB each.
_ADDRESS_SPACE = 2 << 30

_JSON = "json:"
_PERCENT = re.compile(rb"\(([0-9.]+)/100%\)")

_FAILURES = {"No space left on device": errno.ENOSPC, "Disk quota exceeded": errno.EDQUOT}


@dataclasses.dataclass(frozen=True, slots=True)
class Follow:
    """Progress and cancellation: ``advance`` gets bytes of the disk, ``cancel`` and ``watch`` end the run.

    ``source``: the name in messages of the image that is read, in place of a socket or a file in scratch.
    """

    advance: Callable[[int], None] = lambda _count: None
    cancel: cancelling.Cancel = cancelling.NEVER
    watch: process.Watch | None = None
    source: str = ""


def local(path: str | os.PathLike[str], kind: str, *, geometry: bool = False) -> Node:
    """Return the node of an image in a file or on a block device; ``kind``: a name of ``formats.detect``.

    ``geometry``: a VHD has the size of its geometry, not that of its size field.
    """
    path = pathlib.Path(path).absolute()
    driver = "host_device" if path.is_block_device() else "file"
    return _image(kind, {"driver": driver, "filename": str(path)}, geometry)


def exported(socket: str | os.PathLike[str], kind: str, *, geometry: bool = False) -> Node:
    """Return the node of an image on an NBD server on a unix socket. ``geometry``: see ``local``."""
    return _image(kind, {"driver": "nbd", "server": {"type": "unix", "path": os.fspath(socket)}}, geometry)


def _image(kind: str, file: Node, geometry: bool) -> Node:
    if (driver := _DRIVERS.get(kind, kind)) == "raw":
        return {"driver": driver, "file": file}
    # Ignore a backing file in the header. The safety check refuses such images; this is a second barrier.
    node: Node = {"driver": driver, "backing": None, "file": file}
    if driver == "vpc":
        node["force_size_calc"] = "chs" if geometry else "current_size"
    return node


def virtual_size(source: Node, follow: Follow = Follow()) -> int:
    """Return the size of the disk in bytes, a multiple of 512.

    Raises ``errors.Unsupported`` when qemu-img cannot open it.
    """
    output = bytearray()
    try:
        _run(["info", "--output=json", text(source)], output.extend, follow)
    except errors.ToolFailed as err:
        if "could not open" not in str(err):
            raise
        reason = str(err.fields["reason"])
        if "contains a log that needs to be replayed" in reason:
            # Of a VHDX. QEMU's own message ends with a command for what it has opened.
            cure = "replay it in the file and import that: qemu-img check -r all FILE"
            reason = f"{follow.source or name(source)}: has a log that must be replayed; {cure}"
        raise errors.Unsupported(reason=f"{source['driver']}: {reason}") from err
    return int(smalljson.parse(output)["virtual-size"])


@dataclasses.dataclass(frozen=True, slots=True)
class Writing:
    """How to write a target.

    ``start``: bytes before it are not written (``head`` returns them). ``fresh``: the target reads as zeros.
    ``direct``: bypass the page cache. ``sparse``: do not write zeros as data.
    """

    start: int = 0
    fresh: bool = False
    direct: bool = False
    sparse: bool = True


def convert(
    source: Node,
    target: str | os.PathLike[str],
    size: int,
    writing: Writing = Writing(),
    follow: Follow = Follow(),
) -> None:
    """Write a disk of virtual ``size`` to an existing file or block device of at least that size.

    The caller keeps the target open and syncs it. Raises ``errors.TargetError`` if writing fails, for example
    because the target is full, else ``errors.ToolFailed``.
    """
    if writing.start >= size:
        return
    into = local(target, "raw")
    if writing.start:
        source, into = (
            {"driver": "raw", "offset": writing.start, "file": source},
            {**into, "offset": writing.start},
        )
    # 16 parallel reads, written out of order; each takes 2 MiB of qemu's memory.
    flags = ["-p", "-n", "-m16", "-W", "-Oraw", f"-t{'none' if writing.direct else 'writeback'}"]
    if writing.fresh:
        flags.append("--target-is-zero")
    if not writing.sparse:
        flags.append("-S0")
    try:
        _run(["convert", *flags, text(source), text(into)], _percent(size, follow.advance), follow)
    except errors.ToolFailed as err:
        raise _target_error(target, err) from err


def writing(fd: int, *, direct: bool) -> Node:
    """Return the node of a qcow2 file, open as ``fd``, for a server that writes to it."""
    file: Node = {"driver": "file", "filename": f"/proc/self/fd/{fd}", "cache": {"direct": direct}}
    return {**_image("qcow2", file, geometry=False), "discard": "unmap"}


def create(path: str, fd: int, options: Iterable[str], size: int) -> None:
    """Write an empty qcow2 file of virtual ``size`` to the open file ``fd``; ``path`` is for messages."""
    _change(path, fd, ["create", "-q", "-fqcow2", *(f"-o{option}" for option in options)], str(size))


def grow(path: str, fd: int, size: int, *, preallocation: str = "off") -> None:
    """Enlarge a qcow2 file to a virtual ``size``. ``preallocation``: of what is added, as for ``create``."""
    _change(path, fd, ["resize", "-q", "-fqcow2", f"--preallocation={preallocation}"], str(size))


def repair(path: str, fd: int) -> None:
    """Check a qcow2 file, and free clusters without a reference. Raises an error for any other fault."""
    _change(path, fd, ["check", "-q", "-fqcow2", "-rleaks"])


def _change(path: str, fd: int, command: list[str], *more: str) -> None:
    """Run a command on an open file."""
    name = f"/proc/self/fd/{fd}"
    try:
        _run([*command, name, *more], lambda _output: None, Follow(), pass_fds=(fd,))
    except errors.ToolFailed as err:
        reason = str(err.fields["reason"]).replace(f"'{name}'", path).replace(name, path)
        raise _target_error(path, errors.ToolFailed(**{**err.fields, "reason": reason})) from err


def head(source: Node, length: int, follow: Follow = Follow()) -> bytes:
    """Return the first ``length`` bytes (a multiple of 512) of a disk."""
    with open(os.memfd_create("head"), "wb", buffering=0) as memory:
        memory.truncate(length)
        fd = memory.fileno()
        window: Node = {"driver": "raw", "offset": 0, "size": length, "file": source}
        into: Node = {"driver": "raw", "file": {"driver": "file", "filename": f"/proc/self/fd/{fd}"}}
        argv = ["convert", "-n", "--target-is-zero", "-Oraw", text(window), text(into)]
        _run(argv, lambda _output: None, follow, pass_fds=(fd,))
        return os.pread(fd, length, 0)


def commit(
    overlay: str | os.PathLike[str],
    target: str | os.PathLike[str],
    size: int,
    *,
    direct: bool = False,
    follow: Follow = Follow(),
) -> None:
    """Write the changes of a qcow2 ``overlay`` to the raw ``target``, whatever its backing file is named.

    The node gives the backing file, which saves writing it to the overlay's header first (``rebase -u``).
    ``-d`` does not empty the overlay.
    """
    node = {**local(overlay, "qcow2"), "backing": local(target, "raw")}
    try:
        flags = ["-p", "-d", f"-t{'none' if direct else 'writeback'}"]
        _run(["commit", *flags, text(node)], _percent(size, follow.advance), follow)
    except errors.ToolFailed as err:
        raise _target_error(target, err) from err


def _run(
    arguments: list[str], on_output: Callable[[bytes], None], follow: Follow, pass_fds: tuple[int, ...] = ()
) -> None:
    argv = ("qemu-img", *arguments)
    command = process.Command(argv, package=PROGRAM[1], address_space=_ADDRESS_SPACE, pass_fds=pass_fds)
    try:
        process.run(command, on_output, cancel=follow.cancel, watch=follow.watch)
    except errors.ToolFailed as err:
        reason = (
            str(err.fields["reason"]).replace("qemu-img: ", "").replace("Could not open", "could not open")
        )
        source = follow.source
        for argument in arguments:
            if argument.startswith(_JSON):
                node = smalljson.parse(argument.removeprefix(_JSON))
                reason = reason.replace(f"'{argument}'", source or name(node))
                reason = reason.replace(_opened(node), source or _opened(node))
                source = ""  # the next one is the target
        raise errors.ToolFailed(**{**err.fields, "reason": reason}) from err


def text(node: Node) -> str:
    """Return a node as an argument of qemu's programs."""
    return _JSON + json.dumps(node)


def name(node: Node) -> str:
    """Return the file name of a node, for messages: qemu prints the whole node."""
    return str(_file(node).get("filename", "the image"))


def _opened(node: Node) -> str:
    """Return the file or export that an image is in as qemu's drivers print it."""
    file = _file(node)
    if isinstance(server := file.get("server"), dict):
        return f"nbd+unix://?socket={server['path']}"
    return str(file["filename"])


def _file(node: Node) -> Node:
    """Return the node of the file or export that an image is in."""
    while isinstance(inner := node.get("file"), dict):
        node = inner
    return node


def _target_error(target: object, err: errors.ToolFailed) -> errors.Error:
    reason = str(err.fields["reason"])
    for message, number in _FAILURES.items():
        if message in reason:
            return errors.target_error(target, OSError(number, message))
    if "error while writing" in reason:
        return errors.TargetError(path=target, reason=reason)
    return err


def _percent(size: int, advance: Callable[[int], None]) -> Callable[[bytes], None]:
    """Return what converts qemu-img's progress, ``(12.34/100%)`` and carriage returns, to bytes."""
    done, rest = 0, b""

    def take(chunk: bytes) -> None:
        nonlocal done, rest
        *lines, rest = (rest + chunk).replace(b"\n", b"\r").split(b"\r")
        for line in lines:
            if percent := _PERCENT.match(line.strip()):
                now = min(size, int(float(percent[1]) * size / 100))
                # qemu-img starts a second pass at 0 again, but progress must not decrease.
                if now > done:
                    advance(now - done)
                    done = now

    return take
