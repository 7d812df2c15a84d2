"""OCI archives: the same images in one file."""

from __future__ import annotations

import gzip
import os
import random
import resource
import tarfile
import threading
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources.registry import locations
from tests.support import containers, processes, pulled, reading, registries, tls, worker
from tests.support.containers import Entry, Image

DISK = random.Random(1).randbytes(2 << 20)
OTHER = b"other" * 1000
IMAGE = Image((containers.layer(*containers.disk(DISK)),))
SECOND = Image((containers.titled_layer(OTHER, "disk.img"),), containers.EMPTY_CONFIG)


def read(endpoint: str, **more: str) -> bytes:
    with pulled.at(locations.Registry(endpoint, **more)) as found:
        data = reading.read_all(found.ordered(cancelling.Cancel(), lambda _: None))
        found.verify()
        return data


def test_first_of_two_files_is_refused_with_both_names(tmp_path: Path) -> None:
    """A README before the disk is none, and the message is not about its format."""
    layers = containers.layer(Entry("disk/README.html", b"<html>" * 99), Entry("disk/disk.img", b"x" * 512))
    path = containers.archive(tmp_path / "a.tar", {"": containers.Image((layers,))})
    done = worker.call("import", f"oci-archive:{path}", tmp_path / "disk.img")
    assert done.error_message.endswith("two files in /disk, expected one: /disk/README.html, /disk/disk.img")


def test_single_image_is_read(tmp_path: Path) -> None:
    path = containers.archive(tmp_path / "a.tar", {"": IMAGE})
    assert read(f"oci-archive:{path}") == DISK
    location = locations.Registry(f"oci-archive:{path}")
    assert pulled.source(location).digest() == IMAGE.manifest.digest


def test_pipe_is_read_once(tmp_path: Path) -> None:
    path = containers.archive(tmp_path / "a.tar", {"": IMAGE})
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=[path.read_bytes()])
    writer.start()
    assert read(f"oci-archive:{tmp_path / 'pipe'}") == DISK
    writer.join()


def test_image_is_chosen_by_tag(tmp_path: Path) -> None:
    path = containers.archive(tmp_path / "a.tar", {"v1": IMAGE, "docker.io/library/x:v2": SECOND})
    assert read(f"oci-archive:{path}:v1") == DISK
    assert read(f"oci-archive:{path}:v2") == OTHER
    assert read(f"oci-archive:{path}:v2#disk.img") == OTHER
    for tag in ("", ":v3"):
        with pytest.raises(errors.Unreachable, match="choose one by its tag: v1, docker"):
            read(f"oci-archive:{path}{tag}")


@pytest.mark.parametrize("tool", ["skopeo", "buildah"])
def test_archives_of_common_tools_are_read(tool: str, tmp_path: Path) -> None:
    processes.need(tool)
    path = tmp_path / f"{tool}.tar"
    if tool == "skopeo":
        authority = tls.Authority(tmp_path / "ca")
        with registries.registry(tmp_path / "registry", authority=authority) as served:
            served.push("r", IMAGE)
            source = f"docker://{served.host}/r"
            processes.run("skopeo", "copy", "--src-tls-verify=false", source, f"oci-archive:{path}:v1")
    else:
        (tmp_path / "disk.img").write_bytes(DISK)
        (tmp_path / "Containerfile").write_text("FROM scratch\nADD --chown=107:107 disk.img /disk/\n")
        name = f"localhost/cdi-worker-test-{os.getpid()}"
        storage = ("--root", tmp_path / "root", "--runroot", tmp_path / "run", "--storage-driver", "vfs")
        processes.run("buildah", *storage, "bud", "--isolation", "chroot", "-t", name, tmp_path)
        processes.run("buildah", *storage, "push", name, f"oci-archive:{path}:v1")
    assert read(f"oci-archive:{path}:v1") == DISK
    assert read(f"oci-archive:{path}") == DISK


@pytest.mark.parametrize("part", ["config", "layer", "manifest"])
def test_wrong_digest_is_refused(part: str, tmp_path: Path) -> None:
    path = containers.archive(tmp_path / "a.tar", {"": IMAGE})
    blob = {"config": IMAGE.config_blob, "layer": IMAGE.layers[0], "manifest": IMAGE.manifest}[part]
    data = path.read_bytes()
    at = data.index(blob.data) + (len(blob.data) // 2 if part == "layer" else 0)
    path.write_bytes(data[:at] + bytes([data[at] ^ 32]) + data[at + 1 :])
    with pytest.raises((errors.DigestMismatch, errors.Corrupt)):
        read(f"oci-archive:{path}")


def test_truncated_archive_is_refused(tmp_path: Path) -> None:
    path = containers.archive(tmp_path / "a.tar", {"": IMAGE})
    for size in (1 << 20, 2000, 511, 1, 0):
        os.truncate(path, size)
        with pytest.raises(errors.Unreachable):
            read(f"oci-archive:{path}")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"text" * 1000, "not a tar archive"),
        (gzip.compress(containers.tar([Entry("index.json", b"{}")])), "compressed"),
        (containers.tar([Entry("manifest.json", b"[]")]), "no index.json"),
        (containers.tar([Entry("index.json", IMAGE.manifest.data)]), "is not an image index"),
        (containers.tar([Entry("index.json", containers.index().data)]), "0 images match"),
        (containers.tar([Entry("index.json", containers.index(IMAGE.manifest).data)]), "no blobs/sha256"),
    ],
)
def test_other_file_is_refused(data: bytes, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "a.tar"
    path.write_bytes(data)
    with pytest.raises(errors.Unreachable, match=reason):
        read(f"oci-archive:{path}")


def test_long_header_is_not_read(tmp_path: Path) -> None:
    """A sparse file costs nothing, and the size in its header was once allocated in memory."""
    info = tarfile.TarInfo("x")
    info.type, info.size = tarfile.XHDTYPE, 1 << 30
    path = tmp_path / "a.tar"
    path.write_bytes(info.tobuf(tarfile.USTAR_FORMAT))
    os.truncate(path, 2 << 30)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(errors.Unreachable):
        read(f"oci-archive:{path}")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100 << 10


def test_missing_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(errors.Unreachable, match="no such file"):
        read(f"oci-archive:{tmp_path}/none.tar")
    with pytest.raises(errors.Unreachable, match="is a directory"):
        read(f"oci-archive:{tmp_path}")


def test_titles_are_printed_without_control_characters(tmp_path: Path) -> None:
    """A title may be any string of JSON, even terminal control sequences."""
    title = "disk\x1b[2J\ud800\nroute  none"
    one = containers.titled_layer(OTHER, title)
    for number, layers in enumerate([(one,), (one, containers.titled_layer(DISK, "b"))]):
        archive = containers.archive(tmp_path / f"{number}.tar", {"": containers.Image(layers)})
        done = worker.call("inspect", f"oci-archive:{archive}")
        assert done.status == (4 if number else 0), done.errors
        assert "disk\ufffd[2J\ufffd route none" in done.output
        assert "\x1b" not in done.output + done.errors
