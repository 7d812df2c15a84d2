"""Prometheus metrics of a running worker (contract, Metrics; docs/pods/metrics.md)."""

from __future__ import annotations

import collections
import contextlib
import logging
import select
import socket
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import progress

if TYPE_CHECKING:
    from prometheus_client import core, registry

    _Family = core.CounterMetricFamily | core.GaugeMetricFamily

log = logging.getLogger(__name__)

#: The contract's counters, by role.
COUNTERS = {
    "importer": "kubevirt_cdi_import_progress",
    "cloner": "kubevirt_cdi_clone_progress",
    "openstack-populator": "kubevirt_cdi_openstack_populator_progress",
    "ovirt-populator": "kubevirt_cdi_ovirt_progress",
}
#: What Forklift's own controller reads of its populators. Gauges: the names of counters end in ``_total``.
FORKLIFT = {
    "openstack-populator": "openstack_populator_progress",
    "ovirt-populator": "ovirt_progress",
}


class Metrics(progress.Logged):
    """Progress as lines of the log, and exported as metrics; thread-safe.

    ``counter``: name of the percentage, without ``_total``. ``gauge``: the name of a gauge with the same
    value, if there is one.
    """

    def __init__(self, counter: str, owner_uid: str, gauge: str = "") -> None:
        super().__init__()
        self.counter = counter
        self.gauge = gauge
        self.owner_uid = owner_uid
        self._failures: collections.Counter[str] = collections.Counter()

    def retry(self, failure: errors.Error) -> None:
        super().retry(failure)
        with self._lock:
            # The class of a library's exception is more specific: ReadTimeout, ConnectionResetError.
            self._failures[type(failure.__cause__ or failure).__name__] += 1

    def collect(self) -> Iterator[core.Metric]:
        """Yield the current values (docs/pods/metrics.md), at each scrape."""
        from prometheus_client import core

        numbers = self.numbers()
        counter, gauge = core.CounterMetricFamily, core.GaugeMetricFamily

        def family(kind: type[_Family], name: str, text: str, value: float, **more: str) -> core.Metric:
            made = kind(name, text, labels=("ownerUID", *more))
            made.add_metric((self.owner_uid, *more.values()), value)
            return made

        # CDI's controllers match the name, exactly this label, and the value with a regular expression.
        if self.begun:
            percent = round(numbers.percent, 2)
            yield family(counter, self.counter, "Percentage of the work that is done.", percent)
            if self.gauge:
                yield family(gauge, self.gauge, "The same, under Forklift's name.", percent)
        yield family(counter, "cdi_worker_read_bytes", "Bytes on the wire.", numbers.read)
        yield family(counter, "cdi_worker_retries", "Retries after a failure.", numbers.retries)
        kinds = counter(
            "cdi_worker_errors",
            "Failures that were retried, by exception class.",
            labels=("ownerUID", "kind"),
        )
        with self._lock:
            failures = sorted(self._failures.items())
        for kind, count in failures:
            kinds.add_metric((self.owner_uid, kind), count)
        yield kinds
        yield family(gauge, "cdi_worker_phase", "Current phase of the work.", 1, phase=numbers.phase)
        left = None if numbers.left is None else round(numbers.left)
        gauges = (
            ("phase_bytes", "Bytes of the phase that are done, without holes.", numbers.done),
            ("phase_total_bytes", "Bytes of the phase, without holes.", numbers.total),
            ("disk_bytes", "Size of the disk.", numbers.size),
            ("resumed_bytes", "Bytes that an earlier attempt has moved, without holes.", numbers.resumed),
            ("speed_bytes_per_second", "Speed in the last seconds.", round(numbers.speed)),
            ("remaining_seconds", "Estimated time to the end of the phase.", left),
        )
        for name, text, value in gauges:
            if value is not None:
                yield family(gauge, f"cdi_worker_{name}", text, value)


@contextlib.contextmanager
def expose(role: str, owner_uid: str, port: int) -> Iterator[progress.Progress]:
    """Yield the progress of a pod: lines of its log, and metrics on ``port``; 0: no metrics.

    If metrics cannot be served, a warning is logged and the work continues.
    """
    with Metrics(COUNTERS[role], owner_uid, FORKLIFT.get(role, "")) as meter:
        if not port:
            yield meter
            return
        over = cancelling.Cancel()
        serving = threading.Thread(target=_serve, args=(meter, port, over), name="metrics")
        serving.start()
        try:
            yield meter
        finally:
            over.set()
            # Joined because Python unwinds the stacks of remaining threads at exit: a thread inside a C
            # library such as cryptography would crash the process.
            serving.join()


def _serve(meter: Metrics, port: int, over: cancelling.Cancel) -> None:
    try:
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        with (
            socket.create_server(("", port), family=family, dualstack_ipv6=both) as listener,
            cancelling.wake_on(over) as wake,
        ):
            # Loading libraries and making a certificate take longer than many an import.
            waiting = select.poll()
            for fd in (listener.fileno(), wake.fd):
                waiting.register(fd, select.POLLIN)
            if listener.fileno() not in dict(waiting.poll()):
                return
            with errors.optional("/metrics", package="prometheus-client", extra="metrics"):
                from cdi_worker.importer.metrics import server
            server.serve(cast("registry.Collector", meter), listener, wake.fd)
    except errors.MissingExtra as err:
        log.warning("metrics not served: %s", err)
    except OSError as err:
        log.warning("metrics not served port=%d error=%s", port, err.strerror)
