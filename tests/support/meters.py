"""Progress meters that record what they are given, and scrapes of the metrics page."""

from __future__ import annotations

import contextlib
import dataclasses
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator

from prometheus_client import parser

from cdi_worker.importer import progress
from tests.support import processes


class Percents(progress.Meter):
    """Record every percentage reported, and check that it never falls."""

    def __init__(self) -> None:
        super().__init__()
        self.percents = [0.0]

    def changed(self, *, new_phase: bool) -> None:
        """Record the percentage."""
        assert self.percent >= self.percents[-1]
        self.percents.append(self.percent)

    @property
    def between(self) -> set[float]:
        """Return the percentages that were neither the start nor the end."""
        return {percent for percent in self.percents if 1 < percent < 99}


class Totals(progress.Meter):
    """Record the totals of the transfer from its first byte on."""

    def __init__(self) -> None:
        super().__init__()
        self.totals: set[int | None] = set()
        #: Bytes of the transfer that were done at its end.
        self.moved = 0

    def changed(self, *, new_phase: bool) -> None:
        """Record the total."""
        if self.name == "transfer" and self.count:
            self.totals.add(self.total)
            self.moved = self.count


def scrape(port: int, path: str = "/metrics", accept: str = "text/plain") -> str:
    """Return the page of a worker on this machine. Its certificate is self-signed."""
    # Without the authorities of the machine, which take long to load.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    request = urllib.request.Request(f"https://127.0.0.1:{port}{path}", headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=processes.PATIENCE, context=context) as answer:
        return str(answer.read().decode())


def samples(page: str) -> dict[tuple[str, str], float]:
    """Return the values of a page by name and the label besides the owner's."""
    found = {}
    for family in parser.text_string_to_metric_families(page):
        for sample in family.samples:
            assert "ownerUID" in sample.labels
            rest = {key: value for key, value in sample.labels.items() if key != "ownerUID"}
            found[sample.name, "".join(rest.values())] = sample.value
    return found


@dataclasses.dataclass(frozen=True)
class Scrape:
    """The values of one page, without labels, and the phase."""

    values: dict[str, float]
    phase: str

    def __getitem__(self, name: str) -> float:
        return self.values[name]


def scrapes(process: subprocess.Popen[str], port: int, seconds: float = 0.2) -> Iterator[Scrape]:
    """Yield what the worker shows until it ends."""
    while process.poll() is None:
        with contextlib.suppress(OSError):
            found = samples(scrape(port))
            phases = [label for name, label in found if name == "cdi_worker_phase"]
            yield Scrape({name: value for (name, label), value in found.items() if not label}, phases[0])
        time.sleep(seconds)
