"""``disk.img`` of an archive or a clone becomes a disk only if it is a regular file, and the only one."""

from __future__ import annotations

import copy
import tarfile
from pathlib import Path

import pytest

from cdi_worker.formats import clone as stream
from cdi_worker.formats.compressed import snappy
from cdi_worker.importer import contract
from tests.support import clones, misbehave, oracle, pairs, tar_parts, uploads, worker

MIB = 1 << 20
DISK, OTHER = bytes(range(256)) * 8192, bytes(range(255, -1, -1)) * 8192
CLONES = ("clone", "our clone")
WAYS = ("import", "pod", "upload", *CLONES)


def link(name: str, target: str, kind: bytes = tarfile.SYMTYPE) -> tuple[tarfile.TarInfo, bytes]:
    return tar_parts.member(name, type=kind, linkname=target)


def hard(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return link(name, target, tarfile.LNKTYPE)


file = tar_parts.member
#: Archives whose disk.img is no regular file, or two. SECRET stands for a file outside of the volume.
BAD = {
    "absolute link": [link("disk.img", "SECRET")],
    "link out of the volume": [link("disk.img", "../secret")],
    "link within the volume": [file("real", DISK), link("disk.img", "real")],
    "dangling link": [link("disk.img", "nothing")],
    "dotted link": [link("./disk.img", "SECRET")],
    "hard link to a link": [link("a", "SECRET"), hard("disk.img", "a")],
    "hard link to a hard link to a link": [link("a", "SECRET"), hard("b", "a"), hard("disk.img", "b")],
    "link instead of the disk": [file("disk.img", DISK), link("disk.img", "SECRET")],
    "hard link to a link instead of the disk": [
        link("a", "SECRET"),
        file("disk.img", DISK),
        hard("disk.img", "a"),
    ],
    "disk instead of a link": [link("disk.img", "SECRET"), file("disk.img", DISK)],
    "two disks": [file("disk.img", DISK), file("./disk.img", OTHER)],
    "folder": [file("disk.img", type=tarfile.DIRTYPE)],
    "folder by its name": [file("disk.img/", b"")],
    "folder by a name below": [file("disk.img/disk.img", DISK)],
    "link below": [file("disk.img/x", DISK), link("disk.img", "SECRET")],
    "pipe": [file("disk.img", type=tarfile.FIFOTYPE)],
    "device": [file("disk.img", type=tarfile.CHRTYPE, devmajor=1, devminor=3)],
    "link beside a file with a similar name": [link("disk.img", "SECRET"), file("z-disk.img.bak", OTHER)],
}
#: Archives with one disk.
GOOD = {
    "dotted": [file("./disk.img", DISK)],
    "beside links": [link("a", "SECRET"), file("disk.img", DISK), link("z", "disk.img")],
    "packed twice": [file("disk.img", DISK), hard("disk.img", "disk.img")],
    "with a second name": [file("disk.img", DISK), hard("z", "disk.img"), file("z", OTHER)],
    "other letters": [file("disk.img", DISK), file("more/DISK.IMG", OTHER)],
}
#: To a file system alone: what a device would get has passed when its name comes.
HARD_LINKS = {
    "hard link": [file("a", DISK), hard("disk.img", "a")],
    "hard link whose file is replaced": [file("a", DISK), hard("disk.img", "a"), file("a", OTHER)],
}


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(b"of the host" * 1000)
    return path


def packed(members: list[tuple[tarfile.TarInfo, bytes]], secret: Path) -> bytes:
    """Return the archive; links to SECRET lead to the file ``secret``."""
    infos = [copy.copy(info) for info, _ in members]
    for info in infos:
        info.linkname = info.linkname.replace("SECRET", str(secret))
    return tar_parts.packed(*zip(infos, (data for _, data in members), strict=True))


class Ways:
    """Imports an archive to a volume in a given way; returns whether that succeeded, and the message."""

    def __init__(
        self, certificates: uploads.Certificates, paths: contract.Paths, server: misbehave.Server
    ) -> None:
        self.data = Path(paths.data)
        self._paths = paths
        self._certificates = certificates
        self._server = server

    def run(self, way: str, data: bytes) -> tuple[bool, str]:
        if way == "import":
            path = self.data.parent / "archive.tar"
            path.write_bytes(data)
            done = worker.call("import", path, self.data, "--content-type=archive")
            return done.status == 0, done.errors
        if way == "pod":
            url = self._server.serve("/archive.tar", misbehave.Page(data))
            env = {
                "IMPORTER_SOURCE": "http",
                "IMPORTER_ENDPOINT": url,
                "IMPORTER_CONTENTTYPE": "archive",
                "FILESYSTEM_OVERHEAD": "0",
            }
            done = worker.Pod(self.data.parent).call(**env)
            return done.status == 0, done.errors
        return self.upload(way, data)

    def upload(self, way: str, data: bytes, **env: str) -> tuple[bool, str]:
        with uploads.Server(self._certificates, env, self._paths) as server:
            if way == "upload":
                answer = server.ask("POST", "/v1beta1/upload-archive", data)
            else:
                body, headers = cloned(data, ours=way == "our clone")
                answer = server.ask("POST", uploads.SYNC, body, headers)
            return answer.status == 200, answer.text


def cloned(data: bytes, *, ours: bool, disk: bytes = b"") -> tuple[bytes, dict[str, str]]:
    """Return an archive as a clone source sends it, and the headers. ``disk`` comes before it, if ours."""
    headers = {"x-cdi-content-type": "filesystem-clone"}
    if not ours:
        pieces = [memoryview(data)[at : at + 65_536] for at in range(0, len(data), 65_536)]
        return b"".join(snappy.frames(pieces)), headers
    encoder = stream.Encoder(0)
    body = stream.MAGIC + encoder.disk(stream.FolderDisk(len(disk), 0o660))
    for part in (disk, data):
        for at in range(0, len(part), MIB):
            body += b"".join(bytes(piece) for piece in encoder.data(memoryview(part)[at : at + MIB]))
    return body + encoder.end(), {**headers, **clones.OURS}


@pytest.fixture
def ways(certificates: uploads.Certificates, paths: contract.Paths, server: misbehave.Server) -> Ways:
    return Ways(certificates, paths, server)


@pytest.mark.parametrize(("name", "way"), pairs.dealt(BAD, WAYS))
def test_disk_that_is_not_a_file_is_refused(ways: Ways, secret: Path, name: str, way: str) -> None:
    succeeded, message = ways.run(way, packed(BAD[name], secret))
    assert not succeeded
    assert "'disk.img" in message
    assert [*ways.data.iterdir()] == []
    assert secret.read_bytes() == b"of the host" * 1000


@pytest.mark.parametrize(("name", "way"), pairs.dealt({**GOOD, **HARD_LINKS}, WAYS))
def test_disk_that_is_a_file_is_unpacked(ways: Ways, secret: Path, name: str, way: str) -> None:
    succeeded, message = ways.run(way, packed({**GOOD, **HARD_LINKS}[name], secret))
    assert succeeded, message
    path = ways.data / "disk.img"
    assert not path.is_symlink()
    assert path.read_bytes() == DISK


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("absolute link", "clone"),
        ("two disks", "our clone"),
        ("folder by a name below", "clone"),
        ("disk instead of a link", "our clone"),
        *pairs.dealt(HARD_LINKS, CLONES),
    ],
)
def test_device_does_not_get_a_disk_that_is_not_a_file(
    ways: Ways, secret: Path, device: Path, name: str, way: str
) -> None:
    data = packed({**BAD, **HARD_LINKS}[name], secret)
    succeeded, message = ways.upload(way, data, DESTINATION=str(device))
    assert not succeeded
    assert "'disk.img" in message
    oracle.unusable(device)


@pytest.mark.parametrize(("name", "way"), [("beside links", "clone"), ("packed twice", "our clone")])
def test_device_gets_the_disk_that_is_a_file(
    ways: Ways, secret: Path, device: Path, name: str, way: str
) -> None:
    succeeded, message = ways.upload(way, packed(GOOD[name], secret), DESTINATION=str(device))
    assert succeeded, message
    assert device.read_bytes()[: len(DISK)] == DISK


def test_device_does_not_get_a_file_whose_name_contains_that_of_the_disk(
    ways: Ways, secret: Path, device: Path
) -> None:
    members = [file("a-disk.img", OTHER), file("disk.img", DISK)]
    succeeded, message = ways.upload("clone", packed(members, secret), DESTINATION=str(device))
    assert not succeeded
    assert "'a-disk.img' and 'disk.img'" in message
    oracle.unusable(device)


def test_archive_beside_the_disk_of_a_clone_has_no_other(
    ways: Ways, paths: contract.Paths, certificates: uploads.Certificates, secret: Path
) -> None:
    for member in (link("disk.img", "SECRET"), file("./disk.img", OTHER), hard("disk.img", "a")):
        body, headers = cloned(packed([file("a", OTHER), member], secret), ours=True, disk=DISK)
        with uploads.Server(certificates, {}, paths) as server:
            answer = server.ask("POST", uploads.SYNC, body, headers)
        assert (answer.status, "'disk.img'" in answer.text) == (400, True), answer.text
        assert [*ways.data.iterdir()] == []


def test_link_in_a_volume_is_not_its_disk(tmp_path: Path, secret: Path) -> None:
    volume = tmp_path / "volume"
    volume.mkdir()
    (volume / "disk.img").symlink_to(secret)
    target = tmp_path / "target.img"
    done = worker.call("import", "--source=volume", volume, target)
    assert done.status != 0
    assert "disk.img: is not a regular file" in done.error_message
    oracle.unusable(target)


def test_update_in_a_pod_does_not_follow_a_link(
    tmp_path: Path, secret: Path, server: misbehave.Server
) -> None:
    pod = worker.Pod(tmp_path / "pod")
    pod.disk.symlink_to(secret)
    env = {"IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": server.serve("/disk", misbehave.Page(DISK))}
    done = pod.call(**env, CDI_WORKER_UPDATE="true", FILESYSTEM_OVERHEAD="0")
    assert done.status != 0
    assert "is not a regular file" in pod.message
    assert secret.read_bytes() == b"of the host" * 1000
