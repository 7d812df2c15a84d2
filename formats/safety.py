"""Check that a disk image is safe for qemu-img to open.

Each format has a module that reads the header and refuses everything unknown. Whatever OpenStack's format
inspector (oslo.utils) refuses is refused here too, except names that are not ASCII in a VMDK: the tests
compare the two. An exception inside a check refuses the image.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Final, Protocol, cast

from cdi_worker import errors
from cdi_worker.formats import detect, facts, views


class Checks(Protocol):
    """The checks that the module of a disk format provides."""

    def check(self, view: views.View) -> facts.ImageFacts:
        """Return the facts of an image. Raises ``errors.Refused`` if it is unsafe to open."""

    def required_length(self, view: views.View) -> int:
        """Return the minimum length in bytes of the file, by the tables of a checked image."""


#: The module with the checks of each disk format.
_MODULES: Final = {
    "raw": "raw",
    "iso": "raw",
    "qcow2": "qcow2.check",
    "vmdk": "vmdk.check",
    "vdi": "vdi",
    "vhd": "vhd.check",
    "vhdx": "vhdx",
}


def checks(name: str) -> Checks:
    """Import and return the checks of a disk format: 20 ms for all of them, of which an import needs one."""
    if name not in _MODULES:
        raise errors.Unsupported(reason=f"{name} is not a disk format")
    return cast("Checks", importlib.import_module(f"cdi_worker.formats.{_MODULES[name]}"))


@contextlib.contextmanager
def _defects_refuse(name: str) -> Iterator[None]:
    """Refuse the image if a check has a defect, instead of ending the worker."""
    try:
        yield
    except errors.Error:
        raise
    except Exception as err:
        raise facts.refuse(name, "check_failed", f"the safety check failed: {err!r}") from err


def check(
    name: str,
    head: bytes,
    *,
    read: views.Read | None = None,
    size: int | None = None,
    allow_backing: str | None = None,
    layer: bool = False,
) -> facts.ImageFacts:
    """Check an image of the format ``name``, one of ``detect.DISKS``, and return its facts.

    ``head``: the first ``detect.HEAD`` bytes, or the whole file if it is shorter. ``read`` and ``size``:
    random access to a file of ``size`` bytes; without it the result may be incomplete. ``allow_backing``:
    the base name of the one backing file that a qcow2 may have. ``layer``: see ``views.View``.

    Raises ``errors.Refused`` or another ``errors.ImageError``.
    """
    detect.refuse_stranger(name)
    with _defects_refuse(name):
        return checks(name).check(views.View(head, read, size, allow_backing, layer=layer))


def check_length(name: str, read: views.Read, size: int) -> int:
    """Return the minimum length of the file, by the tables of a checked image. ``size``: actual length.

    Raises ``errors.Truncated`` for a shorter file: qemu-img reads zeros past the end of the file.
    """
    view = views.View(read(0, min(size, detect.HEAD)), read, size)
    with _defects_refuse(name):
        required = checks(name).required_length(view)
    if required > size:
        reason = f"the tables need {required} bytes, the file has {size} bytes; transfer the image again"
        raise errors.Truncated(format=name, reason=reason)
    return required
