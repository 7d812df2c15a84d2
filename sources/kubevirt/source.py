"""The source of ``IMPORTER_SOURCE=kubevirt``: an export, or a disk in a backup."""

from __future__ import annotations

from collections.abc import Callable

from cdi_worker.sources import base
from cdi_worker.sources.kubevirt import backup, export, locations


def source(location: locations.KubeVirt, cancel: base.Cancel) -> base.Source:
    """Return the source for what is at the URL."""
    made: dict[locations.Form, Callable[[locations.KubeVirt, base.Cancel], base.Source]] = {
        locations.Form.RAW: export.RawSource,
        locations.Form.GZIP: export.GzipSource,
        locations.Form.ARCHIVE: export.ArchiveSource,
        locations.Form.BACKUP: backup.BackupSource,
    }
    # ``faults`` reports a URL that is none of them.
    return made[location.form or locations.Form.RAW](location, cancel)
