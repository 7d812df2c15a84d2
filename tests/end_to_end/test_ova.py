"""OVAs: the wanted disk is imported, by ranges or as the archive passes, and verified by the manifest.

One OVA is one disk however it arrives: its names have one meaning, as other tools write them, too.
"""

from __future__ import annotations

import gzip
import hashlib
import os
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import together
from cdi_worker.importer.request import Room
from tests.support import devices, misbehave, objectservers, oracle, ovas, pairs, ways, worker
from tests.support import disks as disks_module
from tests.support.ovas import Disk

MiB = 1 << 20
#: Variants of images as programs put them into OVAs.
VARIANTS = ("vmdk-stream", "vmdk-tables-last", "vmdk", "qcow2", "raw", "vhd")
WANTED, OTHER = (bytes(range(256)) * 4096, bytes(range(255, -1, -1)) * 4096)
BOTH = pytest.mark.parametrize("way", ["ranges", "stream"])


@pytest.fixture
def importer(server: misbehave.Server, tmp_path: Path) -> ways.Importer:
    return ways.Importer(server, tmp_path, "vm.ova")


def holds(importer: ways.Importer, data: bytes) -> bool:
    """Return whether the target holds these bytes; remove it."""
    found = importer.target.read_bytes()
    importer.target.unlink()
    return found == data


@pytest.mark.parametrize(
    ("way", "kind", "listed"),
    [
        ("ranges", "file", "last"),
        ("stream", "block", "first"),
        ("local", "block", "none"),
        ("pipe", "file", "last"),
    ],
)
def test_only_disk_is_imported(
    importer: ways.Importer, disks: disks_module.Disks, way: str, kind: str, listed: str, tmp_path: Path
) -> None:
    data = ovas.ova(Disk(disks.image("vmdk-stream").read_bytes()), listed=listed)
    with devices.target(kind, tmp_path, 9 * MiB) as target:
        importer.run(data, way, target=str(target))
        oracle.same(target, disks.expected("vmdk-stream"), beyond=devices.beyond(target))


@pytest.mark.parametrize(("variant", "way"), pairs.dealt(VARIANTS, ways.WAYS))
def test_all_formats_are_imported(
    importer: ways.Importer, disks: disks_module.Disks, way: str, variant: str
) -> None:
    importer.run(ovas.ova(Disk(disks.image(variant).read_bytes(), "disk.bin")), way)
    oracle.same(importer.target, disks.expected(variant))


@pytest.mark.parametrize(
    ("way", "listed", "algorithm"),
    [("ranges", "first", "sha1"), ("stream", "last", "sha256"), ("stream", "first", "sha512")],
)
def test_compressed_disk_is_verified_as_packed(
    importer: ways.Importer, disks: disks_module.Disks, way: str, listed: str, algorithm: str
) -> None:
    packed = gzip.compress(disks.image("qcow2").read_bytes(), 1, mtime=0)
    disk = Disk(packed, "disk.qcow2.gz", file={"compression": "gzip"})
    importer.run(ovas.ova(disk, listed=listed, algorithm=algorithm), way)
    oracle.same(importer.target, disks.expected("qcow2"))


@pytest.mark.parametrize(("choice", "way"), [("data.vmdk", "ranges"), ("vmdisk2", "stream"), ("2", "stream")])
def test_disk_is_chosen(importer: ways.Importer, disks: disks_module.Disks, way: str, choice: str) -> None:
    first = Disk(disks.image("vmdk-stream", "dense").read_bytes())
    second = Disk(disks.image("vmdk-stream").read_bytes(), "data.vmdk")
    importer.run(ovas.ova(first, second), way, disk=choice)
    oracle.same(importer.target, disks.expected("vmdk-stream"))


def test_only_the_wanted_disk_moves(importer: ways.Importer, disks: disks_module.Disks) -> None:
    other = Disk(os.urandom(12 * MiB), "other.vmdk")
    wanted = Disk(disks.image("vmdk-stream").read_bytes())
    importer.run(ovas.ova(other, wanted, listed="last"), "ranges", disk="2")
    oracle.same(importer.target, disks.expected("vmdk-stream"))
    assert importer.server.sent("/vm.ova") < len(wanted.data) + 2 * MiB


@BOTH
def test_ambiguous_choice_lists_the_disks(importer: ways.Importer, way: str) -> None:
    for choice in ("", "3", "nothing.vmdk"):
        error = importer.refused(ovas.ova(Disk(WANTED), Disk(WANTED, "data.vmdk")), way, disk=choice)
        assert "1 vm-disk1.vmdk (vmdisk1, 8388608 bytes), 2 data.vmdk (vmdisk2, 8388608 bytes)" in str(error)
        assert "; choose one (--disk)" in error.at_terminal()


def test_inspect_lists_the_disks(importer: ways.Importer) -> None:
    data = ovas.ova(Disk(WANTED), Disk(WANTED, "data.vmdk"))
    found = cdi_worker.inspect(importer.request(data, "ranges", target=""))
    assert "2 disks" in str(found.obstacle)
    assert [disk["file"] for disk in found.details["disks"]] == ["vm-disk1.vmdk", "data.vmdk"]


@pytest.mark.parametrize(
    ("way", "listed", "kind"),
    [
        ("ranges", "first", "block"),
        ("stream", "last", "block"),
        ("local", "last", "file"),
        ("pipe", "first", "file"),
    ],
)
def test_wrong_disk_is_never_usable(
    importer: ways.Importer, disks: disks_module.Disks, way: str, listed: str, kind: str, tmp_path: Path
) -> None:
    right = disks.image("raw").read_bytes()
    data = ovas.ova(Disk(right), listed=listed)
    at = data.index(right) + 5 * MiB + 17
    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
    with devices.target(kind, tmp_path, 9 * MiB) as target:
        error = importer.refused(data, way, target=str(target))
    assert isinstance(error, errors.ChecksumMismatch)


@pytest.mark.parametrize("way", ["ranges", "pipe"])
def test_checksum_of_the_request_is_of_the_whole_ova(
    importer: ways.Importer, disks: disks_module.Disks, way: str
) -> None:
    data = ovas.ova(Disk(disks.image("vmdk-stream").read_bytes()), listed="none")
    importer.run(data, way, checksum=f"sha256:{hashlib.sha256(data).hexdigest()}")
    oracle.same(importer.target, disks.expected("vmdk-stream"))
    importer.target.unlink()
    error = importer.refused(data + bytes(512), way, checksum=f"sha256:{hashlib.sha256(data).hexdigest()}")
    assert isinstance(error, errors.ChecksumMismatch)


def test_interrupted_stream_is_read_on(importer: ways.Importer, disks: disks_module.Disks) -> None:
    data = ovas.ova(Disk(disks.image("raw").read_bytes()), listed="last")
    wanted = importer.request(data, "stream")
    cut = misbehave.Page(data, ranges=False, cut_at=3 * MiB)
    importer.server.serve("/vm.ova", (cut, 1), misbehave.Page(data, ranges=False))
    cdi_worker.run(wanted)
    oracle.same(importer.target, disks.raw())


def test_wrong_ranges_are_given_up(importer: ways.Importer, disks: disks_module.Disks) -> None:
    data = ovas.ova(Disk(disks.image("raw").read_bytes()), listed="last")
    wanted = importer.request(data, "ranges")
    importer.server.serve("/vm.ova", misbehave.Page(data, lie=lambda first, _: first + (first > 0)))
    cdi_worker.run(wanted)
    oracle.same(importer.target, disks.raw())


def test_pass_that_ends_early_fails_with_its_cause(importer: ways.Importer) -> None:
    """Such as a disk that is too large, found when the server has sent only a part of the OVA."""
    data = ovas.ova(Disk(os.urandom(16 * MiB), "disk.raw"))
    checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
    found = cdi_worker.inspect(importer.request(data, "stream", checksum=checksum))
    assert found.survey.virtual_size == 16 * MiB
    error = importer.refused(data, "stream", checksum=checksum, room=Room(size=MiB))
    assert isinstance(error, errors.TooLarge)


def test_objects_are_read_by_ranges(
    seaweed: objectservers.Store, disks: disks_module.Disks, tmp_path: Path
) -> None:
    seaweed.put("vm.ova", ovas.ova(Disk(disks.image("vmdk-stream").read_bytes()), listed="last"))
    access = cdi_worker.Access(user=objectservers.ACCESS_KEY, password=objectservers.SECRET_KEY)
    target = tmp_path / "disk.img"
    location = cdi_worker.Location(seaweed.url("vm.ova"), access)
    cdi_worker.run(cdi_worker.Request(source="s3", location=location, target=str(target)))
    oracle.same(target, disks.expected("vmdk-stream"))


def test_missing_manifest_is_a_warning(importer: ways.Importer, caplog: pytest.LogCaptureFixture) -> None:
    importer.run(ovas.ova(Disk(WANTED), listed="none"), "stream")
    assert "no manifest" in caplog.text


def test_command_chooses_and_lists(
    importer: ways.Importer, disks: disks_module.Disks, tmp_path: Path
) -> None:
    first = Disk(disks.image("vmdk-stream", "dense").read_bytes())
    path = tmp_path / "vm.ova"
    path.write_bytes(ovas.ova(first, Disk(disks.image("vmdk-stream").read_bytes(), "data.vmdk")))
    shown = worker.call("inspect", path)
    assert (shown.status, "index=2, file=data.vmdk" in shown.output) == (4, True)
    assert "holds 2 disks" in shown.output
    assert worker.call("inspect", path, "--disk=data.vmdk").status == 0
    done = worker.call("import", path, importer.target, env={"CDI_WORKER_DISK": "2"})
    assert done.status == 0, done.errors
    oracle.same(importer.target, disks.expected("vmdk-stream"))


def test_disk_of_another_source_cannot_be_chosen(importer: ways.Importer, disks: disks_module.Disks) -> None:
    assert "neither an OVA nor" in str(importer.refused(disks.raw().read_bytes(), "ranges", disk="1"))


# -- names ------------------------------------------------------------------------------------------------

#: The names in the archive that a descriptor's ``d%31.vmdk`` could mean.
ENCODED, PLAIN = "d%31.vmdk", "d1.vmdk"


@pytest.mark.parametrize(
    ("way", "names", "listed"),
    [
        ("ranges", (ENCODED, PLAIN), "none"),
        ("ranges", (PLAIN, ENCODED), "first"),
        ("stream", (PLAIN, ENCODED), "last"),
        ("stream", (ENCODED, PLAIN), "first"),
    ],
)
def test_name_that_two_files_could_have_is_refused(
    importer: ways.Importer, way: str, names: tuple[str, str], listed: str
) -> None:
    members = [("vm.ovf", ovas.descriptor([Disk(WANTED, ENCODED)])), (names[0], WANTED), (names[1], OTHER)]
    if listed != "none":
        members.insert(1 if listed == "first" else len(members), ("vm.mf", ovas.manifest(members)))
    error = importer.refused(ovas.packed(*members), way)
    assert isinstance(error, errors.Refused)
    assert "could both be the file of one disk" in str(error)


@BOTH
def test_name_is_the_member_s_or_percent_encoded(importer: ways.Importer, way: str) -> None:
    for name in (ENCODED, PLAIN):
        importer.run(ovas.packed(("vm.ovf", ovas.descriptor([Disk(WANTED, ENCODED)])), (name, WANTED)), way)
        assert holds(importer, WANTED), name


def test_file_that_two_disks_could_mean_is_refused(importer: ways.Importer) -> None:
    twice = "d%2531.vmdk"  # decoded once, it is the other's name
    found = ovas.descriptor([Disk(OTHER, twice), Disk(WANTED, ENCODED)])
    error = importer.refused(ovas.packed(("vm.ovf", found), (ENCODED, WANTED)), "ranges", disk=ENCODED)
    assert "two disks have the same file" in str(error)


ATTRIBUTES = (
    'ovf:href="a.raw" href="b.raw"',
    'href="b.raw" ovf:href="a.raw"',
    'ovf:href="a.raw" old:href="b.raw"',  # of two versions of OVF
)


def test_attribute_with_two_values_is_refused(importer: ways.Importer) -> None:
    for attributes in ATTRIBUTES:
        text = ovas.descriptor([Disk(WANTED, "a.raw")]).replace(b'ovf:href="a.raw"', attributes.encode())
        text = text.replace(
            b"<Envelope", b'<Envelope xmlns:old="http://www.vmware.com/schema/ovf/1/envelope"'
        )
        data = ovas.packed(("vm.ovf", text), ("a.raw", WANTED), ("b.raw", OTHER[:-1]))
        error = importer.refused(data, "stream")
        assert isinstance(error, errors.Refused)
        assert "'href' is both" in str(error), attributes


def test_same_attribute_twice_is_one_value(importer: ways.Importer) -> None:
    text = ovas.descriptor([Disk(WANTED, "a.raw")]).replace(b"ovf:href=", b'href="a.raw" ovf:href=')
    importer.run(ovas.packed(("vm.ovf", text), ("a.raw", WANTED)), "ranges")
    assert holds(importer, WANTED)


#: A second disk, a second file with the same id, or another name of the file, in the words of a vendor.
OF_A_VENDOR = {
    b"</References>": b'<vbox:File ovf:href="b.raw" ovf:id="file1"/></References>',
    b"</DiskSection>": b'<vbox:Disk ovf:diskId="x" ovf:fileRef="file1"/></DiskSection>',
    b"ovf:href": b'vbox:href="/etc/passwd" ovf:href',
}


def test_words_of_a_vendor_do_not_count(importer: ways.Importer) -> None:
    for before, after in OF_A_VENDOR.items():
        text = ovas.descriptor([Disk(WANTED, "a.raw")]).replace(before, after)
        text = text.replace(b"<Envelope", b'<Envelope xmlns:vbox="http://www.virtualbox.org/ovf/machine"')
        importer.run(ovas.packed(("vm.ovf", text), ("a.raw", WANTED)), "ranges")
        assert holds(importer, WANTED), after


@BOTH
def test_package_cut_before_its_manifest_is_refused(importer: ways.Importer, way: str) -> None:
    damaged = WANTED[:-1] + b"?"
    whole = ovas.ova(Disk(WANTED, "a.raw"), listed="last").replace(WANTED, damaged)
    error = importer.refused(whole[: whole.index(damaged) + len(damaged)], way)
    assert isinstance(error, errors.Truncated)
    assert "without an end mark" in str(error)


@BOTH
def test_manifest_shows_that_a_package_without_end_mark_is_whole(importer: ways.Importer, way: str) -> None:
    whole = ovas.ova(Disk(WANTED, "a.raw"), listed="first")
    importer.run(whole[: whole.index(WANTED) + len(WANTED)], way)
    assert holds(importer, WANTED)


@pytest.mark.parametrize(("way", "listed"), [("ranges", "last"), ("stream", "first")])
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
    assert holds(importer, WANTED)


# -- OVAs of other tools ----------------------------------------------------------------------------------

DISK = Disk(WANTED, "disk.raw")
OVF = ovas.descriptor([DISK])
#: The metadata of a file that the tar of macOS adds (AppleDouble).
METADATA = b"\0\5\x16\7" + bytes(159)


def lines(form: str, algorithm: str, wrong: bytes = b"") -> bytes:
    """Return the lines of a manifest in a form; ``wrong``: bytes after the disk."""
    members = (("vm.ovf", OVF), (DISK.name, DISK.data + wrong))
    return "".join(
        form.format(name, hashlib.new(algorithm, data, usedforsecurity=False).hexdigest())
        for name, data in members
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


@pytest.mark.parametrize(
    ("form", "way", "place"),
    [(form, way, place) for form, (way, place) in pairs.dealt(MANIFESTS, [("ranges", 2), ("stream", 1)])],
)
def test_manifest_of_a_tool_is_verified(importer: ways.Importer, way: str, form: str, place: int) -> None:
    """``place``: before or behind the disk."""
    for wrong in (b"x", b""):
        members = [("vm.ovf", OVF), (DISK.name, DISK.data)]
        members.insert(place, ("vm.mf", MANIFESTS[form](wrong)))
        if wrong:
            assert isinstance(importer.refused(ovas.packed(*members), way), errors.ChecksumMismatch)
        else:
            importer.run(ovas.packed(*members), way)
            assert holds(importer, DISK.data)


def test_two_checksums_of_one_algorithm_are_refused(importer: ways.Importer) -> None:
    manifest = lines("SHA2-256({})= {}\n", "sha256") + lines("SHA256(./{})= {}\n", "sha256", b"x")
    data = ovas.packed(("vm.ovf", OVF), ("vm.mf", manifest), (DISK.name, DISK.data))
    assert "two checksums of 'disk.raw'" in str(importer.refused(data, "stream"))


@pytest.mark.parametrize(
    ("way", "folder", "listed"),
    [("ranges", "vm/", True), ("stream", "./vm/1/", True), ("stream", "vm/", False)],
)
def test_names_are_relative_to_the_descriptor(
    importer: ways.Importer, way: str, folder: str, *, listed: bool
) -> None:
    members = [("vm.ovf", OVF), (DISK.name, DISK.data), *([("vm.mf", MANIFESTS["dot"](b""))] * listed)]
    packed = ovas.packed(*((folder + name, data) for name, data in members))
    importer.run(packed, way, disk=DISK.name)
    assert holds(importer, DISK.data)


@BOTH
def test_missing_file_of_a_whole_archive_is_not_truncation(importer: ways.Importer, way: str) -> None:
    error = importer.refused(ovas.packed(("vm/vm.ovf", OVF), (DISK.name, DISK.data)), way)
    assert isinstance(error, errors.Refused)
    assert "the archive has no file 'vm/disk.raw', which the descriptor names" in str(error)


def test_metadata_of_macos_is_ignored(importer: ways.Importer) -> None:
    members = [("vm.ovf", OVF), ("vm.mf", MANIFESTS["dot"](b"")), (DISK.name, DISK.data)]
    packed = ovas.packed(
        *(each for name, data in members for each in ((f"._{name}", METADATA), (name, data)))
    )
    importer.run(packed, "stream")
    assert holds(importer, DISK.data)


@BOTH
def test_two_disks_of_one_file_are_told_apart(importer: ways.Importer, way: str, tmp_path: Path) -> None:
    second = Disk(DISK.data, DISK.name, capacity=9, disk={"fileRef": "file1"})
    packed = ovas.packed(("vm.ovf", ovas.descriptor([DISK, second])), (DISK.name, DISK.data))
    for choice in ("vmdisk1", "2", DISK.name):
        importer.run(packed, way, disk=choice)
        assert holds(importer, DISK.data), choice
    error = importer.refused(packed, way)
    assert "2 disks: 1 disk.raw (vmdisk1, 8388608 bytes), 2 disk.raw (vmdisk2" in str(error)
    (tmp_path / "disks").mkdir()
    with pytest.raises(errors.RequestError, match="choose each"):
        together.run_all(importer.request(packed, way, target=tmp_path / "disks", existing="refuse"))
    assert not [*(tmp_path / "disks").iterdir()]
