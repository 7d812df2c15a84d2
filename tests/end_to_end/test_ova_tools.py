"""OVAs as other tools write them: their manifests, folders and additions."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.importer import together
from tests.support import misbehave, ovas, ways
from tests.support.ovas import Disk

WAYS = pytest.mark.parametrize("way", ways.WAYS)
DISK = Disk(bytes(range(256)) * 4096, "disk.raw")
OVF = ovas.descriptor([DISK])
#: The metadata of a file that the tar of macOS adds (AppleDouble).
METADATA = b"\0\5\x16\7" + bytes(159)


@pytest.fixture
def importer(server: misbehave.Server, tmp_path: Path) -> ways.Importer:
    return ways.Importer(server, tmp_path, "vm.ova")


def lines(form: str, algorithm: str, wrong: bytes = b"") -> bytes:
    """Return the lines of a manifest in a form; ``wrong``: bytes after the disk."""
    members = (("vm.ovf", OVF), (DISK.name, DISK.data + wrong))
    return "".join(
        form.format(name, hashlib.new(algorithm, data).hexdigest()) for name, data in members
    ).encode()


MANIFESTS = {
    "OpenSSL 3": lambda wrong: lines("SHA2-256({})= {}\n", "sha256", wrong),
    "OpenSSL 3, 512": lambda wrong: lines("SHA2-512({})= {}\n", "sha512", wrong),
    "dot": lambda wrong: lines("SHA1(./{})= {}\n", "sha1", wrong),
    "byte order mark": lambda wrong: b"\xef\xbb\xbf" + lines("SHA256({})= {}\r\n", "sha256", wrong),
    "two algorithms": lambda wrong: (
        lines("SHA1({})= {}\n", "sha1") + lines("SHA256({})= {}\n", "sha256", wrong)
    ),
}


@WAYS
@pytest.mark.parametrize("place", [1, 2], ids=["first", "last"])
@pytest.mark.parametrize("form", MANIFESTS)
def test_manifest_of_a_tool_is_verified(importer: ways.Importer, way: str, form: str, place: int) -> None:
    for wrong in (b"x", b""):
        members = [("vm.ovf", OVF), (DISK.name, DISK.data)]
        members.insert(place, ("vm.mf", MANIFESTS[form](wrong)))
        if wrong:
            assert isinstance(importer.refused(ovas.packed(*members), way), errors.ChecksumMismatch)
        else:
            importer.run(ovas.packed(*members), way)
            assert importer.target.read_bytes() == DISK.data


@WAYS
def test_two_checksums_of_one_algorithm_are_refused(importer: ways.Importer, way: str) -> None:
    manifest = lines("SHA2-256({})= {}\n", "sha256") + lines("SHA256(./{})= {}\n", "sha256", b"x")
    error = importer.refused(ovas.packed(("vm.ovf", OVF), ("vm.mf", manifest), (DISK.name, DISK.data)), way)
    assert "two checksums of 'disk.raw'" in str(error)


@WAYS
@pytest.mark.parametrize("listed", [True, False])
@pytest.mark.parametrize("folder", ["vm/", "./vm/1/"])
def test_names_are_relative_to_the_descriptor(
    importer: ways.Importer, way: str, folder: str, *, listed: bool
) -> None:
    members = [("vm.ovf", OVF), (DISK.name, DISK.data), *([("vm.mf", MANIFESTS["dot"](b""))] * listed)]
    packed = ovas.packed(*((folder + name, data) for name, data in members))
    importer.run(packed, way, disk=DISK.name)
    assert importer.target.read_bytes() == DISK.data


@WAYS
def test_missing_file_of_a_whole_archive_is_not_truncation(importer: ways.Importer, way: str) -> None:
    packed = ovas.packed(("vm/vm.ovf", OVF), (DISK.name, DISK.data))
    error = importer.refused(packed, way)
    assert isinstance(error, errors.Refused)
    assert "the archive has no file 'vm/disk.raw', which the descriptor names" in str(error)


@WAYS
def test_metadata_of_macos_is_ignored(importer: ways.Importer, way: str) -> None:
    members = [("vm.ovf", OVF), ("vm.mf", MANIFESTS["dot"](b"")), (DISK.name, DISK.data)]
    packed = ovas.packed(
        *(each for name, data in members for each in ((f"._{name}", METADATA), (name, data)))
    )
    importer.run(packed, way)
    assert importer.target.read_bytes() == DISK.data


@pytest.mark.parametrize("choice", ["", "vmdisk1", "2", DISK.name])
@WAYS
def test_two_disks_of_one_file_are_told_apart(importer: ways.Importer, way: str, choice: str) -> None:
    second = Disk(DISK.data, DISK.name, capacity=9, disk={"fileRef": "file1"})
    text = ovas.descriptor([DISK, second])
    packed = ovas.packed(("vm.ovf", text), (DISK.name, DISK.data))
    if choice:
        importer.run(packed, way, disk=choice)
        assert importer.target.read_bytes() == DISK.data
    else:
        error = importer.refused(packed, way)
        assert "2 disks: 1 disk.raw (vmdisk1, 8388608 bytes), 2 disk.raw (vmdisk2" in str(error)


@pytest.mark.parametrize("way", ["ranges", "stream"])
def test_two_disks_of_one_file_are_not_imported_together(
    importer: ways.Importer, tmp_path: Path, way: str
) -> None:
    text = ovas.descriptor([DISK, Disk(DISK.data, DISK.name, disk={"fileRef": "file1"})])
    packed = ovas.packed(("vm.ovf", text), (DISK.name, DISK.data))
    (tmp_path / "disks").mkdir()
    with pytest.raises(errors.RequestError, match="choose each"):
        together.run_all(importer.request(packed, way, target=tmp_path / "disks", existing="refuse"))
    assert not [*(tmp_path / "disks").iterdir()]
