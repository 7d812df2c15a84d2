"""Formats of uploads: what is written, and what needs scratch."""

from __future__ import annotations

import gzip
import hashlib
import zlib
from pathlib import Path

import pytest

from cdi_worker.importer import contract
from tests.support import devices, disks, oracle, pairs, processes, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
DATA = uploads.DATA
DONE = uploads.DONE
paths = uploads.with_scratch
server = uploads.server


@pytest.mark.parametrize(
    ("variant", "name"),
    pairs.dealt(("vmdk-stream", "vmdk-tables-last", "vdi", "vhdx", "vhdx-log"), ("upload-async", "upload")),
)
def test_format_is_converted(
    server: uploads.Server, disk: Path, disks: disks.Disks, variant: str, name: str
) -> None:
    assert server.ask("POST", f"/v1beta1/{name}", disks.image(variant).read_bytes()).status == 200
    assert server.result().status == 0
    oracle.same(disk, disks.expected(variant))


def test_truncated_image_in_scratch_is_refused_before_an_early_answer(
    server: uploads.Server, disk: Path, disks: disks.Disks
) -> None:
    body = disks.image("vhdx-log").read_bytes()
    answer = server.ask("POST", "/v1beta1/upload-async", body[: -2 * MIB])
    assert (answer.status, "the tables need" in answer.text) == (400, True), answer.text
    oracle.unusable(disk)


@pytest.mark.parametrize(
    ("variant", "compression"), [("raw", "gz"), ("qcow2", None), ("qcow2", "gz"), ("qcow2-zlib", None)]
)
def test_streamable_format_needs_no_scratch(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    disk: Path,
    disks: disks.Disks,
    variant: str,
    compression: str | None,
) -> None:
    Path(paths.scratch).rmdir()
    with uploads.Server(certificates, {}, paths) as server:
        body = disks.wrapped(variant, compression).read_bytes()
        assert server.ask("POST", SYNC, body).status == 200
    oracle.same(disk, disks.expected(variant))


@pytest.mark.parametrize("which", ["gzip", "meaningless"])
def test_content_encoding_is_undone_ignored_or_refused(
    server: uploads.Server, disk: Path, which: str
) -> None:
    deflated = server.ask("POST", SYNC, zlib.compress(DATA), {"Content-Encoding": "deflate"})
    assert (deflated.status, "content encoding 'deflate'" in deflated.text) == (400, True), deflated.text
    assert server.ask("POST", SYNC, DATA, {"Content-Encoding": "gzip"}).status == 400
    oracle.unusable(disk)
    good, body = {"gzip": ("gzip", gzip.compress(DATA)), "meaningless": ("UTF-8", DATA)}[which]
    assert server.ask("POST", SYNC, body, {"Content-Encoding": good}).status == 200
    assert disk.read_bytes() == DATA


def test_other_formats_need_scratch(
    certificates: uploads.Certificates, paths: contract.Paths, disks: disks.Disks
) -> None:
    Path(paths.scratch).rmdir()
    with uploads.Server(certificates, {}, paths) as server:
        answer = server.ask("POST", SYNC, disks.image("vhdx-log").read_bytes())
        assert (answer.status, "scratch space required" in answer.text) == (500, True)


def test_upload_is_written_to_a_device(
    certificates: uploads.Certificates, paths: contract.Paths, block: Path, disks: disks.Disks
) -> None:
    with uploads.Server(certificates, {"DESTINATION": str(block)}, paths) as server:
        assert server.ask("POST", "/v1beta1/upload-archive", disks.tar().read_bytes()).status == 400
        assert server.ask("POST", SYNC, disks.image("qcow2").read_bytes()).status == 200
        assert server.result().status == 0
    oracle.same(block, disks.expected("qcow2"), beyond=devices.DIRT)


def test_upload_is_preallocated_and_grown(
    certificates: uploads.Certificates, paths: contract.Paths, disk: Path
) -> None:
    env = {"PREALLOCATION": "true", "UPLOAD_IMAGE_SIZE": "16Mi", "FILESYSTEM_OVERHEAD": "0.06"}
    with uploads.Server(certificates, env, paths) as server:
        assert server.ask("POST", SYNC, DATA).status == 200
        assert server.result().message == '{"preallocationApplied":true,"message":"Upload Complete"}'
    assert disk.stat().st_size == 15 * MIB
    assert disk.stat().st_blocks * 512 >= 15 * MIB


def test_checksum_is_verified(server: uploads.Server, disk: Path) -> None:
    wrong = {"x-cdi-checksum": "sha256:" + "0" * 64}
    answer = server.ask("POST", SYNC, DATA, wrong)
    assert (answer.status, "checksum mismatch: expected sha256:000" in answer.text) == (400, True)
    oracle.unusable(disk)
    assert server.ask("POST", SYNC, DATA, {"x-cdi-checksum": "sha256:zz"}).status == 400
    right = {"x-cdi-checksum": f"sha256:{hashlib.sha256(DATA).hexdigest()}"}
    assert server.ask("POST", "/v1beta1/upload-async", DATA, right).status == 200


@pytest.mark.parametrize("compression", [None, "gz", "xz", "zst"])
def test_archive_is_unpacked(
    server: uploads.Server, paths: contract.Paths, disks: disks.Disks, compression: str | None
) -> None:
    body = disks.tar(compression).read_bytes()
    assert server.ask("POST", "/v1beta1/upload-archive", body).status == 200
    assert server.result().message == DONE
    processes.run("diff", "-r", "--no-dereference", disks.tree(), paths.data)


def test_disk_is_refused_as_archive(server: uploads.Server, paths: contract.Paths) -> None:
    assert server.ask("POST", "/v1beta1/upload-archive", DATA).status == 400
    assert not list(Path(paths.data).iterdir())
