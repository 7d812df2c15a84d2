"""Valid inputs for the parsers of ``documents``, by the makers of the tests."""

from __future__ import annotations

import contextlib
import hashlib
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from cdi_worker.formats import clone
from cdi_worker.formats.compressed import snappy
from tests.support import ovas, repository, signers, signing, tar_parts

_TEXT = b"cdi " * 40
_HASH = hashlib.sha256(_TEXT).hexdigest()
_DIGEST = f"sha256:{_HASH}"


def made() -> Iterator[tuple[str, bytes]]:
    """Yield valid inputs with the names of their parsers."""
    yield from _packages()
    yield from _images()
    with tempfile.TemporaryDirectory() as folder:
        yield from _signatures(Path(folder))
    yield from _servers()
    yield from _clones()
    for path in sorted((repository.ROOT / "tests/support/datavolumes").glob("*.yaml")):
        yield "datavolume", path.read_bytes()
    yield from _uploads()


def _packages() -> Iterator[tuple[str, bytes]]:
    disk = ovas.Disk(_TEXT)
    compressed = ovas.Disk(
        _TEXT, "d%31.vmdk.gz", units="MegaBytes", file={"compression": "gzip"}, disk={"parentRef": "vmdisk1"}
    )
    yield "ovf", ovas.descriptor([disk])
    yield "ovf", ovas.descriptor([disk, compressed])
    yield "mf", ovas.manifest([("vm.ovf", b"x"), ("vm-disk1.vmdk", _TEXT)])
    yield "mf", ovas.manifest([("vm.ovf", b"x")], "sha1", "\r\n")
    yield "ova", ovas.ova(disk)
    yield "ova", ovas.ova(disk, listed="last", algorithm="sha512")
    files = (tar_parts.member("disk.img", _TEXT), tar_parts.member("folder/" + "n" * 120, b"x"))
    yield "tar", tar_parts.packed(*files)[:4096]
    yield "tar", tar_parts.pax([tar_parts.record(b"path", b"disk.img")])
    yield "sparse", tar_parts.gnu_sparse([(0, 512), (1 << 20, 100)], 2 << 20, 612)
    yield "sparse", tar_parts.pax_sparse(b"2\n0\n512\n1048576\n100\n", 2 << 20, 612)
    listed = [(b"numblocks", b"1"), (b"size", b"4096"), (b"map", b"0,512")]
    records = [tar_parts.record(b"GNU.sparse." + key, value) for key, value in listed]
    yield "sparse", tar_parts.pax(records, then=tar_parts.block(size=512) + bytes(512))


def _images() -> Iterator[tuple[str, bytes]]:
    blob = {"mediaType": "application/vnd.oci.image.layer.v1.tar+gzip", "digest": _DIGEST, "size": 160}
    notes = {"org.opencontainers.image.title": "disk.img", "io.kubevirt.disk.size": "10Gi"}
    file = {
        "mediaType": "application/vnd.kubevirt.disk.raw",
        "digest": _DIGEST,
        "size": 160,
        "annotations": notes,
    }
    kind = "application/vnd.oci.image.manifest.v1+json"
    arm = {"architecture": "arm64", "os": "linux", "variant": "v8"}
    entry = {"mediaType": kind, "digest": _DIGEST, "size": 7, "platform": arm}
    for layers in ([blob], [file], [blob, file]):
        yield "image", _json({"schemaVersion": 2, "mediaType": kind, "config": blob, "layers": layers})
    yield "image", _json({"schemaVersion": 2, "manifests": [entry, {**entry, "platform": {"os": "linux"}}]})
    docker = "application/vnd.docker.distribution.manifest.list.v2+json"
    yield "image", _json({"schemaVersion": 2, "mediaType": docker, "manifests": [entry]})
    yield "image", _json({"schemaVersion": 1, "fsLayers": []})
    yield (
        "config",
        _json(
            {
                "architecture": "arm",
                "os": "linux",
                "variant": "v7",
                "rootfs": {"type": "layers", "diff_ids": [_DIGEST]},
            }
        ),
    )
    yield "reference", b"docker://quay.io:443/kubevirt/fedora:39@" + _DIGEST.encode() + b"#disk.img"
    yield "reference", b"oci-archive:/images/disk.tar:tag"


def _signatures(folder: Path) -> Iterator[tuple[str, bytes]]:
    sums = f"{_HASH}  disk.qcow2\n{_HASH[:32]} *folder/other\n".encode()
    yield "checksums", sums
    yield "checksums", f"# comment\nSHA256 (disk.qcow2) = {_HASH}\n\\MD5 (a\\nb) = {_HASH[:32]}\n".encode()
    yield "checksums", _HASH.encode()
    with contextlib.closing(signers.openpgp(folder / "g")) as made:
        clear = made.sign("good", sums, "--clear-sign")
        yield "checksums", clear
        yield "clear", clear
        yield "keyring", made.export("good")
        yield "keyring", made.export("good", armor=True)
    good = f"[GNUPG:] GOODSIG {_HASH[:16]} Signer\n[GNUPG:] VALIDSIG {_HASH[:40]} 2024-01-01 1 0 4 0 22 8 00"
    yield "verdict", f"[GNUPG:] NEWSIG\n{good} {_HASH[:40]}\n".encode()
    yield "verdict", f"[GNUPG:] NEWSIG\n[GNUPG:] ERRSIG {_HASH[:16]} 22 8 00 1 9\n".encode()
    signer = signing.Signer()
    yield "pem", signer.pem
    yield "simple", signer.simple(_DIGEST, "quay.io/vm/disk", {"a": "b"}).data
    bundle = signer.bundle(_DIGEST, annotations={"a": "b"}).data
    yield "bundle", bundle
    yield "statement", signing.decoded(json.loads(bundle)["dsseEnvelope"]["payload"])


def _servers() -> Iterator[tuple[str, bytes]]:
    def extent(offset: int, length: int, kind: int, description: str) -> dict[str, object]:
        return {"offset": offset, "length": length, "type": kind, "description": description}

    first = {
        "extents": [extent(0, 4096, 0, "data"), extent(4096, 8192, 3, "hole,zero")],
        "next_offset": 12288,
    }
    last = {"extents": [extent(12288, 512, 2, "zero")], "next_offset": None}
    yield "map", _json(first) + b"\0" + _json(last)
    changes = [
        extent(0, 4096, 0, "clean"),
        extent(4096, 4096, 1, "dirty"),
        extent(8192, 512, 3, "dirty,zero"),
    ]
    yield "map", _json({"extents": changes, "next_offset": None})
    yield "nbd", b"\x03\x0a" + b"\x24\0\1\0\0" + b"\x04\0\2\0\0" + b"\x27\xff\xff\xff\xff"
    yield "nbd", (b"\x81\x0a" + b"\x07\xff\xff\xff\xff") * 40
    head = b'HTTP/1.1 206 Partial Content\r\nContent-Range: bytes 0-3/4096\r\nETag: "a"\r\n'
    dated = (
        b"Last-Modified: Mon, 01 Jan 2024 00:00:00 GMT\r\nx-amz-version-id: 7\r\nContent-Encoding: gzip\r\n"
    )
    yield "head", head + dated + b"Content-Length: 4\r\n\r\ndisk"
    yield "head", b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + head + b"Connection: close\r\n\r\ndisk"
    yield "head", head + b"Transfer-Encoding: chunked\r\n\r\n4\r\ndisk\r\n0\r\nTrailer: x\r\n\r\n"


def _clones() -> Iterator[tuple[str, bytes]]:
    yield "device", _stream(clone.Encoder())
    yield "device", _stream(clone.Encoder(0))
    encoder = clone.Encoder(0)
    disk = encoder.disk(clone.FolderDisk(4096 + len(_TEXT), 0o644, 1_700_000_000))
    yield "folder", _stream(encoder, disk)
    encoder = clone.Encoder(0)
    disk = encoder.disk(clone.FolderDisk(4096 + len(_TEXT), 0o644, 1, preallocated=True))
    yield "folder", _stream(encoder, disk, tar_parts.packed(tar_parts.member("file", b"x"))[:2048])
    pieces = [memoryview(_TEXT), memoryview(bytes(snappy.BLOCK))]
    yield "snappy", b"".join(map(bytes, snappy.frames(pieces)))
    yield "snappy", snappy.IDENTIFIER + b"\xfe\x03\0\0abc" + b"".join(map(bytes, snappy.frames(pieces[:1])))


def _stream(encoder: clone.Encoder, disk: bytes = b"", files: bytes = b"") -> bytes:
    stream = clone.MAGIC + disk + encoder.zeros(4096) + b"".join(map(bytes, encoder.data(memoryview(_TEXT))))
    if files:
        stream += b"".join(map(bytes, encoder.data(memoryview(files))))
    return stream + encoder.end()


def _uploads() -> Iterator[tuple[str, bytes]]:
    first = (
        b"POST /v1beta1/upload HTTP/1.1\r\nHost: cdi\r\nx-cdi-checksum: sha256:" + _HASH.encode() + b"\r\n"
    )
    yield "upload", first + b"Content-Length: 4\r\nExpect: 100-continue\r\n\r\ndisk"
    yield "upload", first + b"Transfer-Encoding: chunked\r\n\r\n4;a=b\r\ndisk\r\n0\r\nTrailer: x\r\n\r\n"
    boundary = b"Content-Type: multipart/form-data; boundary=frontier\r\nContent-Length: "
    part = b'--frontier\r\nContent-Disposition: form-data; name="file"; filename="d"\r\n\r\ndisk'
    part += b"\r\n--frontier--\r\n"
    yield "upload", first + boundary + b"%d\r\n\r\n" % len(part) + part
    patch = b"PATCH /v1beta1/upload/resumable/a HTTP/1.1\r\nHost: cdi\r\nUpload-Offset: 4\r\n"
    yield "upload", patch + b"Upload-Metadata: a Yg==\r\nContent-Length: 4\r\n\r\ndisk"


def _json(document: object) -> bytes:
    return json.dumps(document).encode()
