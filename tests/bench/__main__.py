"""Measure the worker against the commands that people use: ``python -m tests.bench``.

All sides of a row alternate, one warm-up first, and their figures are printed as hyperfine does. A whole run
writes ``docs/about/benchmarks.md``. ``--more`` measures other rows instead, which have bounds: what a million
extents, 50 imports at once or a distant source cost. ``CDI_GO_WORKER`` adds CDI's importer.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import compare, inputs, page, rows, wire
from tests.bench.bench import Row
from tests.bench.compare import Comparison
from tests.bench.settings import FAR, SETTINGS, Setting

assert rows  # declares all rows
ROUNDS = 5


def main() -> None:
    """Measure the requested rows; write the page if that are all of its rows."""
    given = _parser().parse_args()
    # Devices and mounts must not be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    chosen = [row for row in benches.ROWS if row.is_extra == given.more and _is_chosen(row, given.only)]
    if not chosen:
        sys.exit("no row is named so; see --list")
    if given.list:
        print("\n".join(row.key for row in chosen))
        return
    given.directory.mkdir(parents=True, exist_ok=True)
    inputs.bytecode(given.before)
    began = time.monotonic()
    is_right = True
    if given.far:
        found = _measure(given, FAR, [row for row in chosen if row.setting is FAR])
    else:
        found = _measure(given, SETTINGS[given.setting], [row for row in chosen if row.setting is None])
        if any(row.setting is FAR for row in chosen):
            is_right = _measured_far()
    if not (is_right and all(each.is_right for each in found)):
        sys.exit("not every row has figures, or a bound does not hold")
    if given.far:
        return
    if given.more:
        print(f"{len(chosen)} rows, and every bound holds")
    elif not (given.only or given.before or given.alone or given.setting != "machine"):
        minutes = (time.monotonic() - began) / 60
        given.report.write_text(page.page(found, given.rounds or ROUNDS, minutes))


def _is_chosen(row: Row, parts: Sequence[str]) -> bool:
    return not parts or any(part in row.key for part in parts)


def _measured_far() -> bool:
    """Measure the rows that need a network of their own in another process; return whether all is right."""
    argv = ["unshare", "--net", sys.executable, "-m", "tests.bench", *sys.argv[1:], "--far"]
    return subprocess.run(argv, check=False).returncode == 0


def _measure(given: argparse.Namespace, setting: Setting, chosen: Sequence[Row]) -> list[Comparison]:
    found = []
    with contextlib.ExitStack() as stack:
        if setting.delay:
            stack.enter_context(wire.delayed(given.directory, setting.delay, setting.wire))
        rounds = given.rounds or (1 if given.more else ROUNDS)
        opened = benches.opened(given.directory, setting, rounds, given.before, given.alone)
        bench = stack.enter_context(opened)
        for row in chosen:
            found.append(compare.row(bench, row))
            print(found[-1], flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    def path(text: str) -> Path:
        return Path(text).absolute()

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="rows whose name and target contain this")
    parser.add_argument(
        "--more", action="store_true", help="the rows with bounds, once, instead of the page's"
    )
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}, with --more 1")
    parser.add_argument(
        "--before", type=path, metavar="DIRECTORY", help="in turn with another version: its checkout"
    )
    parser.add_argument("--alone", action="store_true", help="without the rivals, for a quick --before")
    parser.add_argument(
        "--setting", choices=[*SETTINGS], default="machine", help="pod: 0.75 CPU and 600M for each side"
    )
    parser.add_argument("--directory", type=path, default=path("build/bench"), help="for the disks (10 GiB)")
    parser.add_argument("--report", type=path, default=path("docs/about/benchmarks.md"), help="the page")
    parser.add_argument("--far", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
