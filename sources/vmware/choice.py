"""How a disk of the source ``vddk`` is read: by VMware's library, or else by an export lease."""

from __future__ import annotations

import logging
import os

from cdi_worker.sources import base
from cdi_worker.sources.vmware import locations, vddk

log = logging.getLogger(__name__)


def source(
    location: locations.Vddk, cancel: base.Cancel, architecture: str = os.uname().machine
) -> base.Source:
    """Return the source that reads the disk. ``architecture``: the kernel's name of that of this machine."""
    why = vddk.missing(location.vddk_libdir, architecture)
    if location.read_by == locations.VDDK or (location.read_by == locations.AUTO and not why):
        from cdi_worker.sources.vmware import source as by_library

        return by_library.VddkSource(location, cancel, architecture)
    # Imported when used, as above (start-up time).
    from cdi_worker.sources.vmware import exported

    if location.read_by == locations.LEASE:
        why = "as requested"
    else:
        log.warning("read by an export lease, not by VDDK: %s", why)
    return exported.LeaseSource(location, cancel, why)
