"""An export server of KubeVirt on 127.0.0.1, written from the description of its API: there is no cluster.

The paths, the queries, the JSON of a map and its pages are those of kubevirt's virt-exportserver
(``fileHandler``, ``gzipHandler``, ``backupMapHandler``, ``backupDataHandler``, ``tokenChecker``). TLS and its
certificates are real, and so is the disk behind a backup: QEMU serves it with its bitmaps over NBD, and each
request connects to it with libnbd, as KubeVirt's does.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import http.server
import json
import re
import ssl
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from tests.support import processes, threaded, tls

KiB, MiB = 1 << 10, 1 << 20
HEADER, TOKEN = "x-kubevirt-export-token", "token-of-the-export"
#: The path of an export on virt-exportproxy, which forwards to the server.
EXPORT = "/api/export.kubevirt.io/v1/namespaces/vms/virtualmachineexports/nightly"
#: Bytes that the server sends at once (``maxReadChunkSize``), and extents of a page (``defaultMapPageSize``).
CHUNK, PAGE_SIZE = 256 * KiB, 512
ALLOCATED = {0: "data", 1: "hole", 2: "zero", 3: "hole,zero"}
CHANGED = {0: "clean", 1: "dirty", 2: "zero", 3: "dirty,zero"}

#: Offset, length and type.
Run = tuple[int, int, int]


class Disk(Protocol):
    """The disk behind a backup. ``names``: of the types of its extents."""

    size: int
    names: dict[int, str]

    def runs(self, offset: int) -> Iterator[Run]:
        """Yield the extents from ``offset`` to the end."""

    def read(self, offset: int, length: int) -> bytes:
        """Return bytes of the disk."""


@dataclasses.dataclass
class Plain:
    """A disk in memory with the extents that a test wants."""

    data: bytes
    extents: list[Run]
    names: dict[int, str] = dataclasses.field(default_factory=lambda: ALLOCATED)

    @property
    def size(self) -> int:
        return len(self.data)

    def runs(self, offset: int) -> Iterator[Run]:
        for start, length, kind in self.extents:
            if start + length > offset:
                first = max(start, offset)
                yield first, start + length - first, kind

    def read(self, offset: int, length: int) -> bytes:
        return self.data[offset : offset + length]


@dataclasses.dataclass
class Nbd:
    """A disk that QEMU serves; with a ``bitmap``, the extents tell what has changed since it was made."""

    socket: Path
    bitmap: str = ""

    @property
    def size(self) -> int:
        with self._connected() as handle:
            return int(handle.get_size())

    @property
    def names(self) -> dict[int, str]:
        return CHANGED if self.bitmap else ALLOCATED

    def runs(self, offset: int) -> Iterator[Run]:
        contexts = ["base:allocation", *([f"qemu:dirty-bitmap:{self.bitmap}"] if self.bitmap else [])]
        with self._connected(*contexts) as handle:
            size = handle.get_size()
            while offset < size:
                found = _block_status(handle, offset, min(size - offset, 1 << 30))
                runs = found[contexts[0]]
                if self.bitmap:
                    # Of the allocation only "reads as zeros" counts.
                    runs = _merged([(length, flags & 2) for length, flags in runs], found[contexts[1]])
                for length, flags in runs:
                    yield offset, length, flags
                    offset += length

    def read(self, offset: int, length: int) -> bytes:
        with self._connected() as handle:
            return b"".join(
                bytes(handle.pread(min(CHUNK, offset + length - at), at))
                for at in range(offset, offset + length, CHUNK)
            )

    @contextlib.contextmanager
    def _connected(self, *contexts: str) -> Iterator[Any]:
        import nbd

        handle = nbd.NBD()
        for context in contexts:
            handle.add_meta_context(context)
        handle.set_export_name("disk")
        handle.connect_unix(str(self.socket))
        try:
            for context in contexts:
                assert handle.can_meta_context(context), context
            yield handle
        finally:
            handle.shutdown()


def _block_status(handle: Any, offset: int, length: int) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = {}

    def see(context: str, _offset: int, entries: list[int], _error: Any) -> int:
        found[context] = list(zip(entries[::2], entries[1::2], strict=True))
        return 0

    handle.block_status(length, offset, see)
    return found


def _merged(left: list[tuple[int, int]], right: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the runs that both lists describe, with the flags of both."""
    made, lefts, rights = [], list(reversed(left)), list(reversed(right))
    while lefts and rights:
        (one, flags), (other, more) = lefts.pop(), rights.pop()
        length = min(one, other)
        made.append((length, flags | more))
        if one > length:
            lefts.append((one - length, flags))
        if other > length:
            rights.append((other - length, more))
    return made


@contextlib.contextmanager
def exported(directory: Path, image: Path, bitmap: str = "") -> Iterator[Nbd]:
    """Serve a qcow2 image by qemu-nbd, as KubeVirt serves the disk of a stopped machine."""
    processes.need("qemu-nbd")
    socket = directory / f"nbd-{time.monotonic_ns()}.sock"
    argv: list[str | Path] = ["qemu-nbd", "--socket", socket, "--export-name", "disk", "--persistent"]
    argv += ["--shared", "8", "--read-only", "--format", "qcow2"]
    argv += [*(["--bitmap", bitmap] if bitmap else []), image]
    with processes.running(argv, log=directory / "nbd.log", ready=lambda: processes.is_listening(socket)):
        yield Nbd(socket, bitmap)


@dataclasses.dataclass
class Seen:
    """A request. ``sent``: bytes of its body."""

    path: str
    query: dict[str, str]
    headers: dict[str, str]
    connection: int
    status: int = 0
    sent: int = 0


#: Returns status and body instead of the server's answer; None: the server answers.
Trick = Callable[[Seen], tuple[int, bytes] | None]


class Server(threaded.Threaded):
    """Serve volumes and disks of backups, by name.

    ``trick``: answers in place of the server. ``shorten``: returns how many bytes of a range are sent before
    the connection breaks, or None. ``slow``: bytes a second and connection. ``lengths``: digits of the
    Content-Length of a backup's ranges; 0: chunks instead of one. ``redirect``: where all requests are sent.
    """

    def __init__(self, pair: tls.KeyPair) -> None:
        super().__init__(_HTTP(self), pair)
        self.token = TOKEN
        self.volumes: dict[str, Path] = {}
        self.backups: dict[str, Disk] = {}
        self.slow = 0
        self.trick: Trick = lambda _: None
        self.shorten: Callable[[Seen], int | None] = lambda _: None
        self.lengths = 0
        self.redirect = ""
        self.seen: list[Seen] = []
        self.stopping = threading.Event()

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        super().__exit__()

    def url(self, *path: str, scheme: str = "https") -> str:
        """Return the URL of a path below the export."""
        return f"{scheme}://localhost:{self.port}{EXPORT}/{'/'.join(path)}"

    def gets(self, end: str) -> list[Seen]:
        """Return the requests for paths with this end."""
        return [seen for seen in self.seen if seen.path.endswith(end)]

    def sent(self, end: str) -> int:
        """Return the bytes sent for paths with this end."""
        return sum(seen.sent for seen in self.gets(end))


class _HTTP(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, owner: Server) -> None:
        self.owner = owner
        super().__init__(("127.0.0.1", 0), _Handler)

    def handle_error(self, *_: Any) -> None:
        """Ignore clients that disconnect early: the tests are about them."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Chunks are written as they are: a buffer would join their frames, and copy them.
    wbufsize = 0
    server: _HTTP

    def log_message(self, *_: object) -> None:
        """Log nothing; ``Server.seen`` has the requests."""

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        headers = {name.lower(): value for name, value in self.headers.items()}
        seen = Seen(parts.path, query, headers, id(self.connection))
        owner = self.server.owner
        owner.seen.append(seen)
        if owner.token not in (headers.get(HEADER), query.get(HEADER)):
            self._small(seen, 401, b"")
        elif owner.redirect:
            self._head(seen, 307, Location=owner.redirect, **{"Content-Length": "0"})
            self.end_headers()
        elif tricked := owner.trick(seen):
            self._small(seen, *tricked)
        elif found := re.fullmatch(re.escape(EXPORT) + r"/(volumes|exports)/([^/]+)/(.*)", parts.path):
            self._serve(seen, *found.groups())
        else:
            self._small(seen, 404, b"404 page not found\n")

    def _serve(self, seen: Seen, kind: str, name: str, rest: str) -> None:
        owner = self.server.owner
        if kind == "volumes" and name in owner.volumes and rest in {"disk.img", "disk.img.gz", "disk.tar.gz"}:
            serve = self._raw if rest == "disk.img" else self._packed
            serve(seen, owner.volumes[name])
        elif kind == "exports" and name in owner.backups and rest in {"map", "data"}:
            serve_disk = self._map if rest == "map" else self._data
            serve_disk(seen, owner.backups[name])
        else:
            self._small(seen, 404, b"404 page not found\n")

    def _raw(self, seen: Seen, path: Path) -> None:
        """Serve a file as Go's ``http.ServeContent`` with neither time nor ETag."""
        size = path.stat().st_size
        start, end = 0, size
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", seen.headers.get("range", ""))
        if found:
            start, end = int(found[1]), min(int(found[2]) + 1 if found[2] else size, size)
            if start >= size:
                self._small(seen, 416, b"")
                return
        self._head(seen, 206 if found else 200, **{"Content-Length": str(end - start)})
        if found:
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        self.end_headers()
        with path.open("rb") as file:
            file.seek(start)
            for at in range(start, end, CHUNK):
                self._write(seen, file.read(min(CHUNK, end - at)))

    def _packed(self, seen: Seen, path: Path) -> None:
        self._head(seen, 200, **{"Transfer-Encoding": "chunked"})
        self.end_headers()
        data = path.read_bytes()
        # An archive is stored as it is sent.
        self._chunks(seen, data if path.name.endswith(".gz") else gzip.compress(data, 1))

    def _map(self, seen: Seen, disk: Disk) -> None:
        offset = int(seen.query.get("offset", "0"))
        if offset >= disk.size:
            self._small(seen, 500, b"Failed to collect map extents for export: disk\n")
            return
        extents: list[dict[str, object]] | None = None
        following = None
        for start, length, kind in _coalesced(disk.runs(offset)):
            if len(extents or ()) >= int(seen.query.get("page_size", PAGE_SIZE)):
                following = start
                break
            extents = extents or []
            extents.append({"offset": start, "length": length, "type": kind, "description": disk.names[kind]})
        page = {"extents": extents, "next_offset": following}
        self._small(seen, 200, json.dumps(page, separators=(",", ":")).encode() + b"\n", "application/json")

    def _data(self, seen: Seen, disk: Disk) -> None:
        offset, length = (int(seen.query.get(name, "0")) for name in ("offset", "length"))
        if offset >= disk.size:
            # http.ErrAbortHandler
            self.close_connection = True
            return
        if not length or offset + length > disk.size:
            length = disk.size - offset
        if self.server.owner.lengths:
            self._head(seen, 200, **{"Content-Length": str(length).zfill(self.server.owner.lengths)})
            self.end_headers()
            self._write(seen, disk.read(offset, length))
            # Clients that do not understand the length read to the end.
            self.close_connection = self.server.owner.lengths > 1
            return
        self._head(seen, 200, **{"Transfer-Encoding": "chunked"})
        self.end_headers()
        short = self.server.owner.shorten(seen)
        if short is not None:
            self._chunks(seen, disk.read(offset, short), whole=False)
            return
        self._chunks(seen, disk.read(offset, length))

    def _head(self, seen: Seen, status: int, **headers: str) -> None:
        seen.status = status
        self.send_response(status)
        self.send_header("Content-Type", "application/octet-stream")
        for name, value in headers.items():
            self.send_header(name, value)

    def _small(self, seen: Seen, status: int, body: bytes, kind: str = "text/plain") -> None:
        seen.status = status
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self._write(seen, body)

    def _chunks(self, seen: Seen, data: bytes, *, whole: bool = True) -> None:
        for at in range(0, len(data), CHUNK):
            piece = data[at : at + CHUNK]
            self._write(seen, b"%x\r\n%b\r\n" % (len(piece), piece))
        if whole:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.close_connection = True

    def _write(self, seen: Seen, data: bytes) -> None:
        seen.sent += len(data)
        with contextlib.suppress(ssl.SSLError):
            self.wfile.write(data)
        if self.server.owner.slow:
            self.server.owner.stopping.wait(len(data) / self.server.owner.slow)


def _coalesced(runs: Iterator[Run]) -> Iterator[Run]:
    """Yield runs with adjacent ones of the same type joined (``extentBatcher``)."""
    last: Run | None = None
    for run in runs:
        if last is not None and last[2] == run[2] and last[0] + last[1] == run[0]:
            last = last[0], last[1] + run[1], run[2]
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last
