"""What is mostly start-up: short commands, and imports of small disks."""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections.abc import Iterator

from tests.bench import bench as benches
from tests.bench import go, inputs
from tests.bench.bench import Bench, Sides
from tests.support import repository

#: The worker as the image starts it, without what a virtual environment for tests adds to Python.
#: A version of ``--before`` comes first in the path.
PLACES = [str(repository.ROOT), sysconfig.get_path("purelib")]
CODE = f"import sys; sys.path += {PLACES}; from cdi_worker.__main__ import main; main()"
COMMAND = (sys.executable, "-S", "-c", CODE)
SIZE = 8 << 20


@benches.row("--version", more=True)
def version(bench: Bench) -> Iterator[Sides]:
    """Measure the least that a command needs."""
    yield Sides(bench.command([*COMMAND, "--version"], bench.file))


@benches.row("a sparse file", rival="qemu-img create", more=True)
def blank(bench: Bench) -> Iterator[Sides]:
    """Measure an import without a source."""
    yield Sides(
        bench.command([*COMMAND, "blank", bench.file, "1Gi"], bench.file),
        bench.shell(f"qemu-img create -q -f raw {bench.file} 1G && sync {bench.file}", bench.file),
        go.importer(bench, "file", "", IMPORTER_SOURCE="none"),
    )


def small(bench: Bench, name: str) -> Iterator[Sides]:
    """Measure the import of a small disk from a web server."""
    noise = inputs.noise(bench.directory, SIZE)
    url = bench.web.url(noise if name == "raw" else inputs.form(noise, name))
    yield Sides(bench.command([*COMMAND, "import", "--progress=none", url, bench.file], bench.file))


for _name in ("raw", "qcow2"):
    benches.row(f"8 MiB of {_name}", more=True)(functools.partial(small, name=_name))
