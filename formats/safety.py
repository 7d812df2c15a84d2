"""What a disk image must not be before another program opens it.

Each format has a module that reads its header and refuses what it does not know. What OpenStack's
format inspector (oslo.utils) refuses is refused here too: the tests compare the two. An exception inside a
check is a refusal, and so is doubt.
"""

from __future__ import annotations

from typing import Protocol

from cdi_worker import errors, lazy
from cdi_worker.formats import detect, facts, views


class Format(Protocol):
    """What the module of a disk format checks."""

    def check(self, view: views.View) -> facts.Facts:
        """Refuse what is unsafe to open; return what the image is."""

    def required_length(self, view: views.View) -> int:
        """Return how many bytes the tables of a checked image require."""


FORMATS: lazy.Table[str, Format] = lazy.Table(
    {
        "raw": "cdi_worker.formats.raw",
        "iso": "cdi_worker.formats.raw",
        "qcow2": "cdi_worker.formats.qcow2.check",
        "vmdk": "cdi_worker.formats.vmdk.check",
        "vdi": "cdi_worker.formats.vdi",
        "vhd": "cdi_worker.formats.vhd",
        "vhdx": "cdi_worker.formats.vhdx",
    }
)


def check(
    name: str,
    head: bytes,
    *,
    read: views.Read | None = None,
    size: int | None = None,
    allow_backing: str | None = None,
) -> facts.Facts:
    """Check an image of the format ``name`` (a name of ``detect.DISKS``) and return what it is.

    ``head``: its first bytes, ``detect.HEAD`` or all of them. ``read`` and ``size``: random access to
    the file of ``size`` bytes; without it the result may be incomplete. ``allow_backing``: the base
    name of the one backing file that a qcow2 may have.

    Raises ``errors.Refused`` or another ``errors.ImageError``.
    """
    detect.refuse_stranger(name)
    if name not in FORMATS:
        raise errors.Unsupported(reason=f"{name} is not a disk format")
    try:
        return FORMATS[name].check(views.View(head, read, size, allow_backing))
    except errors.Error:
        raise
    except Exception as err:
        raise facts.refuse(name, "check_failed", f"it cannot be checked: {err!r}") from err


def check_length(name: str, read: views.Read, size: int) -> int:
    """Return how many bytes the tables of a checked image require; ``size``: what the file has.

    Raises ``errors.Truncated`` when that is less: qemu-img reads zeros past the end of the file.
    """
    view = views.View(read(0, min(size, detect.HEAD)), read, size)
    try:
        required = FORMATS[name].required_length(view)
    except errors.Error:
        raise
    except Exception as err:
        raise facts.refuse(name, "check_failed", f"its tables cannot be read: {err!r}") from err
    if required > size:
        reason = f"the file has {size} bytes, but its tables require {required}"
        raise errors.Truncated(format=name, reason=reason)
    return required
