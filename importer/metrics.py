"""What a running worker tells Prometheus (contract, Metrics; docs/metrics.md)."""

from __future__ import annotations

import collections
import contextlib
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from cdi_worker import errors, progress

if TYPE_CHECKING:
    from prometheus_client import core

log = logging.getLogger(__name__)

#: Seconds: an import that is over sooner is asked by nobody, and need not share its start-up.
DELAY = 0.25
#: The contract's counters, by role.
COUNTERS = {"importer": "kubevirt_cdi_import_progress", "cloner": "kubevirt_cdi_clone_progress"}


class Metrics(progress.Meter):
    """A progress that can be asked. ``counter``: the name of the percentage, without ``_total``."""

    def __init__(self, counter: str, owner_uid: str) -> None:
        super().__init__()
        self.counter = counter
        self.owner_uid = owner_uid
        self.bytes_read = 0
        self._failures: collections.Counter[str] = collections.Counter()
        self._counting = threading.Lock()
        self._written = 0

    def read(self, count: int) -> None:
        with self._counting:
            self.bytes_read += count

    def retry(self, failure: errors.Error) -> None:
        with self._counting:
            # A library's class says more than ours: ReadTimeout, ConnectionResetError.
            self._failures[type(failure.__cause__ or failure).__name__] += 1

    @property
    def failures(self) -> Mapping[str, int]:
        """How often an exception of each class was answered by another attempt."""
        with self._counting:
            return dict(self._failures)

    @property
    def bytes_written(self) -> int | None:
        """Bytes that this process and the programs it runs have given to storage; None: not counted.

        The kernel's own count: qemu-img writes by itself, and holes are not written at all.
        """
        try:
            now = sum(_written(pid) for pid in ("self", *_children()))
        except OSError:
            return None
        # Between two readings a program may end, whose bytes become ours.
        self._written = max(self._written, now)
        return self._written

    def families(self) -> Iterator[core.Metric]:
        """Yield the numbers as they are now (docs/metrics.md)."""
        from prometheus_client import core

        def counter(name: str, text: str, value: float) -> core.CounterMetricFamily:
            family = core.CounterMetricFamily(name, text, labels=("ownerUID",))
            family.add_metric((self.owner_uid,), value)
            return family

        # Controllers look for the name, this one label and digits (CDI's progress reporters).
        yield counter(self.counter, "Percent of the work that is done.", round(self.percent, 2))
        yield counter("cdi_worker_read_bytes", "Bytes that came from the source.", self.bytes_read)
        if (written := self.bytes_written) is not None:
            yield counter("cdi_worker_written_bytes", "Bytes given to storage.", written)
        failures = self.failures
        yield counter("cdi_worker_retries", "Further attempts after a failure.", sum(failures.values()))
        kinds = core.CounterMetricFamily(
            "cdi_worker_errors",
            "Failures that were followed by another attempt.",
            labels=("ownerUID", "kind"),
        )
        for kind, count in sorted(failures.items()):
            kinds.add_metric((self.owner_uid, kind), count)
        yield kinds
        phase = core.GaugeMetricFamily(
            "cdi_worker_phase", "What is being done.", labels=("ownerUID", "phase")
        )
        phase.add_metric((self.owner_uid, "done" if self.finished else self.name or "start"), 1)
        yield phase


@contextlib.contextmanager
def exposed(role: str, owner_uid: str, port: int) -> Iterator[progress.Progress]:
    """Yield a progress that is served while the block lasts; ``port`` 0: not served.

    Whatever goes wrong with it is a warning: a disk is worth more than its metrics.
    """
    if not port:
        yield progress.NullProgress()
        return
    told = Metrics(COUNTERS[role], owner_uid)
    over = threading.Event()
    # Libraries, key and certificate take a while that the import need not wait for.
    serving = threading.Thread(target=_serve, args=(told, port, over), name="metrics")
    serving.start()
    try:
        yield told
    finally:
        over.set()
        # Python ends threads that are left by unwinding their stacks, which those of other languages do not
        # survive: a thread on its way through cryptography would take the whole process with it.
        serving.join()


def _serve(told: Metrics, port: int, over: threading.Event) -> None:
    if over.wait(DELAY):
        return
    try:
        from cdi_worker import metrics_server
    except ImportError:
        missing = errors.MissingExtra(what="/metrics", package="prometheus-client", extra="metrics")
        log.warning("no metrics: %s", missing)
        return
    try:
        metrics_server.serve(told.families, port, over)
    except OSError as err:
        log.warning("no metrics port=%d error=%s", port, err.strerror)


def _children() -> Iterator[str]:
    """Yield the process ids of the programs that this process runs."""
    parent = f"PPid:\t{os.getpid()}\n"
    for path in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if parent in path.read_text("utf-8", "replace"):
                yield path.parent.name


def _written(pid: str) -> int:
    """Return the kernel's ``write_bytes`` of a process and of its children that have ended, proc(5)."""
    try:
        lines = Path(f"/proc/{pid}/io").read_text("ascii").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        if pid == "self":
            raise
        return 0
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes:"))
