"""The figures of whole runs: for each release of Debian a file of JSON lines, of which the page is made.

The first line says where and with what was measured; each other one has the costs of a row.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.bench import bench as benches
from tests.bench import go
from tests.bench.compare import BEFORE, CDI, Comparison, Figures
from tests.bench.measure import Cost

#: All programs of rows and of their servers that print their version.
_TOOLS: Final = ["qemu-img", "curl", "dd", "pigz", "xz", "zstd", "tar", "cmp", "nbdkit", "nbdcopy"]


@dataclasses.dataclass(frozen=True)
class Report:
    """What was measured on a release of Debian: the lines of its file."""

    facts: Mapping[str, Any]
    found: Mapping[str, Comparison]


def save(folder: Path, found: Sequence[Comparison]) -> None:
    """Write the figures to the file of this machine's release; those of other rows stay."""
    system = platform.freedesktop_os_release()
    path = folder / f"{system['ID']}-{system.get('VERSION_ID', 'sid')}.jsonl"
    facts = {
        "system": path.stem.replace("-", " ").title(),
        "date": str(dt.datetime.now(dt.UTC).date()),
        "machine": f"{os.cpu_count()} cores, {_processor()}, Linux {platform.release()}",
        "versions": _versions(any(CDI in each.figures for each in found)),
    }
    known = load(path).found if path.exists() else {}
    rows = {**known, **{each.row.key: each for each in found}}
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in (facts, *map(_line, rows.values()))))


def load(path: Path) -> Report:
    """Read a file; rows that no longer exist are left out."""
    facts, *lines = map(json.loads, path.read_text().splitlines())
    rows = {row.key: row for row in benches.ROWS}
    found = {
        line["row"]: Comparison(
            rows[line["row"]],
            {name: Figures(name, [Cost(*cost) for cost in costs]) for name, costs in line["costs"].items()},
            line["failures"],
            line["bound"],
        )
        for line in lines
        if line["row"] in rows
    }
    return Report(facts, found)


def _line(each: Comparison) -> dict[str, Any]:
    """Return what is kept of a row: not another version of ours, which each run chooses."""
    costs = {
        name: [[round(value, 3) for value in dataclasses.astuple(cost)] for cost in figures.costs]
        for name, figures in each.figures.items()
        if name != BEFORE
    }
    failures = {name: reason for name, reason in each.failures.items() if name != BEFORE}
    return {"row": each.row.key, "bound": each.bound, "costs": costs, "failures": failures}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (each.partition(": ")[2] for each in lines if each.startswith("model name"))
    return next(names, platform.machine())


def _versions(has_cdi: bool) -> dict[str, str]:
    """Return the versions of the programs that are measured, and of their server."""
    commands = {tool: [tool, "--version"] for tool in _TOOLS} | {"nginx": ["nginx", "-v"]}
    if has_cdi:
        # Go notes the commit that a program was built from.
        commands["CDI"] = ["go", "version", "-m", f"{os.environ[go.PROGRAMS]}/cdi-importer"]
    found = {"Python": platform.python_version()}
    for name, command in commands.items():
        # By env: one that is not installed prints no version.
        done = subprocess.run(["env", *command], capture_output=True, text=True, check=False)
        wanted = r"vcs\.revision=(\w{12})" if name == "CDI" else r"(\d+(?:\.\d+)+)"
        version = re.search(wanted, done.stdout + done.stderr)
        found[name] = version[1] if version else "of unknown version"
    return {**found, "ovirt-imageio": importlib.metadata.version("ovirt-imageio")}
