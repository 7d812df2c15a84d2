"""What only QEMU reads: a disk that qemu-nbd serves. Beside that, MERGE: qemu-img commits a delta."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import detect, facts, safety
from cdi_worker.images import targets
from cdi_worker.images.disks import base as disks
from cdi_worker.images.disks import raw
from cdi_worker.images.engine import ahead, fetch
from cdi_worker.images.export import server
from cdi_worker.images.tools import process, qemu_img, qemu_nbd
from cdi_worker.importer import reading
from cdi_worker.importer.attempt import Attempt
from cdi_worker.sources import base, extents
from cdi_worker.sources.nbd import client, handshake, locations

#: Seconds after which QEMU itself hangs. Its replies wait for the source, whose limits end that earlier.
_HANGS: Final = 24 * 3600.0


@contextlib.contextmanager
def converted(attempt: Attempt, phase: str) -> Iterator[Callable[[Attempt], disks.Disk]]:
    """CONVERT: yield what makes the disk of the image, which qemu-nbd serves until the end of the block.

    QEMU reads the image at random through our NBD export, and so through the fetch engine: identity,
    credentials and retries are the same as on any other route; qemu's and nbdkit's own clients have none of
    these rules. Opening it is a part of the ``phase`` of the progress.
    """
    attempt.progress.phase(phase, attempt.facts.size)
    name, form, options = attempt.facts.name, attempt.survey.format, attempt.request.fetch
    fetcher = attempt.image.fetcher(attempt.scope, reading.counted(attempt, attempt.progress.advance))
    # QEMU gets the bytes that the survey has checked, from memory. The tables read here may be too long to
    # keep, and no file that QEMU opens depends on them.
    head = fetcher.read(0, min(detect.HEAD, fetcher.size))
    checked = safety.check(form, head, read=fetcher.read, size=fetcher.size)
    if checked.layout is not None:
        facts.check_table(form, checked.layout.map_length)
    safety.check_length(form, fetcher.read, fetcher.size)

    def explain(err: errors.Error, at: int) -> errors.Error:
        if not isinstance(err, client.Failed):
            return errors.ToolFailed(tool="qemu-nbd", exit_status="unknown", reason=err.fields["reason"])
        reason = f"{name}: QEMU cannot read byte {at} of the disk: {err.fields['reason']}"
        return errors.Unsupported(reason=reason)

    with contextlib.ExitStack() as stack:
        # QEMU reads parts of the tables again; each is confirmed by a second request. Closing the export sets
        # the scope, which ends all its reads.
        length, parallel = checked.length or fetcher.size, options.connections
        export = stack.enter_context(
            server.NbdServer(fetcher.fill_confirmed, length, attempt.scope, parallel=parallel)
        )
        node = qemu_img.exported(export.socket, form, geometry=checked.geometry)
        try:
            url = stack.enter_context(qemu_nbd.serve(node, patience=_HANGS, cancel=attempt.scope))
        except errors.ToolFailed as err:
            cause = str(err.fields["reason"]).rpartition("': ")[2]
            reason, remedy = f"could not open {name}: {cause}", None
            if "contains a log that needs to be replayed" in reason:
                # Of a VHDX. QEMU's own message ends with a command for what it has opened.
                reason = f"{name}: has a log that must be replayed"
                remedy = errors.Remedy([("replay it in the file and import that", "repair")])
            raise errors.Unsupported(reason=f"{form}: {reason}", remedy=remedy) from err
        disk = handshake.Server(name, locations.parse(url), (handshake.ALLOCATION,), "", True)
        limits = client.Limits(parallel, stall=_HANGS, patience=_HANGS, min_speed=0)
        local = dataclasses.replace(options, min_speed=0)
        served = stack.enter_context(contextlib.closing(client.Client(disk, attempt.reads, limits, explain)))
        size, available = served.open(), attempt.survey.available
        if size > available:
            raise errors.TooLarge(virtual_size=size, available=available)
        attempt.progress.disk(size)

        def make(attempt: Attempt) -> disks.Disk:
            def opened(advance: disks.Advance) -> fetch.Fetcher:
                return fetch.Fetcher(served, size, local, name=name, scope=attempt.scope, advance=advance)

            def in_order(advance: disks.Advance) -> contextlib.AbstractContextManager[Iterator[disks.Run]]:
                return contextlib.nullcontext(_runs(listed(), opened(advance)))

            def listed() -> Iterator[base.Extent]:
                return extents.coarse(served.extents())

            if attempt.survey.ordered:
                return raw.RunsDisk(in_order, attempt.scope, size=size)
            return ServedDisk(opened, size, listed)

        yield make


class ServedDisk(raw.ExtentsDisk):
    """A disk whose image QEMU reads: what arrives of that is progress."""

    def deliver(self, sink: disks.Sink, missing: disks.Missing, meter: disks.DeliveryMeter) -> int:
        return super().deliver(sink, missing, disks.DeliveryMeter(moved=meter.moved))


def _runs(listed: Iterator[base.Extent], fetcher: fetch.Fetcher) -> Iterator[disks.Run]:
    """Yield the runs of a disk in order."""
    buffers = ahead.buffers()
    for extent in listed:
        if extent.zero:
            yield extent.length
            continue
        at, end = extent.offset, extent.offset + extent.length
        while at < end:
            data = next(buffers)[: end - at]
            fetcher.fill(at, data)
            at += len(data)
            yield data


# -- MERGE


class _Watch(process.Watch):
    """Also ends qemu-img when another run has taken the target over."""

    def __init__(self, attempt: Attempt) -> None:
        super().__init__("qemu-img", attempt.request.fetch.no_progress)
        self._claim = attempt.claim

    def check(self) -> None:
        super().check()
        self._claim.guard()


def check_delta(attempt: Attempt, path: str) -> None:
    """Check a qcow2 delta that was downloaded to ``path``."""
    previous, planned = attempt.request.stage.previous, attempt.plan.virtual_size
    with open(path, "rb") as stream:
        fd = stream.fileno()
        size = os.fstat(fd).st_size

        def read(offset: int, length: int) -> bytes:
            return os.pread(fd, length, offset)

        delta = safety.check("qcow2", read(0, detect.HEAD), read=read, size=size, allow_backing=previous)
        safety.check_length("qcow2", read, size)
    if delta.backing is None or delta.virtual_size != planned:
        before, now = (previous, planned), (delta.backing, delta.virtual_size)
        raise errors.SourceChanged(url=attempt.facts.name, what="delta", before=before, now=now)


def merge(attempt: Attempt, path: str, out: targets.Target) -> None:
    """Write the changes of the qcow2 delta at ``path`` to the disk ``out``.

    After an interruption this runs again from its start and writes the same bytes to the same offsets.
    """
    size, previous = attempt.plan.virtual_size or 0, attempt.facts.previous_size
    if previous:
        # The delta does not list the space by which the disk grew; to qemu-img the base seems to hold it.
        out.zero(previous, max(0, size - previous))
        out.flush()
    qemu_img.commit(
        path,
        out.written_path,
        size,
        source=attempt.facts.name,
        direct=targets.facts(attempt.request.target).direct,
        advance=attempt.progress.advance,
        cancel=attempt.scope,
        watch=_Watch(attempt),
    )
