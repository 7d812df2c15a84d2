"""Machines on vCenter and ESXi: their disks by an export lease, or by VMware's library."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "vsphere",
        source=f"{__name__}.exported:LeaseSource",
        location=f"{__name__}.locations:Vsphere",
        schemes=("vsphere",),
        example="cdi-worker import --disk 1 vsphere://HOST/UUID disk.img",
    ),
    kind.Kind(
        "vddk",
        source=f"{__name__}.choice:source",
        location=f"{__name__}.locations:Vddk",
        example="cdi-worker import --source vddk --uuid 42… --backing-file '[ds] x/x.vmdk' https://HOST disk",
    ),
)
