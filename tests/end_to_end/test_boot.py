"""A real operating system's disk, imported over HTTP from a compressed qcow2, boots.

With ``--whole`` (make boot, make prove) to the installer's menu, else to its first program: the boot loader
has then read the kernel, and the kernel has unpacked the initial file system.
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


@pytest.mark.timeout(700)
def test_imported_disk_boots_to_its_menu(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    machine, makers = MACHINES[os.uname().machine]
    processes.need(machine[0], *makers, "mcopy", "mkfs.vfat", "sfdisk")
    image, disk, serial = tmp_path / "installer.qcow2", tmp_path / "disk.img", tmp_path / "serial.log"
    processes.run("tools/demo-disk", image)
    (tmp_path / "nginx").mkdir()
    with servers.nginx(tmp_path / "nginx", tmp_path) as server:
        processes.run(sys.executable, "-m", "cdi_worker", "import", server.url(image), disk)

    machine = [*machine, "-accel", "tcg", "-m", "1024", "-display", "none", "-nodefaults"]
    machine += ["-serial", f"file:{serial}", "-drive", f"file={disk},format=raw,if=virtio,snapshot=on"]
    with processes.running(machine, log=tmp_path / "qemu.log", ready=serial.exists):
        end = b"Select a language" if pytestconfig.getoption("--whole") else b"Run /init as init process"
        processes.wait_for(lambda: end in serial.read_bytes(), end.decode(), 600)
