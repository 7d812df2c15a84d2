"""Check that a disk image is safe for qemu-img to open.

Each format has a module that reads the header and refuses everything unknown. Whatever OpenStack's format
inspector (oslo.utils) refuses is refused here too: the tests compare the two. An exception inside a check
refuses the image.
"""

from __future__ import annotations

from typing import Protocol

from cdi_worker import errors, lazy
from cdi_worker.formats import detect, facts, views


class Format(Protocol):
    """The checks that the module of a disk format provides."""

    def check(self, view: views.View) -> facts.Facts:
        """Return the facts of an image. Raises ``errors.Refused`` if it is unsafe to open."""

    def required_length(self, view: views.View) -> int:
        """Return the minimum length in bytes of the file, by the tables of a checked image."""


FORMATS: lazy.Table[str, Format] = lazy.Table(
    {
        "raw": "cdi_worker.formats.raw",
        "iso": "cdi_worker.formats.raw",
        "qcow2": "cdi_worker.formats.qcow2.check",
        "vmdk": "cdi_worker.formats.vmdk.check",
        "vdi": "cdi_worker.formats.vdi",
        "vhd": "cdi_worker.formats.vhd.check",
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
    layer: bool = False,
) -> facts.Facts:
    """Check an image of the format ``name``, one of ``detect.DISKS``, and return its facts.

    ``head``: the first ``detect.HEAD`` bytes, or the whole file if it is shorter. ``read`` and ``size``:
    random access to a file of ``size`` bytes; without it the result may be incomplete. ``allow_backing``:
    the base name of the one backing file that a qcow2 may have. ``layer``: see ``views.View``.

    Raises ``errors.Refused`` or another ``errors.ImageError``.
    """
    detect.refuse_stranger(name)
    if name not in FORMATS:
        raise errors.Unsupported(reason=f"{name} is not a disk format")
    try:
        return FORMATS[name].check(views.View(head, read, size, allow_backing, layer=layer))
    except errors.Error:
        raise
    except Exception as err:
        # A defect of a check must refuse the image, not end the worker.
        raise facts.refuse(name, "check_failed", f"the safety check failed: {err!r}") from err


def check_length(name: str, read: views.Read, size: int) -> int:
    """Return the minimum length of the file, by the tables of a checked image. ``size``: actual length.

    Raises ``errors.Truncated`` for a shorter file: qemu-img reads zeros past the end of the file.
    """
    view = views.View(read(0, min(size, detect.HEAD)), read, size)
    try:
        required = FORMATS[name].required_length(view)
    except errors.Error:
        raise
    except Exception as err:
        raise facts.refuse(name, "check_failed", f"the tables cannot be read: {err!r}") from err
    if required > size:
        reason = f"the tables need {required} bytes, the file has {size} bytes; transfer the image again"
        raise errors.Truncated(format=name, reason=reason)
    return required
