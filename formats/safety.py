"""What a disk image must not be before another program opens it.

Each format has a module that reads its header and refuses what it does not know. What OpenStack's
format inspector (oslo.utils) refuses is refused here too: the tests compare the two. An exception inside a
check is a refusal, and so is doubt.
"""

from __future__ import annotations

import posixpath
import struct
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.formats import detect, facts, vdi, vhd, vhdx
from cdi_worker.formats.facts import Facts, Read, View
from cdi_worker.formats.qcow2 import header as qcow2_header
from cdi_worker.formats.qcow2 import layout
from cdi_worker.formats.vmdk import check as vmdk

#: In qcow2's header: offset of the backing file's name in the file, and the name's length.
_BACKING = struct.Struct(">8xQI")
_BACKING_FIELDS = slice(8, 20)


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


_CHECKS: dict[str, Callable[[View, str | None], Facts]] = {
    "raw": _raw,
    "iso": _raw,
    "qcow2": _qcow2,
    "vmdk": lambda view, _: vmdk.check(view),
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
