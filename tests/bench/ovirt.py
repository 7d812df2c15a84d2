"""A full copy from oVirt against downloads by one connection, with 5 ms for each read of the storage.

Our time includes preparing and ending the transfer; the others use a prepared one.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests.bench import measure, report
from tests.bench.measure import Cost
from tests.support import engine, imageiod, worker

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


def plain(directory: Path, raw: Path, target: Path, rounds: int) -> report.Row:
    """Measure a raw disk served as by an oVirt host, against one plain GET."""

    def rival(url: str, ca: Path) -> list[str | Path]:
        return ["bash", "-o", "pipefail", "-c", CURL.format(ca=ca, url=url, target=target)]

    return _row("oVirt, 5 ms a read", (directory, raw, target), rounds, rival)


def library(directory: Path, raw: Path, target: Path, rounds: int) -> report.Row:
    """Measure the same against the client library with one worker."""

    def rival(url: str, ca: Path) -> list[str | Path]:
        return [sys.executable, "-c", LIBRARY, url, target, ca]

    return _row("oVirt, 5 ms, client library", (directory, raw, target), rounds, rival)


def _row(
    name: str,
    paths: tuple[Path, Path, Path],
    rounds: int,
    rival: Callable[[str, Path], list[str | Path]],
) -> report.Row:
    directory, raw, target = paths
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        password = own / "password"
        password.write_text(engine.PASSWORD)
        served, authority = stack.enter_context(engine.running(own, local=False))
        chain = served.add_disk("disk", raw)
        served.delay = DELAY
        directory_of_rival = own / "rival"
        directory_of_rival.mkdir()
        with imageiod.exported(directory_of_rival, chain.active.path, delay=DELAY) as socket:
            served.daemon.add("rival", f"nbd:unix:{socket}", chain.active.size)
            alone = rival(served.daemon.url("rival"), authority.certificate)
            ours = [
                *(*worker.COMMAND, "import", "--force", "--progress", "none", "--source", "imageio"),
                *("--user", engine.USER, "--password-file", password, "--ca-file", authority.certificate),
                *("--disk-id", "disk", served.url, target),
            ]
            mine, theirs = measure.alternate(rounds, [_fresh(target, ours), _fresh(target, alone)])
    ratio = mine.wall / theirs.wall
    return report.Row(name, "file", mine, theirs, AIM, ratio)


def _fresh(target: Path, argv: list[str | Path]) -> Callable[[], Cost]:
    def run() -> Cost:
        target.unlink(missing_ok=True)
        return measure.run(argv)

    return run
