"""Every variant and every content: what the check says, and the disk that both readers return."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import detect, facts, safety
from tests.support import disks as disks_module
from tests.support import inspected, placing

#: One of each way in which the tables of an image lead to its data.
BASE = ("qcow2", "qcow2-zlib", "vmdk", "vmdk-stream", "vdi", "vhd", "vhdx")
CASES = [
    *((variant, "ragged") for variant in placing.VARIANTS),
    *((variant, content) for variant in BASE for content in disks_module.CONTENTS if content != "ragged"),
]
#: Formats whose names differ from those of qemu-img.
OURS = {"vpc": "vhd"}


def check_facts(data: bytes, driver: str, size: int) -> facts.ImageFacts:
    """Check that the image is accepted with its format and size, and not found too short by its head."""
    form = OURS.get(driver, driver)
    found = inspected.check(data)
    assert (found.format, found.virtual_size, found.complete) == (form, size, True)
    assert inspected.check_length(data) <= len(data)
    early = safety.check(form, data[: detect.HEAD])
    assert early.virtual_size in {size, None}
    return early


@pytest.mark.slow
@pytest.mark.parametrize(("variant", "content"), CASES)
def test_both_readers_return_the_disk_of_qemu_img(
    disks: disks_module.Disks, variant: str, content: str
) -> None:
    data, driver = disks.image(variant, content).read_bytes(), disks.driver(variant)
    disk = disks.expected(variant, content).read_bytes()
    raw = disks.raw(content).read_bytes()
    assert disk == raw.ljust(len(disk), b"\0")
    early = check_facts(data, driver, len(disk))
    assert early.complete or variant.startswith("vhdx") or "last" in variant
    assert inspected.check(data).layout is not None
    assert placing.read_disk(data, driver) == disk
    assert placing.streamed(data, form=driver) == disk


@pytest.mark.parametrize("variant", ["raw", "vmdk-odd", "vhdx-log", "vhd-fixed"])
def test_variant_that_is_not_placed_is_accepted(disks: disks_module.Disks, variant: str) -> None:
    for content in ("mixed", "ragged", "zero", "far"):
        data = disks.image(variant, content).read_bytes()
        size = disks.expected(variant, content).stat().st_size
        early = check_facts(data, disks.driver(variant), size)
        assert early.complete == (variant in {"raw", "vmdk-odd"})
        assert inspected.check(data).layout is None


@pytest.mark.parametrize("variant", [*BASE, "vmdk-footer"])
def test_required_length_is_exact(disks: disks_module.Disks, variant: str, tmp_path: Path) -> None:
    """One byte less is refused; what follows is read by nobody."""
    for content in ("mixed", "far"):
        data = inspected.image(disks, variant, content)
        required = inspected.check_length(data)
        assert required <= len(data)
        with pytest.raises(errors.ImageError):
            inspected.check_length(data[: required - 1])
    if variant == "vmdk-footer":
        return  # the footer is found at the end of the file
    data = inspected.image(disks, variant)
    required = inspected.check_length(data)
    footer = data[-512:] if variant == "vhd" else b""
    cut = (data[:required] + footer).ljust(-(-(required + len(footer)) // 512) * 512, b"\xff")
    (tmp_path / "cut").write_bytes(cut)
    disks_module.to_raw(tmp_path / "cut", disks.driver(variant), tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == disks.expected(variant).read_bytes()


def test_iso_image_is_a_raw_disk(disks: disks_module.Disks) -> None:
    for variant in ("iso", "iso-hybrid"):
        data = disks.image(variant).read_bytes()
        assert inspected.check(data) == facts.ImageFacts("raw", len(data))
        assert inspected.check_length(data) == 0


def test_vmdk_with_footer_is_incomplete_without_its_end(disks: disks_module.Disks, tmp_path: Path) -> None:
    data = inspected.image(disks, "vmdk-footer")
    early = safety.check("vmdk", data[: detect.HEAD])
    assert (early.virtual_size, early.complete) == (8 << 20, False)
    assert inspected.check(data).complete
    (tmp_path / "disk").write_bytes(data)
    disks_module.to_raw(tmp_path / "disk", "vmdk", tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == disks.raw().read_bytes()
