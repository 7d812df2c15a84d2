"""Measure the worker against the commands that people use: ``python -m tests.bench``.

All sides of a row alternate, one warm-up first, and their figures are printed as hyperfine does. A whole run
writes ``docs/about/benchmarks.md``. ``CDI_GO_WORKER`` adds CDI's importer.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import compare, inputs, page, rows
from tests.bench.settings import SETTINGS

assert rows  # declares all rows
ROUNDS = 5


def main() -> None:
    """Measure the requested rows; write the page if that are all of its rows."""
    given = _parser().parse_args()
    # Devices and mounts must not be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    listed = [row for row in benches.ROWS if row.more == given.more]
    chosen = [row for row in listed if not given.only or any(part in row.key for part in given.only)]
    if not chosen:
        sys.exit("no row is named so; see --list")
    if given.list:
        print("\n".join(row.key for row in chosen))
        return
    given.directory.mkdir(parents=True, exist_ok=True)
    inputs.bytecode(given.before)
    began = time.monotonic()
    found, rounds = [], given.rounds or ROUNDS
    setting = SETTINGS[given.setting]
    with benches.opened(given.directory, setting, rounds, given.before, given.alone) as bench:
        for row in chosen:
            found.append(compare.row(bench, row))
            print(found[-1], flush=True)
    if not all(each.is_right for each in found):
        sys.exit("not every row has figures")
    if not (given.only or given.more or given.before or given.alone or given.setting != "machine"):
        given.report.write_text(page.page(found, rounds, (time.monotonic() - began) / 60))


def _parser() -> argparse.ArgumentParser:
    def path(text: str) -> Path:
        return Path(text).absolute()

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="rows whose name and target contain this")
    parser.add_argument(
        "--more", action="store_true", help="the second list: start-up, distance, scale, limits"
    )
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--rounds", type=int, help=f"default: {ROUNDS}")
    parser.add_argument(
        "--before", type=path, metavar="DIRECTORY", help="in turn with another version: its checkout"
    )
    parser.add_argument("--alone", action="store_true", help="without the rivals, for a quick --before")
    parser.add_argument(
        "--setting", choices=[*SETTINGS], default="machine", help="pod: 0.75 CPU and 600M for each side"
    )
    parser.add_argument("--directory", type=path, default=path("build/bench"), help="for the disks (10 GiB)")
    parser.add_argument("--report", type=path, default=path("docs/about/benchmarks.md"), help="the page")
    return parser


if __name__ == "__main__":
    main()
