"""The set-up: its packages on every architecture, what it leaves enabled and prints; and the demo disk."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
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


#: Runs a command where set-up finds no package installed, and where what it changes is not the machine's.
PLACE = """
mount -t tmpfs tmpfs "$1"
for folder in /etc /usr/sbin; do
    mkdir -p "$1$folder/upper" "$1$folder/work"
    mount -t overlay overlay -o "lowerdir=$folder,upperdir=$1$folder/upper,workdir=$1$folder/work" "$folder"
done
rm -f /usr/sbin/policy-rc.d
mount --bind "$2/python3" /usr/bin/python3
mkdir -p /etc/systemd/system/multi-user.target.wants /etc/systemd/user /etc/rc2.d /etc/rcS.d
ln -s /lib/systemd/system/ssh.service /etc/systemd/system/multi-user.target.wants/of-before.service
export PATH="$2:$PATH"
tools/setup enabled
echo --
tools/setup run || echo "failed: $?"
echo --
tools/setup enabled
ls /etc/rc2.d/*of-apt /usr/sbin/policy-rc.d || :
"""
#: Makes an environment without anything in it.
PYTHON = """#!/bin/sh
mkdir -p .venv/bin .venv/lib/python3.0/site-packages
printf '#!/bin/sh\\n' >.venv/bin/pip
chmod 755 .venv/bin/pip
"""
#: Enables what packages enable, as noisily.
APT = """#!/bin/sh
echo "noise of apt"
echo "invoke-rc.d: noise" >&2
[ "$6" = install ] || exit 0
ln -s /lib/systemd/system/a.service /etc/systemd/system/multi-user.target.wants/a.service
ln -s /lib/systemd/system/a.service /etc/systemd/system/alias-of-apt.service
mkdir /etc/systemd/system/new.target.wants
ln -s /lib/systemd/system/a.socket /etc/systemd/system/new.target.wants/a.socket
ln -s /lib/systemd/user/b.socket /etc/systemd/user/b.socket
ln -s /dev/null /etc/systemd/system/masked-by-apt.service
ln -s ../init.d/of-apt /etc/rc2.d/S01of-apt
ln -s ../init.d/of-apt /etc/rcS.d/S01of-apt
exit STATUS
"""


def set_up(tmp_path: Path, status: int) -> tuple[list[str], str]:
    """Run set-up with an apt that exits with ``status``; return the parts of its output, and its errors."""
    processes.need_root()
    processes.need("unshare")
    programs = tmp_path / "bin"
    programs.mkdir()
    apt = APT.replace("STATUS", str(status))
    for name, text in {"apt-get": apt, "dpkg-query": "#!/bin/sh\n", "python3": PYTHON}.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    (tmp_path / "place").mkdir()
    for name in ("tools", "share"):
        shutil.copytree(repository.ROOT / name, tmp_path / "checkout" / name)
    shutil.copy(repository.ROOT / "pyproject.toml", tmp_path / "checkout")
    command = ["unshare", "--mount", "sh", "-euc", PLACE, "sh", tmp_path / "place", programs]
    done = subprocess.run(
        command, cwd=tmp_path / "checkout", capture_output=True, text=True, timeout=60, check=True
    )
    return done.stdout.split("--\n"), done.stderr


def test_setup_is_quiet_and_disables_exactly_what_packages_enabled(tmp_path: Path) -> None:
    (before, output, after), errors = set_up(tmp_path, 0)
    assert "/etc/systemd/system/multi-user.target.wants/of-before.service" in before
    # As Debian's own tools disable a script of sysvinit.
    assert after == f"{before}/etc/rc2.d/K01of-apt\n"
    assert re.fullmatch(r"Installing Debian packages: .* qemu-utils\nCreating .venv .*\n", output)
    assert "noise" not in errors
    # Completions and manual pages are where a wheel has them: as links, as ``make share`` changes them.
    checkout, share = tmp_path / "checkout", repository.ROOT / "share"
    files = [path.relative_to(share) for path in share.rglob("*") if path.is_file()]
    assert len(files) > len(("bash", "zsh", "fish"))
    for path in files:
        assert (checkout / ".venv/share" / path).samefile(checkout / "share" / path)


def test_setup_that_fails_prints_what_apt_says_and_disables_the_same(tmp_path: Path) -> None:
    (before, output, after), errors = set_up(tmp_path, 100)
    assert after == f"{before}/etc/rc2.d/K01of-apt\n"
    assert "failed: 1\n" in output
    assert "noise of apt\ninvoke-rc.d: noise\n" in errors


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


def test_demo_imports_what_is_named(tmp_path: Path) -> None:
    """``make import URL=… TARGET=…``: the options that it uses exist."""
    (tmp_path / "disk.raw").write_bytes(b"disk" * 4096)
    target = tmp_path / "disk.img"
    processes.run(TOOLS / "demo", tmp_path / "disk.raw", "--target", target)
    assert target.read_bytes() == b"disk" * 4096
