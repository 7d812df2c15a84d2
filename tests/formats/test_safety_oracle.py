"""We refuse every image that OpenStack refuses; its format inspector (oslo.utils) is the oracle."""

from __future__ import annotations

import re

import hypothesis
import pytest
from hypothesis import strategies as st
from oslo_utils.imageutils import format_inspector

from cdi_worker import errors
from tests.support import hostile, inspected

#: Incompatible features of a qcow2. The inspector takes extended L2 entries for unknown, and what version 2
#: has in this place for features.
FEATURES = slice(72, 80)
EXTENDED_L2 = 1 << 4
DESCRIPTOR = slice(512, 512 + 20 * 512)

#: Lines of a descriptor, good ones and others, in any case; each text may follow any other.
PARTS = (
    *("# Disk DescriptorFile", "version=1", "CID=12345678", "parentCID=ffffffff", "parentCID=00000001"),
    *('createType="monolithicSparse"', 'CREATETYPE="streamOptimized"', 'createType="monolithicFlat"'),
    *(
        'createType="',
        'createType=""',
        'createType="vmfs"',
        '"',
        "=",
        " =",
        "a b=c",
        "a=b c",
        "ddb",
        " ddb.x",
    ),
    *('RW 16384 SPARSE "disk.vmdk"', 'rw 16384 sparse "x"', 'RDONLY 1 SPARSE "x"', "NOACCESS 1 ZERO", "RW"),
    *('RW 16384 FLAT "/etc/hostname" 0', 'RW\t1\tSPARSE\t"x=y"', '\x1cRW 1 SPARSE "/x"', 'RW  1 SPARSE "x"'),
    *(
        'RW 1 SPARSE "a\\b"',
        'RW=1 SPARSE "/x"',
        "changeTrackPath=x",
        "é",
        'RW 16384 SPARSE "é.vmdk"',
        'RW 16384 SPARSE "é\\.vmdk"',
        'RW 16384 SPARSE "/é.vmdk"',
        "\r",
        "\t",
        "\x0b",
        "\0",
        "\n",
        "\n",
    ),
)


def is_refused_by_openstack(name: str, data: bytes) -> bool:
    patched = bytearray(data)
    if name == "qcow2":
        is_new = int.from_bytes(patched[4:8]) >= 3
        features = int.from_bytes(patched[FEATURES]) & ~EXTENDED_L2 if is_new else 0
        patched[FEATURES] = features.to_bytes(8)
    else:
        # Programs write names in the encoding of their host; OpenStack reads ASCII only.
        patched[DESCRIPTOR] = re.sub(
            rb"[\x80-\xff]\\?", lambda found: b"?" * len(found[0]), patched[DESCRIPTOR]
        )
    inspector = format_inspector.ALL_FORMATS[name]()
    try:
        inspector.eat_chunk(bytes(patched))
        inspector.finish()
        inspector.safety_check()
    except Exception:  # noqa: BLE001 - whatever it is, OpenStack does not use the image then
        return True
    return False


def is_refused(data: bytes) -> bool:
    try:
        inspected.check(data)
        inspected.check_length(data)
    except errors.Error:
        return True
    return False


def check(name: str, data: bytes) -> None:
    assert is_refused(data) or not is_refused_by_openstack(name, data)


@pytest.mark.parametrize("name", [name for name in hostile.IMAGES if name.startswith(("qcow2", "vmdk"))])
def test_hostile_image_refused_by_openstack_is_refused(disks, name):
    check(name.partition("-")[0], hostile.image(disks, name).read_bytes())


@pytest.mark.parametrize("variant", ["qcow2", "qcow2-v2", "vmdk", "vmdk-footer"])
def test_good_image_is_accepted_by_both(disks, variant):
    data = inspected.image(disks, variant)
    assert not is_refused(data)
    assert not is_refused_by_openstack(inspected.kind(data), data)


@pytest.mark.parametrize("variant", ["qcow2", "qcow2-v2", "vmdk", "vmdk-footer"])
@hypothesis.given(data=st.data())
@hypothesis.settings(
    deadline=None, max_examples=100, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_mutated_header_refused_by_openstack_is_refused(disks, variant, data):
    bad = bytearray(inspected.image(disks, variant, "zero"))
    offsets = st.integers(0, 112) | st.integers(len(bad) - 1536, len(bad) - 400)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(offsets)
        value = data.draw(st.binary(min_size=1, max_size=8) | st.sampled_from([b"\xff" * 8, bytes(8)]))
        bad[at : at + len(value)] = value
    bad[:4] = inspected.image(disks, variant, "zero")[:4]
    check(variant.partition("-")[0], bytes(bad))


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["vmdk", "vmdk-footer"])
@hypothesis.given(data=st.data())
@hypothesis.settings(
    deadline=None, max_examples=300, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_descriptor_refused_by_openstack_is_refused(disks, variant, data):
    bad = bytearray(inspected.image(disks, variant, "zero"))
    good = bytes(bad[DESCRIPTOR]).partition(b"\0")[0].decode().splitlines()
    dropped = data.draw(st.none() | st.integers(0, len(good) - 1))
    lines = [line for number, line in enumerate(good) if number != dropped]
    for _ in range(data.draw(st.integers(0, 4))):
        part = "".join(data.draw(st.lists(st.sampled_from(PARTS), min_size=1, max_size=3)))
        lines.insert(data.draw(st.integers(0, len(lines))), part)
    text = "\n".join(lines).encode()
    bad[DESCRIPTOR] = text.ljust(20 * 512, b"\0")[: 20 * 512]
    check("vmdk", bytes(bad))
