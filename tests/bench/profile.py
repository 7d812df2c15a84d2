"""Profile an import with perf: ``python -m tests.bench.profile raw``.

The first table shows the CPU time of each function alone, the second with the functions it calls, including
the kernel and Python's C functions. For Python code, ``py-spy record --gil`` shows more.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from tests.bench import inputs
from tests.support import processes, servers, worker

LINES = 40


def main() -> None:
    """Import the benchmark's disk in one format under perf; write the tables to a file and print its name."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("form", choices=["raw", *inputs.FORMS])
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="of the benchmark")
    given = parser.parse_args()
    directory = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    inputs.bytecode()
    raw = inputs.disk(directory)
    path = raw if given.form == "raw" else inputs.form(raw, given.form)
    data, target = directory / "perf.data", directory / "target"
    own = directory / "nginx-profile"
    own.mkdir(exist_ok=True)
    with servers.nginx(own, directory) as web:
        command = [*worker.COMMAND, "import", "--force", "--progress", "none", web.url(path), target]
        target.unlink(missing_ok=True)
        processes.run("perf", "record", "-g", "--freq", "999", "--output", data, "--", *command)
    report = directory / f"profile-{given.form}.txt"
    report.write_text("\n\n".join(_table(data, kind) for kind in ("--no-children", "--children")))
    target.unlink()
    print(report)


def _table(data: Path, kind: str) -> str:
    """Return the first lines of a perf report."""
    output = processes.run("perf", "report", kind, "--call-graph", "none", "--stdio", "--input", data).stdout
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and not line.startswith("#")]
    return "\n".join([f"perf report {kind}", *lines[:LINES]])


if __name__ == "__main__":
    main()
