"""The rows of VMware: a full copy through nbdkit and the stub of the VDDK library."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from tests.bench import inputs, measure, report
from tests.bench.measure import Cost
from tests.support import vmware

#: Bytes; large enough for the start-up of either side not to matter.
SIZE = 2 << 30
#: One read in flight, as large as the worker's, to show the cost of each read's delay.
SINGLE = "--synchronous --connections=1 --requests=1 --request-size=2097152"


def delayed(directory: Path, target: Path, rounds: int) -> report.Row:
    """Measure against nbdcopy with one read at a time, where each read is delayed by 5 ms."""
    with _disk(directory, delay=5000) as vcsim:
        return _row("vddk, 5 ms a read", 0.25, vcsim, target, rounds, SINGLE)


def undelayed(directory: Path, target: Path, rounds: int) -> report.Row:
    """Measure against nbdcopy at its best: 0.9 of its speed is 1.11 of its time."""
    with _disk(directory, delay=0) as vcsim:
        return _row("vddk", 1.11, vcsim, target, rounds, "")


@contextlib.contextmanager
def _disk(directory: Path, delay: int) -> Iterator[vmware.Vcsim]:
    own = directory / f"vmware-{os.urandom(4).hex()}"
    vcsim = vmware.Vcsim(own, SIZE)
    vcsim.content(0).unlink()
    vcsim.content(0).hardlink_to(inputs.noise(directory, SIZE))
    vcsim.take_snapshot()
    del vcsim.settings["log"]
    vcsim.settings["delay"] = delay
    (own / "password").write_text(vmware.PASSWORD)
    try:
        with vcsim.running():
            yield vcsim
    finally:
        shutil.rmtree(own)


def _row(name: str, aim: float, vcsim: vmware.Vcsim, target: Path, rounds: int, options: str) -> report.Row:
    def ours() -> Cost:
        target.unlink(missing_ok=True)
        return measure.run(_ours(vcsim, target))

    def theirs() -> Cost:
        target.unlink(missing_ok=True)
        return measure.run(_nbdcopy(vcsim, target, options))

    mine, rival = measure.alternate(rounds, [ours, theirs])
    return report.Row(name, "file", mine, rival, aim, mine.wall / rival.wall)


def _ours(vcsim: vmware.Vcsim, target: Path) -> list[str | Path]:
    known = vcsim.location(**vcsim.stage(0))
    given = {
        "--source": "vddk",
        "--user": vmware.USER,
        "--password-file": vcsim.directory / "password",
        "--uuid": known.uuid,
        "--backing-file": known.backing_file,
        "--thumbprint": known.thumbprint,
        "--vddk-libdir": known.vddk_libdir,
        "--current-checkpoint": known.current,
        "--progress": "none",
    }
    options = [part for pair in given.items() for part in pair]
    return [sys.executable, "-m", "cdi_worker", "import", "--force", *options, known.endpoint, target]


def _nbdcopy(vcsim: vmware.Vcsim, target: Path, options: str) -> list[str | Path]:
    given = {
        "libdir": vcsim.libdir,
        "server": "localhost",
        "user": vmware.USER,
        "password": f"+{vcsim.directory}/password",
        "thumbprint": vcsim.thumbprint,
        "vm": "moref=vm-1",
        "file": vcsim.file(0),
        "snapshot": vcsim.snapshot(0),
    }
    quoted = shlex.quote(str(target))
    copy = f'truncate -s {vcsim.size} {quoted} && nbdcopy --flush {options} "$uri" {quoted}'
    plugin = ["vddk", *(f"{key}={value}" for key, value in given.items())]
    return ["nbdkit", "--readonly", "--unix=-", *plugin, f"--run={copy}"]
