"""A full copy from oVirt against downloads by one connection, with 5 ms for each read of the storage.

Our time includes preparing and ending the transfer; the others use a prepared one.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench.bench import Bench, Sides, Work
from tests.support import engine, imageiod

DELAY = "5ms"
AIM = 0.6
#: One request for everything, as a user would type it.
CURL = "curl -sf --cacert {ca} {url} | dd bs=1M iflag=fullblock conv=sparse,fsync status=none of={target}"
#: The client library's own download, which does not read zeros, and requests 128 MiB at a time.
LIBRARY = """\
import sys
from ovirt_imageio import client
client.download(*sys.argv[1:], fmt="raw", max_workers=1)
"""


#: The command of a rival: of the URL of the disk, the CA, and the target.
Rival = Callable[[str, Path, Path], list[str | Path]]


@benches.row(
    "oVirt, 5 ms a read",
    rival="`curl` from the imageio server into `dd`; each storage read is delayed by 5 ms",
    aim=AIM,
)
def plain(bench: Bench) -> Iterator[Sides]:
    """Measure a raw disk served as by an oVirt host, against one plain GET."""

    def rival(url: str, ca: Path, target: Path) -> list[str | Path]:
        return ["bash", "-o", "pipefail", "-c", CURL.format(ca=ca, url=url, target=target)]

    yield from _sides(bench, rival)


@benches.row(
    "oVirt, 5 ms, client library",
    rival="the download of oVirt's client library, with one connection",
    aim=AIM,
)
def library(bench: Bench) -> Iterator[Sides]:
    """Measure the same against the client library with one worker."""

    def rival(url: str, ca: Path, target: Path) -> list[str | Path]:
        return [sys.executable, "-c", LIBRARY, url, target, ca]

    yield from _sides(bench, rival)


def _sides(bench: Bench, rival: Rival) -> Iterator[Sides]:
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
            alone = rival(served.daemon.url("rival"), authority.certificate, bench.file)
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
                bench.command(alone, bench.file),
                work=Work(bench.setting.data, bench.setting.data),
            )
