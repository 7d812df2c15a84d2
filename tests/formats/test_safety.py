"""The safety check refuses hostile images, and raises only our errors (``test_content``: the good ones)."""

from __future__ import annotations

import contextlib
import struct
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats import detect, facts, safety
from tests.support import hostile, inspected, processes, qcow2_parts


@pytest.mark.parametrize(
    ("old", "new"), [(b'"streamOptimized"', b'"monolithicOther"'), (b"ddb.adapterType", b"odd.adapter Typ")]
)
def test_descriptor_of_vmdk_with_footer_is_checked_in_the_head(disks, old, new):
    """The disk of a stream is written before the footer is read."""
    head = inspected.image(disks, "vmdk-tables-last")[: detect.HEAD]
    assert not safety.check("vmdk", head).complete
    with pytest.raises(errors.Refused, match="descriptor"):
        safety.check("vmdk", head.replace(old, new))


# -- hostile images

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
        inspected.check(data)
    assert caught.value.fields["rule"] == REFUSED[name]


@pytest.mark.parametrize("name", sorted(UNUSABLE))
def test_unusable_image_is_an_image_error(disks, name):
    data = hostile.image(disks, name).read_bytes()
    with pytest.raises(errors.ImageError):  # noqa: PT012 - the second check finds what the first cannot
        inspected.check(data)
        inspected.check_length(data)


def test_dirty_qcow2_is_accepted(disks):
    data = hostile.image(disks, "qcow2-dirty").read_bytes()
    assert inspected.check(data).virtual_size
    assert inspected.check_length(data) <= len(data)


# -- an expected backing file


@pytest.mark.parametrize(
    ("version", "name"), [("1.1", "base"), ("0.10", "../images/base"), ("1.1", "/var/lib/base")]
)
def test_expected_backing_file_is_accepted(tmp_path, version, name):
    path = tmp_path / "delta"
    options = ("-u", "-b", name, "-F", "qcow2", "-o", f"compat={version}")
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", *options, path, "8M")
    data = path.read_bytes()
    assert inspected.check(data, allow_backing="base") == facts.ImageFacts("qcow2", 8 << 20, backing=name)
    for options in ({"allow_backing": "other"}, {"allow_backing": ""}, {}):
        with pytest.raises(errors.Refused, match="backing_file"):
            inspected.check(data, **options)


@pytest.mark.parametrize(
    "name",
    ["https://user:secret@host/base?signature=secret", 'json:{"driver": "https", "password": "secret"}'],
)
def test_secret_in_the_name_of_another_backing_file_is_not_shown(tmp_path, name):
    path = tmp_path / "delta"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-u", "-b", name, "-F", "qcow2", path, "8M")
    with pytest.raises(errors.Refused, match="backing_file") as caught:
        inspected.check(path.read_bytes(), allow_backing="other")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(("length", "cut"), [(1024, 0), (4, 1), (1 << 31, 0)])
def test_name_of_a_backing_file_is_limited(length, cut):
    """QEMU reads 1023 bytes; the name is in the part of the image that was read, or it is not known."""
    data = qcow2_parts.header(backing=200)
    path = "/base".rjust(min(length, 1024), "d").encode()
    data = bytearray(data.ljust(200, b"\0") + path)
    struct.pack_into(">QI", data, 8, 200, length)
    with pytest.raises(errors.Refused, match="backing_file"):
        safety.check("qcow2", bytes(data[: len(data) - cut]), allow_backing="base")


def test_missing_backing_file_is_accepted(disks):
    assert inspected.check(inspected.image(disks, "qcow2"), allow_backing="base").backing is None


# -- other formats, sizes, and noise


def test_format_that_is_not_a_disk_is_unsupported():
    for name in ("html", "tar", "gz", "unknown", "", "empty"):
        with pytest.raises(errors.Unsupported):
            safety.check(name, b"x" * 1000)


def test_raw_disk_of_unusable_size_is_refused():
    assert safety.check("raw", b"x") == facts.ImageFacts("raw", None, unrecognised=True)
    assert inspected.check(bytes(512)) == facts.ImageFacts("raw", 512)
    for size in (0, 511, (64 << 40) + 1):
        with pytest.raises(errors.Refused, match="virtual_size"):
            safety.check("raw", b"x", size=size)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["qcow2", "vmdk", "vmdk-footer", "vdi", "vhd", "vhd-fixed", "vhdx"])
@hypothesis.given(data=st.data())
@hypothesis.settings(
    deadline=None, max_examples=60, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_mutated_image_raises_only_our_errors(disks, variant, data):
    bad = bytearray(inspected.image(disks, variant))
    name = inspected.kind(bad)
    offsets = (
        st.integers(0, 2048)
        | st.integers(192 << 10, (192 << 10) + 100)
        | st.integers(2 << 20, (2 << 20) + 200)
    )
    offsets |= st.integers(len(bad) - 1536, len(bad) - 1)
    for _ in range(data.draw(st.integers(1, 8))):
        at = data.draw(offsets)
        value = data.draw(st.binary(min_size=1, max_size=9) | st.sampled_from([b"\xff" * 8, bytes(8)]))
        bad[at : at + len(value)] = value
    started = time.process_time()
    with contextlib.suppress(errors.Error):
        safety.check(name, bytes(bad[: detect.HEAD]))
        safety.check(name, bytes(bad[: detect.HEAD]), **inspected.reader_arguments(bytes(bad)))
        safety.check_length(name, **inspected.reader_arguments(bytes(bad)))
    assert time.process_time() - started < 5
