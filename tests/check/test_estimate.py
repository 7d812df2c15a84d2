"""deploy/estimate.py: what it simulates, its list, and that its figures are those of the benchmarks."""

from __future__ import annotations

import json
import math
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cdi_worker import units
from cdi_worker.importer.kubernetes import pod
from tests.bench import compare, costs, report
from tests.bench.rows import kinds
from tests.check.docs.test_tables import tables
from tests.support import repository

sys.path.insert(0, str(repository.ROOT / "deploy"))
import estimate

PROGRAM = repository.ROOT / "deploy/estimate.py"
REPORTS = [report.load(path) for path in sorted((repository.ROOT / "docs/about/benchmarks").glob("*.jsonl"))]
GIB = 1 << 30


def disk(host: str = "a", alone: float = 10, **needs: float) -> estimate.Disk:
    return estimate.Disk(host, needs, alone)


def run(
    folder: Path, text: str | bytes, *options: str, costs: Any = None
) -> subprocess.CompletedProcess[str]:
    (folder / "disks.txt").write_bytes(text if isinstance(text, bytes) else text.encode())
    if costs:
        (folder / "costs.json").write_text(json.dumps(costs))
        options = ("--costs", "costs.json", *options)
    argv = [sys.executable, "-I", PROGRAM, "disks.txt", *options]
    return subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=60, check=False)


def estimated(folder: Path, text: str, *options: str, **more: Any) -> list[dict[str, Any]]:
    done = run(folder, text, "--json", *options, **more)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


# -- the simulation ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "pods", "capacity", "seconds", "limit"),
    [
        ([disk()] * 8, 2, {}, 40, "pods"),
        ([disk()] * 8, 8, {}, 10, "the last disks"),
        # CPU, a link and storage: 8 disks need 80 of what gives 2 a second.
        ([disk(CPU=10)] * 8, 8, {"CPU": 2}, 40, "CPU"),
        ([disk(CPU=10)] * 8, 1, {"CPU": 2}, 80, "pods"),
        ([disk(link=5, CPU=1)] * 8, 8, {"link": 2, "CPU": 2}, 20, "link"),
        # The list is the order: a long one at its end is alone at the end.
        ([disk()] * 6 + [disk(alone=60)], 2, {}, 90, "the last disks"),
        ([disk(alone=60)] + [disk()] * 6, 2, {}, 60, "pods"),
        # A host's link limits its disks only.
        ([disk("a", **{"link of a": 40}), disk("b")], 1, {"link of a": 1}, 40, "link of a"),
        # What limits most of the disks is what limits.
        (
            [disk("a", **{"link of a": 10}), *[disk("b", link=10)] * 3],
            3,
            {"link of a": 0.6, "link": 2},
            10 / 0.6,
            "link",
        ),
        # Of a shared link, a disk gets what the slower one leaves: 0.7 for 20 seconds, then all.
        (
            [disk("a", link=10, **{"link of a": 10}), disk("b", 20, link=20)],
            1,
            {"link": 1.2, "link of a": 0.5},
            26,
            "link of a",
        ),
    ],
)
def test_simulation(
    found: Sequence[estimate.Disk], pods: int, capacity: dict[str, float], seconds: float, limit: str
) -> None:
    result = estimate.simulate(found, pods, capacity)
    assert result.seconds == pytest.approx(seconds)
    assert max(result.limits, key=lambda name: result.limits[name]) == limit
    assert sum(result.limits.values()) == pytest.approx(1)


def test_simulation_keeps_within_its_bounds() -> None:
    """No resource gives more than it has, no disk is faster than alone, nothing is slower than one by one."""
    chance = random.Random(7)
    for _ in range(100):
        names = ["CPU", "link", "storage", "link of a", "link of b"]
        capacity = {name: chance.uniform(0.5, 8) for name in chance.sample(names, chance.randint(0, 5))}
        found = []
        for _ in range(chance.randint(1, 30)):
            host = chance.choice("ab")
            own = [name for name in names if name[-2:] not in {" a", " b"} or name[-1] == host]
            found.append(disk(host, chance.uniform(1, 20), **{name: chance.uniform(0, 9) for name in own}))
        result = estimate.simulate(found, chance.randint(1, 9), capacity)
        used = {name: sum(each.needs.get(name, 0) for each in found) / capacity[name] for name in capacity}
        assert result.seconds >= max([*used.values(), *(each.alone for each in found)]) * (1 - 1e-6)
        assert result.seconds <= sum([*used.values(), *(each.alone for each in found)]) * (1 + 1e-6)


def test_search_finds_the_fewest_pods_that_are_enough() -> None:
    found = [disk("a", 10, storage=10), disk("b", 10, storage=10)] * 200
    tried = estimate.search(found, 200, {"storage": 20})
    # 20 pods, 10 for each host, keep the storage busy.
    assert tried[-1].pods == 10
    assert tried[-1].seconds == pytest.approx(4000 / 20)
    assert [each.pods for each in tried] == sorted({each.pods for each in tried})
    assert estimate.search(found, 4, {"storage": 20})[-1].pods == 4
    assert estimate.search([disk()], 1, {})[-1].pods == 1


# -- the list and the options ----------------------------------------------------------------------

COSTS = {
    "crowded": 1.25,
    "start": 1.0,
    "kinds": {
        "raw": {"size": GIB, "read": GIB, "written": GIB // 2, "cpu": 3.0, "memory": 1},
        "vsphere": {"size": GIB, "read": GIB // 4, "written": GIB, "cpu": 5.0, "memory": 1},
        "zeros": {"size": GIB, "read": GIB, "written": 0, "cpu": 3.0, "memory": 1},
    },
}


def test_cost_of_a_disk_follows_from_its_size_and_kind(tmp_path: Path) -> None:
    """CPU: 1 s to start and 2 s for each GiB, of which a pod has 0.75 CPU."""
    (found,) = estimated(tmp_path, "4Gi", costs=COSTS)
    assert found == {"pods": 1, "seconds": 9 / 0.75, "limits": {"the last disks": 1}}
    (found,) = estimated(tmp_path, "4Gi", "--rate", "128Mi/s", "--pod-start", "5", costs=COSTS)
    assert found["seconds"] == 37
    (found,) = estimated(tmp_path, "4Gi", "--storage", "64Mi/s", costs=COSTS)
    assert found["seconds"] == pytest.approx(32)
    (found,) = estimated(tmp_path, "4Gi zeros", "--storage", "64Mi/s", costs=COSTS)
    assert found["seconds"] == 12
    # With 2 CPUs for 3 pods, each costs a quarter more.
    (found,) = estimated(tmp_path, "4Gi\n" * 3, "--cpus", "2", "--pods", "3", costs=COSTS)
    assert found["seconds"] == pytest.approx(3 * 9 * 1.25 / 2)
    (found,) = estimated(tmp_path, "4Gi vsphere", "--link", "64Mi/s", "--storage", "1G", costs=COSTS)
    # 17 s of CPU take 22.7 s; the link needs 16 s for a quarter of the data.
    assert found["seconds"] == pytest.approx(17 / 0.75)
    (found,) = estimated(tmp_path, "4Gi vsphere", "--link", "8Mi/s", "--storage", "128Mi/s", costs=COSTS)
    assert found["seconds"] == pytest.approx(128)
    assert found["limits"] == {"link": 1}


def test_list_may_be_csv(tmp_path: Path) -> None:
    plain = estimated(tmp_path, "1.5Gi raw a\n2G\n3GiB vsphere\n", "--pods=1", costs=COSTS)
    csv = '\ufeffsize;kind;host\r\n"1.5Gi" ; "raw";a # first\r\n\r\n2GB,\n# none\n3Gi\tvsphere\t\n'
    assert estimated(tmp_path, csv, "--pods=1", costs=COSTS) == plain


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1Gi\n0 raw\n", "disks.txt: line 2: '0' is not a size such as 40Gi or 500M"),
        ("1Gi\nraw 5Gi\n", "line 2: 'raw' is not a size such as 40Gi"),
        ("40\n", "line 1: 40 is less than 1Mi; write a unit, such as 40Gi"),
        ("1Gi qcow3", "line 1: unknown kind 'qcow3'; known: raw, vsphere, zeros"),
        ("1Gi raw ESX_1", "line 1: 'esx_1' is not a name for a host: use a-z, 0-9, - and ."),
        ("1Gi raw a b", "line 1: 'b': a line is SIZE KIND HOST"),
        ("-1Gi", "line 1: '-1Gi' is not a size"),
        ("9" * 5000, f"line 1: '{'9' * 40}' is not a size"),
        ("nan", "line 1: 'nan' is not a size"),
        (b"\xff\x00\xfe", "line 1: '�\\x00�' is not a size"),
        ("# nothing\n\n", "disks.txt: has no disks"),
    ],
)
def test_line_that_is_wrong_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    done = run(tmp_path, text, costs=COSTS)
    assert done.returncode == 1
    assert message in done.stderr
    assert done.stderr.startswith("estimate: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "10Gib"], "argument --link: '10Gib' is not a rate such as 10Gbit or 500Mi/s"),
        (["--link", "xbit"], "argument --link: 'xbit' is not a rate such as 10Gbit"),
        (["--cpus", "0"], "argument --cpus: '0' is not a number"),
        (["--pods", "-1"], "argument --pods: '-1' is not a number"),
        (["--pods", "5", "--host-pods", "4"], "5 pods for each of 2 hosts; possible: 4"),
        (["--memory", "1G"], "0 pods for each of 2 hosts; possible: 0"),
        (["--costs", "/nothing"], "No such file or directory: '/nothing'"),
    ],
)
def test_option_that_is_wrong_is_named(tmp_path: Path, options: list[str], message: str) -> None:
    done = run(tmp_path, "1Gi raw a\n1Gi raw b", *options)
    assert done.returncode
    assert message in done.stderr


def test_memory_and_host_pods_bound_the_pods(tmp_path: Path) -> None:
    text = "1Gi raw a\n1Gi raw b\n" * 20
    assert estimated(tmp_path, text, "--memory", "3G")[-1]["pods"] == 2
    assert estimated(tmp_path, text, "--host-pods", "3")[-1]["pods"] == 3
    assert [each["pods"] for each in estimated(tmp_path, text, "--pods", "7")] == [7]


def test_help_lists_the_kinds() -> None:
    done = subprocess.run([PROGRAM, "--help"], capture_output=True, text=True, check=True, timeout=60)
    assert all(kind in " ".join(done.stdout.split()) for kind in kinds.KINDS)


def test_pod_is_that_of_a_job(tmp_path: Path) -> None:
    limits, requests = pod.RESOURCES["limits"], pod.RESOURCES["requests"]
    two = {name: 2 * int(requests[name].rstrip("mM")) for name in requests}
    assert {"pods": 1, **two} == estimate.REQUESTS
    cpu = int(limits["cpu"].removesuffix("m")) / 1000
    stated = ("--pod-cpu", str(cpu), "--pod-memory", limits["memory"], "--memory", "5G")
    assert estimated(tmp_path, "1Gi\n" * 9, *stated) == estimated(tmp_path, "1Gi\n" * 9, "--memory", "5G")
    most = 5 * 10**9 // units.parse_quantity(limits["memory"])
    assert run(tmp_path, "1Gi", "--memory", "5G", f"--pods={most}").returncode == 0
    assert run(tmp_path, "1Gi", "--memory", "5G", f"--pods={most + 1}").returncode == 1


# -- the figures -----------------------------------------------------------------------------------


def test_costs_are_those_of_the_benchmarks() -> None:
    """``make bench`` writes both."""
    assert costs.FILE.read_text() == costs.text(REPORTS)
    assert json.loads(costs.FILE.read_text())["kinds"].keys() == kinds.KINDS.keys()
    page = (repository.ROOT / "docs/pods/scale.md").read_text()
    assert f"A disk of {kinds.SIZE >> 30} GiB " in page


def test_page_has_the_seconds_that_the_program_predicts(tmp_path: Path) -> None:
    known = json.loads(costs.FILE.read_text())["kinds"]
    rows = {
        row[0].strip("`"): row for row in (line[2:-2].split(" | ") for line in tables.costs() if "`" in line)
    }
    assert rows.keys() == known.keys()
    for kind, row in rows.items():
        for link, shown in zip(("1Gbit", "10Gbit"), row[-2:], strict=True):
            (found,) = estimated(tmp_path, f"{known[kind]['size']} {kind}", "--link", link)
            assert f"{found['seconds']:.1f} s" == shown


def test_imports_at_once_took_about_as_long_as_predicted() -> None:
    """Within a fifth of the measured time (medians), for all rows in the published figures."""
    found = [each for made in REPORTS for each in made.found.values() if each.row.rival == kinds.ESTIMATE]
    assert {each.row.key for each in found} == {
        f"50 imports at once: {names}, file" for names in ("raw", "raw, qcow2, raw.gz")
    }
    for each in found:
        predicted, measured = (each.figures[name].median.wall for name in (kinds.ESTIMATE, compare.OURS))
        ratio = predicted / measured
        assert math.isclose(ratio, 1, abs_tol=0.2), (each.row.key, ratio)
