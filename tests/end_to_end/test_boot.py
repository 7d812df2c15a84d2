"""A real operating system's disk, imported over HTTP from a compressed qcow2, boots."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.support import processes, servers


@pytest.mark.timeout(700)
def test_imported_disk_boots_to_its_menu(tmp_path: Path) -> None:
    processes.need("qemu-system-x86_64", "syslinux", "mcopy", "mkfs.vfat", "sfdisk")
    image, disk, serial = tmp_path / "installer.qcow2", tmp_path / "disk.img", tmp_path / "serial.log"
    processes.run("tools/demo-disk", image)
    (tmp_path / "nginx").mkdir()
    with servers.nginx(tmp_path / "nginx", tmp_path) as server:
        processes.run(sys.executable, "-m", "cdi_worker", "import", server.url(image), disk)

    machine = ["qemu-system-x86_64", "-accel", "tcg", "-m", "1024", "-display", "none", "-nodefaults"]
    machine += ["-serial", f"file:{serial}", "-drive", f"file={disk},format=raw,if=virtio,snapshot=on"]
    with processes.running(machine, log=tmp_path / "qemu.log", ready=serial.exists):
        processes.wait_for(lambda: b"Select a language" in serial.read_bytes(), "the installer's menu", 600)
