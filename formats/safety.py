"""What a disk image must not be before another program opens it.

Two opinions are asked: the inspectors of oslo.utils, which know what has been used for attacks, and
the module of each format, which also knows where those are silent. An exception inside a check is a
refusal, and so is doubt.
"""

from __future__ import annotations

import functools
import importlib
import posixpath
import struct
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cdi_worker import errors
from cdi_worker.formats import detect, facts, vdi, vhd, vhdx
from cdi_worker.formats.facts import Facts, Read, View
from cdi_worker.formats.qcow2 import header as qcow2_header
from cdi_worker.formats.qcow2 import layout
from cdi_worker.formats.vmdk import check as vmdk
from cdi_worker.formats.vmdk import header as vmdk_header

#: In qcow2's header: offset of the backing file's name in the file, and the name's length.
_BACKING = struct.Struct(">8xQI")
_BACKING_FIELDS = slice(8, 20)
#: Incompatible features (version 3); version 2 has other things there.
_FEATURES = slice(72, 80)
_EXTENDED_L2 = 1 << 4


def check(
    name: str,
    head: bytes,
    *,
    read: Read | None = None,
    size: int | None = None,
    allow_backing: str | None = None,
) -> Facts:
    """Check an image of the format ``name`` (a name of ``detect.DISKS``) and return what it is.

    ``head``: its first bytes, ``detect.HEAD`` or all of them. ``read`` and ``size``: random access to
    the file of ``size`` bytes; without it the result may be incomplete. ``allow_backing``: the base
    name of the one backing file that a qcow2 may have.

    Raises ``errors.Refused`` or another ``errors.ImageError``.
    """
    detect.refuse_stranger(name)
    view = View(head, read, size)
    checks = _CHECKS.get(name)
    if checks is None:
        raise errors.Unsupported(reason=f"{name} is not a disk format")
    try:
        return checks(view, allow_backing)
    except errors.Error:
        raise
    except Exception as err:
        raise facts.refuse(name, "check_failed", f"it cannot be checked: {err!r}") from err


def check_length(name: str, read: Read, size: int) -> int:
    """Return how many bytes the tables of a checked image require; ``size``: what the file has.

    Raises ``errors.Truncated`` when that is less: qemu-img reads zeros past the end of the file.
    """
    view = View(read(0, min(size, detect.HEAD)), read, size)
    try:
        required = layout.required_length(_alone(read), size) if name == "qcow2" else _LENGTHS[name](view)
    except errors.Error:
        raise
    except Exception as err:
        raise facts.refuse(name, "check_failed", f"its tables cannot be read: {err!r}") from err
    if required > size:
        reason = f"the file has {size} bytes, but its tables require {required}"
        raise errors.Truncated(format=name, reason=reason)
    return required


def _raw(view: View, _: str | None) -> Facts:
    if view.size is not None:
        facts.check_size("raw", view.size)
    return Facts("raw", view.size)


def _qcow2(view: View, allow_backing: str | None) -> Facts:
    head = bytearray(view.head)
    backing = _backing(view.head, allow_backing) if allow_backing is not None else None
    if backing is not None:
        head[_BACKING_FIELDS] = bytes(12)
    header = qcow2_header.parse(bytes(head))
    facts.check_size("qcow2", header.virtual_size)
    # oslo.utils takes extended L2 entries for unknown, and version 2's extensions for features.
    features = int.from_bytes(head[_FEATURES]) & ~_EXTENDED_L2 if header.version == 3 else 0
    head[_FEATURES] = features.to_bytes(8)
    _inspect("qcow2", View(bytes(head)))
    return Facts("qcow2", header.virtual_size, backing=backing)


def _backing(head: bytes, allowed: str) -> str | None:
    """Return the name of the backing file if there is one, and its base name is the allowed one."""
    offset, length = _BACKING.unpack_from(head)
    if not offset:
        return None
    name = head[offset : offset + length].decode()
    if len(name.encode()) != length or posixpath.basename(name) != allowed:
        raise facts.refuse("qcow2", "backing_file", f"its backing file is {name!r}, not {allowed!r}")
    return name


def _alone(read: Read) -> Read:
    """Return ``read`` of a qcow2 image without its backing file, of which ``check`` is the judge."""

    def masked(offset: int, length: int) -> bytes:
        data = bytearray(read(offset, length))
        for place in range(max(offset, _BACKING_FIELDS.start), min(offset + len(data), _BACKING_FIELDS.stop)):
            data[place - offset] = 0
        return bytes(data)

    return masked


def _vmdk(view: View, _: str | None) -> Facts:
    found = vmdk.check(view)
    # Of one that ends with another header at least the descriptor can be inspected early.
    _inspect("vmdk", view if found.complete else View(vmdk_header.without_footer(view.head)))
    return found


def _inspect(name: str, view: View) -> None:
    """Let the inspector of oslo.utils see the head and the tail, and ask it."""
    format_inspector = inspectors()
    inspector = format_inspector.ALL_FORMATS[name]()
    inspector.eat_chunk(view.head)
    if view.random and (rest := (view.size or 0) - len(view.head)) > 0:
        inspector.eat_chunk(view.tail(min(rest, vmdk_header.FOOTER)))
    inspector.finish()
    try:
        inspector.safety_check()
    except format_inspector.SafetyCheckFailed as err:
        rule, reason = next(iter(err.failures.items()))
        raise facts.refuse(name, rule, str(reason)) from err


@functools.cache
def inspectors() -> Any:
    """Import the inspectors when they are needed, and without what their package imports beside them.

    That compiles hundreds of patterns which hide passwords in logs: a fifth of the time to start.
    """
    import oslo_utils

    package = "oslo_utils.imageutils"
    if package in sys.modules:
        return importlib.import_module(f"{package}.format_inspector")
    bare = types.ModuleType(package)
    bare.__path__ = [str(Path(folder) / "imageutils") for folder in oslo_utils.__path__]
    sys.modules[package] = bare
    try:
        return importlib.import_module(f"{package}.format_inspector")
    finally:
        # Whoever else imports it gets all of it.
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{package}.")]:
            del sys.modules[name]


_CHECKS: dict[str, Callable[[View, str | None], Facts]] = {
    "raw": _raw,
    "iso": _raw,
    "qcow2": _qcow2,
    "vmdk": _vmdk,
    "vdi": lambda view, _: vdi.check(view),
    "vhd": lambda view, _: vhd.check(view),
    "vhdx": lambda view, _: vhdx.check(view),
}

_LENGTHS: dict[str, Callable[[View], int]] = {
    "raw": lambda _: 0,
    "iso": lambda _: 0,
    "vmdk": vmdk.required_length,
    "vdi": vdi.required_length,
    "vhd": vhd.required_length,
    "vhdx": vhdx.required_length,
}
