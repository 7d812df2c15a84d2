"""Prometheus metrics of a running worker (contract, Metrics; docs/pods/metrics.md)."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import select
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import progress

if TYPE_CHECKING:
    from prometheus_client import core

    _Family = core.CounterMetricFamily | core.GaugeMetricFamily

log = logging.getLogger(__name__)

#: The contract's counters, by role.
COUNTERS = {
    "importer": "kubevirt_cdi_import_progress",
    "cloner": "kubevirt_cdi_clone_progress",
    "openstack-populator": "kubevirt_cdi_openstack_populator_progress",
    "ovirt-populator": "kubevirt_cdi_ovirt_progress",
}


class Metrics(progress.Meter):
    """Progress exported as metrics; thread-safe. ``counter``: name of the percentage, without ``_total``."""

    def __init__(self, counter: str, owner_uid: str) -> None:
        super().__init__()
        self.counter = counter
        self.owner_uid = owner_uid
        self._failures: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()
        self._written = 0

    def retry(self, failure: errors.Error) -> None:
        super().retry(failure)
        with self._counting:
            # The class of a library's exception is more specific: ReadTimeout, ConnectionResetError.
            self._failures[type(failure.__cause__ or failure).__name__] += 1

    @property
    def failures(self) -> Mapping[str, int]:
        """The number of retries by the class of the exception that caused them."""
        with self._counting:
            return dict(self._failures)

    @property
    def bytes_written(self) -> int | None:
        """Bytes that this process and its programs have written to storage; None: not counted.

        Counted by the kernel: qemu-img writes on its own, and holes are not written at all.
        """
        try:
            now = sum(_written(pid) for pid in ("self", *_children()))
        except OSError:
            return None
        # A program may end between two readings; its bytes are then counted with ours.
        self._written = max(self._written, now)
        return self._written

    def families(self) -> Iterator[core.Metric]:
        """Yield the current values (docs/pods/metrics.md)."""
        from prometheus_client import core

        numbers = self.numbers()
        counter, gauge = core.CounterMetricFamily, core.GaugeMetricFamily

        def family(kind: type[_Family], name: str, text: str, value: float, **more: str) -> core.Metric:
            made = kind(name, text, labels=("ownerUID", *more))
            made.add_metric((self.owner_uid, *more.values()), value)
            return made

        # CDI's controllers match the name, exactly this label, and the value with a regular expression.
        percent = round(numbers.percent, 2)
        yield family(counter, self.counter, "Percentage of the work that is done.", percent)
        yield family(counter, "cdi_worker_read_bytes", "Bytes on the wire.", numbers.read)
        if (written := self.bytes_written) is not None:
            yield family(counter, "cdi_worker_written_bytes", "Bytes written to storage.", written)
        yield family(counter, "cdi_worker_retries", "Retries after a failure.", numbers.retries)
        kinds = counter(
            "cdi_worker_errors",
            "Failures that were retried, by exception class.",
            labels=("ownerUID", "kind"),
        )
        for kind, count in sorted(self.failures.items()):
            kinds.add_metric((self.owner_uid, kind), count)
        yield kinds
        yield family(gauge, "cdi_worker_phase", "Current phase of the work.", 1, phase=numbers.phase)
        for name, text, value in _gauges(numbers):
            if value is not None:
                yield family(gauge, f"cdi_worker_{name}", text, value)


def _gauges(numbers: progress.Numbers) -> Iterator[tuple[str, str, float | None]]:
    """Yield name, text and value (None: unknown) of the gauges."""
    yield "phase_bytes", "Bytes of the phase that are done, without holes.", numbers.done
    yield "phase_total_bytes", "Bytes of the phase, without holes.", numbers.total
    yield "disk_bytes", "Size of the disk.", numbers.size
    yield "resumed_bytes", "Bytes that an earlier attempt has moved, without holes.", numbers.resumed
    yield "speed_bytes_per_second", "Speed in the last seconds.", round(numbers.speed)
    left = None if numbers.left is None else round(numbers.left)
    yield "remaining_seconds", "Estimated time to the end of the phase.", left


@contextlib.contextmanager
def exposed(role: str, owner_uid: str, port: int) -> Iterator[progress.Progress]:
    """Yield the progress of a pod: lines on standard error, and metrics on ``port``; 0: no metrics.

    If metrics cannot be served, a warning is logged and the work continues.
    """
    with progress.Lines(sys.stderr) as lines:
        if not port:
            yield lines
            return
        meter = Metrics(COUNTERS[role], owner_uid)
        over = cancelling.Cancel()
        serving = threading.Thread(target=_serve, args=(meter, port, over), name="metrics")
        serving.start()
        try:
            yield progress.Several(lines, meter)
        finally:
            over.set()
            # Joined because Python unwinds the stacks of remaining threads at exit: a thread inside a C
            # library such as cryptography would crash the process.
            serving.join()


def _serve(meter: Metrics, port: int, over: cancelling.Cancel) -> None:
    try:
        with _listener(port) as listener, cancelling.woken(over) as wake:
            # Loading libraries and making a certificate take longer than many an import.
            waiting = select.poll()
            for fd in (listener.fileno(), wake.fd):
                waiting.register(fd, select.POLLIN)
            if listener.fileno() not in dict(waiting.poll()):
                return
            with errors.optional("/metrics", package="prometheus-client", extra="metrics"):
                from cdi_worker.importer.metrics import server
            server.serve(meter.families, listener, wake.fd)
    except errors.MissingExtra as err:
        log.warning("metrics not served: %s", err)
    except OSError as err:
        log.warning("metrics not served port=%d error=%s", port, err.strerror)


def _listener(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def _children() -> Iterator[str]:
    """Yield the process ids of this process's children."""
    parent = f"PPid:\t{os.getpid()}\n"
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if parent in path.read_text("utf-8", "replace"):
                yield path.parent.name


def _written(pid: str) -> int:
    """Return ``write_bytes`` of a process and of its children that have ended (proc(5), /proc/pid/io)."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text("ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        if pid == "self":
            raise
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
