"""A real operating system's disk, imported over HTTP from a compressed qcow2, boots.

To the installer's menu, also from a qcow2 file.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support import processes, servers

#: How a virtual machine is run on each kind of machine, and what makes its disk.
MACHINES = {
    "x86_64": (["qemu-system-x86_64"], ["syslinux"]),
    "aarch64": (
        [
            "qemu-system-aarch64",
            "-machine",
            "virt",
            "-cpu",
            "max",
            "-bios",
            "/usr/share/qemu-efi-aarch64/QEMU_EFI.fd",
        ],
        [],
    ),
}


@pytest.mark.timeout(1400)
def test_imported_disk_boots_to_its_menu(tmp_path: Path) -> None:
    command, makers = MACHINES[os.uname().machine]
    processes.need(command[0], *makers, "mcopy", "mkfs.vfat", "sfdisk")
    image, end = tmp_path / "installer.qcow2", b"Select a language"
    processes.run("tools/demo-disk", image)
    (tmp_path / "nginx").mkdir()
    with servers.nginx(tmp_path / "nginx", tmp_path) as server:
        for form in ("raw", "qcow2"):
            disk = tmp_path / f"disk.{form}"
            argv = ["-m", "cdi_worker", "import", "--format", form, server.url(image), disk]
            processes.run(sys.executable, *argv)
            _boot(command, disk, form, end, tmp_path)


def _boot(command: list[str], disk: Path, form: str, end: bytes, folder: Path) -> None:
    """Run a virtual machine until its serial console shows ``end``."""
    serial = folder / f"{form}.log"
    machine = [*command, "-accel", "tcg", "-m", "1024", "-display", "none", "-nodefaults"]
    machine += ["-serial", f"file:{serial}", "-drive", f"file={disk},format={form},if=virtio,snapshot=on"]
    with processes.running(machine, log=folder / "qemu.log", ready=serial.exists):
        processes.wait_for(lambda: end in serial.read_bytes(), end.decode(), 600)
