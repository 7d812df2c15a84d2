"""VMware disks on vCenter and ESXi."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "vddk",
        source=f"{__name__}.source:VddkSource",
        location=f"{__name__}.locations:Vddk",
        example="cdi-worker import --source vddk --uuid 42… --backing-file '[ds] x/x.vmdk' https://HOST disk",
    ),
)
