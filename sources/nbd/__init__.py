"""Disks that an NBD server exports: qemu-nbd, QEMU, libvirt, nbdkit, XCP-ng."""

from __future__ import annotations

from cdi_worker.sources import kind

KINDS = (
    kind.Kind(
        "nbd",
        source=f"{__name__}.source:NbdSource",
        location=f"{__name__}.locations:Nbd",
        schemes=("nbd", "nbds", "nbd+unix"),
        example="cdi-worker import --cert client.crt --key client.key nbds://host/export disk.img",
    ),
)
