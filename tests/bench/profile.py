"""Profile a row of the benchmark: ``python -m tests.bench.profile 'qcow2, file' --before DIRECTORY``.

For each version of the worker, NAME.txt has perf's tables: the CPU time of each function alone, then with the
functions it calls, including the kernel and Python's C functions. NAME.svg is a flame graph of the threads
that are not idle, by py-spy (MIT), which reads the process from outside: Python 3.11 tells perf no names.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final
from xml.sax import saxutils

from tests.bench import bench as benches
from tests.bench import inputs, rows, settings
from tests.support import processes

assert rows  # declares all rows
LINES: Final = 40
#: Units of the flame graph: its width, and the height of a frame.
WIDTH: Final = 1000
HEIGHT: Final = 15
#: The part of all samples below which a frame is left out: it could not be read.
LEAST: Final = 0.01
#: Frames that only pass a call on: they were two thirds of the graph.
PASSING: Final = re.compile(
    r"\(<frozen |[(/](click/\w+|contextlib|importlib/__init__)\.py|^_bootstrap|^__call__ "
)
#: Units of a character.
_CHARACTER: Final = 6
_STYLE: Final = "text{font:10px monospace}rect{stroke:#fff;fill:#bcd3e6}.own{fill:#f2b985}"

#: A function and its file, and how often it was sampled: with the frames that it called.
Frames = dict[str, "Frame"]


@dataclasses.dataclass
class Frame:
    """A function where it was called, with the functions that it called there."""

    samples: int = 0
    called: Frames = dataclasses.field(default_factory=dict)


def main() -> None:
    """Run a row under both recorders, for each version; print the names of the files."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "row",
        choices=[row.key for row in benches.ROWS],
        metavar="ROW",
        help="as python -m tests.bench --list names it",
    )
    parser.add_argument("--before", type=Path, help="another version, as for tests.bench")
    parser.add_argument("--directory", type=Path, default=Path("build/bench"), help="of the benchmark")
    given = parser.parse_args()
    directory = given.directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    inputs.bytecode()
    row = next(row for row in benches.ROWS if row.key == given.row)
    name = "profile-" + re.sub("[^a-z0-9]+", "-", row.key.lower())
    with benches.opened(directory, settings.SETTINGS["machine"], 1, benches.Scale(), given.before) as bench:
        for version in ["before", "now"] if given.before else ["now"]:
            path = directory / f"{name}-{version}"
            _perf(bench, row, path.with_suffix(".txt"), version)
            _flames(bench, row, path.with_suffix(".svg"), version)
            print(f"{path}.txt {path}.svg")


def _perf(bench: benches.Bench, row: benches.Row, path: Path, version: str) -> None:
    data = path.with_suffix(".data")
    _run(bench, row, ["perf", "record", "-g", "--freq", "999", "--output", data, "--"], version)
    path.write_text("\n\n".join(_table(data, kind) for kind in ("--no-children", "--children")))


def _flames(bench: benches.Bench, row: benches.Row, path: Path, version: str) -> None:
    data = path.with_suffix(".folded")
    options = ["--rate", "500", "--function", "--format", "raw", "--output", data]
    _run(bench, row, [Path(sys.executable).with_name("py-spy"), "record", *options, "--"], version)
    path.write_text(drawn(data.read_text().splitlines(), f"{row.key}: {version}"))


def _run(bench: benches.Bench, row: benches.Row, recorder: Sequence[str | Path], version: str) -> None:
    with row.open(dataclasses.replace(bench, recorder=recorder)) as sides:
        side = bench.earlier(sides.ours) if version == "before" else sides.ours
        assert side
        side()


def _table(data: Path, kind: str) -> str:
    """Return the first lines of a perf report."""
    output = processes.run("perf", "report", kind, "--call-graph", "none", "--stdio", "--input", data).stdout
    lines = [line.rstrip() for line in output.splitlines() if line.strip() and not line.startswith("#")]
    return "\n".join([f"perf report {kind}", *lines[:LINES]])


def drawn(folded: Sequence[str], title: str) -> str:
    """Return a flame graph as SVG, the first caller on top.

    ``folded``: of each stack its functions from the first caller on, with semicolons between, and the number
    of samples.
    """
    root = Frame()
    for line in folded:
        stack, _, count = line.rpartition(" ")
        frame = root
        frame.samples += int(count)
        for name in itertools.filterfalse(PASSING.search, stack.split(";")):
            frame = frame.called.setdefault(name, Frame())
            frame.samples += int(count)
    shapes = list(_shapes(root, root.samples, 0, 1))
    height = HEIGHT * (2 + max((depth for depth, _ in shapes), default=0))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"><style>{_STYLE}</style>'
    caption = f'<text x="3" y="11">{saxutils.escape(title)}, {root.samples} samples</text>'
    return "\n".join([head, caption, *(shape for _, shape in shapes), "</svg>\n"])


def _shapes(parent: Frame, total: int, start: int, depth: int) -> Iterator[tuple[int, str]]:
    """Yield the depth and the SVG of each frame; ``start``: the samples left of it."""
    for name, frame in sorted(parent.called.items()):
        if frame.samples >= LEAST * total:
            yield depth, _shape(name, start / total * WIDTH, depth * HEIGHT, frame.samples / total)
            yield from _shapes(frame, total, start, depth + 1)
        start += frame.samples


def _shape(name: str, x: float, y: int, part: float) -> str:
    width = part * WIDTH
    function = name.partition(" (")[0].replace(".<locals>", "")
    own = ' class="own"' if "cdi_worker/" in name else ""
    text = saxutils.escape(function[: int((width - 4) / _CHARACTER)])
    label = f'<text x="{x + 2:.0f}" y="{y + 11}">{text}</text>' if text else ""
    shape = f'<rect{own} x="{x:.1f}" y="{y}" width="{width:.1f}" height="{HEIGHT}">'
    return f"{shape}<title>{saxutils.escape(name)}: {part:.1%}</title></rect>{label}"


if __name__ == "__main__":
    main()
