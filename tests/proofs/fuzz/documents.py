"""Parsers of what others send: documents, heads, archives and streams. They may raise only ``errors.Error``.

    make fuzz TARGET=documents SECONDS=600

The first byte of an input selects the parser.
"""

from __future__ import annotations

import contextlib
import email.message
import functools
import http.client
import io
import itertools
import os
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import requests

from cdi_worker import errors
from cdi_worker.formats import checksum_file, clone, readers
from cdi_worker.formats.compressed import snappy
from cdi_worker.formats.ova import descriptor, package
from cdi_worker.formats.signature import bundle, keys, openpgp, simple
from cdi_worker.formats.tar import archive
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.kubernetes import datavolume
from cdi_worker.importer.kubernetes import documents as manifests
from cdi_worker.importer.upload import connection, form
from cdi_worker.importer.upload import http as upload
from cdi_worker.sources import reference, responses
from cdi_worker.sources.kubevirt import maps
from cdi_worker.sources.nbd import client, handshake, locations
from cdi_worker.sources.registry import documents
from cdi_worker.sources.web import http as web
from tests.proofs.fuzz import sums

#: Bytes of a disk or a body: what an input of some KiB may become.
LIMIT = 1 << 24
_MIB = 1 << 20
_NBD_SIZE = (1 << 40) + 513


# -- packages and archives


def _descriptor(data: bytes) -> None:
    for disk in descriptor.parse(data):
        assert disk.file
        disk.describe()
        if not disk.obstacle:
            assert not disk.file.startswith("/")
            assert ".." not in disk.file.split("/")


def _ova_manifest(data: bytes) -> None:
    for name, stated in package.parse_manifest(data).items():
        assert name == name.strip()
        str(stated)


def _ova(data: bytes) -> None:
    opened = package.Package(readers.BytesReader(sums.tar(data)))
    scrap = memoryview(bytearray(4096))
    while opened.next():
        while opened.readinto(scrap):
            pass
    for disk in opened.disks:
        if member := opened.member_of(disk):
            opened.checksum_of(member)
    opened.drain()


def _tar(data: bytes, *, thin: bool = False) -> None:
    opened = archive.Archive(readers.BytesReader(sums.tar(data)), limit_bytes=LIMIT, thin=thin)
    scrap = memoryview(bytearray(4096))
    for entry in opened:
        assert ".." not in entry.path
        assert not any("/" in part for part in entry.path)
        end = 0
        for offset, length in entry.extents():
            assert end <= offset <= offset + length <= entry.size
            end = offset + length
        while opened.readinto(scrap):
            pass


# -- registries


def _image(data: bytes) -> None:
    found = documents.parse(data, "image")
    if isinstance(found, documents.Index):
        documents.platforms(found.manifests)
        for wanted in ("", "arm64"):
            with contextlib.suppress(errors.Error):
                documents.choose(found, wanted, "image")
    else:
        for choice in ("", "disk.img"):
            with contextlib.suppress(errors.Error):
                documents.artifact(found, choice, "image")
        for layer in found.layers:
            with contextlib.suppress(errors.Error):
                assert (layer.disk_size or 0) >= 0


def _config(data: bytes) -> None:
    config = documents.load(data, "image")
    entry = documents.Descriptor("", "", 0, architecture="arm", system="linux", variant="v7")
    documents.contradiction(entry, config)
    documents.check_platform(config, "arm", "image")


def _reference(data: bytes) -> None:
    reference.parse(data.decode("utf-8", "surrogateescape"))


# -- signatures and checksums


def _checksums(data: bytes) -> None:
    for line in checksum_file.parse(data):
        assert line.checksum == line.checksum.lower()
    assert ":" in checksum_file.find(data, "disk.qcow2")


def _clear(data: bytes) -> None:
    openpgp.clear(data, "sums")


def _verdict(data: bytes) -> None:
    openpgp.signer(data.decode("utf-8", "replace"), "sums")


def _keyring(data: bytes) -> None:
    assert openpgp.keys_in([("keys", data)], "keys")


def _pem(data: bytes) -> None:
    for key in keys.read(data, "keys"):
        str(key)


def _accepted(_proof: bytes, _message: bytes, _name: str) -> str:
    return "signer"


def _simple(data: bytes) -> None:
    signed = simple.Signed(data, {simple.SIGNATURE: "AAAA"})
    simple.verified(signed, _accepted, "image").check(["sha256:" + 64 * "0"], "image")


def _bundle(data: bytes) -> None:
    bundle.verified(data, _accepted, "image").check(["sha256:" + 64 * "0"], "image")


def _statement(data: bytes) -> None:
    bundle.statement(data, "signer", "image").check(["sha256:" + 64 * "0"], "image")


# -- servers


def _map(data: bytes) -> None:
    """Read the pages of a map, which stand between zero bytes."""
    pages = iter(data.split(b"\0")[:64])
    found = maps.Map("disk")
    found.read(lambda _offset: next(pages, b""))
    end = 0
    for extent in found.extents():
        assert end <= extent.offset < extent.offset + extent.length <= found.size
        end = extent.offset + extent.length
    found.check_same(found)


class _Nbd:
    """A connection whose replies to a request for extents are 5 bytes for each: flags and length."""

    dead, load, failure, is_violated, size, is_shared = False, 0, "", False, _NBD_SIZE, False
    longest = _NBD_SIZE

    def __init__(self, data: bytes) -> None:
        self._data = io.BytesIO(data)
        self.unit = 512 if data[:1] > b"\x7f" else 1

    def read(self, _offset: int, _into: memoryview) -> int:
        return 0

    def status(self, _offset: int, _length: int) -> tuple[int, dict[str, list[tuple[int, int]]]]:
        head = self._data.read(2)
        count = head[0] % 8 if head else 0
        entries = [self._data.read(5) for _ in range(count)]
        listed = [(int.from_bytes(each[1:], "big") << each[0] % 8, each[0] >> 4) for each in entries if each]
        name = "other" if head[1:] == b"\xff" else handshake.ALLOCATION
        return (head[1] if head[1:] and head[1] < 4 else 0), {name: listed}

    def close(self) -> None: ...


class _Borrowed(client.Client):
    """A client with one connection, and no other."""

    def __init__(self, lent: Any) -> None:
        server = handshake.Server("nbd", locations.Address())
        super().__init__(server, cancelling.Cancel(), client.Limits(patience=0.0))
        self._connections = [lent]
        self._size = _NBD_SIZE
        self.contexts = frozenset({handshake.ALLOCATION})

    def _connect(self, _beside: object) -> None:
        raise errors.Transient(url="nbd", reason="there is no other connection")


def _nbd(data: bytes) -> None:
    end = 0
    for extent in _Borrowed(_Nbd(data)).extents():
        assert extent.offset == end
        assert extent.length > 0
        end += extent.length
    assert end == _NBD_SIZE


class _Socket:
    def __init__(self, data: bytes) -> None:
        self._file = io.BufferedReader(io.BytesIO(data))

    def makefile(self, _mode: str) -> io.BufferedReader:
        return self._file

    def gettimeout(self) -> None:
        return None


class _Bounded(responses.Bounded):
    most = 4096


def _head(data: bytes) -> None:
    # The exceptions that urllib3 translates.
    with contextlib.suppress(http.client.HTTPException, OSError):
        answer = _Bounded(_Socket(data), method="GET")
        answer.begin()
        _versions(answer.msg)
        assert len(answer.read()) <= answer.most


class _Resource:
    """What the http source asks for an answer."""

    name = "http://host/disk"

    def drop(self, _answer: object) -> None: ...

    def was_redirected(self, _answer: object) -> bool:
        return False

    def failure(self, answer: requests.Response) -> errors.Error:
        return errors.SourceError(reason=f"{answer.status_code}")


def _versions(headers: email.message.Message) -> None:
    answer = requests.Response()
    answer.status_code = 206
    answer.headers.update({name: value for name, value in headers.items() if value})
    version = web._version(answer, web._length(answer))
    assert version.difference(version) is None
    assert isinstance(version.digest, str)
    str(version.identity)
    resource: Any = _Resource()
    source = web.HttpSource(resource)
    for start in (0, 4096):
        with contextlib.suppress(errors.Error):
            assert source._check_range(answer, start) > 0


# -- clones


_BUFFER = memoryview(bytearray(clone.LONGEST))


def _buffers(size: int) -> Iterator[memoryview]:
    return itertools.repeat(_BUFFER[:size])


def _device(data: bytes) -> None:
    for extent in clone.Decoder(readers.BytesReader(sums.clone(data)), _buffers):
        assert extent if isinstance(extent, int) else 0 < len(extent) <= clone.LONGEST


def _folder(data: bytes) -> None:
    opened = clone.FolderDecoder(readers.BytesReader(sums.clone(data)), _buffers)
    total = sum(run if isinstance(run, int) else len(run) for run in opened.runs())
    assert total == opened.disk.size
    if (files := opened.archive()) is not None:
        for entry in archive.Archive(files, limit_bytes=LIMIT):
            assert entry.path
    opened.finish()


def _snappy(data: bytes) -> None:
    opened, total = snappy.SnappyReader(readers.BytesReader(data)), 0
    scrap = _BUFFER[:_MIB]
    while count := opened.readinto(scrap):
        total += count
        # A block of 64 KiB is 3 KiB or more after compression.
        assert total <= 64 * len(data) + snappy.BLOCK


# -- pods


def _datavolume(data: bytes) -> None:
    found = datavolume.find(manifests.read(_written(data)))
    for volume in datavolume.parse_all(found):
        for stage in volume.checkpoints:
            volume.stages_after(stage.previous)
        str(volume.source.provider)


class _Peer(connection.Connection):
    """The connection of a client that has sent everything. No TLS, no socket."""

    client_name = ""

    def __init__(self, data: bytes) -> None:
        self._rest = io.BytesIO(data)
        self._tls = types.SimpleNamespace(read=lambda _count, into: self._rest.readinto(into))
        self._ahead = b""
        self.interrupted = False

    def _record(self, _limit: float) -> bytes:
        return self._rest.read(connection.RECORD)

    def send(self, _data: bytes) -> None: ...

    def drain(self, _limit: float) -> None: ...


def _upload(data: bytes) -> None:
    # What the server's loop handles.
    with contextlib.suppress(upload.Refusal, OSError):
        exchange = upload.Exchange(_Peer(data), upload.Limits(1.0, 1.0))
        while request := exchange.receive():
            content: Any = request.content
            kind = request.headers.get("content-type", "")
            if kind.startswith("multipart/"):
                content = form.FormFile(kind, content)
            scrap = memoryview(bytearray(4096))
            while content.readinto(scrap):
                pass
            echoed = {"Upload-Metadata": request.headers.get("upload-metadata", "")}
            if not exchange.answer(upload.Answer(headers=echoed)):
                break
            exchange = upload.Exchange(_Peer(b""), upload.Limits(1.0, 1.0))


@functools.cache
def _file() -> int:
    return os.memfd_create("input")


def _written(data: bytes) -> str:
    """Return the path of a file with ``data``, the same for each call."""
    os.ftruncate(_file(), 0)
    os.pwrite(_file(), data, 0)
    return f"/proc/self/fd/{_file()}"


#: By the name of its files in tests/proofs/fuzz/corpus.
PARSERS: Mapping[str, Callable[[bytes], None]] = {
    "ovf": _descriptor,
    "mf": _ova_manifest,
    "ova": _ova,
    "tar": _tar,
    "sparse": functools.partial(_tar, thin=True),
    "image": _image,
    "config": _config,
    "reference": _reference,
    "checksums": _checksums,
    "clear": _clear,
    "verdict": _verdict,
    "keyring": _keyring,
    "pem": _pem,
    "simple": _simple,
    "bundle": _bundle,
    "statement": _statement,
    "map": _map,
    "nbd": _nbd,
    "head": _head,
    "device": _device,
    "folder": _folder,
    "snappy": _snappy,
    "datavolume": _datavolume,
    "upload": _upload,
}


def seeds() -> Iterator[tuple[str, bytes]]:
    """Yield valid inputs with the names of their parsers."""
    from tests.proofs.fuzz import seeds_of_documents

    yield from seeds_of_documents.made()
