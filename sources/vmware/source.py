"""The VMware source: disks found through vSphere, and read by VDDK in nbdkit."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, extents, fields, wire
from cdi_worker.sources.extents import Kept
from cdi_worker.sources.nbd import client, handshake
from cdi_worker.sources.nbd import locations as nbd
from cdi_worker.sources.vmware import locations, nbdkit, session, vddk
from cdi_worker.sources.vmware import machine as vsphere_machine

log = logging.getLogger(__name__)

#: Largest read in bytes, through vCenter and on ESXi directly. vCenter runs out of memory for larger ones
#: (KB 1022543).
LONGEST = {True: 2 << 20, False: 32 << 20}
#: Only the network transports: a pod is not a VM of that host and cannot access its storage.
TRANSPORTS = "nbdssl:nbd"
#: No log lines for reads. Without any debug flag nbdkit does not log VDDK's version and host.
DEBUG = {"nbdkit.backend.datapath": 0, "vddk.datapath": 0}
#: VMware's guide and virt-v2v's measurements: 505 MB/s for ten disks instead of 347 MB/s with its defaults.
#: Four buffers of 16 times 64 KiB are 4 MB for each session (``locations.MOST_CONNECTIONS``).
CONFIGURATION = "vixDiskLib.nfcAio.Session.BufSizeIn64KB=16\nvixDiskLib.nfcAio.Session.BufCount=4\n"


class VddkSource(base.Source):
    """A disk, a disk at a snapshot, or with a previous checkpoint the changes since then.

    The vSphere session is closed before the transfer starts: sessions expire before a large disk is read.
    ``architecture``: the kernel's name of that of this machine.
    """

    def __init__(
        self, location: locations.Vddk, cancel: base.Cancel, architecture: str = os.uname().machine
    ) -> None:
        self.name = f"{wire.safe_url(location.endpoint)} {location.backing_file}"
        self._location = location
        self._cancel = cancel
        self._architecture = architecture
        self._vddk = vddk.Log(self.name)
        self._areas: Kept | None = None
        self._allocated: Kept | None = None
        self._names: dict[str, frozenset[str]] = {}
        self._size = 0
        self._open = contextlib.ExitStack()

    def open(self, opening: base.Opening) -> base.Facts:
        self._check_library()
        machine, disk, server, self.longest_read = cancelling.run_apart(self._look, self._cancel)
        with contextlib.ExitStack() as stack:
            follow = nbdkit.Follow(on_line=self._vddk.line, on_end=self._vddk.ended, cancel=self._cancel)
            try:
                socket = stack.enter_context(
                    nbdkit.serve(self._plugin(machine.reference, disk, server), follow)
                )
            except errors.ToolFailed as err:
                raise self._vddk.explain(err) from err
            stack.callback(self._vddk.wait_closed)
            access = self._location.access
            # VDDK may be slow to open a disk, and to list its allocated blocks: these have their own limits.
            limits = client.Limits(
                self._location.vddk_connections,
                always=True,
                connect=vddk.LIMIT,
                another=vddk.LIMIT,
                stall=access.patience,
                patience=vddk.LISTING_LIMIT,
                min_speed=access.min_speed,
                longest=self.longest_read,
            )
            served = handshake.Server(self.name, nbd.Address(socket=socket))
            self._disk = client.Client(served, self._cancel, limits, self._vddk.explain)
            stack.callback(self._disk.close)
            self._size = self._disk.open()
            if self._size != disk.size:
                # Neither list of areas is one of this disk. CDI copies what VDDK serves.
                if self._areas is not None:
                    reason = f"{self.name}: has {self._size} bytes, vSphere lists changes of {disk.size}"
                    raise errors.SourceError(reason=reason)
                self._allocated = None
                log.warning(
                    "size differs: all of what VDDK serves is copied size=%d vsphere=%d",
                    self._size,
                    disk.size,
                )
            self._open = stack.pop_all()
        # Only a snapshot is immutable.
        moment = (self._location.uuid, disk.object_id, disk.snapshot, disk.change_id, disk.file)
        identity = " ".join(moment) if disk.snapshot else None
        log.info("source file=%r size=%r identity=%r", disk.file, self._size, identity)
        return base.Facts(name=self.name, size=self._size, identity=identity, format="raw")

    @property
    def ranges(self) -> base.RandomReader:
        return self._disk

    def names(self, checkpoint: str) -> frozenset[str]:
        return self._names.get(checkpoint, frozenset({checkpoint}))

    def close(self) -> None:
        self._open.close()

    def finish(self) -> base.Provenance:
        """Return VDDK's version and host, which its log has named by now."""
        return base.Provenance(info=self._vddk.info)

    def extents(self) -> Iterator[base.Extent]:
        parts = None if self._areas is None else extents.pieces(self._areas)
        if self._allocated is None:
            runs = self._disk.extents(parts)
        else:
            runs = extents.complete(self._allocated, self._size)
        return extents.coarse(runs if self._areas is None else extents.overlay(self._areas, runs))

    def _check_library(self) -> None:
        if why := vddk.missing(self._location.vddk_libdir, self._architecture):
            instead = f"with {{}} {locations.AUTO} an export lease reads the disk"
            raise errors.RequestError(fields.fault(self._location, f"{why}; {instead}", "read_by"))
        config = self._location.vddk_config
        # VDDK opens it, and would wait for the writer of a pipe.
        if config and not (Path(config).is_file() and os.access(config, os.R_OK)):
            raise errors.RequestError(f"{config}: no such file, or it cannot be read (configuration of VDDK)")

    def _look(self) -> tuple[vsphere_machine.Machine, vsphere_machine.VirtualDisk, session.Server, int]:
        """Query vSphere for nbdkit's parameters, the changed areas and the allocated ones."""
        location = self._location
        with session.Session(location) as opened:
            machine = vsphere_machine.Machine(opened, location.uuid)
            disk = machine.disk(location.backing_file)
            if location.moment:
                disk = machine.at(location.moment, disk)
                self._names[location.moment] = vsphere_machine.names(location.moment, disk)
            if location.previous:
                self._areas = self._changed(machine, disk)
            self._allocated = machine.allocated(disk)
            return machine, disk, opened.server, LONGEST[opened.is_vcenter]

    def _changed(self, machine: vsphere_machine.Machine, disk: vsphere_machine.VirtualDisk) -> Kept:
        """Return the areas changed since the previous checkpoint."""
        since = self._location.previous
        # A change id ends in "/" and a number. It outlives a removed snapshot.
        before = machine.since(since, disk) if "/" in since else machine.at(since, disk)
        if before is not None and not before.change_id:
            raise errors.SourceError(
                reason=f"{self.name}: changed block tracking was off when snapshot {since!r} was taken; "
                "start again with a full copy"
            )
        if before is None:
            areas = machine.changed(disk, since)
        else:
            areas = machine.changed(disk, before.change_id, before.size)
        self._names[since] = vsphere_machine.names(since, before)
        changed = sum(area.length for area in areas)
        log.info("changed since=%r areas=%d bytes=%d", since, len(areas), changed)
        return areas

    def _plugin(
        self, machine: str, disk: vsphere_machine.VirtualDisk, server: session.Server
    ) -> nbdkit.Plugin:
        parameters = {
            "libdir": str(Path(self._location.vddk_libdir).absolute()),
            "server": server.host,
            "port": str(server.port),
            "user": self._location.access.user,
            "thumbprint": server.thumbprint,
            "vm": f"moref={machine}",
            "file": disk.file,
            "transports": TRANSPORTS,
        }
        if disk.snapshot:
            parameters["snapshot"] = disk.snapshot
        files = {}
        if self._location.vddk_config:
            parameters["config"] = str(Path(self._location.vddk_config).absolute())
        else:
            files["config"] = CONFIGURATION
        secrets = {"password": self._location.access.password}
        # Without it the plugin restarts nbdkit with this path, and passes the password in a file in /tmp.
        libraries = str(Path(self._location.vddk_libdir).resolve() / "lib64")
        return nbdkit.Plugin(
            "vddk",
            parameters,
            secrets,
            files,
            debug=DEBUG,
            package="nbdkit-plugin-vddk",
            library_path=libraries,
            threads=vddk.READS,
        )
