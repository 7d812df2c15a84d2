"""The rows of VMware: a full copy through nbdkit and the stub of the VDDK library."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs
from tests.bench.bench import Bench, Sides, Work
from tests.support import vmware

#: One read in flight, as large as the worker's, to show the cost of each read's delay.
SINGLE = "--synchronous --connections=1 --requests=1 --request-size=2097152"


@benches.row(
    "vddk, 5 ms a read",
    rival="nbdkit and `nbdcopy`, one read at a time; each read is delayed by 5 ms (2 GiB of data)",
    aim=0.25,
)
def delayed(bench: Bench) -> Iterator[Sides]:
    """Measure against nbdcopy with one read at a time, where each read is delayed by 5 ms."""
    with _disk(bench, delay=5000) as vcsim:
        yield _sides(bench, vcsim, SINGLE)


@benches.row("vddk", rival="the same without the delay, `nbdcopy` with its default settings", aim=1.11)
def undelayed(bench: Bench) -> Iterator[Sides]:
    """Measure against nbdcopy at its best: 0.9 of its speed is 1.11 of its time."""
    with _disk(bench, delay=0) as vcsim:
        yield _sides(bench, vcsim, "")


def _sides(bench: Bench, vcsim: vmware.Vcsim, options: str) -> Sides:
    target = bench.file
    return Sides(
        bench.command(_ours(vcsim, target), target),
        bench.command(_nbdcopy(vcsim, target, options), target),
        work=Work(vcsim.size, vcsim.size),
    )


@contextlib.contextmanager
def _disk(bench: Bench, delay: int) -> Iterator[vmware.Vcsim]:
    own = bench.directory / f"vmware-{os.urandom(4).hex()}"
    vcsim = vmware.Vcsim(own, bench.setting.size)
    vcsim.content(0).unlink()
    vcsim.content(0).hardlink_to(inputs.noise(bench.directory, bench.setting.size))
    vcsim.take_snapshot()
    del vcsim.settings["log"]
    vcsim.settings["delay"] = delay
    (own / "password").write_text(vmware.PASSWORD)
    try:
        with vcsim.running():
            yield vcsim
    finally:
        shutil.rmtree(own)


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
    }
    options = [part for pair in given.items() for part in pair]
    return benches.importing(known.endpoint, target, *options)


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
