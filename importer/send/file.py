"""The command ``upload``: send a file to an upload server, directly or through CDI's upload proxy."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import ssl
import stat
import time
from collections.abc import Generator, Iterator
from typing import Self

from cdi_worker import errors
from cdi_worker.formats import checksum
from cdi_worker.images import targets
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import progress
from cdi_worker.importer.send import client as upload_client
from cdi_worker.importer.send import sender as upload_sender
from cdi_worker.importer.upload import headers as upload_headers
from cdi_worker.sources import base, certificates, smallfile, wire
from cdi_worker.sources.web import proxies

log = logging.getLogger(__name__)

#: The path of uploads on CDI's upload server and its proxy.
USUAL_PATH = "/v1beta1/upload"
RESUMABLE = "-resumable"
#: As many as an import follows.
REDIRECTS = 10
PIECE = 1 << 20
#: The sample that identifies a file: bytes of a place, and the number of places, in equal distances.
SAMPLE = 64 << 10
PLACES = 64


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of an upload. ``access``: certificates, proxies, and how long to wait without progress."""

    path: str
    url: str = dataclasses.field(repr=False)
    token: str = dataclasses.field(default="", repr=False)
    access: base.Access = dataclasses.field(default_factory=base.Access)
    certificate: str | None = None
    key: str | None = None
    checksum: str | None = None


@dataclasses.dataclass(frozen=True)
class Sent:
    """The result of an upload. Sizes in bytes; ``resumed``: the server had them from an earlier run."""

    path: str
    url: str
    size: int
    resumed: int
    seconds: float


class ImageFile(upload_sender.Stream):
    """A file as a stream; see ``send.sender.Stream``."""

    length: int

    def __init__(self, path: str, reporter: progress.Progress) -> None:
        super().__init__(reporter)
        self.path = path
        try:
            with contextlib.ExitStack() as undo:
                # Without O_NONBLOCK, opening a pipe without a writer blocks and cannot be cancelled.
                self._fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
                undo.callback(os.close, self._fd)
                found = os.fstat(self._fd)
                if stat.S_ISFIFO(found.st_mode):
                    raise errors.Unreachable(
                        url=path, reason="is a pipe, which cannot be sent again; write it to a file first"
                    )
                targets.refuse_unfinished(path, self._fd)
                self.length = os.lseek(self._fd, 0, os.SEEK_END)
                undo.pop_all()
        except OSError as err:
            is_missing = isinstance(err, FileNotFoundError)
            remedy = errors.Remedy([("check the path", "command")]) if is_missing else None
            raise errors.Unreachable(url=path, reason=errors.words(err), remedy=remedy) from err
        self._version = _version(found)
        times = f"{found.st_mtime_ns} {found.st_ctime_ns}"
        self._file = f"{found.st_dev} {found.st_ino} {times} {self.length}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    @property
    def fingerprint(self) -> str:
        """Equal for equal bytes, as far as the file system and a sample can show.

        The clock of a file system ticks only every few milliseconds, so that its times alone are not enough.
        """
        digest = hashlib.sha256()
        try:
            for number in range(PLACES):
                place = max(0, self.length - SAMPLE) * number // (PLACES - 1)
                digest.update(os.pread(self._fd, SAMPLE, place))
        except OSError as err:
            raise errors.TransferFailed(url=self.path, offset=0, reason=errors.words(err)) from err
        return f"{self._file} {digest.hexdigest()}"

    def begin(self, kept: int = 0) -> None:
        """Begin the transfer of a file of which the server has ``kept`` bytes."""
        if kept:
            self._reporter.resume(kept, self.length)
            self._reporter.keep(kept)
        self._reporter.phase("transfer", self.length)
        self._reported = kept

    def restart(self, kept: str) -> None:
        """Do nothing: the file is sent from its first byte."""

    def chunks(self, offset: int) -> Generator[memoryview, None, None]:
        """Yield the file from ``offset`` on, each piece in the same buffer.

        The last one is withheld from a server that would make a disk of two versions of the file.
        """
        buffer = memoryview(bytearray(PIECE))
        while offset < self.length:
            try:
                count = os.preadv(self._fd, [buffer[: self.length - offset]], offset)
                now = _version(os.fstat(self._fd)) if offset + count == self.length else self._version
            except OSError as err:
                reason = errors.words(err)
                raise errors.TransferFailed(url=self.path, offset=offset, reason=reason) from err
            if not count:
                raise errors.SourceChanged(url=self.path, what="size", before=self.length, now=offset)
            if now != self._version:
                raise errors.SourceChanged(url=self.path, what="file", before=self._version, now=now)
            yield buffer[:count]
            offset += count
            self._report(offset, self._reporter.advance)


def _version(found: os.stat_result) -> str:
    """Return what changes with the content of a file; the same for any device or pipe."""
    return f"changed {found.st_mtime_ns} size {found.st_size}" if stat.S_ISREG(found.st_mode) else ""


def send(settings: Settings, reporter: progress.Progress, cancel: cancelling.Cancel) -> Sent:
    """Upload, and return when the disk is on storage. Raises ``errors.Error``."""
    url, token = address(settings.url), settings.token
    for _ in range(REDIRECTS):
        try:
            return _send(dataclasses.replace(settings, url=url, token=token), reporter, cancel)
        except upload_client.Moved as moved:
            to = moved.to.removesuffix(RESUMABLE)
        try:
            upload_client.parse_url(to)
        except errors.RequestError as err:
            reason = "redirects to a malformed address"
            raise errors.UploadFailed(url=wire.safe_url(url), reason=reason) from err
        before, after = wire.origin(url), wire.origin(to)
        if before[0] == "https" != after[0]:
            reason = "redirects from https to http; name the address of the upload server"
            raise errors.UploadFailed(url=wire.safe_url(url), reason=reason)
        # Only the first server gets the token.
        url, token = to, token if before == after else ""
        log.info("redirect url=%r", wire.safe_url(url))
    raise errors.UploadFailed(url=wire.safe_url(url), reason=f"more than {REDIRECTS} redirects")


def _send(settings: Settings, reporter: progress.Progress, cancel: cancelling.Cancel) -> Sent:
    started = time.monotonic()
    headers = {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
    upload_client.parse_url(settings.url)
    proxy = proxies.find(settings.access, settings.url)
    client = upload_client.Client(
        settings.url, _tls(settings), cancel, headers, proxy, follows=True, stall=settings.access.patience
    )
    promised = None if settings.checksum is None else checksum.parse(settings.checksum)
    more = {upload_headers.CHECKSUM: settings.checksum} if settings.checksum else {}
    reporter.phase("connect", None)
    with ImageFile(settings.path, reporter) as file:
        sender = upload_sender.Sender(
            client,
            f"{client.path}{RESUMABLE}",
            cancel,
            settings.access.patience,
            more,
            reporter,
            # The checksum belongs to it: an upload with another checksum must not be resumed.
            fingerprint=f"{file.fingerprint} {(settings.checksum or '').lower()}".rstrip(),
        )
        offset = None
        # Then ``begin`` waits for the next server. Any other failure is reported at once.
        with contextlib.suppress(upload_client.Leaving):
            offset = sender.left_over(file.length)
        if offset is not None or sender.begin(file.length):
            file.begin(offset or 0)
            try:
                sender.send(file, offset or 0)
            except errors.Cancelled as err:
                raise errors.Interrupted(kept="the server keeps what it has received") from err
        else:
            file.begin()
            log.info("not resumable: the server accepts one request only url=%r", client.url)
            pieces = file.chunks(0) if promised is None else _verify(file, promised)
            body = upload_client.Body(pieces, reporter.read, file.length)
            upload_sender.check(client, client.ask("POST", client.path, more, body))
    reporter.done()
    return Sent(settings.path, client.url, file.length, offset or 0, time.monotonic() - started)


def _verify(file: ImageFile, promised: checksum.Checksum) -> Iterator[memoryview]:
    """Yield the file, its last piece only if the checksum matches: CDI's own servers do not verify it."""
    digest, left = checksum.Hash(promised), file.length
    for piece in file.chunks(0):
        digest.update(piece)
        left -= len(piece)
        if not left:
            digest.verify()
        yield piece


def address(url: str) -> str:
    """Return ``url`` with the path ``USUAL_PATH`` if it has none."""
    bare = url.rstrip("/")
    return bare if bare.count("/") > 2 else bare + USUAL_PATH


def _tls(settings: Settings) -> ssl.SSLContext:
    made = wire.tls_context(settings.access)
    if settings.certificate:
        certificate = smallfile.read(settings.certificate)
        key = smallfile.read(settings.key) if settings.key else b""
        name = ", ".join(filter(None, (settings.certificate, settings.key)))
        certificates.load_pair(made, certificate, key, name)
    return made
