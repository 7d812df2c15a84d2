"""Each rule refuses what was made against it, good images pass, and nothing but our errors comes out."""

from __future__ import annotations

import contextlib
import json
import struct
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from formats import detect, facts, safety, vhd
from importer import errors
from tests import disks as disks_module
from tests import hostile, processes

CONTENTS = ("mixed", "ragged", "zero", "far")
SPARSE = ("qcow2", "qcow2-zlib", "vmdk", "vmdk-stream", "vmdk-footer", "vdi", "vhd", "vhdx")


def kind(data):
    found = detect.detect(data[: detect.HEAD])
    return "vhd" if found == "raw" and vhd.is_fixed_vhd(data) else found


def seen(data):
    return {"read": lambda offset, length: data[offset : offset + length], "size": len(data)}


def check(data, **options):
    return safety.check(kind(data), data[: detect.HEAD], **seen(data), **options)


def check_length(data):
    return safety.check_length(kind(data), **seen(data))


def with_footer(data):
    """Make of QEMU's stream-optimized VMDK one like VMware's, whose true header is at the end."""
    header = bytearray(data[:512])
    struct.pack_into("<Q", header, 56, (1 << 64) - 1)
    marker = struct.pack("<QII496x", 1, 0, 3)
    return bytes(header) + data[512:] + marker + data[:512] + bytes(512)


def image(disks, variant, content="mixed"):
    if variant == "vmdk-footer":
        return with_footer(disks.image("vmdk-stream", content).read_bytes())
    return disks.image(variant, content).read_bytes()


def patched(data, *fields):
    data = bytearray(data)
    for offset, layout, value in fields:
        struct.pack_into(layout, data, offset, value)
    return bytes(data)


# -- good images


@pytest.mark.parametrize("content", CONTENTS)
@pytest.mark.parametrize("variant", disks_module.FORMATS)
def test_good_image(disks, variant, content):
    path = disks.image(variant, content)
    told = processes.run("qemu-img", "info", "--output=json", "-f", disks.driver(variant), path).stdout
    size = json.loads(told)["virtual-size"]
    data = path.read_bytes()
    assert check(data) == facts.Facts(kind(data), size)
    assert check_length(data) <= len(data)
    early = safety.check(kind(data), data[: detect.HEAD])
    assert early.virtual_size in {size, None}
    assert early.complete or variant in {"vhdx", "vhdx-fixed", "vhd-fixed"} or "last" in variant


def test_good_iso(disks):
    for variant in ("iso", "iso-hybrid"):
        data = disks.image(variant).read_bytes()
        assert check(data) == facts.Facts("raw", len(data))
        assert check_length(data) == 0


def test_footer_makes_a_vmdk_incomplete_without_its_end(disks, tmp_path):
    data = image(disks, "vmdk-footer")
    early = safety.check("vmdk", data[: detect.HEAD])
    assert (early.virtual_size, early.complete) == (8 << 20, False)
    assert check(data).complete
    (tmp_path / "disk").write_bytes(data)
    disks_module.to_raw(tmp_path / "disk", "vmdk", tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == disks.raw().read_bytes()


@pytest.mark.parametrize(
    ("old", "new"), [(b'"streamOptimized"', b'"monolithicOther"'), (b"ddb.adapterType", b"odd.adapter Typ")]
)
def test_descriptor_of_a_vmdk_with_a_footer_is_inspected_at_once(disks, old, new):
    """A stream is placed before its footer is seen."""
    head = image(disks, "vmdk-tables-last")[: detect.HEAD]
    assert not safety.check("vmdk", head).complete
    with pytest.raises(errors.Refused, match="descriptor"):
        safety.check("vmdk", head.replace(old, new))


@pytest.mark.parametrize("variant", ["qcow2", "qcow2-v2"])
def test_extended_and_old_qcow2_are_no_unknown_features(disks, variant):
    assert check(image(disks, variant)).format == "qcow2"


# -- the end of the file


@pytest.mark.parametrize("content", ["mixed", "far"])
@pytest.mark.parametrize("variant", SPARSE)
def test_required_length_is_exact(disks, variant, content):
    """What is cut off below the required length changes what qemu-img reads, or makes it fail."""
    data = image(disks, variant, content)
    required = check_length(data)
    assert required <= len(data)
    short = data[: required - 1]
    with pytest.raises(errors.ImageError):
        check_length(short)


@pytest.mark.parametrize("variant", [name for name in SPARSE if name != "vmdk-footer"])
def test_nothing_behind_the_required_length_is_read(disks, variant, tmp_path):
    data = image(disks, variant, "mixed")
    cut = data[: check_length(data)]
    if variant == "vhd":
        cut += data[-512:]
    cut = cut.ljust(-(-len(cut) // 512) * 512, b"\xff")
    (tmp_path / "cut").write_bytes(cut)
    disks_module.to_raw(tmp_path / "cut", disks.driver(variant), tmp_path / "raw")
    assert (tmp_path / "raw").read_bytes() == disks.expected(variant).read_bytes()


# -- images of the shared collection

REFUSED = {
    "qcow2-backing": "backing_file",
    "qcow2-backing-json": "backing_file",
    "qcow2-data-file": "data_file",
    "qcow2-luks": "encryption",
    "qcow2-aes": "encryption",
    "qcow2-unknown-incompatible": "unknown_features",
    "vmdk-flat": "subformat",
    "vmdk-extent": "extents",
    "vmdk-huge": "virtual_size",
    "vdi-differencing": "parent",
    "vdi-huge": "virtual_size",
    "vhd-differencing": "parent",
    "vhdx-parent": "parent",
    "two-magics": "ambiguous",
}
UNUSABLE = set(hostile.IMAGES) - set(REFUSED) - {"qcow2-dirty"}


@pytest.mark.parametrize("name", REFUSED)
def test_hostile_image_is_refused(disks, name):
    data = hostile.image(disks, name).read_bytes()
    with pytest.raises(errors.Refused) as caught:
        check(data)
    assert caught.value.fields["rule"] == REFUSED[name]


@pytest.mark.parametrize("name", sorted(UNUSABLE))
def test_hostile_image_is_no_disk(disks, name):
    data = hostile.image(disks, name).read_bytes()
    with pytest.raises(errors.ImageError):  # noqa: PT012 - the second sees what the first cannot
        check(data)
        check_length(data)


def test_dirty_qcow2_passes(disks):
    data = hostile.image(disks, "qcow2-dirty").read_bytes()
    assert check(data).virtual_size
    assert check_length(data) <= len(data)


# -- rules that only a patch brings out


#: Format, rule, and fields to write: offset, layout, value.
PATCHES = {
    "qcow2-empty": ("qcow2", "virtual_size", (24, ">Q", 0)),
    "qcow2-65-tib": ("qcow2-2m-zlib", "virtual_size", (24, ">Q", 65 << 40), (36, ">I", 140)),
    "vmdk-capacity": ("vmdk", "virtual_size", (12, "<Q", 0)),
    "vmdk-version": ("vmdk", "header", (4, "<I", 4)),
    "vmdk-grain": ("vmdk", "header", (20, "<Q", 7)),
    "vmdk-grain-table": ("vmdk", "header", (44, "<I", 513)),
    "vmdk-line-ends": ("vmdk", "header", (73, "4s", b"\n\n\r\n")),
    "vmdk-hint": ("vmdk", "parent", (9000, "20s", b'parentFileNameHint="')),
    "vmdk-footer-size": ("vmdk-footer", "footer", (-1024 + 12, "<Q", 8)),
    "vmdk-footer-gone": ("vmdk-footer", "footer", (-1024, "4s", b"GONE")),
    "vmdk-footer-marker": ("vmdk-footer", "footer", (-1536 + 12, "<I", 2)),
    "vdi-empty": ("vdi", "virtual_size", (368, "<Q", 0)),
    "vdi-version": ("vdi", "header", (68, "<I", 0x00020001)),
    "vdi-undo": ("vdi", "parent", (76, "<I", 3)),
    "vdi-link": ("vdi", "parent", (424, "<I", 1)),
    "vdi-block": ("vdi", "header", (376, "<I", 1 << 21)),
    "vdi-map": ("vdi", "header", (384, "<I", 7)),
    "vhd-fixed-at-0": ("vhd", "parent", (60, ">I", 2)),
    "vhd-huge": ("vhd", "virtual_size", (48, ">Q", 65 << 40)),
    "vhd-map": ("vhd", "header", (512 + 28, ">I", 3)),
    "vhd-block": ("vhd", "header", (512 + 32, ">I", 0)),
    "vhd-parent": ("vhd", "parent", (512 + 64, ">H", 65)),
    "vhd-locator": ("vhd", "parent", (512 + 576, "4s", b"W2ru")),
    "vhdx-region": ("vhdx", "header", (192 << 10, "4s", b"none")),
    "vhdx-regions": ("vhdx", "header", ((192 << 10) + 8, "<I", 2048)),
    "vhdx-one-region": ("vhdx", "check_failed", ((192 << 10) + 8, "<I", 1)),
}

#: Format, rule, what is there, and what comes in its place. The ids of VHDX are from [MS-VHDX] 2.6.2.
REPLACEMENTS = {
    "vmdk-parent": ("vmdk", "parent", b"parentCID=ffffffff", b"parentCID=12345678"),
    "vmdk-two-extents": ("vmdk", "extents", b"ddb.virtualHWVersion", b'RW 8 SPARSE "x"\nddb.'),
    "vmdk-flat-extent": ("vmdk", "extents", b" SPARSE ", b" FLAT   "),
    "vmdk-type": ("vmdk", "descriptor", b'"monolithicSparse"', b'"monolithicOthers"'),
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
}


def with_vhd_sums(data):
    """Make the checksums of a VHD's footer and header right again."""
    data = bytearray(data)
    for start, end, at in ((0, 512, 64), (512, 1536, 512 + 36)):
        data[at : at + 4] = bytes(4)
        struct.pack_into(">I", data, at, ~sum(data[start:end]) & 0xFFFFFFFF)
    return bytes(data)


@pytest.mark.parametrize("name", PATCHES)
def test_patched_field_is_refused(disks, name):
    variant, rule, *fields = PATCHES[name]
    data = patched(image(disks, variant), *fields)
    with pytest.raises(errors.Refused) as caught:
        check(with_vhd_sums(data) if variant == "vhd" else data)
    assert caught.value.fields["rule"] == rule


@pytest.mark.parametrize("name", REPLACEMENTS)
def test_replaced_bytes_are_refused(disks, name):
    variant, rule, old, new = REPLACEMENTS[name]
    data = image(disks, variant)
    assert old in data
    assert len(old) == len(new)
    with pytest.raises(errors.Refused) as caught:
        check(data.replace(old, new))
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
def test_vhdx_sizes_that_contradict(disks, item, layout, value):
    data = image(disks, "vhdx")
    (offset,) = struct.unpack_from("<I", data, data.index(bytes.fromhex(item)) + 16)
    with pytest.raises(errors.Refused, match="metadata"):
        check(patched(data, (data.index(b"metadata") + offset, layout, value)))


def test_vmdk_of_too_many_grains(disks):
    data = patched(image(disks, "vmdk"), (12, "<Q", 64 << 31), (20, "<Q", 8), (44, "<I", 64))
    assert check(data).virtual_size == 64 << 40
    with pytest.raises(errors.Refused, match="grains"):
        check_length(data)


@pytest.mark.parametrize("size", ["8M", "1G", "200G"])
@pytest.mark.parametrize("subformat", ["dynamic", "fixed"])
def test_vhd_whose_size_is_its_geometry(tmp_path, size, subformat):
    path = tmp_path / "disk"
    processes.run("qemu-img", "create", "-q", "-f", "vpc", "-o", f"subformat={subformat}", path, size)
    told = processes.run("qemu-img", "info", "--output=json", "-f", "vpc", path).stdout
    with path.open("rb") as file:

        def read(offset, length):
            file.seek(offset)
            return file.read(length)

        found = safety.check("vhd", read(0, detect.HEAD), read=read, size=path.stat().st_size)
    assert found.virtual_size == json.loads(told)["virtual-size"]


def test_fixed_vhd_promising_more_than_there_is(disks):
    data = image(disks, "vhd-fixed")
    with pytest.raises(errors.Refused, match="more than the file holds"):
        check(data[4096:])


# -- the backing file that was asked for


@pytest.mark.parametrize("version", ["0.10", "1.1"])
@pytest.mark.parametrize("name", ["base", "../images/base", "/var/lib/base"])
def test_allowed_backing_file(tmp_path, version, name):
    path = tmp_path / "delta"
    options = ("-u", "-b", name, "-F", "qcow2", "-o", f"compat={version}")
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", *options, path, "8M")
    data = path.read_bytes()
    assert check(data, allow_backing="base") == facts.Facts("qcow2", 8 << 20, backing=name)
    for options in ({"allow_backing": "other"}, {"allow_backing": ""}, {}):
        with pytest.raises(errors.Refused, match="backing_file"):
            check(data, **options)


def test_no_backing_file_where_one_is_allowed(disks):
    assert check(image(disks, "qcow2"), allow_backing="base").backing is None


# -- strangers, sizes, and noise


@pytest.mark.parametrize("name", ["luks", "html", "tar", "gz", "unknown", "", "empty"])
def test_no_disk(name):
    with pytest.raises(errors.Unsupported):
        safety.check(name, b"x" * 1000)


def test_raw_sizes():
    assert safety.check("raw", b"x") == facts.Facts("raw", None)
    assert check(b"x") == facts.Facts("raw", 1)
    for size in (0, (64 << 40) + 1):
        with pytest.raises(errors.Refused, match="virtual_size"):
            safety.check("raw", b"x", size=size)


@pytest.mark.parametrize("variant", ["qcow2", "vmdk", "vmdk-footer", "vdi", "vhd", "vhd-fixed", "vhdx"])
@hypothesis.given(data=st.data())
@hypothesis.settings(
    deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_mutations_give_errors_of_ours_only(disks, variant, data):
    bad = bytearray(image(disks, variant))
    name = kind(bad)
    places = (
        st.integers(0, 2048)
        | st.integers(192 << 10, (192 << 10) + 100)
        | st.integers(2 << 20, (2 << 20) + 200)
    )
    places |= st.integers(len(bad) - 1536, len(bad) - 1)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(places)
        value = data.draw(st.binary(min_size=1, max_size=9) | st.sampled_from([b"\xff" * 8, bytes(8)]))
        bad[at : at + len(value)] = value
    started = time.monotonic()
    with contextlib.suppress(errors.Error):
        safety.check(name, bytes(bad[: detect.HEAD]))
        safety.check(name, bytes(bad[: detect.HEAD]), **seen(bytes(bad)))
        safety.check_length(name, **seen(bytes(bad)))
    assert time.monotonic() - started < 5
