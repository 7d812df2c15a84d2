"""A full copy from oVirt against a download by one connection, with 5 ms for each read of the storage.

Our time includes preparing and ending the transfer; the rival uses a prepared one.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench.bench import Bench, Sides
from tests.support import engine, imageiod

DELAY = "5ms"
#: The client library's own download, which does not read zeros, and requests 128 MiB at a time.
LIBRARY = """\
import sys
from ovirt_imageio import client
client.download(*sys.argv[1:], fmt="raw", max_workers=1)
"""


@benches.row("oVirt, 5 ms, client library", rival="download of ovirt_imageio.client")
def library(bench: Bench) -> Iterator[Sides]:
    """Measure a raw disk served as by an oVirt host, against the client library with one worker."""
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=bench.directory)))
        password = own / "password"
        password.write_text(engine.PASSWORD)
        served, authority = stack.enter_context(engine.running(own, local=False))
        chain = served.add_disk("disk", bench.raw)
        served.delay = DELAY
        directory_of_rival = own / "rival"
        directory_of_rival.mkdir()
        with imageiod.exported(directory_of_rival, chain.active.path, delay=DELAY) as socket:
            served.daemon.add("rival", f"nbd:unix:{socket}", chain.active.size)
            alone = [sys.executable, "-c", LIBRARY, served.daemon.url("rival"), bench.file]
            known = {
                "--source": "imageio",
                "--user": engine.USER,
                "--password-file": password,
                "--ca-file": authority.certificate,
                "--disk-id": "disk",
            }
            options = [part for pair in known.items() for part in pair]
            yield Sides(
                bench.imports(served.url, bench.file, *options),
                bench.command([*alone, authority.certificate], bench.file),
            )
