"""Write the results of the benchmark as a page with plots."""

from __future__ import annotations

import datetime as dt
import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from tests.bench import settings
from tests.bench.measure import Cost
from tests.bench.results import Result, Results
from tests.support import processes

MIB = 1 << 20
HEAD = ["row", "target", "s", "rival s", "Go s", "ratio", "aim", "", "limit s", "CPU s (ratio)", "MiB"]
#: Points of a plot: size in bytes and cost.
Points = Sequence[tuple[int, Cost]]


def cells(result: Result) -> list[str]:
    """Return a line of the table."""
    ours, rival, go = result.ours, result.rival, result.go
    compared = rival or go
    ratio = f"{result.ratio:.2f}" if result.ratio is not None else ""
    return [
        result.name,
        result.target,
        f"{ours.wall:.2f}" if ours else "",
        f"{rival.wall:.2f}" if rival else "",
        f"{go.wall:.2f}" if go else "",
        " ".join(filter(None, (ratio, result.note))),
        f"{result.aim}" if result.aim is not None else "",
        result.verdict,
        f"{result.limit[0]} {result.limit[1]:.2f}" if result.limit else "",
        (f"{ours.cpu:.2f}" + (f" ({ours.cpu / compared.cpu:.2f})" if compared and compared.cpu else ""))
        if ours
        else "",
        f"{ours.memory / MIB:.0f}" if ours else "",
    ]


def line(result: Result) -> str:
    """Return a line for the terminal."""
    why = (result.failure, result.rival_failure and f"rival: {result.rival_failure}", result.skipped)
    return " | ".join([*cells(result), *filter(None, (_compared(result), *why))])


def _compared(result: Result) -> str:
    ours, before = result.ours, result.before
    if not ours or not before:
        return ""
    cpu = f", CPU {ours.cpu / before.cpu:.2f}" if before.cpu else ""
    return f"before {before.wall:.2f} s: {ours.wall / before.wall:.2f}{cpu}"


def write(path: Path, keys: Sequence[str], now: Results) -> None:
    """Write the page, with its plots beside it. ``keys``: of all declared rows, in order."""
    folder = path.with_suffix("")
    folder.mkdir(exist_ok=True)
    machine = now.rows.get("machine", {})
    plot_times(folder / "times.svg", [result for result in machine.values() if result.aim])
    curves = _curves(machine.values())
    growth = {name: points for name, points in curves.items() if "extent" not in name}
    extents = {name: points for name, points in curves.items() if name not in growth}
    for name, points in (("growth", growth), ("extents", extents)):
        if not points:
            continue
        plot_growth(folder / f"{name}.svg", points, "seconds", lambda cost: cost.wall)
        plot_growth(folder / f"{name}-memory.svg", points, "peak memory, MiB", lambda cost: cost.memory / MIB)
    path.write_text(page(keys, now))


def page(keys: Sequence[str], now: Results) -> str:
    """Return the page."""
    return PAGE.format(
        date=dt.datetime.now(dt.UTC).date(),
        machine=f"{os.cpu_count()} cores, {cpu()}, Linux {platform.release()}",
        versions=versions(),
        table=_overview(keys, now),
        plots=_plots(now),
        sections="\n\n".join(_section(setting, keys, now) for setting in settings.SETTINGS.values()),
    )


def _overview(keys: Sequence[str], now: Results) -> str:
    """Return the table of all rows, each once, with the ratios in the other settings."""
    names = [setting.name for setting in settings.SETTINGS.values()]
    pods = [
        setting.name for setting in settings.SETTINGS.values() if setting.is_pod and not setting.is_special
    ]
    lines = [[*HEAD[:2], "compared with", *HEAD[2:], *pods]]
    for key in keys:
        found = {name: now.rows.get(name, {}).get(key) for name in names}
        first = next(filter(None, found.values()), None)
        if first is None or (first.curve and first.aim is None):
            continue
        others = [found[name] for name in pods]
        short = [_short(other) if other and other is not first else "" for other in others]
        shown = cells(first)
        lines.append([*shown[:2], first.rival_is, *shown[2:], *short])
    return table(lines)


def _short(result: Result) -> str:
    ratio = f"{result.ratio:.2f}" if result.ratio is not None else ""
    return " ".join(filter(None, (ratio, result.verdict)))


def _section(setting: settings.Setting, keys: Sequence[str], now: Results) -> str:
    known = now.rows.get(setting.name, {})
    rows = [known[key] for key in keys if key in known]
    rates = now.rates.get(setting.name, {})
    text = [f"## {setting.title}", setting.about]
    if rows:
        text.append(f"Rounds: {min(row.rounds for row in rows)}.")
    else:
        text.append("Not measured in this report.")
    if rates:
        parts = [
            f"{name} {rate:.1f} s" if name.startswith("unpack") else f"{name} {rate / 1e6:.0f} MB/s"
            for name, rate in rates.items()
        ]
        text.append(f"The machine's limits here: {', '.join(parts)}.")
    if setting.is_pod:
        shown = [row for row in rows if not row.skipped]
        text += [table([HEAD, *map(cells, shown)])] if shown else []
    failures = [f"- {row.name}, {row.target}: {why}" for row in rows for why in _failures(row)]
    if failures:
        text.append("\n".join(["Without figures:", "", *failures]))
    elif rows:
        text.append("Every row ran at the first try.")
    return "\n\n".join(text)


def _failures(row: Result) -> list[str]:
    rival = row.rival_failure and f"the rival failed: {row.rival_failure}"
    return [why for why in (row.failure, rival, row.skipped and f"not run: {row.skipped}") if why]


def table(lines: Sequence[Sequence[str]]) -> str:
    """Return lines as a table; the first has its titles."""
    return "\n".join(
        "| " + " | ".join(each) + " |" for each in (lines[0], ["---"] * len(lines[0]), *lines[1:])
    )


PAGE = """\
# Every measured row, with our aims

The [benchmarks](benchmarks.md) in short come first. This page is for those who change the code; it was
generated by `make bench` on {date}. Machine: {machine}. Versions: {versions}.

Each value is the median of the rounds of a row, which alternates with its rival in one run. Compare the
ratios, not the seconds: the machine is shared and noisy.

**The disk** is an ext4 file system with real files from /usr, served by nginx on loopback: 2 GiB with 400 MiB
of files, or as the section says.

**Columns.** *Go s* is CDI's own worker; it is measured where `CDI_GO_WORKER` names the directory of its
programs. *limit s* is the machine's limit: the seconds for what cannot be avoided, the longest of writing
the data to the target (`dd` with a sync), receiving the bytes (one `curl`, or the rate of the emulated
network), and unpacking (the fastest tool, writing to /dev/null). A row that misses its aim and is within
1.2 of that is marked *limit*. The last columns are the ratios in pods; the sections below have their
seconds. CPU includes child processes. MiB is the peak of anonymous memory of all processes together. For
the causes of **missed** aims see [benchmarks-profile.md](benchmarks-profile.md).

{table}

![Time compared with the rivals](benchmarks-rows/times.svg)

{sections}

{plots}"""


def _plots(now: Results) -> str:
    curves = _curves(now.rows.get("machine", {}).values())
    titles = {
        "growth": "Memory does not grow with the size of the image",
        "extents": "Time grows with the extents, not with the virtual size",
    }
    shown = {"extents" if "extent" in name else "growth" for name in curves}
    images = "![Time by size](benchmarks-rows/{0}.svg)\n![Memory by size](benchmarks-rows/{0}-memory.svg)\n"
    return "\n".join(
        f"## {title}\n\n{images.format(name)}" for name, title in titles.items() if name in shown
    )


def _curves(results: Iterable[Result]) -> dict[str, list[tuple[int, Cost]]]:
    found: dict[str, list[tuple[int, Cost]]] = {}
    for result in results:
        if result.curve and result.ours:
            name, size = result.curve
            found.setdefault(name, []).append((size, result.ours))
    return {name: sorted(points, key=lambda point: point[0]) for name, points in found.items()}


def plot_times(path: Path, rows: Sequence[Result]) -> None:
    """Draw our time and the rival's for each row, by the rival's time."""
    from matplotlib import pyplot as plt

    shown = [row for row in rows if row.ours and row.rival]
    places = range(len(shown))
    figure, axes = plt.subplots(figsize=(9, 0.4 * len(shown) + 1))
    for shift, label, costs in (
        (0.2, "cdi-worker", [row.ours for row in shown]),
        (-0.2, "rival", [row.rival for row in shown]),
    ):
        walls = [cost.wall for cost in costs if cost]
        axes.barh([place + shift for place in places], walls, 0.4, label=label)
    axes.set_yticks(list(places), [f"{row.name}, {row.target}" for row in shown])
    axes.invert_yaxis()
    axes.set_xlabel("seconds")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def plot_growth(path: Path, curves: Mapping[str, Points], label: str, value: Callable[[Cost], float]) -> None:
    """Draw a value of the cost against the size of the disk."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5))
    for name, points in curves.items():
        axes.plot(
            [size / (1 << 30) for size, _ in points], [value(cost) for _, cost in points], "o-", label=name
        )
    axes.set_xlabel("size of the disk, GiB")
    axes.set_ylabel(label)
    axes.set_ylim(bottom=0)
    if curves:
        axes.legend()
    figure.savefig(path, bbox_inches="tight")
    plt.close(figure)


def cpu() -> str:
    """Return the name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (each.partition(": ")[2] for each in lines if each.startswith("model name"))
    return next(names, platform.machine())


def versions() -> str:
    """Return the versions of the programs that are measured."""
    tools = {"qemu-img": "--version", "curl": "--version", "xz": "--version", "zstd": "--version"}
    versions = [processes.run(tool, flag).stdout.splitlines()[0] for tool, flag in tools.items()]
    return "; ".join([f"Python {platform.python_version()}", *versions])
