"""Write the figures of all rows as a page."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tests.bench import bench as benches
from tests.bench.bench import Row
from tests.bench.compare import CDI, OURS, Comparison
from tests.bench.report import Report


def page(reports: Sequence[Report]) -> str:
    """Return the page of the reports, one for each release of Debian."""
    return PAGE.format(
        sums="\n".join(map(_sum, reports)),
        table=_table(reports),
        measured="\n".join(map(_measured, reports)),
    )


def first(reports: Sequence[Report], readme: str) -> str:
    """Return README with the figures of some rows, each from the least to the most of all releases."""
    lines = []
    for key, title in FIRST.items():
        found = [each for each in (report.found.get(key) for report in reports) if each and _has_rival(each)]
        ratios = [each.times(each.row.rival)[0] for each in found]
        rival = found[0].row.rival.replace("|", r"\|")
        lines.append(f"| {title} | `{rival}` | **{min(ratios):.1f} to {max(ratios):.1f}** |")
    every = [[each.times(each.row.rival)[0] for each in _full(report)] for report in reports]
    means = sorted(map(statistics.geometric_mean, every))
    least, most = min(map(min, every)), max(map(max, every))
    means_of_all = f"{least:.1f} to {most:.1f}; mean **{means[0]:.1f} to {means[-1]:.1f}**"
    count = max(map(len, every))
    lines.append(f"| {count} disks, sources and targets | the usual commands | {means_of_all} |")
    systems = " and ".join(str(report.facts["system"]) for report in reports)
    head = ("", f"| disk | compared with | times as fast, {systems} |", "|---|---|---|")
    begin = readme.index("\n", readme.index("<!-- figures")) + 1
    end = readme.index("<!-- end of figures")
    return "\n".join((readme[:begin].rstrip("\n"), *head, *lines, "", readme[end:]))


def _full(report: Report) -> list[Comparison]:
    """Return the rows whose rival does all that is needed."""
    measured = (each for each in report.found.values() if _has_rival(each))
    return [each for each in measured if not (each.row.is_least or each.row.more or each.row.scale)]


def _sum(report: Report) -> str:
    """Return the line of what all rows of a report have in common."""
    full = _full(report)
    ratios = [each.times(each.row.rival)[0] for each in full]
    if not ratios:
        return f"- {report.facts['system']}: not measured"
    return SUM.format(
        system=report.facts["system"],
        mean=statistics.geometric_mean(ratios),
        count=len(ratios),
        least=min(ratios),
        most=max(ratios),
        cpu=statistics.geometric_mean([_cpu(each) for each in full]),
        memory=max(each.figures[OURS].memory for each in full) >> 20,
    )


def _measured(report: Report) -> str:
    facts = report.facts
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return f"- {facts['system']}, {facts['date']}: {facts['machine']}. {versions}."


def _table(reports: Sequence[Report]) -> str:
    """Return a line for each row, with the figures of each release beside one another."""
    has_cdi = any(CDI in each.figures for report in reports for each in report.found.values())
    titles = ["disk, target", "compared with"]
    for report in reports:
        titles += [
            f"{report.facts['system']}: s",
            "times as fast",
            "CPU",
            "MiB",
            "bound by",
            *[CDI] * has_cdi,
        ]
    lines = [titles, ["---"] * len(titles)]
    lines += [_cells(row, reports, has_cdi) for row in benches.ROWS if not row.scale]
    return "\n".join("|" + "|".join(line) + "|" for line in lines)


def _cells(row: Row, reports: Sequence[Report], has_cdi: bool) -> list[str]:
    found = [report.found.get(row.key) for report in reports]
    rival = f"`{row.rival}`".replace("|", r"\|") if row.rival else ""
    cells = [row.key, rival + "¹" * row.is_least]
    for each in found:
        cells += _figures(each)
        cells += [_cdi(each)] * has_cdi
    return cells


def _figures(each: Comparison | None) -> list[str]:
    """Return the cells of a row on one release: the reason, if it has no figures."""
    if each is None or not (_has_rival(each) or (OURS in each.figures and not each.row.rival)):
        reason = next(iter(each.failures.values() if each else ()), "not measured")
        return [reason.replace("|", r"\|"), *[""] * 4]
    ours, ratio = each.figures[OURS], ""
    if each.row.rival:
        ratio = "**{:.2f}** ± {:.2f}".format(*each.times(each.row.rival))
    seconds = f"{ours.mean:.2f}" + (f" (wire {each.bound:.2f})" if each.bound else "")
    # CPU and memory of the servers are not measured.
    cpu = f"{_cpu(each):.2f}" if _has_rival(each) and not each.row.is_least else ""
    memory = "" if each.row.is_least else f"{ours.memory >> 20}"
    return [seconds, ratio, cpu, memory, each.bound_by]


def _cdi(each: Comparison | None) -> str:
    """Return the time of CDI's worker, by ours."""
    if each is None or CDI not in each.figures or OURS not in each.figures:
        return "failed" if each and CDI in each.failures else ""
    return f"{each.figures[CDI].mean:.2f} ({each.times(CDI)[0]:.2f})"


def _has_rival(each: Comparison) -> bool:
    return {OURS, each.row.rival} <= each.figures.keys()


def _cpu(each: Comparison) -> float:
    """Return our CPU time by the rival's, of which a hundredth of a second is the least that is counted."""
    return max(each.figures[OURS].cpu, 0.01) / max(each.figures[each.row.rival].cpu, 0.01)


#: The rows on the first page, and their names there.
FIRST = {
    "qcow2, file": "qcow2",
    "raw.gz, file": "raw.gz",
    "raw, block": "raw, to a device",
}
SUM = (
    "- {system}: **{mean:.1f} times as fast** ({count} rows, {least:.2f} to {most:.2f}), {cpu:.2f} of their"
    " CPU time, at most {memory} MiB"
)

PAGE = """\
# Benchmarks

cdi-worker, compared with the commands that people use instead (geometric means):

{sums}

Its time includes what most of them do not do: the image is checked before it is read, and the disk becomes
usable only when all of it is on storage. Compare the ratios, not the seconds. Repeat it: `make bench`, as
root, with 10 GiB of free space.

{table}

Seconds are means of three runs or more after one that is not counted; a run of more than a minute is the only
one. ± is the standard deviation, *CPU* our CPU time by that of the command, *MiB* our peak of anonymous
memory. The disk is an ext4 file system of 2 GiB with 400 MiB of files from /usr, served by nginx on loopback.
Every command ends with a sync. One with ¹ does less than is needed; the mean leaves out these, start-up,
distance and scale. *wire*: the seconds of the bytes on it.

*Bound by* is what was busy most of our time: a CPU (also a server's) or the disk; if neither, the network. On
a slower network, expect the time that it needs for the bytes.

{measured}
"""
