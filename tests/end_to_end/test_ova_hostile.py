"""OVAs that contradict themselves, lead outside or exhaust a reader are refused."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import misbehave, oracle, ovas, processes, tar_parts
from tests.support.ovas import Disk

MiB = 1 << 20
WAYS = pytest.mark.parametrize("ranges", [True, False], ids=["ranges", "stream"])
RAW = Disk(bytes(range(256)) * 16384, "disk.raw")
LAUGHS = """<?xml version="1.0"?>
<!DOCTYPE Envelope [<!ENTITY a "ha"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;"><!ENTITY c "&b;&b;&b;&b;&b;&b;">]>
<Envelope><References><File href="&c;" id="f"/></References></Envelope>
"""
EXTERNAL = """<?xml version="1.0"?>
<!DOCTYPE Envelope [<!ENTITY secret SYSTEM "file:///etc/passwd">]>
<Envelope><References><File href="disk.raw" id="f"/></References><Name>&secret;</Name></Envelope>
"""


def refused(server: misbehave.Server, folder: Path, data: bytes, *, ranges: bool) -> errors.Error:
    """Return the error of an import; of a source with ranges it comes before the disk is read."""
    path = f"/{len(server.requests)}.ova"
    location = cdi_worker.Location(server.serve(path, misbehave.Page(data, ranges=ranges)))
    target = folder / "disk.img"
    with pytest.raises(errors.ImageError) as caught:
        cdi_worker.run(
            cdi_worker.Request(source="http", location=location, target=str(target), existing="replace")
        )
    oracle.unusable(target)
    assert not ranges or server.sent(path) < 2 * MiB
    return caught.value


def described(text: bytes) -> bytes:
    """Return an OVA with a descriptor and RAW, without a manifest."""
    return ovas.packed(("vm.ovf", text), (RAW.name, RAW.data))


def changed(**disk: object) -> bytes:
    """Return an OVA with RAW, of which the descriptor has other attributes."""
    return described(ovas.descriptor([Disk(RAW.data, RAW.name, **disk)]))


DESCRIPTORS = {
    "laughs": (LAUGHS.encode(), "document type"),
    "external": (EXTERNAL.encode(), "document type"),
    "deep": (b"<Envelope>" + b"<a>" * 100_000, "levels of elements"),
    "large": (b"<Envelope>" + b" " * (5 << 20), "at most 4194304 are read"),
    "no XML": (b"\0" * 1000, "corrupt OVF descriptor"),
    "encoding": (b'<?xml version="1.0" encoding="nothing"?><Envelope/>', "corrupt OVF descriptor"),
    "other document": (b"<html/>", "the document is a 'html'"),
    "no disk": (ovas.descriptor([]), "lists no disk"),
    "dot dot": (ovas.descriptor([Disk(RAW.data, "../disk.raw")]), 'contains ".."'),
    "absolute": (ovas.descriptor([Disk(RAW.data, "/etc/passwd")]), "absolute path"),
    "elsewhere": (ovas.descriptor([Disk(RAW.data, "https://example.org/disk.raw")]), "at a URL"),
    "chunks": (ovas.descriptor([Disk(RAW.data, RAW.name, file={"chunkSize": "1024"})]), "split into chunks"),
    "delta": (
        ovas.descriptor([Disk(RAW.data, RAW.name, disk={"parentRef": "x"})]),
        "changes to another disk",
    ),
    "size": (
        ovas.descriptor([Disk(RAW.data, RAW.name, file={"size": "5"})]),
        "states 5 bytes for 'disk.raw'",
    ),
    "no gzip": (ovas.descriptor([Disk(RAW.data, RAW.name, file={"compression": "gzip"})]), "it is not"),
    "compression": (
        ovas.descriptor([Disk(RAW.data, RAW.name, file={"compression": "lz4"})]),
        "unknown compr",
    ),
    "reference": (ovas.descriptor([Disk(RAW.data, RAW.name, disk={"fileRef": "no"})]), "names no file"),
    "one file twice": (ovas.descriptor([RAW, RAW]), "the same file"),
    "one id twice": (ovas.descriptor([RAW, Disk(b"", "b", file={"id": "file1"})]), "two files with the id"),
    "missing": (ovas.descriptor([Disk(RAW.data, "nothing.raw")]), "has no file 'nothing.raw'"),
}


@WAYS
def test_bad_descriptor_is_refused(server: misbehave.Server, tmp_path: Path, *, ranges: bool) -> None:
    for name, (text, message) in DESCRIPTORS.items():
        said = str(refused(server, tmp_path, described(text), ranges=ranges))
        assert message in said, (name, said)


def archived(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return an OVA of the given members after the descriptor of RAW."""
    return tar_parts.packed(tar_parts.member("vm.ovf", ovas.descriptor([RAW])), *members)


DESCRIBED = ovas.manifest([("vm.ovf", ovas.descriptor([RAW]))])
MANIFEST = DESCRIBED + ovas.manifest([(RAW.name, RAW.data)])
WRONG = ovas.manifest([(RAW.name, b"other")])
ARCHIVES = {
    "member twice": (
        archived(tar_parts.member(RAW.name, RAW.data), tar_parts.member(f"./{RAW.name}", RAW.data)),
        "two members with the name",
    ),
    "second descriptor": (
        archived(tar_parts.member(RAW.name, RAW.data), tar_parts.member("b.ovf", b"<Envelope/>")),
        "a second descriptor",
    ),
    "dot dot": (
        archived(tar_parts.member("../x", b""), tar_parts.member(RAW.name, RAW.data)),
        'contains ".."',
    ),
    "link": (
        archived(tar_parts.member(RAW.name, type=tarfile.SYMTYPE, linkname="/dev/sda")),
        "is not a file",
    ),
    "hard link": (
        archived(tar_parts.member(RAW.name, type=tarfile.LNKTYPE, linkname="vm.ovf")),
        "is not a file",
    ),
    "cut": (ovas.ova(RAW, listed="none")[:-MiB], "truncated"),
    "two manifests": (
        archived(
            tar_parts.member("a.mf", MANIFEST),
            tar_parts.member(RAW.name, RAW.data),
            tar_parts.member("b.mf", MANIFEST),
        ),
        "a second manifest",
    ),
    "two checksums": (
        archived(tar_parts.member("vm.mf", MANIFEST + WRONG), tar_parts.member(RAW.name, RAW.data)),
        "two checksums of 'disk.raw'",
    ),
    "no checksum": (
        archived(
            tar_parts.member("vm.mf", DESCRIBED + ovas.manifest([("x", b"")])),
            tar_parts.member(RAW.name, RAW.data),
        ),
        "no checksum of 'disk.raw'",
    ),
    "no checksum of the descriptor": (
        archived(
            tar_parts.member("vm.mf", ovas.manifest([(RAW.name, RAW.data)])),
            tar_parts.member(RAW.name, RAW.data),
        ),
        "no checksum of 'vm.ovf'",
    ),
    "no manifest": (
        archived(tar_parts.member("vm.mf", b"<xml/>"), tar_parts.member(RAW.name, RAW.data)),
        "not a checksum: '<xml/>'",
    ),
    "large manifest": (
        archived(tar_parts.member("vm.mf", b"\n" * (2 << 20)), tar_parts.member(RAW.name, RAW.data)),
        "at most 1048576 are read",
    ),
    "another descriptor": (
        archived(
            tar_parts.member("vm.mf", ovas.manifest([("vm.ovf", b"other"), (RAW.name, RAW.data)])),
            tar_parts.member(RAW.name, RAW.data),
        ),
        "checksum mismatch",
    ),
    "descriptor last": (
        ovas.packed((RAW.name, RAW.data), ("vm.ovf", ovas.descriptor([RAW]))),
        "in an OVA the OVF descriptor is the first file",
    ),
}


@WAYS
def test_bad_archive_is_refused(server: misbehave.Server, tmp_path: Path, *, ranges: bool) -> None:
    for name, (data, message) in ARCHIVES.items():
        said = str(refused(server, tmp_path, data, ranges=ranges))
        assert message in said, (name, said)


@pytest.mark.parametrize(("dialect", "ranges"), [("gnu", False), ("pax", True)])
def test_sparse_member_is_refused(
    server: misbehave.Server, tmp_path: Path, dialect: str, *, ranges: bool
) -> None:
    (tmp_path / "vm.ovf").write_bytes(ovas.descriptor([Disk(bytes(MiB), "./disk.raw")]))
    with (tmp_path / "disk.raw").open("wb") as file:
        file.truncate(MiB)
    names = ("vm.ovf", "./disk.raw")
    processes.run(
        "tar", "--sparse", f"--format={dialect}", "-C", tmp_path, "-cf", tmp_path / "vm.ova", *names
    )
    data = (tmp_path / "vm.ova").read_bytes()
    assert "sparse member" in str(refused(server, tmp_path, data, ranges=ranges))
