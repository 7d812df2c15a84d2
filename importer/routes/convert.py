"""The routes CONVERT, SPOOL and MERGE: qemu-img reads the image, and writes a path."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import detect, facts, safety, views
from cdi_worker.images import targets, volume
from cdi_worker.images.disks import base as disks
from cdi_worker.images.disks import raw
from cdi_worker.images.engine import ahead
from cdi_worker.images.export import server
from cdi_worker.images.tools import process, qemu_img, qemu_nbd
from cdi_worker.importer import destination, survey
from cdi_worker.importer.routes import delivery, disk, reading, stage
from cdi_worker.importer.routes.attempt import Attempt
from cdi_worker.scratch import space

#: Scratch may still hold the image of a killed run, and have no room for a second one.
_REMOVED: Final = targets.TargetOptions(existing="remove")


def convert(attempt: Attempt) -> None:
    """CONVERT: qemu-img reads the source at random through our NBD export.

    The export reads through the fetch engine, so that identity, credentials and retries are the same as on
    any other route; qemu's and nbdkit's own clients have none of these rules.
    """
    # Bytes of the file: qemu-img counts holes as work in formats whose map it does not use (VHDX).
    attempt.progress.phase("transfer", attempt.facts.size)
    fetcher = reading.ranges(attempt)(attempt.progress.advance)
    # qemu-img gets the bytes that the survey has checked, from memory. The tables read here may be too long
    # to keep, and no file that qemu-img opens depends on them.
    found = _checked(attempt, fetcher.read, fetcher.size)
    parallel = fetcher.options.connections
    # qemu-img reads parts of the tables again; each is confirmed by a second request. Closing the export sets
    # the scope, which ends all its reads.
    length = found.length or fetcher.size
    with server.NbdServer(fetcher.fill_confirmed, length, attempt.scope, parallel=parallel) as export:
        image = qemu_img.exported(export.socket, attempt.survey.format, geometry=found.geometry)
        _write(attempt, image, _fitting_size(attempt, image), _follow(attempt))


def spool(attempt: Attempt) -> None:
    """SPOOL: download the image into scratch, check it there, and convert it from there."""
    with _scratch(attempt) as kept:
        path = kept.path("image")
        size = _download(attempt, path)
        attempt.image.verify()
        with open(path, "rb") as stream:
            found = _checked(attempt, _reader(stream.fileno()), size)
        if found.length is not None:
            # QEMU searches a footer at the end of the file.
            os.truncate(path, found.length)
        image = qemu_img.local(path, attempt.survey.format, geometry=found.geometry)
        fitting = _fitting_size(attempt, image)
        attempt.accept()
        attempt.progress.phase("convert", fitting)
        _write(attempt, image, fitting, _follow(attempt, attempt.progress.advance))


def _checked(attempt: Attempt, read: views.Read, size: int) -> facts.ImageFacts:
    form = attempt.survey.format
    checked = safety.check(form, read(0, min(detect.HEAD, size)), read=read, size=size)
    if checked.layout is not None:
        facts.check_table(form, checked.layout.map_length)
    safety.check_length(form, read, size)
    return checked


@contextlib.contextmanager
def _scratch(attempt: Attempt) -> Iterator[space.Scratch]:
    """Yield scratch space; its files are kept for the next attempt after a failure that they outlive."""
    with space.Scratch(attempt.request.scratch or "", attempt.job, resume=True) as kept:
        try:
            yield kept
        except errors.Error as err:
            # The run that has taken the target over uses the same folder.
            if delivery.outlives(attempt, err) or isinstance(err, errors.TargetLost):
                kept.keep()
            raise


def _download(attempt: Attempt, path: str) -> int:
    """Download and decompress the source to ``path`` in scratch; return the number of bytes."""
    size = attempt.facts.size or 0
    available = survey.spare(attempt.request) or 0
    is_random = attempt.image.seeks and size and not attempt.survey.compressions

    def make(attempt: Attempt) -> disks.Disk:
        if is_random:
            return raw.whole(reading.ranges(attempt), size)
        if delivery.has_begun(attempt, path, size):
            return disk.continued(attempt, size)
        opened = functools.partial(reading.plain, attempt, limit=available)
        return raw.StreamDisk(opened, attempt.scope, footer=False)

    total = size if is_random else attempt.image.transferred
    place = delivery.Place(path, _REMOVED, available, phase="spool", total=total)
    try:
        with delivery.delivered(attempt, make, place) as (out, stored):
            out.commit()
    except errors.TooLarge as err:
        # The limit here is scratch space, not the target's.
        raise errors.ScratchTooSmall(size=f"more than {available}", available=available) from err
    if is_random:
        # Fetched in any order, perhaps in several attempts.
        with open(path, "rb", buffering=0) as stream:
            reading.verify(attempt, stream)
    return stored


class _Watch(process.Watch):
    """Also ends qemu-img when another run has taken the target over."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__("qemu-img", attempt.request.fetch.no_progress)
        self._claim = attempt.claim

    def check(self) -> None:
        super().check()
        self._claim.guard()


def _follow(attempt: Attempt, advance: Callable[[int], None] = lambda _: None) -> qemu_img.Follow:
    return qemu_img.Follow(advance, attempt.scope, _Watch(attempt), source=attempt.facts.name)


def _fitting_size(attempt: Attempt, image: qemu_img.Node) -> int:
    """Return the virtual size in bytes. Raises ``TooLarge``."""
    size, available = qemu_img.virtual_size(image, _follow(attempt)), attempt.survey.available
    if size > available:
        raise errors.TooLarge(virtual_size=size, available=available)
    return size


def _write(attempt: Attempt, image: qemu_img.Node, size: int, follow: qemu_img.Follow) -> None:
    """Write the disk of ``image`` to the target, and make it usable."""
    if attempt.request.form is not None or targets.is_export(attempt.request.target):
        _write_served(attempt, image, size)
        return
    if attempt.plan.compared or attempt.survey.ordered:
        _write_from_scratch(attempt, image, size, follow)
        return
    with targets.open(attempt.request.target, size, delivery.options(attempt)) as out:
        if out.withheld:
            out.write(0, memoryview(qemu_img.head(image, min(out.withheld, size), follow)))
        writing = qemu_img.Writing(
            start=out.withheld,
            fresh=out.is_fresh,
            # Bypassing the page cache took half of the time and a third of the CPU.
            direct=targets.facts(attempt.request.target).direct,
            sparse=not attempt.request.preallocation,
        )
        qemu_img.convert(image, out.written_path, size, writing, follow)
        delivery.commit(attempt, out, size)


def _write_from_scratch(attempt: Attempt, image: qemu_img.Node, size: int, follow: qemu_img.Follow) -> None:
    """Write the disk of ``image`` to scratch, and from there to the target: what differs, or in order."""
    with _scratch(attempt) as kept:
        path = kept.path("disk")
        with targets.open(path, size, _REMOVED) as out:
            writing = qemu_img.Writing(fresh=True, direct=targets.facts(path).direct)
            qemu_img.convert(image, out.written_path, size, writing, follow)
            out.commit()

        _deliver(attempt, size, lambda: volume.Volume(path), "output")


def _write_served(attempt: Attempt, image: qemu_img.Node, size: int) -> None:
    """Let qemu serve the disk of ``image``, and write it to a target that qemu-img does not write."""
    connect = destination.connect(attempt.request, attempt.scope)
    with (
        qemu_nbd.serve(image, cancel=attempt.scope) as url,
        contextlib.closing(connect(url, writable=False, name=f"{attempt.facts.name} (qemu-nbd)")) as served,
    ):
        _deliver(attempt, size, lambda: volume.RemoteVolume(served, attempt.facts.name, size), "")


def _deliver(attempt: Attempt, size: int, read: Callable[[], volume.Volume], phase: str) -> None:
    """Deliver a disk that ``read`` opens, and make it usable."""

    @contextlib.contextmanager
    def opened(advance: disks.Advance) -> Iterator[Iterator[disks.Run]]:
        with read() as stored:
            yield runs(stored, advance if phase else lambda _count: None)

    def make(attempt: Attempt) -> disks.Disk:
        return raw.RunsDisk(opened, attempt.scope, size=size)

    place = delivery.to_target(attempt, size)
    with delivery.delivered(attempt, make, place._replace(phase=phase)) as (out, _):
        delivery.commit(attempt, out, size)


def runs(stored: volume.Volume, advance: disks.Advance) -> Iterator[disks.Run]:
    """Yield the runs of a disk in scratch, for an ``Ahead``, whose items outlive the parts of a volume."""
    buffers = ahead.buffers(volume.CHUNK)
    for part in stored.pieces():
        advance(part.length)
        if isinstance(part, volume.Hole):
            yield part.length
            continue
        data = next(buffers)[: part.length]
        data[:] = part.data
        yield data


def _reader(fd: int) -> views.Read:
    """Return a function that reads from the open file ``fd``."""
    return lambda offset, length: os.pread(fd, length, offset)


def merge(attempt: Attempt) -> None:
    """MERGE: download a qcow2 delta into scratch, check it there, and commit it onto the target's disk.

    The disk is not usable until the commit has ended. After an interruption the commit is run again from its
    start and writes the same bytes to the same offsets.
    """
    stage.check(attempt)
    with _scratch(attempt) as kept:
        path = kept.path("delta")
        size = _download(attempt, path)
        # Ends the transfer, so that the source's disk is not locked during the commit.
        attempt.image.verify()
        _check_delta(attempt, path, size)
        attempt.accept()
        _commit(attempt, path)


def _check_delta(attempt: Attempt, path: str, size: int) -> None:
    previous, planned = attempt.request.stage.previous, attempt.plan.virtual_size
    with open(path, "rb") as stream:
        read = _reader(stream.fileno())
        found = safety.check("qcow2", read(0, detect.HEAD), read=read, size=size, allow_backing=previous)
        safety.check_length("qcow2", read, size)
    if found.backing is None or found.virtual_size != planned:
        before, now = (previous, planned), (found.backing, found.virtual_size)
        raise errors.SourceChanged(url=attempt.facts.name, what="delta", before=before, now=now)


def _commit(attempt: Attempt, path: str) -> None:
    size, previous = attempt.plan.virtual_size or 0, attempt.facts.previous_size
    attempt.progress.phase("merge", size)
    direct = targets.facts(attempt.request.target).direct
    options = delivery.options(attempt)._replace(mode="delta")
    with targets.open(attempt.request.target, None, options) as out:
        stage.begin(attempt, out)
        if previous:
            # The delta does not list the space by which the disk grew; to qemu-img the base seems to hold it.
            out.zero(previous, max(0, size - previous))
            out.flush()
        follow = _follow(attempt, attempt.progress.advance)
        qemu_img.commit(path, out.written_path, size, direct=direct, follow=follow)
        delivery.commit(attempt, out, out.size or size)
