"""What the benchmark makes of its figures: failures and aims."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.bench import bench as benches
from tests.bench import profile, public, report, run, wire
from tests.bench.bench import Bench, Row, Sides, Work
from tests.bench.machine import Machine
from tests.bench.measure import Cost
from tests.bench.results import Result, Results
from tests.bench.rows import scale
from tests.bench.settings import FAR, MACHINE, POD
from tests.support import limits, processes, repository, servers, worker

MiB = 1 << 20


def measured(bench: Bench, sides: Sides, aim: float | None = None) -> Result:
    row = Row("row", lambda _: contextlib.nullcontext(sides), aim=aim)
    return run.row(bench, row, Machine(bench, {"network": 100, "disk file": 10}))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    web = servers.Web("http", 1, tmp_path, tmp_path)
    return Bench(tmp_path, web, tmp_path / "target", tmp_path / "block", MACHINE, None, rounds=3)


def always(wall: float) -> Callable[[], Cost]:
    return lambda: Cost(wall, wall, 0)


def test_ratio_of_medians_is_compared_with_the_aim(bench: Bench) -> None:
    walls = iter([1.0, 9.0, 2.0])
    result = measured(bench, Sides(lambda: Cost(next(walls), 0, 0), always(4)), aim=0.5)
    assert (result.ratio, result.verdict) == (0.5, "ok")
    assert measured(bench, Sides(always(3), always(4)), aim=0.5).verdict == "**missed**"


def test_machine_limit_excuses_a_missed_aim(bench: Bench) -> None:
    sides = Sides(always(1.1), always(1.0), work=Work(fetched=50, written=10))
    result = measured(bench, sides, aim=0.5)
    assert (result.limit, result.verdict) == (("disk", 1.0), "limit")


def test_failure_of_a_side_is_its_result(bench: Bench) -> None:
    fail = bench.command(["sh", "-c", "echo no such disk; exit 1"], bench.file)
    result = measured(bench, Sides(fail, always(1), work=Work(1, 1)), aim=0.5)
    assert result.verdict == "**failed**"
    assert result.failure.endswith("no such disk")
    assert "no such disk" in measured(bench, Sides(always(1), fail), aim=0.5).rival_failure


def test_failure_to_start_a_row_does_not_end_the_run(bench: Bench) -> None:
    @contextlib.contextmanager
    def opening(_: Bench) -> Iterator[Sides]:
        pytest.skip("needs a server")
        yield Sides(always(1))

    result = run.row(bench, Row("row", opening), Machine(bench, {}))
    assert (result.skipped, result.verdict) == ("needs a server", "not run")


def test_row_killed_for_memory_says_so(bench: Bench) -> None:
    with limits.cgroup(memory=32 * MiB, cpus=1) as group:
        pod = dataclasses.replace(bench, setting=POD, group=group, rounds=1)
        eat = pod.command([sys.executable, "-c", "bytearray(128 << 20)"], pod.file)
        assert measured(pod, Sides(eat, always(1))).failure.startswith("killed for memory")


def test_another_version_is_measured_in_turn_with_this_one(bench: Bench, tmp_path: Path) -> None:
    earlier = tmp_path / "installed" / "cdi_worker"
    earlier.mkdir(parents=True)
    (earlier / "__main__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')")
    compared = dataclasses.replace(bench, before=earlier.parent)
    result = measured(compared, Sides(bench.command([*worker.COMMAND, "--version"], bench.file)))
    assert (tmp_path / "ran").read_text() == "xxx"
    assert result.ours
    assert result.before
    assert f"before {result.before.wall:.2f} s" in report.line(result)
    (earlier / "__main__.py").write_text("exit('too old')")
    result = measured(compared, Sides(bench.command([*worker.COMMAND, "--version"], bench.file)))
    assert (result.before, result.failure) == (None, "")
    assert result.rival_failure.endswith("too old")


def test_pod_is_compared_with_the_go_worker(bench: Bench) -> None:
    pod = dataclasses.replace(bench, setting=POD)
    result = measured(pod, Sides(always(3), always(9), go=always(4)), aim=0.5)
    assert (result.ratio, result.aim, result.verdict) == (0.75, run.POD_AIM, "**missed**")


def test_page_has_a_line_for_each_row(tmp_path: Path) -> None:
    now = Results(tmp_path / "now")
    result = Result("qcow2", "file", "curl", 0.5, Cost(1, 1, MiB), Cost(2, 2, MiB), ratio=0.5)
    now.keep("machine", "qcow2, file", result)
    page = report.page(["qcow2, file"], Results(tmp_path / "now"))
    assert "| qcow2 | file | curl | 1.00 | 2.00 |" in page


def test_rows_of_one_setting_are_measured_in_no_other() -> None:
    everywhere, single = (
        Row("row", lambda _: contextlib.nullcontext(Sides(always(1))), only=only) for only in ("", "far")
    )
    assert (everywhere.is_for(POD), everywhere.is_for(FAR)) == (True, False)
    assert (single.is_for(POD), single.is_for(FAR)) == (False, True)
    assert not dataclasses.replace(everywhere, pod=False).is_for(POD)


def test_rows_have_names_of_their_own() -> None:
    from tests.bench import rows

    assert rows
    keys = [row.key for row in benches.ROWS]
    assert len(keys) == len({*keys})


_ROUND_TRIP = """
import pathlib, socket, sys, time
from tests.bench import wire
with wire.delayed(pathlib.Path(sys.argv[1]), 0.1, 10**9), socket.create_server(("127.0.0.1", 0)) as server:
    started = time.monotonic()
    with socket.create_connection(server.getsockname()):
        print(time.monotonic() - started)
"""


def test_wire_delays_the_loopback_interface(tmp_path: Path) -> None:
    processes.need_root()
    processes.need("unshare", "ip")
    if not Path("/dev/net/tun").exists():
        pytest.skip("needs /dev/net/tun")
    assert wire
    env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(repository.ROOT)}
    argv = ["unshare", "--net", sys.executable, "-c", _ROUND_TRIP, tmp_path]
    assert 0.1 < float(processes.run(*argv, env=env).stdout) < 0.3


@pytest.mark.parametrize("spacing", [1 * MiB, 64 * MiB])
def test_images_of_many_extents_are_valid(tmp_path: Path, spacing: int) -> None:
    with scale._image(tmp_path, spacing, 5000) as image:
        checked = json.loads(processes.run("qemu-img", "check", "--output=json", image).stdout)
        mapped = json.loads(processes.run("qemu-img", "map", "--output=json", image).stdout)
    assert (checked["check-errors"], checked.get("leaks", 0)) == (0, 0)
    data = [extent for extent in mapped if extent["data"]]
    assert [extent["start"] // spacing for extent in data] == [*range(5000)]
    assert {extent["length"] for extent in data} == {scale.CLUSTER}


def test_public_page_says_how_many_times_as_fast(tmp_path: Path, bench: Bench) -> None:
    name = "raw, file"
    walls = {"ours": iter([9.0, 1.0, 1.0, 1.0]), "rival": iter([9.0, 2.0, 4.0, 3.0])}
    sides = Sides(
        lambda: Cost(next(walls["ours"]), 0.5, 30 * MiB), lambda: Cost(next(walls["rival"]), 1.0, 0)
    )
    found = public.compare(bench, Row("raw", lambda _: contextlib.nullcontext(sides)))
    assert isinstance(found, public.Comparison)
    assert "cdi-worker ran 3.00 ± 1.00 times as fast as curl | dd" in str(found)
    assert "3.000 s ±  1.000 s" in str(found)
    text = public.page([found], 3, 0.2)
    assert (
        f"| {name} | `curl \\| dd` | 3.00 ± 1.00 s | 1.00 ± 0.00 s | **3.00** ± 1.00 | 0.50 | 30 MiB |"
        in text
    )
    assert "**3.0 times as fast**" in text


def test_row_without_figures_says_why(bench: Bench) -> None:
    def fail() -> Cost:
        raise AssertionError("no such disk")

    calls = iter([Cost(1, 1, 1)])
    sides = Sides(lambda: next(calls, None) or fail(), always(1))
    found = public.compare(bench, Row("raw", lambda _: contextlib.nullcontext(sides)))
    assert found == "raw, file: cdi-worker failed: no such disk"


def test_public_rows_are_declared() -> None:
    assert set(public.ROWS) <= {row.key for row in benches.ROWS}


def test_flame_graph_shows_who_called_whom() -> None:
    folded = [
        "main (cdi_worker/importer/cli.py);Command.main (click/core.py);write (cdi_worker/a.py) 60",
        "main (cdi_worker/importer/cli.py);read (lib<1>.py) 39",
        "rare (cdi_worker/importer/cli.py) 1",
        "rarer (cdi_worker/importer/cli.py) 0",
    ]
    found = ET.fromstring(profile.drawn(folded, "row: now"))
    shapes = {
        str(each[0].text): (float(each.attrib["x"]), float(each.attrib["y"]), float(each.attrib["width"]))
        for each in found.iter("{http://www.w3.org/2000/svg}rect")
    }
    assert shapes == {
        "main (cdi_worker/importer/cli.py): 99.0%": (0.0, 15.0, 990.0),
        "read (lib<1>.py): 39.0%": (0.0, 30.0, 390.0),
        "write (cdi_worker/a.py): 60.0%": (390.0, 30.0, 600.0),
        "rare (cdi_worker/importer/cli.py): 1.0%": (990.0, 15.0, 10.0),
    }
