"""Run qemu-img, one function per use. Works with qemu 7.2 and 10.0.

qemu never probes a format: an image that it reads is given as a JSON node with its driver, so that a file
name can neither add options nor select a protocol.

The virtual size is qemu's. For ``vhd``, which has two sizes in its footer, the caller selects one: qemu's
choice depends on its version (block/vpc.c) and may cut off data.
"""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process

#: The program, and the Debian package with it.
PROGRAM = "qemu-img", "qemu-utils"
#: A node of qemu's block layer (``BlockdevOptions`` in the QMP reference).
Node = dict[str, object]

# Drivers with another name than in ``formats.detect``.
_DRIVERS = {"vhd": "vpc"}

# Threads with stacks of 8 MiB, and caches of tables.
_ADDRESS_SPACE = 2 << 30

_PERCENT = re.compile(rb"\(([0-9.]+)/100%\)")

_FAILURES = {"No space left on device": errno.ENOSPC, "Disk quota exceeded": errno.EDQUOT}


def local(path: str | os.PathLike[str], kind: str) -> Node:
    """Return the node of an image in a file or on a block device; ``kind``: a name of ``formats.detect``."""
    path = pathlib.Path(path).absolute()
    driver = "host_device" if path.is_block_device() else "file"
    return _image(kind, {"driver": driver, "filename": str(path)})


def exported(socket: str | os.PathLike[str], kind: str, *, geometry: bool = False) -> Node:
    """Return the node of an image on an NBD server on a unix socket.

    ``geometry``: a VHD has the size of its geometry, not that of its size field.
    """
    node = _image(kind, {"driver": "nbd", "server": {"type": "unix", "path": os.fspath(socket)}})
    if kind == "vhd":
        node["force_size_calc"] = "chs" if geometry else "current_size"
    return node


def _image(kind: str, file: Node) -> Node:
    if kind == "raw":
        return {"driver": kind, "file": file}
    # Ignore a backing file in the header. The safety check refuses such images; this is a second barrier.
    return {"driver": _DRIVERS.get(kind, kind), "backing": None, "file": file}


def text(node: Node) -> str:
    """Return a node as an argument of qemu's programs."""
    return f"json:{json.dumps(node)}"


def name(node: Node) -> str:
    """Return the file name of a node, for messages: qemu prints the whole node."""
    while isinstance(inner := node.get("file"), dict):
        node = inner
    return str(node.get("filename", "the image"))


def create(path: str, fd: int, options: Iterable[str], size: int) -> None:
    """Write an empty qcow2 file of virtual ``size`` to the open file ``fd``; ``path`` is for messages."""
    _change(path, fd, ["create", "-q", "-fqcow2", *(f"-o{option}" for option in options)], str(size))


def grow(path: str, fd: int, size: int, *, preallocation: str = "off") -> None:
    """Enlarge a qcow2 file to a virtual ``size``. ``preallocation``: of what is added, as for ``create``."""
    _change(path, fd, ["resize", "-q", "-fqcow2", f"--preallocation={preallocation}"], str(size))


def repair(path: str, fd: int) -> None:
    """Check a qcow2 file, and free clusters without a reference. Raises an error for any other fault."""
    _change(path, fd, ["check", "-q", "-fqcow2", "-rleaks"])


def _change(path: str, fd: int, arguments: list[str], *more: str) -> None:
    """Run a command on an open file."""
    name = f"/proc/self/fd/{fd}"
    _run([*arguments, name, *more], path, {f"'{name}'": path, name: path}, pass_fds=(fd,))


def commit(
    overlay: str | os.PathLike[str],
    target: str | os.PathLike[str],
    size: int,
    *,
    source: str,
    direct: bool = False,
    advance: Callable[[int], None] = lambda _count: None,
    cancel: cancelling.Cancel = cancelling.NEVER,
    watch: process.Watch | None = None,
) -> None:
    """Write the changes of a qcow2 ``overlay`` to the raw ``target``, whatever its backing file is named.

    The node gives the backing file, which saves writing it to the overlay's header first (``rebase -u``).
    ``-d`` does not empty the overlay. ``source``: the overlay's name in messages. ``advance`` gets bytes of
    the disk. Raises ``errors.TargetError`` if the target is full, and ``errors.ToolFailed``.
    """
    node = text({**local(overlay, "qcow2"), "backing": local(target, "raw")})
    arguments = ["commit", "-p", "-d", f"-t{'none' if direct else 'writeback'}", node]
    names = {f"'{node}'": source, str(pathlib.Path(overlay).absolute()): source}
    _run(arguments, target, names, _percent(size, advance), cancel=cancel, watch=watch)


def _run(
    arguments: list[str],
    target: object,
    names: Mapping[str, str],
    on_output: Callable[[bytes], None] = lambda _chunk: None,
    *,
    pass_fds: tuple[int, ...] = (),
    cancel: cancelling.Cancel = cancelling.NEVER,
    watch: process.Watch | None = None,
) -> None:
    """Run qemu-img, which writes to ``target``. ``names`` replace others in its messages."""
    command = process.Command(("qemu-img", *arguments), PROGRAM[1], _ADDRESS_SPACE, pass_fds)
    try:
        process.run(command, on_output, cancel=cancel, watch=watch)
    except errors.ToolFailed as err:
        reason = str(err.fields["reason"])
        for printed, shown in {"qemu-img: ": "", "Could not open": "could not open", **names}.items():
            reason = reason.replace(printed, shown)
        for message, number in _FAILURES.items():
            if message in reason:
                raise errors.target_error(target, OSError(number, message)) from err
        raise errors.ToolFailed(**{**err.fields, "reason": reason}) from err


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
