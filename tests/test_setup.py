"""The tools work on every architecture: the packages of set-up, and the demo disk."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.support import processes, repository

TOOLS = repository.ROOT / "tools"


@pytest.mark.parametrize(
    ("architecture", "other"), [("arm64", "amd64|x86|syslinux"), ("amd64", "arm64|aarch64|-arm$")]
)
def test_setup_installs_packages_of_the_architecture(architecture: str, other: str) -> None:
    packages = processes.run(TOOLS / "setup", "packages", architecture).stdout.split()
    assert any(name.endswith(f"-netboot-{architecture}") for name in packages)
    assert not [name for name in packages if re.search(other, name)]
    assert not [name for name in packages if not re.fullmatch(r"[a-z0-9][a-z0-9.+-]+", name)]


@pytest.fixture
def installers(tmp_path: Path) -> Path:
    """Return a folder with the files of the Debian installer for every architecture."""
    for architecture in ("arm64", "riscv64"):
        folder = tmp_path / architecture / "text/debian-installer" / architecture
        folder.mkdir(parents=True)
        for name in ("linux", "initrd.gz", "grubaa64.efi"):
            (folder / name).write_text(f"{architecture} {name}")
    return tmp_path


def make_disk(installers: Path, *architecture: str) -> Path:
    """Run tools/demo-disk, and return the disk."""
    processes.need("mcopy", "mkfs.vfat", "sfdisk")
    env = {**os.environ, "INSTALLERS": str(installers)}
    processes.run(TOOLS / "demo-disk", installers / "disk.qcow2", *architecture, env=env)
    processes.run(
        "qemu-img", "convert", "-f", "qcow2", "-O", "raw", installers / "disk.qcow2", installers / "disk"
    )
    return installers / "disk"


def test_demo_disk_for_arm64_boots_by_uefi(installers: Path) -> None:
    """UEFI loads BOOTAA64.EFI; Debian's GRUB looks for its configuration where the network boot has it."""
    disk = make_disk(installers, "arm64")
    table = json.loads(processes.run("/sbin/sfdisk", "--json", disk).stdout)["partitiontable"]
    assert table["partitions"][0]["type"] == "ef"

    def content(path: str) -> str:
        return processes.run("mtype", "-i", f"{disk}@@1M", f"::{path}").stdout

    assert content("EFI/BOOT/BOOTAA64.EFI") == "arm64 grubaa64.efi"
    assert "linux /linux console=ttyAMA0" in content("debian-installer/arm64/grub/grub.cfg")
    assert content("linux") == "arm64 linux"
    assert content("initrd.gz") == "arm64 initrd.gz"


def test_demo_disk_names_supported_architectures(installers: Path) -> None:
    with pytest.raises(AssertionError, match="no disk for riscv64; supported: amd64, arm64"):
        make_disk(installers, "riscv64")
