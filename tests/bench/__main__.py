"""Measure the worker against the commands a user would type: ``python -m tests.bench``.

Each row alternates with its rival; medians. Compare ratios: machines differ and are noisy. The result is
``docs/about/benchmarks-rows.md`` with its plots and figures. What is measured is kept in the directory, so
that a run can be made in pieces: ``--only`` and ``--resume``, then ``--write``.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import inputs, report, rows, run, wire
from tests.bench.machine import Machine
from tests.bench.results import Results
from tests.bench.settings import SETTINGS, Setting

assert rows  # declares all rows
ROUNDS = 5


def main() -> None:
    """Measure the requested rows; write the report if all rows were measured."""
    given = _parser().parse_args()
    # Devices and mounts must not be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    directory = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    results = directory / "results.json"
    if given.list:
        print("\n".join(row.key for row in benches.ROWS))
        return
    if not given.write:
        if not (given.only or given.resume or given.setting):
            results.unlink(missing_ok=True)
        names = [given.setting] if given.setting else [*SETTINGS]
        for name in names:
            if not given.setting:
                print(f"# {name}", flush=True)
            _measure_in_namespace(given, SETTINGS[name], results)
    if given.write or not (given.only or given.setting):
        report.write(given.report, [row.key for row in benches.ROWS], Results(results))


def _measure_in_namespace(given: argparse.Namespace, setting: Setting, results: Path) -> None:
    """Measure in a process of its own if the setting needs a network of its own."""
    if setting.delay and not given.unshared:
        arguments = [*sys.argv[1:], "--unshared", "--setting", setting.name]
        argv = ["unshare", "--net", sys.executable, "-m", "tests.bench", *arguments]
        if status := subprocess.run(argv, check=False).returncode:
            sys.exit(status)
        return
    _measure(given, setting, results)


def _measure(given: argparse.Namespace, setting: Setting, path: Path) -> None:
    directory = path.parent
    inputs.bytecode()
    results = Results(path)
    done = results.rows.get(setting.name, {})
    scale = benches.Scale(given.imports, given.size << 20, given.extents)
    until = time.monotonic() + given.seconds
    with contextlib.ExitStack() as stack:
        if setting.delay:
            stack.enter_context(wire.delayed(directory, setting.delay, setting.wire))
        bench = stack.enter_context(
            benches.opened(directory, setting, given.rounds, scale, given.before, given.alone)
        )
        machine = Machine(bench, results.rates.setdefault(setting.name, {}))
        for row in benches.ROWS:
            if not row.is_for(setting) or not any(part in row.key for part in given.only or [""]):
                continue
            if given.resume and row.key in done:
                continue
            if time.monotonic() > until:
                sys.exit("out of time: run this again with --resume for the other rows")
            results.keep(setting.name, row.key, run.row(bench, row, machine))
            print(report.line(results.rows[setting.name][row.key]), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--setting", choices=[*SETTINGS], help="measure only in this setting; write no report"
    )
    parser.add_argument(
        "--only",
        action="append",
        help="measure only rows whose name and target contain this; write no report",
    )
    parser.add_argument(
        "--resume", action="store_true", help="measure only what the directory has no figures of"
    )
    parser.add_argument("--write", action="store_true", help="write the report of what the directory has")
    parser.add_argument("--seconds", type=float, default=math.inf, help="start no row after this time")
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="for the disks (50 GiB)")
    parser.add_argument(
        "--imports", type=int, default=benches.Scale.imports, help="of the rows with many imports"
    )
    parser.add_argument(
        "--size", type=int, default=benches.Scale.size >> 20, help="MiB of each of these imports"
    )
    parser.add_argument(
        "--extents", type=int, default=benches.Scale.extents, help="of the rows with many extents"
    )
    parser.add_argument(
        "--before",
        type=lambda given: Path(given).absolute(),
        metavar="DIRECTORY",
        help="measure another version of the worker in turn with this one; it was installed there by "
        "pip install --target DIRECTORY 'CHECKOUT[all]'",
    )
    parser.add_argument("--alone", action="store_true", help="without the rivals, for a quick --before")
    parser.add_argument("--report", type=Path, default=Path("docs/about/benchmarks-rows.md"))
    parser.add_argument("--unshared", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
