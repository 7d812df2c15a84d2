"""The disk of another volume. Always raw: its guest controls the content, so no format is detected."""

from __future__ import annotations

import pathlib

from cdi_worker.sources import base
from cdi_worker.sources.local import file


def source(location: base.Location, cancel: base.Cancel) -> file.LocalSource:
    """Return the source for a device, a disk image, or a volume's directory with ``disk.img``."""
    path = pathlib.Path(location.endpoint)
    made = file.LocalSource(str(path / "disk.img" if path.is_dir() else path), cancel)
    made.format = "raw"
    made.thin = True
    return made
