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
from tests.bench.bench import Bench, Sides
from tests.support import vmware


@benches.row("vddk", rival="nbdkit and nbdcopy, as virt-v2v")
def vddk(bench: Bench) -> Iterator[Sides]:
    """Measure against nbdcopy with its default settings."""
    target = bench.file
    with _disk(bench) as vcsim:
        yield Sides(
            bench.command(_ours(vcsim, target), target), bench.command(_nbdcopy(vcsim, target), target)
        )


@contextlib.contextmanager
def _disk(bench: Bench) -> Iterator[vmware.Vcsim]:
    own = bench.directory / f"vmware-{os.urandom(4).hex()}"
    vcsim = vmware.Vcsim(own, bench.setting.size)
    vcsim.content(0).unlink()
    vcsim.content(0).hardlink_to(inputs.noise(bench.directory, bench.setting.size))
    vcsim.take_snapshot()
    del vcsim.settings["log"]
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


def _nbdcopy(vcsim: vmware.Vcsim, target: Path) -> list[str | Path]:
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
    copy = f'truncate -s {vcsim.size} {quoted} && nbdcopy --flush "$uri" {quoted}'
    plugin = ["vddk", *(f"{key}={value}" for key, value in given.items())]
    return ["nbdkit", "--readonly", "--unix=-", *plugin, f"--run={copy}"]
