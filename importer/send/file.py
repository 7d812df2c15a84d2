"""The command ``upload``: a file to an upload server, perhaps through CDI's upload proxy."""

from __future__ import annotations

import dataclasses
import logging
import os
import pathlib
import ssl
from collections.abc import Generator, Iterator
from typing import Self

from cdi_worker import errors, progress
from cdi_worker.formats import checksum
from cdi_worker.images.engine import retry
from cdi_worker.send import client as upload_client
from cdi_worker.send import sender as upload_sender
from cdi_worker.upload import headers as upload_headers

log = logging.getLogger(__name__)

#: Where CDI's upload server and its proxy take uploads.
USUAL_PATH = "/v1beta1/upload"
PIECE = 1 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class Wanted:
    """What to upload where. ``stall``: seconds without progress until it is given up."""

    path: str
    url: str
    token: str = dataclasses.field(default="", repr=False)
    ca_file: str = ""
    certificate: str = ""
    key: str = ""
    insecure: bool = False
    checksum: str = ""
    stall: float = 180.0


class File(upload_sender.Stream):
    """A file as a stream; see ``send.sender.Stream``."""

    length: int

    def __init__(self, path: str, shown: progress.Progress) -> None:
        self.path = path
        self._shown = shown
        self._told = 0
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            self.length = os.lseek(self._fd, 0, os.SEEK_END)
            found = os.fstat(self._fd)
        except OSError as err:
            raise errors.Unreachable(url=path, reason=errors.words(err)) from err
        #: The same bytes, as far as the file system knows.
        self.fingerprint = f"{found.st_dev} {found.st_ino} {found.st_mtime_ns} {self.length}"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def chunks(self, offset: int) -> Generator[memoryview, None, None]:
        """Yield what follows ``offset``; the buffer is used again."""
        buffer = memoryview(bytearray(PIECE))
        while offset < self.length:
            try:
                count = os.preadv(self._fd, [buffer[: self.length - offset]], offset)
            except OSError as err:
                reason = errors.words(err)
                raise errors.TransferFailed(url=self.path, offset=offset, reason=reason) from err
            if not count:
                raise errors.SourceChanged(url=self.path, what="size", before=self.length, now=offset)
            yield buffer[:count]
            offset += count
            if offset > self._told:
                self._shown.advance(offset - self._told)
                self._told = offset


def send(wanted: Wanted, shown: progress.Progress, cancel: retry.Cancel) -> None:
    """Upload, and return when the disk is on storage. Raises ``errors.Error``."""
    headers = {"Authorization": f"Bearer {wanted.token}"} if wanted.token else {}
    client = upload_client.Client(address(wanted.url), _tls(wanted), cancel, headers)
    promised = checksum.parse(wanted.checksum) if wanted.checksum else None
    more = {upload_headers.CHECKSUM: wanted.checksum} if wanted.checksum else {}
    with File(wanted.path, shown) as file:
        shown.phase("transfer", file.length)
        sender = upload_sender.Sender(
            client,
            f"{client.path}-resumable",
            cancel,
            wanted.stall,
            # One that is to be verified, or of something else, is another upload.
            fingerprint=f"{file.fingerprint} {wanted.checksum.lower()}".rstrip(),
            headers=more,
            retried=shown.retry,
        )
        offset = sender.left_over(file.length)
        if offset is not None or sender.begin(file.length):
            sender.send(file, offset or 0)
        else:
            log.info("one request: the server offers no other way url=%r", client.url)
            pieces = file.chunks(0) if promised is None else _verified(file, promised)
            body = upload_client.Body(pieces, file.length)
            answer = client.ask("POST", client.path, more, body)
            if not answer.is_good:
                raise errors.UploadFailed(url=client.url, reason=answer.reason())
    shown.done()


def _verified(file: File, promised: checksum.Checksum) -> Iterator[memoryview]:
    """Yield the file, but its end only if it is what was promised: CDI's servers compare no checksums."""
    digest, left = checksum.Hash(promised), file.length
    for piece in file.chunks(0):
        digest.update(piece)
        left -= len(piece)
        if not left:
            digest.verify()
        yield piece


def address(url: str) -> str:
    """Return ``url`` with the usual path where it has none."""
    bare = url.rstrip("/")
    return bare if bare.count("/") > 2 else bare + USUAL_PATH


def _tls(wanted: Wanted) -> ssl.SSLContext:
    def text(path: str) -> str:
        try:
            return pathlib.Path(path).read_text(encoding="ascii") if path else ""
        except (OSError, UnicodeDecodeError) as err:
            raise errors.RequestError(f"{path}: unreadable certificate or key") from err

    made = upload_client.context(text(wanted.ca_file), text(wanted.certificate), text(wanted.key))
    if wanted.insecure:
        made.check_hostname = False
        made.verify_mode = ssl.CERT_NONE
    return made
