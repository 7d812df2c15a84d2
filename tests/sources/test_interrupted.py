"""Reads are interrupted from another thread: they end at once, and other reads continue."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from pathlib import Path

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from tests.support import http_disk, misbehave, processes, proxy, tls

DATA = bytes(range(256)) * 4096
#: Seconds. Timeouts are much longer.
SOON = processes.PATIENCE


def test_read_through_a_tls_proxy_can_be_interrupted(tmp_path: Path) -> None:
    """For TLS within TLS urllib3 uses an object that is not a Python socket."""
    authority = tls.Authority(tmp_path)
    page = misbehave.Page(DATA)
    with misbehave.Server(authority.issue()) as server, proxy.Proxy(pair=authority.issue()) as between:
        server.serve("/d", (page, 1), dataclasses.replace(page, stall=1000))
        url = server.url("/d", host=tls.FAR)
        access = base.Access(ca_files=(str(authority.certificate),), https_proxy=between.url)
        into = memoryview(bytearray(100_000))
        outcome: list[int] = []

        def read() -> None:
            with contextlib.suppress(errors.Cancelled):
                outcome.append(image.source.ranges.read_range(300_000, into))

        cancel = cancelling.Cancel()
        with http_disk.opened(url, access, cancel) as image:
            reading = threading.Thread(target=read)
            reading.start()
            processes.wait_for(lambda: len(server.gets("/d")) == 2, "the second request")
            time.sleep(0.2)
            began = time.monotonic()
            cancel.set()
            reading.join()
            assert time.monotonic() - began < SOON
            # Received bytes may have been written to the buffer, but are not reported as read.
            assert not outcome
