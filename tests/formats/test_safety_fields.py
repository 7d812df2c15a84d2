"""Safety rules that only modified fields of a good image violate."""

from __future__ import annotations

import json
import struct

import pytest

from cdi_worker import errors
from cdi_worker.formats import detect, safety
from tests.support import inspected, processes, vhd_images, vhdx_images


def patched(data, *fields):
    data = bytearray(data)
    for offset, layout, value in fields:
        struct.pack_into(layout, data, offset, value)
    return bytes(data)


#: Format, rule, and fields to write: offset, layout, value.
PATCHES = {
    "qcow2-empty": ("qcow2", "virtual_size", (24, ">Q", 0)),
    "qcow2-65-tib": ("qcow2-2m-zlib", "virtual_size", (24, ">Q", 65 << 40), (36, ">I", 140)),
    "vmdk-capacity": ("vmdk", "virtual_size", (12, "<Q", 0)),
    "vmdk-version": ("vmdk", "header", (4, "<I", 4)),
    "vmdk-grain": ("vmdk", "header", (20, "<Q", 7)),
    "vmdk-compressed-grain": ("vmdk-stream", "table", (20, "<Q", 1 << 16)),
    "vmdk-grain-table": ("vmdk", "header", (44, "<I", 513)),
    "vmdk-line-ends": ("vmdk", "header", (73, "4s", b"\n\n\r\n")),
    "vmdk-descriptor-at": ("vmdk", "descriptor", (28, "<Q", 2)),
    "vmdk-descriptor-length": ("vmdk", "descriptor", (36, "<Q", 1 << 60)),
    "vmdk-descriptor-cut": ("vmdk", "descriptor", (36, "<Q", 0)),
    "vmdk-hint": ("vmdk", "parent", (9000, "20s", b'parentFileNameHint="')),
    "vmdk-footer-size": ("vmdk-footer", "footer", (-1024 + 12, "<Q", 8)),
    "vmdk-footer-gone": ("vmdk-footer", "footer", (-1024, "4s", b"GONE")),
    "vmdk-footer-marker": ("vmdk-footer", "footer", (-1536 + 12, "<I", 2)),
    "vdi-empty": ("vdi", "virtual_size", (368, "<Q", 0)),
    "vdi-version": ("vdi", "header", (68, "<I", 0x00020001)),
    "vdi-undo": ("vdi", "parent", (76, "<I", 3)),
    "vdi-link": ("vdi", "parent", (424, "<I", 1)),
    "vdi-block": ("vdi", "header", (376, "<I", 1 << 21)),
    "vdi-blocks": ("vdi", "table", (384, "<I", 1 << 28)),
    "vdi-map-at": ("vdi", "header", (340, "<I", 513)),
    "vdi-data-at": ("vdi", "header", (344, "<I", 1025)),
    "vdi-map": ("vdi", "header", (384, "<I", 7)),
    "vhd-fixed-at-0": ("vhd", "parent", (60, ">I", 2)),
    "vhd-huge": ("vhd", "virtual_size", (48, ">Q", 65 << 40)),
    "vhd-map": ("vhd", "header", (512 + 28, ">I", 3)),
    "vhd-block": ("vhd", "header", (512 + 32, ">I", 0)),
    "vhd-entries": ("vhd", "table", (512 + 28, ">I", 1 << 28)),
    "vhd-parent": ("vhd", "parent", (512 + 64, ">H", 65)),
    "vhd-locator": ("vhd", "parent", (512 + 576, "4s", b"W2ru")),
    "vhdx-bat": ("vhdx", "table", ((192 << 10) + 16 + 24, "<I", 1 << 30)),
    "vhdx-log": ("vhdx", "table", ((64 << 10) + 68, "<I", 1 << 31)),
    "vhdx-second-log": ("vhdx", "table", ((128 << 10) + 68, "<I", 1 << 31)),
    "vhdx-log-version": ("vhdx", "header", *((at + 64, "<H", 1) for at in vhdx_images.HEADERS)),
    "vhdx-log-at": ("vhdx", "header", *((at + 72, "<Q", 4096) for at in vhdx_images.HEADERS)),
    "vhdx-version": ("vhdx", "header", *((at + 66, "<H", 2) for at in vhdx_images.HEADERS)),
    "vhdx-sequence": ("vhdx", "header", *((at + 8, "<Q", 5) for at in vhdx_images.HEADERS), (65552, "<Q", 7)),
    "vhdx-region": ("vhdx", "header", (192 << 10, "4s", b"none")),
    "vhdx-missing": ("vhdx", "metadata", ((3 << 20) + 10, "<H", 4)),
    "vhdx-regions": ("vhdx", "header", ((192 << 10) + 8, "<I", 2048)),
    "vhdx-one-region": ("vhdx", "header", ((192 << 10) + 8, "<I", 1)),
}

#: Format, rule, the bytes to replace, and their replacement. The ids of VHDX are from [MS-VHDX] 2.6.2.
REPLACEMENTS = {
    "vmdk-parent": ("vmdk", "parent", b"parentCID=ffffffff", b"parentCID=12345678"),
    "vmdk-path": ("vmdk", "extents", b' SPARSE "', b' SPARSE"/'),
    "vmdk-two-extents": ("vmdk", "extents", b"ddb.virtualHWVersion", b'RW 8 SPARSE "x"\nddb.'),
    "vmdk-flat-extent": ("vmdk", "extents", b" SPARSE ", b" FLAT   "),
    "vmdk-type": ("vmdk", "descriptor", b'"monolithicSparse"', b'"monolithicOthers"'),
    "vmdk-letter": ("vmdk", "descriptor", b"createType", b"cr\xe9ateType"),
    "vmdk-line": ("vmdk", "descriptor", b"ddb.virtualHWVersion", b"odd.virtual HWersion"),
    "vhd-footer-sum": ("vhd", "footer", b"conectix\0\0\0\x02", b"conectix\0\0\0\x03"),
    "vhd-header-sum": ("vhd", "header", b"cxsparse\xff", b"cxsparse\xfe"),
    "vhdx-locator": (
        "vhdx",
        "parent",
        bytes.fromhex("ab12cabee6b2234593efc309e000c746"),
        bytes.fromhex("2d5fd3a80bb34d45abf7d3d84834ab0c"),
    ),
    "vhdx-unknown": (
        "vhdx",
        "unknown_features",
        bytes.fromhex("c748a3cd5d4471449cc9e9885251c556"),
        b"unknown-required",
    ),
    "vhdx-twice": (
        "vhdx",
        "header",
        bytes.fromhex("ab12cabee6b2234593efc309e000c746"),
        bytes.fromhex("2442a52f1bcd7648b2115dbed83bf4b8"),
    ),
    "vhdx-metadata": ("vhdx", "header", b"metadata", b"METADATA"),
    "vhdx-header-sums": ("vhdx", "header", b"head", b"HEAD"),
    "vhdx-region-sum": ("vhdx", "header", bytes.fromhex("6677c22d23f600429d64115e9bfd4a08"), bytes(16)),
}


#: What recomputes the checksums of an image.
SUMS = {"vhd": vhd_images.with_sums, "vhdx": vhdx_images.with_sums}


@pytest.mark.parametrize("name", PATCHES)
def test_patched_field_is_refused(disks, name):
    variant, rule, *fields = PATCHES[name]
    data = patched(inspected.image(disks, variant), *fields)
    with pytest.raises(errors.Refused) as caught:
        inspected.check(SUMS.get(variant, bytes)(data))
    assert caught.value.fields["rule"] == rule


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_replaced_bytes_are_refused(disks, name):
    variant, rule, old, new = REPLACEMENTS[name]
    data = inspected.image(disks, variant)
    assert old in data
    assert len(old) == len(new)
    with pytest.raises(errors.Refused) as caught:
        inspected.check(data.replace(old, new))
    assert caught.value.fields["rule"] == rule


@pytest.mark.parametrize(
    ("item", "layout", "value"),
    [
        ("3767a1ca36fa434db3b633f0aa44e76b", "<I", 1 << 19),
        ("3767a1ca36fa434db3b633f0aa44e76b", "<I", 3 << 20),
        ("2442a52f1bcd7648b2115dbed83bf4b8", "<Q", (8 << 20) + 5),
        ("2442a52f1bcd7648b2115dbed83bf4b8", "<Q", 60 << 40),
        ("1dbf41816fa90947ba47f233a8faab5f", "<I", 1024),
    ],
)
def test_contradictory_vhdx_size_is_refused(disks, item, layout, value):
    data = inspected.image(disks, "vhdx")
    (offset,) = struct.unpack_from("<I", data, data.index(bytes.fromhex(item)) + 16)
    with pytest.raises(errors.Refused, match="metadata"):
        inspected.check(patched(data, (data.index(b"metadata") + offset, layout, value)))


def test_vmdk_with_too_many_grains_is_refused(disks):
    data = patched(inspected.image(disks, "vmdk"), (12, "<Q", 64 << 31), (20, "<Q", 8), (44, "<I", 64))
    with pytest.raises(errors.Refused, match="grains"):
        inspected.check(data)


@pytest.mark.parametrize(
    ("subformat", "size"), [("dynamic", "8M"), ("dynamic", "200G"), ("fixed", "1G"), ("fixed", "200G")]
)
def test_vhd_size_is_that_of_qemu_img(tmp_path, size, subformat):
    path = tmp_path / "disk"
    processes.run("qemu-img", "create", "-q", "-f", "vpc", "-o", f"subformat={subformat}", path, size)
    info = processes.run("qemu-img", "info", "--output=json", "-f", "vpc", path).stdout
    with path.open("rb") as file:

        def read(offset, length):
            file.seek(offset)
            return file.read(length)

        found = safety.check("vhd", read(0, detect.HEAD), read=read, size=path.stat().st_size)
    assert found.virtual_size == json.loads(info)["virtual-size"]


def test_fixed_vhd_larger_than_its_file_is_refused(disks):
    data = inspected.image(disks, "vhd-fixed")
    with pytest.raises(errors.Refused, match="more than the file holds"):
        inspected.check(data[4096:])
