"""Measure the worker against the commands that people use: ``python -m tests.bench``.

All sides of a row alternate, one warm-up first, and their figures are printed as hyperfine does. A whole run
writes them to ``docs/about/benchmarks/``, a file for each release of Debian, the page of all files, some
of them to README.md, and ``deploy/costs.json``.
``CDI_GO_WORKER`` adds CDI's importer.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.bench import bench as benches
from tests.bench import compare, costs, inputs, page, report, rows
from tests.bench.settings import SETTINGS
from tests.support import repository

assert rows  # declares all rows
PAGE, README = repository.ROOT / "docs/about/benchmarks.md", repository.ROOT / "README.md"
#: The most rounds of a row, and how many are enough if they differ little.
ROUNDS, ENOUGH = 5, 3


def main() -> None:
    """Measure the requested rows; write the page if that are all of a list."""
    given = _parser().parse_args()
    # Devices and mounts must not be left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    listed = [row for row in benches.ROWS if (row.more, row.scale) == (given.more, given.scale)]
    chosen = [row for row in listed if not given.only or any(part in row.key for part in given.only)]
    if not chosen:
        sys.exit("no row is named so; see --list")
    if given.list:
        print("\n".join(row.key for row in chosen))
        return
    if not given.page:
        _measure(given, chosen)
    results = sorted(given.report.with_suffix("").glob("*.jsonl"))
    reports = [report.load(path) for path in results]
    given.report.write_text(page.page(reports))
    costs.FILE.write_text(costs.text(reports))
    if given.report == PAGE:
        README.write_text(page.first(reports, README.read_text()))


def _measure(given: argparse.Namespace, chosen: Sequence[benches.Row]) -> None:
    """Measure rows; keep the figures, or exit if that are not all rows of a list."""
    given.directory.mkdir(parents=True, exist_ok=True)
    inputs.bytecode(given.before)
    began, found = time.monotonic(), []
    rounds = {"rounds": given.rounds or ROUNDS, "enough": 0 if given.rounds else ENOUGH}
    setting = SETTINGS[given.setting]
    with benches.opened(
        given.directory, setting, **rounds, before=given.before, is_alone=given.alone
    ) as bench:
        for number, row in enumerate(chosen, 1):
            print(f"{number} of {len(chosen)}, {time.monotonic() - began:.0f} s: ", end="", flush=True)
            found.append(compare.row(bench, row))
            print(found[-1], flush=True)
    is_whole = not (given.only or given.alone or given.setting != "machine")
    if is_whole:
        report.save(given.report.with_suffix(""), found)
    failed = [each.row.key for each in found if not each.is_right]
    if failed:
        print(f"without figures: {'; '.join(failed)}", file=sys.stderr)
    if failed or not is_whole:
        sys.exit(bool(failed))


def _parser() -> argparse.ArgumentParser:
    def path(text: str) -> Path:
        return Path(text).absolute()

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", action="append", default=[], help="rows whose name and target contain this")
    parser.add_argument(
        "--more", action="store_true", help="the second list: start-up, distance, many extents"
    )
    parser.add_argument(
        "--scale", action="store_true", help="the third list: the figures of docs/pods/scale.md"
    )
    parser.add_argument(
        "--page", action="store_true", help="write only the page, of the figures that are there"
    )
    parser.add_argument("--list", action="store_true", help="list the rows")
    parser.add_argument("--rounds", type=int, help=f"default: {ENOUGH}, or {ROUNDS} if they differ")
    parser.add_argument(
        "--before", type=path, metavar="DIRECTORY", help="in turn with another version: its checkout"
    )
    parser.add_argument("--alone", action="store_true", help="without the rivals, for a quick --before")
    parser.add_argument(
        "--setting", choices=[*SETTINGS], default="machine", help="pod: 0.75 CPU and 600M for each side"
    )
    parser.add_argument("--directory", type=path, default=path("build/bench"), help="for the disks (10 GiB)")
    parser.add_argument("--report", type=path, default=PAGE, help="the page")
    return parser


if __name__ == "__main__":
    main()
