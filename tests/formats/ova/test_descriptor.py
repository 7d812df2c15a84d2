"""Descriptors as programs write them."""

from __future__ import annotations

import contextlib

import hypothesis
import pytest
from hypothesis import strategies

from cdi_worker import errors
from cdi_worker.formats import checksum
from cdi_worker.formats.ova import descriptor, package
from tests.support import ovas

GiB = 1 << 30
VIRTUALBOX = b"""<?xml version="1.0"?>
<Envelope ovf:version="1.0" xml:lang="en-US" xmlns="http://schemas.dmtf.org/ovf/envelope/1"
  xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" xmlns:vbox="http://www.virtualbox.org/ovf/machine">
  <References>
    <File ovf:id="file1" ovf:href="box-disk001.vmdk"/><File ovf:id="file2" ovf:href="a.iso"/>
  </References>
  <DiskSection>
    <Info>List of the virtual disks used in the package</Info>
    <Disk ovf:capacity="21474836480" ovf:diskId="vmdisk1" ovf:fileRef="file1"
      ovf:format="http://www.vmware.com/interfaces/specifications/vmdk.html#streamOptimized" vbox:uuid="5e"/>
    <Disk ovf:capacity="1073741824" ovf:diskId="vmdisk2"/>
  </DiskSection>
</Envelope>"""
OVIRT = b"""<?xml version='1.0' encoding='UTF-8'?>
<ovf:Envelope xmlns:ovf="http://schemas.dmtf.org/ovf/envelope/1" xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance">
  <References><File ovf:id="i1" ovf:href="d1" ovf:size="196616" ovf:description="Active VM"/></References>
  <Section xsi:type="ovf:DiskSection_Type"><Info>List of Virtual Disks</Info>
    <Disk ovf:diskId="i1" ovf:capacity="10" ovf:capacityAllocationUnits="GigaBytes" ovf:parentRef=""
      ovf:fileRef="i1" ovf:volume-format="COW"/>
  </Section>
</ovf:Envelope>"""
OLD = b"""<Envelope xmlns="http://www.vmware.com/schema/ovf/1/envelope"><References>
  <File id="f" href="disk%201.vmdk.gz" compression="gzip" size="5"/></References>
  <DiskSection><Disk capacity="${size}" diskId="d" fileRef="f"/></DiskSection></Envelope>"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (VIRTUALBOX, descriptor.OvfDisk(1, "box-disk001.vmdk", "vmdisk1", 20 * GiB)),
        (OVIRT, descriptor.OvfDisk(1, "d1", "i1", 10 * GiB, 196616)),
        (OLD, descriptor.OvfDisk(1, "disk%201.vmdk.gz", "d", None, 5, "gz")),
        (ovas.descriptor([ovas.Disk(b"abc")]), descriptor.OvfDisk(1, "vm-disk1.vmdk", "vmdisk1", 8 << 20, 3)),
    ],
)
def test_descriptors_of_programs_are_read(text: bytes, expected: descriptor.OvfDisk) -> None:
    assert descriptor.parse(text) == (expected,)


def test_encoded_name_may_also_be_a_plain_one() -> None:
    assert descriptor.names("disk%201.vmdk") == ("disk%201.vmdk", "disk 1.vmdk")


@hypothesis.given(
    strategies.binary(max_size=50), strategies.integers(0, len(OVIRT)), strategies.integers(0, 50)
)
def test_damaged_descriptor_raises_our_errors_only(junk: bytes, at: int, cut: int) -> None:
    with contextlib.suppress(errors.ImageError):
        descriptor.parse(OVIRT[:at] + junk + OVIRT[at + cut :])


@pytest.mark.parametrize(
    "line", ["SHA256(a b.vmdk)= {}", "sha-256 ( a b.vmdk ) = {}\r", "\nSHA256(a b.vmdk)={}\n"]
)
def test_lines_of_manifests_are_read(line: str) -> None:
    text = line.format("Ab" * 32)
    assert package.parse_manifest(text.encode()) == {"a b.vmdk": checksum.Checksum("sha256", "ab" * 32)}


@hypothesis.given(strategies.binary(max_size=200))
def test_damaged_manifest_raises_our_errors_only(junk: bytes) -> None:
    with contextlib.suppress(errors.ImageError):
        package.parse_manifest(ovas.manifest([("a", b"a")]) + junk)
