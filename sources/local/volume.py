"""Another volume's disk: raw, whatever its guest has written to it."""

from __future__ import annotations

import pathlib

from cdi_worker.sources import base
from cdi_worker.sources.local import file


def source(location: base.Location, cancel: base.Cancel) -> file.LocalSource:
    """Return the source for a device, for a disk's file, or for the directory of a volume."""
    path = pathlib.Path(location.endpoint)
    made = file.LocalSource(str(path / "disk.img" if path.is_dir() else path), cancel)
    made.format = "raw"
    return made
