"""One OVA is one disk however it arrives: names have one meaning, and a cut or tampered package is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdi_worker import errors
from tests.support import misbehave, oracle, ovas, ways
from tests.support.ovas import Disk

WAYS = pytest.mark.parametrize("way", ways.WAYS)
MANIFESTS = pytest.mark.parametrize("listed", ["first", "last"])
WANTED, OTHER = (bytes(range(256)) * 4096, bytes(range(255, -1, -1)) * 4096)
#: The names in the archive that a descriptor's ``d%31.vmdk`` could mean.
ENCODED, PLAIN = "d%31.vmdk", "d1.vmdk"


@pytest.fixture
def importer(server: misbehave.Server, tmp_path: Path) -> ways.Importer:
    return ways.Importer(server, tmp_path, "vm.ova")


@WAYS
@pytest.mark.parametrize("names", [(ENCODED, PLAIN), (PLAIN, ENCODED)])
@pytest.mark.parametrize("listed", ["first", "last", "none"])
def test_name_that_two_files_could_have_is_refused(
    importer: ways.Importer, way: str, names: tuple[str, str], listed: str
) -> None:
    members = [("vm.ovf", ovas.descriptor([Disk(WANTED, ENCODED)])), (names[0], WANTED), (names[1], OTHER)]
    if listed != "none":
        members.insert(1 if listed == "first" else len(members), ("vm.mf", ovas.manifest(members)))
    error = importer.refused(ovas.packed(*members), way)
    assert isinstance(error, errors.Refused)
    assert "could both be the file of one disk" in str(error)


@WAYS
@pytest.mark.parametrize("name", [ENCODED, PLAIN])
def test_name_is_the_member_s_or_percent_encoded(importer: ways.Importer, way: str, name: str) -> None:
    importer.run(ovas.packed(("vm.ovf", ovas.descriptor([Disk(WANTED, ENCODED)])), (name, WANTED)), way)
    assert importer.target.read_bytes() == WANTED


@WAYS
def test_file_that_two_disks_could_mean_is_refused(importer: ways.Importer, way: str) -> None:
    twice = "d%2531.vmdk"  # decoded once, it is the other's name
    found = ovas.descriptor([Disk(OTHER, twice), Disk(WANTED, ENCODED)])
    error = importer.refused(ovas.packed(("vm.ovf", found), (ENCODED, WANTED)), way, disk=ENCODED)
    assert "two disks have the same file" in str(error)


ATTRIBUTES = {
    "qualified first": 'ovf:href="a.raw" href="b.raw"',
    "bare first": 'href="b.raw" ovf:href="a.raw"',
    "two versions": 'ovf:href="a.raw" old:href="b.raw"',
}


@WAYS
@pytest.mark.parametrize("attributes", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_attribute_with_two_values_is_refused(importer: ways.Importer, way: str, attributes: str) -> None:
    text = ovas.descriptor([Disk(WANTED, "a.raw")]).replace(b'ovf:href="a.raw"', attributes.encode())
    text = text.replace(b"<Envelope", b'<Envelope xmlns:old="http://www.vmware.com/schema/ovf/1/envelope"')
    error = importer.refused(ovas.packed(("vm.ovf", text), ("a.raw", WANTED), ("b.raw", OTHER[:-1])), way)
    assert isinstance(error, errors.Refused)
    assert "'href' is both" in str(error)


def test_same_attribute_twice_is_one_value(importer: ways.Importer) -> None:
    text = ovas.descriptor([Disk(WANTED, "a.raw")]).replace(b"ovf:href=", b'href="a.raw" ovf:href=')
    importer.run(ovas.packed(("vm.ovf", text), ("a.raw", WANTED)), "ranges")
    assert importer.target.read_bytes() == WANTED


@WAYS
@pytest.mark.parametrize("element", ["File", "Disk"])
def test_vendor_s_elements_do_not_count(importer: ways.Importer, way: str, element: str) -> None:
    text = ovas.descriptor([Disk(WANTED, "a.raw")])
    text = text.replace(b"<Envelope", b'<Envelope xmlns:vbox="http://www.virtualbox.org/ovf/machine"')
    # A second disk, or a second file with the same id, in the words of a vendor.
    extra = {
        "File": (b"</References>", b'<vbox:File ovf:href="b.raw" ovf:id="file1"/></References>'),
        "Disk": (b"</DiskSection>", b'<vbox:Disk ovf:diskId="x" ovf:fileRef="file1"/></DiskSection>'),
    }
    text = text.replace(*extra[element])
    importer.run(ovas.packed(("vm.ovf", text), ("a.raw", WANTED)), way)
    assert importer.target.read_bytes() == WANTED


@WAYS
def test_package_cut_before_its_manifest_is_refused(importer: ways.Importer, way: str) -> None:
    damaged = WANTED[:-1] + b"?"
    whole = ovas.ova(Disk(WANTED, "a.raw"), listed="last").replace(WANTED, damaged)
    error = importer.refused(whole[: whole.index(damaged) + len(damaged)], way)
    assert isinstance(error, errors.Truncated)
    assert "without an end mark" in str(error)


@WAYS
def test_manifest_shows_that_a_package_without_end_mark_is_whole(importer: ways.Importer, way: str) -> None:
    whole = ovas.ova(Disk(WANTED, "a.raw"), listed="first")
    importer.run(whole[: whole.index(WANTED) + len(WANTED)], way)
    assert importer.target.read_bytes() == WANTED


@WAYS
@MANIFESTS
def test_tampered_descriptor_beside_an_intact_manifest_is_refused(
    importer: ways.Importer, way: str, listed: str
) -> None:
    right = ovas.ova(Disk(WANTED, "a.raw"), Disk(OTHER, "b.raw"), listed=listed)
    # Each file is as the manifest says; the descriptor names the other one.
    tampered = right.replace(b'href="a.raw"', b'href="?.raw"').replace(b'href="b.raw"', b'href="a.raw"')
    tampered = tampered.replace(b'href="?.raw"', b'href="b.raw"')
    assert tampered != right
    error = importer.refused(tampered, way, disk="1")
    assert isinstance(error, errors.ChecksumMismatch)
    importer.run(right, way, disk="1")
    oracle.same(importer.target, _file(importer.target.parent, WANTED))


def _file(folder: Path, data: bytes) -> Path:
    path = folder / "expected"
    path.write_bytes(data)
    return path
