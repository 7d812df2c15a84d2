"""Our qemu-img commands write what a plain ``qemu-img convert`` writes, and nothing else."""

from __future__ import annotations

import contextlib
import functools
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process, qemu_img
from tests.support import devices, oracle, processes
from tests.support import disks as disks_module

MiB = 1 << 20
WITHHELD = MiB

KINDS = {
    "qcow2": "qcow2",
    "qcow2-v2-zlib": "qcow2",
    "qcow2-zstd": "qcow2",
    "qcow2-extended": "qcow2",
    "vmdk": "vmdk",
    "vmdk-stream": "vmdk",
    "vdi": "vdi",
    "vhd": "vhd",
    "vhd-fixed": "vhd",
    "vhdx": "vhdx",
}

#: Virtual sizes below, at and above the withheld part, and unaligned ones.
SIZES = [512, MiB - 512, MiB, MiB + 512, 3 * MiB + 5 * 512]


@contextlib.contextmanager
def served(path: Path, directory: Path) -> Iterator[Path]:
    """Serve a file unchanged over NBD."""
    processes.need("nbdkit")
    socket = directory / "sock"
    argv = ["nbdkit", "-f", "--exit-with-parent", "-U", socket, "file", path]
    ready = functools.partial(processes.is_listening, socket)
    with processes.running(argv, log=directory / "nbdkit.log", ready=ready):
        yield socket


def write_block_target(source: qemu_img.Node, device: Path, **options: bool) -> int:
    """Write to a block target: the body by qemu-img, then the head by ourselves."""
    size = qemu_img.virtual_size(source)
    qemu_img.convert(source, device, size, qemu_img.Writing(start=WITHHELD, **options))
    with device.open("rb") as file:
        assert file.read(min(size, WITHHELD)).strip(devices.DIRT) == b"", "what is withheld was written"
    head = qemu_img.head(source, min(size, WITHHELD))
    with device.open("r+b") as file:
        file.write(head)
        os.fsync(file.fileno())
    return size


@pytest.mark.parametrize("variant", KINDS)
@pytest.mark.parametrize("direct", [False, True], ids=["cached", "direct"])
def test_block_device_holds_what_a_plain_convert_writes(
    variant: str, direct: bool, disks: disks_module.Disks, block: Path
) -> None:
    write_block_target(qemu_img.local(disks.image(variant), KINDS[variant]), block, direct=direct)
    oracle.same(block, disks.expected(variant), beyond=devices.DIRT)


@pytest.mark.parametrize("variant", ["qcow2", "vmdk-stream", "vhdx", "vhd"])
def test_block_device_is_written_from_an_export(
    variant: str, disks: disks_module.Disks, block: Path, tmp_path: Path
) -> None:
    with served(disks.image(variant), tmp_path) as socket:
        write_block_target(qemu_img.exported(socket, KINDS[variant]), block)
    oracle.same(block, disks.expected(variant), beyond=devices.DIRT)


@pytest.mark.parametrize("driver", ["qcow2", "vmdk", "vdi", "vpc", "vhdx"])
def test_sizes_around_the_withheld_part_are_written(driver: str, block: Path, tmp_path: Path) -> None:
    for size in SIZES:
        raw, image, expected = (tmp_path / f"{size}.{end}" for end in ("raw", "image", "expected"))
        raw.write_bytes(random.Random(size).randbytes(size))
        options = "force_size=on" if driver == "vpc" else ""
        disks_module.convert(raw, image, disks_module.Format(driver, options))
        disks_module.to_raw(image, driver, expected)
        devices.fill(block, 32 * MiB)
        size_written = write_block_target(qemu_img.local(image, "vhd" if driver == "vpc" else driver), block)
        assert size_written == expected.stat().st_size
        oracle.same(block, expected, beyond=devices.DIRT)


@pytest.mark.parametrize("force", ["on", "off"])
def test_size_of_vhd_is_that_of_a_plain_convert(force: str, tmp_path: Path) -> None:
    """5 MiB + 512 is not a multiple of a cylinder: with ``force_size=off`` the geometry rounds it up."""
    raw, image, expected = (tmp_path / name for name in ("raw", "image", "expected"))
    devices.fill(raw, 5 * MiB + 512)
    disks_module.convert(raw, image, disks_module.Format("vpc", f"force_size={force}"))
    disks_module.to_raw(image, "vpc", expected)
    assert qemu_img.virtual_size(qemu_img.local(image, "vhd")) == expected.stat().st_size


@pytest.mark.parametrize("variant", KINDS)
def test_new_file_is_sparse(variant: str, disks: disks_module.Disks, tmp_path: Path) -> None:
    source = qemu_img.local(disks.image(variant), KINDS[variant])
    size = qemu_img.virtual_size(source)
    target = tmp_path / "disk.img.part"
    target.touch()
    os.truncate(target, size)
    qemu_img.convert(source, target, size, qemu_img.Writing(fresh=True))
    oracle.same(target, disks.expected(variant))
    assert target.stat().st_blocks * 512 < size * 3 // 4


def test_dirty_file_is_written_fully(disks: disks_module.Disks, tmp_path: Path) -> None:
    source = qemu_img.local(disks.image("qcow2"), "qcow2")
    target = devices.fill(tmp_path / "target", 8 * MiB)
    qemu_img.convert(source, target, 8 * MiB, qemu_img.Writing(sparse=False))
    oracle.same(target, disks.expected("qcow2"))
    assert target.stat().st_blocks * 512 >= 8 * MiB


SPECIAL_NAMES = [
    "a,b",
    "json:{}",
    "nbd:unix:x",
    "file:name",
    'quo"te\\',
    "new\nline",
    "%41 &",
    "ümläut",
    "-p",
    "a=b,driver=raw",
]


@pytest.mark.parametrize("name", SPECIAL_NAMES)
def test_special_file_names_are_not_interpreted(name: str, disks: disks_module.Disks, tmp_path: Path) -> None:
    with contextlib.chdir(tmp_path):
        Path(name).write_bytes(disks.image("qcow2").read_bytes())
        target = Path(f"{name}.target")
        devices.fill(target, 8 * MiB)
        qemu_img.convert(qemu_img.local(name, "qcow2"), target, 8 * MiB)
        oracle.same(target, disks.expected("qcow2"))


def test_progress_ends_at_virtual_size(disks: disks_module.Disks, tmp_path: Path) -> None:
    steps: list[int] = []
    target = devices.fill(tmp_path / "target", 8 * MiB)
    follow = qemu_img.Follow(advance=steps.append)
    qemu_img.convert(qemu_img.local(disks.image("qcow2"), "qcow2"), target, 8 * MiB, follow=follow)
    assert sum(steps) == 8 * MiB
    assert min(steps) > 0
    assert len(steps) > 3


def test_format_is_never_probed(disks: disks_module.Disks) -> None:
    image = disks.image("qcow2")
    with pytest.raises(errors.Unsupported) as caught:
        qemu_img.virtual_size(qemu_img.local(image, "vhd"))
    assert str(caught.value) == f"unsupported image: vpc: could not open {image}: invalid VPC image"
    assert qemu_img.virtual_size(qemu_img.local(image, "raw")) == image.stat().st_size


def test_messages_call_an_export_the_image(disks: disks_module.Disks, tmp_path: Path) -> None:
    with served(disks.image("qcow2"), tmp_path) as socket, pytest.raises(errors.Unsupported) as caught:
        qemu_img.virtual_size(qemu_img.exported(socket, "vmdk"))
    assert (
        str(caught.value)
        == "unsupported image: vmdk: could not open the image: invalid VMDK image descriptor"
    )


def test_missing_or_too_small_target_is_an_error(disks: disks_module.Disks, tmp_path: Path) -> None:
    source = qemu_img.local(disks.image("qcow2"), "qcow2")
    with pytest.raises(errors.ToolFailed, match=r"could not open .*/nowhere: .*No such file"):
        qemu_img.convert(source, tmp_path / "nowhere", 8 * MiB)
    small = devices.fill(tmp_path / "small", MiB)
    with pytest.raises(errors.ToolFailed, match="output file is smaller than input file"):
        qemu_img.convert(source, small, 8 * MiB)


@pytest.mark.parametrize("driver", ["qcow2", "vmdk"])
def test_backing_file_is_not_opened(driver: str, tmp_path: Path) -> None:
    base, overlay = devices.fill(tmp_path / "base", 2 * MiB), tmp_path / "overlay"
    base_format = "raw"
    if driver == "vmdk":
        base_format, base = "vmdk", tmp_path / "base.vmdk"
        disks_module.convert(tmp_path / "base", base, disks_module.Format("vmdk"))
    processes.run("qemu-img", "create", "-q", "-f", driver, "-b", base, "-F", base_format, overlay)
    assert qemu_img.head(qemu_img.local(overlay, driver), MiB) == bytes(MiB)


def test_full_target_has_the_contract_phrase(tmp_path: Path) -> None:
    raw, image = tmp_path / "raw", tmp_path / "image"
    raw.write_bytes(random.Random(1).randbytes(40 * MiB))
    disks_module.convert(raw, image, disks_module.Format("qcow2"))
    with devices.filesystem("tmpfs", tmp_path) as small:
        target = small / "disk"
        target.touch()
        os.truncate(target, 40 * MiB)
        with pytest.raises(errors.TargetError, match="no space left on device"):
            qemu_img.convert(qemu_img.local(image, "qcow2"), target, 40 * MiB)


def test_failing_device_is_a_target_error(disks: disks_module.Disks, tmp_path: Path) -> None:
    with devices.failing(tmp_path, 16 * MiB) as device:
        device.fail()
        with pytest.raises(errors.TargetError, match="error while writing"):
            qemu_img.convert(
                qemu_img.local(disks.image("qcow2"), "qcow2"),
                device.path,
                8 * MiB,
                qemu_img.Writing(direct=True),
            )


def test_cancel_stops_the_conversion(disks: disks_module.Disks, tmp_path: Path) -> None:
    cancel = cancelling.Cancel()
    target = devices.fill(tmp_path / "target", 8 * MiB)
    cancel.set()
    with pytest.raises(errors.Cancelled):
        qemu_img.convert(
            qemu_img.local(disks.image("vmdk"), "vmdk"),
            target,
            8 * MiB,
            follow=qemu_img.Follow(cancel=cancel),
        )


def test_stalled_source_is_no_progress(disks: disks_module.Disks, tmp_path: Path) -> None:
    processes.need("nbdkit")
    socket = tmp_path / "sock"
    argv = ["nbdkit", "-f", "-U", socket, "--filter=delay", "file", disks.image("qcow2"), "delay-read=60"]
    with processes.running(
        argv, log=tmp_path / "log", ready=functools.partial(processes.is_listening, socket)
    ):
        follow = qemu_img.Follow(watch=process.Watch("qemu-img", 1))
        with pytest.raises(errors.NoProgress):
            qemu_img.virtual_size(qemu_img.exported(socket, "qcow2"), follow)


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
        qemu_img.commit(overlay, target, 8 * MiB, follow=qemu_img.Follow(advance=steps.append))
        oracle.same(target, expected)
        assert sum(steps) == 8 * MiB
