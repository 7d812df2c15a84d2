"""A full copy from oVirt beside a download by one connection, 5 ms for each read of the storage."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from tests import bench_measure, bench_report, engine, imageiod
from tests.bench_measure import Cost

DELAY = "5ms"
AIM = 0.6
#: One request for everything, which is what can be typed.
RIVAL = "curl -sf --cacert {ca} {url} | dd bs=1M iflag=fullblock conv=sparse,fsync status=none of={target}"


def row(directory: Path, raw: Path, target: Path, rounds: int) -> bench_report.Row:
    """Measure a raw disk that is served as an oVirt host does."""
    with contextlib.ExitStack() as stack:
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=directory)))
        password = own / "password"
        password.write_text(engine.PASSWORD)
        served, authority = stack.enter_context(engine.running(own, local=False))
        chain = served.add_disk("disk", raw)
        served.delay = DELAY
        place = own / "rival"
        place.mkdir()
        with imageiod.exported(place, chain.active.path, delay=DELAY) as socket:
            served.daemon.add("rival", f"nbd:unix:{socket}", chain.active.size)
            rival = RIVAL.format(ca=authority.certificate, url=served.daemon.url("rival"), target=target)
            alone: list[str | Path] = ["bash", "-o", "pipefail", "-c", rival]
            ours = [
                *(sys.executable, "-m", "importer", "import", "--progress", "none", "--source", "imageio"),
                *("--user", engine.USER, "--password-file", password, "--ca-file", authority.certificate),
                *("--disk-id", "disk", served.url, target),
            ]
            mine, theirs = bench_measure.alternate(rounds, [_fresh(target, ours), _fresh(target, alone)])
    ratio = mine.wall / theirs.wall
    return bench_report.Row("oVirt, 5 ms a read", "file", mine, theirs, AIM, ratio)


def _fresh(target: Path, argv: list[str | Path]) -> Callable[[], Cost]:
    def run() -> Cost:
        target.unlink(missing_ok=True)
        return bench_measure.run(argv)

    return run
