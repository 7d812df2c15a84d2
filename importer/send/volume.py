"""The clone source role: send a volume's content to the upload server of another volume."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import secrets
from collections.abc import Generator, Iterator, Mapping, Set

from cdi_worker import errors
from cdi_worker.formats.compressed import snappy
from cdi_worker.images import volume
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.images.tools import gnu_tar
from cdi_worker.importer import contract, metrics, progress, report
from cdi_worker.importer.send import client as upload_client
from cdi_worker.importer.send import extents
from cdi_worker.importer.send import sender as upload_sender
from cdi_worker.importer.upload import headers
from cdi_worker.sources import fields

log = logging.getLogger(__name__)

#: Seconds to wait for a server that is still starting.
PATIENCE = 60.0
#: Seconds without progress after which a clone fails.
NO_PROGRESS = 180.0
MODES = {"block": headers.BLOCK, "filesystem": headers.FILESYSTEM}

VARIABLES = (
    contract.Variable(
        "UPLOAD_URL", "`https://…/v1beta1/upload` of the target; it selects this role", required=True
    ),
    contract.Variable("VOLUME_MODE", "`block` or `filesystem`"),
    contract.Variable("MOUNT_POINT", "device or directory to send", required=True),
    contract.Variable("CLIENT_KEY", "key of the client (PEM text)", required=True),
    contract.Variable("CLIENT_CERT", "certificate of the client (PEM text)", required=True),
    contract.Variable("SERVER_CA_CERT", "CA of the upload server (PEM text)", required=True),
)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a clone source.

    ``kind``: the content type. ``path``: the device or directory.
    """

    url: str
    kind: str
    path: str
    owner_uid: str = fields.field(
        env="OWNER_UID",
        roles=(fields.CLONER,),
        help="Label of the metrics; a resumed clone must have the same one.",
    )
    preallocation: bool = fields.field(
        default=False, env="PREALLOCATION", strict=True, roles=(fields.CLONER,), help="Send holes as data."
    )
    authority: str = dataclasses.field(default="", repr=False)
    certificate: str = dataclasses.field(default="", repr=False)
    key: str = dataclasses.field(default="", repr=False)


def read(env: Mapping[str, str]) -> Settings:
    """Return the settings. Raises ``RequestError`` that lists all faults of the environment."""
    reading = contract.Reading(env, VARIABLES)
    mode = reading.text("VOLUME_MODE")
    if mode.lower() not in MODES:
        reading.faults.append(f"VOLUME_MODE={mode!r} is neither block nor filesystem")
    settings = Settings(
        url=reading.text("UPLOAD_URL"),
        kind=MODES.get(mode.lower(), ""),
        path=reading.text("MOUNT_POINT"),
        **reading.fields(Settings, fields.CLONER),
        authority=reading.text("SERVER_CA_CERT"),
        certificate=reading.text("CLIENT_CERT"),
        key=reading.text("CLIENT_KEY"),
    )
    if reading.faults:
        raise errors.RequestError(*reading.faults)
    return settings


def run(env: Mapping[str, str], paths: contract.Paths, cancel: cancelling.Cancel) -> report.Report:
    """Send the volume and return the report."""
    settings = read(env)
    reason = "a clone has none, and one is demanded; only what is imported can be verified"
    paths.refuse_demand("clone source", reason)
    with metrics.expose("cloner", settings.owner_uid, paths.metrics_port) as reporter:
        send(settings, reporter, cancel)
    return report.cloned(preallocated=settings.preallocation)


def send(settings: Settings, reporter: progress.Progress, cancel: cancelling.Cancel) -> None:
    """Send the volume and return when the server has it on storage. Raises ``errors.Error``."""
    tls = upload_client.context(settings.authority, settings.certificate, settings.key)
    client = upload_client.Client(settings.url, tls, cancel)
    reporter.phase("connect", None)
    probe = f"{client.path}-async"
    answer = retry.patiently(lambda: client.ask("HEAD", probe), PATIENCE, cancel)
    log.info("clone url=%r kind=%r server=%r", client.url, settings.kind, dict(answer.headers))
    if answer.header(headers.OFFER) == headers.EXTENTS:
        send_extents(settings, client, reporter, cancel)
    else:
        with plain(settings, reporter) as pieces:
            body = upload_client.Body(snappy.frames(pieces), reporter.read)
            answer = client.ask("POST", client.path, {headers.CONTENT_TYPE: settings.kind}, body)
        upload_sender.check(client, answer)
    reporter.done()


def send_extents(
    settings: Settings, client: upload_client.Client, reporter: progress.Progress, cancel: cancelling.Cancel
) -> None:
    """Send the volume in our own clone format, in as many requests as needed."""
    chosen = {headers.CONTENT_TYPE: settings.kind, headers.CHOICE: headers.EXTENTS}
    path = f"{client.path}-resumable"
    with contextlib.ExitStack() as stack:
        device = None
        if settings.kind == headers.BLOCK:
            device = stack.enter_context(volume.Volume(settings.path))
            device.check_finished()
            # A server that is started again keeps what it has of this run. A later one may find other bytes.
            chosen[headers.CONTENT] = f"{secrets.token_hex(16)} {device.size}"
        sender = upload_sender.Sender(
            client, path, cancel, NO_PROGRESS, chosen, reporter, fingerprint=fingerprint(settings)
        )
        arrived = retry.patiently(lambda: sender.left_over(None), NO_PROGRESS, cancel, reporter.retry)
        if arrived is not None:
            # The container was killed before the target's answer.
            log.info("all has arrived from an earlier run bytes=%d", arrived)
            reporter.phase("sync", None)
            sender.send(Sent(reporter), arrived)
            return
        if not sender.begin(None):
            reason = "the server refused the clone format it offered"
            raise errors.UploadFailed(url=client.url, reason=reason)
        stream: extents.Stream
        if device is not None:
            total, stream = device.size, extents.Stream(device, reporter)
        else:
            disk = stack.enter_context(extents.open_disk(settings.path))
            total = occupied(settings.path, frozenset() if disk is None else frozenset({extents.DISK}))
            total += 0 if disk is None else disk.size
            stream = extents.Directory(settings.path, disk, reporter, sparse=not settings.preallocation)
        reporter.phase("transfer", total)
        sender.send(stream)


class Sent(upload_sender.Stream):
    """The end of a clone that the target has received completely."""

    def chunks(self, _offset: int) -> Generator[memoryview, None, None]:
        """Yield nothing."""
        yield from ()

    def restart(self, _kept: str) -> None:
        """Fail: this run has not begun to read the volume."""
        raise errors.SourceError(reason="the target has lost the clone; the next run starts over")


def fingerprint(settings: Settings) -> str:
    """Return an id of this clone: the same when the container is restarted in its pod.

    It changes with a file. Nothing shows that a device has changed, but each container has a new node of it.
    """
    found = [settings.owner_uid, os.uname().nodename, settings.kind, settings.path]
    for path in (pathlib.Path(settings.path), pathlib.Path(settings.path, extents.DISK)):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            of = path.stat()
            found += map(
                str, (of.st_rdev,) if of.st_rdev else (of.st_dev, of.st_ino, of.st_size, of.st_ctime_ns)
            )
    return hashlib.sha256("\n".join(found).encode("utf-8", "surrogateescape")).hexdigest()


@contextlib.contextmanager
def plain(settings: Settings, reporter: progress.Progress) -> Iterator[Iterator[memoryview]]:
    """Yield the content of CDI's clone format, before compression: the device's bytes, or a tar."""
    path = settings.path
    if settings.kind == headers.BLOCK:
        with volume.Volume(path) as device:
            device.check_finished()
            reporter.phase("transfer", device.size)
            yield _device(device, reporter)
        return
    reporter.phase("transfer", occupied(path))
    tar = gnu_tar.TarReader(path, gnu_tar.names(path), sparse=not settings.preallocation)
    with contextlib.closing(tar):
        yield _archive(tar, reporter)


def _device(device: volume.Volume, reporter: progress.Progress) -> Iterator[memoryview]:
    zeros = memoryview(bytes(snappy.PIECE))
    for piece in device.pieces():
        if isinstance(piece, volume.Data):
            yield piece.data
            reporter.advance(len(piece.data))
            continue
        for start in range(0, piece.length, len(zeros)):
            part = zeros[: piece.length - start]
            yield part
            reporter.skip(len(part))


def _archive(tar: gnu_tar.TarReader, reporter: progress.Progress) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(snappy.PIECE))
    while count := tar.readinto(buffer):
        yield buffer[:count]
        reporter.advance(count)


def occupied(directory: str, without: Set[str] = frozenset()) -> int:
    """Return roughly the bytes of data below ``directory``, holes excluded: the size of a sparse archive.

    ``without``: names that the archive does not contain.
    """
    total = 0
    for root, folders, files in os.walk(directory):
        folders[:] = [name for name in folders if name not in gnu_tar.NOT_CONTENT]
        for name in set(files) - without if root == directory else files:
            with contextlib.suppress(OSError):
                found = pathlib.Path(root, name).lstat()
                total += min(found.st_size, found.st_blocks * 512)
    return total
