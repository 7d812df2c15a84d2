"""Images are opened as what they are called, and qemu-img writes a delta to a disk and nothing else."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import qemu_img
from tests.support import devices, nbd_wire, oracle, processes
from tests.support import disks as disks_module

MiB = 1 << 20


def to_raw(source: qemu_img.Node, target: Path) -> Path:
    processes.run("qemu-img", "convert", "-O", "raw", qemu_img.text(source), target)
    return target


def delta(base: Path, overlay: Path, *writes: str) -> Path:
    """Make an overlay over a base that it does not name."""
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", overlay)
    for write in writes:
        processes.run("qemu-io", "-f", "qcow2", "-c", write, overlay)
    processes.run("qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", "gone", overlay)
    return overlay


@pytest.mark.parametrize("force", ["on", "off"])
def test_size_of_vhd_is_that_of_a_plain_convert(force: str, tmp_path: Path) -> None:
    """5 MiB + 512 is not a multiple of a cylinder: with ``force_size=off`` the geometry rounds it up."""
    raw, image, expected = (tmp_path / name for name in ("raw", "image", "expected"))
    devices.fill(raw, 5 * MiB + 512)
    disks_module.convert(raw, image, disks_module.Format("vpc", f"force_size={force}"))
    disks_module.to_raw(image, "vpc", expected)
    with nbd_wire.from_memory(image.read_bytes()) as running:
        result = to_raw(qemu_img.exported(running.socket, "vhd"), tmp_path / "result")
    assert result.stat().st_size == expected.stat().st_size


@pytest.mark.parametrize("driver", ["qcow2", "vmdk"])
def test_backing_file_is_not_opened(driver: str, tmp_path: Path) -> None:
    base, overlay = devices.fill(tmp_path / "base", 2 * MiB), tmp_path / "overlay"
    base_format = "raw"
    if driver == "vmdk":
        base_format, base = "vmdk", tmp_path / "base.vmdk"
        disks_module.convert(tmp_path / "base", base, disks_module.Format("vmdk"))
    processes.run("qemu-img", "create", "-q", "-f", driver, "-b", base, "-F", base_format, overlay)
    assert to_raw(qemu_img.local(overlay, driver), tmp_path / "result").read_bytes() == bytes(2 * MiB)


def test_format_is_never_probed(disks: disks_module.Disks, tmp_path: Path) -> None:
    image = disks.image("qcow2")
    oracle.same(to_raw(qemu_img.local(image, "raw"), tmp_path / "result"), image)
    with pytest.raises(AssertionError, match="invalid VPC image"):
        to_raw(qemu_img.local(image, "vhd"), tmp_path / "result")


SPECIAL_NAMES = ["json:{}", "nbd:unix:x", "file:name", "-p", 'a=b,driver=raw\n"\\ %41 & ümläut']


@pytest.mark.parametrize("name", SPECIAL_NAMES)
def test_special_file_names_are_not_interpreted(name: str, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        base = devices.fill(Path("base"), MiB)
        delta(base, Path("overlay"), "write -P 1 64k 64k").rename(name)
        target = Path(f"{name}.target")
        target.write_bytes(base.read_bytes())
        qemu_img.commit(name, target, MiB, source="disk.qcow2")
        devices.change(base, 65536, b"\1" * 65536)
        oracle.same(target, base)


def test_overlay_is_called_as_the_source(tmp_path: Path) -> None:
    overlay, target = devices.fill(tmp_path / "overlay", MiB), devices.fill(tmp_path / "target", MiB)
    with pytest.raises(errors.ToolFailed) as caught:
        qemu_img.commit(overlay, target, MiB, source="disk.qcow2")
    assert "could not open disk.qcow2: Image is not in qcow2 format" in str(caught.value)


def test_full_target_has_the_contract_phrase(tmp_path: Path) -> None:
    base, body = tmp_path / "base", tmp_path / "body"
    with base.open("wb") as file:
        file.truncate(40 * MiB)
    body.write_bytes(random.Random(1).randbytes(40 * MiB))
    overlay = delta(base, tmp_path / "overlay", f"write -s {body} 0 40M")
    with devices.filesystem("tmpfs", tmp_path) as small:
        target = small / "disk"
        with target.open("wb") as file:
            file.truncate(40 * MiB)
        with pytest.raises(errors.TargetError, match="no space left on device"):
            qemu_img.commit(overlay, target, 40 * MiB, source="disk.qcow2")


def test_cancel_stops_the_commit(tmp_path: Path) -> None:
    base = devices.fill(tmp_path / "base", MiB)
    overlay = delta(base, tmp_path / "overlay", "write -P 1 0 1M")
    cancel = cancelling.Cancel()
    cancel.set()
    with pytest.raises(errors.Cancelled):
        qemu_img.commit(overlay, base, MiB, source="disk.qcow2", cancel=cancel)


@pytest.mark.parametrize("kind", ["file", "block"])
def test_commit_writes_the_changes_to_the_target(
    kind: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    base, overlay, expected = disks.raw(), tmp_path / "overlay", tmp_path / "expected"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", base, "-F", "raw", overlay)
    for start in (0, 777_216, 4 * MiB, 8 * MiB - 65536):
        processes.run("qemu-io", "-f", "qcow2", "-c", f"write -P 1 {start} 65536", overlay)
    processes.run("qemu-io", "-f", "qcow2", "-c", "write -z 2M 1M", overlay)
    disks_module.to_raw(overlay, "qcow2", expected)
    processes.run("qemu-img", "rebase", "-u", "-f", "qcow2", "-F", "raw", "-b", "gone", overlay)
    with contextlib.ExitStack() as stack:
        if kind == "block":
            target = stack.enter_context(devices.loop(tmp_path, 8 * MiB))
        else:
            target = tmp_path / "target"
        target.write_bytes(base.read_bytes())
        steps: list[int] = []
        qemu_img.commit(overlay, target, 8 * MiB, source="disk.qcow2", advance=steps.append)
        oracle.same(target, expected)
        assert sum(steps) == 8 * MiB
        assert min(steps) > 0
