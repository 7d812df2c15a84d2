"""What the benchmark makes of its figures: comparisons, failures and the page."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench import bench as benches
from tests.bench import compare, go, measure, page, report, rows
from tests.bench.bench import Bench, Row, Sides
from tests.bench.compare import BEFORE, CDI, OURS, Comparison, Figures
from tests.bench.measure import Cost
from tests.bench.settings import POD
from tests.support import limits, processes, repository, servers, worker

MiB = 1 << 20
RIVAL = "curl | dd"


def measured(bench: Bench, sides: Sides, **declared: bool) -> Comparison:
    return compare.row(bench, Row("raw", opening(sides), rival=RIVAL, **declared))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    web = servers.Web("http", 1, tmp_path, tmp_path)
    return Bench(tmp_path, web, tmp_path / "target", tmp_path / "block", rounds=3)


def nothing(_: Bench) -> contextlib.AbstractContextManager[Sides]:
    raise AssertionError


def opening(sides: Sides) -> Callable[[Bench], contextlib.AbstractContextManager[Sides]]:
    return lambda _: contextlib.nullcontext(sides)


def always(wall: float) -> Callable[[], Cost]:
    return lambda: Cost(wall, wall, 0)


def test_sides_alternate_after_a_warm_up(bench: Bench) -> None:
    ran = []

    def side(name: str, *walls: float) -> Callable[[], Cost]:
        left = iter(walls)

        def run() -> Cost:
            ran.append(name)
            return Cost(next(left), 0.5, 30 * MiB)

        return run

    found = measured(bench, Sides(side("ours", 9, 1, 1, 1), side("rival", 9, 2, 4, 3)))
    assert ran == ["ours", "rival"] * 4
    assert "cdi-worker ran 3.00 ± 1.00 times as fast as curl | dd" in str(found)
    assert "3.000 s ±  1.000 s" in str(found)


def test_row_that_varies_little_ends_early(bench: Bench) -> None:
    bench = dataclasses.replace(bench, rounds=5, enough=3)
    assert len(measured(bench, Sides(always(1), always(2))).figures[RIVAL].costs) == 3
    walls = iter([1, 1, 1, 2, 1, 1])
    found = measured(bench, Sides(lambda: Cost(next(walls), 1, 0), always(2)))
    assert len(found.figures[RIVAL].costs) == 5


def test_round_of_more_than_a_minute_is_the_only_one(bench: Bench) -> None:
    assert [cost.wall for cost in measured(bench, Sides(always(61))).figures[OURS].costs] == [61]


@pytest.mark.parametrize(
    ("cost", "expected"),
    [
        (Cost(10, 6, 0), "CPU"),
        (Cost(10, 1, 0, busy=6 * (os.cpu_count() or 1)), "CPU"),
        (Cost(10, 1, 0, disk=6), "disk"),
        (Cost(10, 6, 0, disk=6), "CPU, disk"),
        (Cost(10, 1, 0, busy=1, disk=1), "network"),
    ],
)
def test_row_is_bound_by_what_is_busy(cost: Cost, expected: str) -> None:
    assert Figures(OURS, [cost, cost]).bound_by == expected


def test_cost_counts_the_machine_and_its_disk(tmp_path: Path) -> None:
    burn = "import time\nwhile time.process_time() < 0.5: pass"
    outside = measure.run(["unshare", "--pid", "--fork", sys.executable, "-c", burn])
    assert outside.busy > 0.4
    write = f"dd if=/dev/zero of={tmp_path / 'file'} bs=1M count=64 oflag=direct status=none"
    found = measure.run(write.split())
    assert found.disk > 0
    assert 64 << 20 <= found.written < 65 << 20
    printed = '{"source": "a", "target": "b", "size": 9, "read": 5, "written": 3}'
    assert measure.run(["printf", rf"{printed}\n{printed}\nwarning\n"]).read == 10


def kept(folder: Path, *found: Comparison) -> list[str]:
    """Return the lines of the page of these figures."""
    report.save(folder, found)
    return page.page([report.load(path) for path in sorted(folder.glob("*.jsonl"))]).splitlines()


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Declare the rows of these tests, no others."""
    declared = [
        Row("raw", nothing, rival=RIVAL),
        Row("upload", nothing, rival=RIVAL, is_least=True),
        Row("far", nothing, more=True),
        Row("start", nothing, rival=RIVAL, more=True),
        Row("cost", nothing, scale=True),
    ]
    monkeypatch.setattr(benches, "ROWS", declared)


@pytest.mark.usefixtures("declared")
def test_page_has_a_line_for_each_row(bench: Bench, tmp_path: Path) -> None:
    walls = iter([9.0, 2.0, 4.0, 3.0])
    raw = Sides(lambda: Cost(1, 0.5, 30 * MiB), lambda: Cost(next(walls), 1.0, 0))
    least = dataclasses.replace(benches.ROWS[1], open=opening(Sides(always(8), always(1))))
    far = dataclasses.replace(benches.ROWS[2], open=opening(Sides(always(4), bound=3)))
    found = [measured(bench, raw), compare.row(bench, least), compare.row(bench, far)]
    starting = dataclasses.replace(benches.ROWS[3], open=opening(Sides(always(2), always(1))))
    lines = kept(tmp_path / "report", *found, compare.row(bench, starting))
    assert r"|start, file|`curl \| dd`|2.00|**0.50** ± 0.00|2.00|0|CPU|" in lines
    assert r"|raw, file|`curl \| dd`|1.00|**3.00** ± 1.00|0.50|30|CPU|" in lines
    assert r"|upload, file|`curl \| dd`¹|8.00|**0.12** ± 0.00|||CPU|" in lines
    assert "|far, file||4.00 (wire 3.00)|||0|network|" in lines
    assert not [line for line in lines if line.startswith("|cost, ")]
    assert "**3.0 times as fast**" in " ".join(lines)
    assert CDI not in " ".join(lines)


@pytest.mark.usefixtures("declared")
def test_row_without_figures_says_why(bench: Bench, tmp_path: Path) -> None:
    def skipped() -> Cost:
        raise AssertionError("needs a | server")

    lines = kept(tmp_path / "report", measured(bench, Sides(always(1), skipped)))
    assert r"|raw, file|`curl \| dd`|needs a \| server|||||" in lines
    assert r"|upload, file|`curl \| dd`¹|not measured|||||" in lines
    assert "|far, file||not measured|||||" in lines
    # As from before the row had a rival.
    lines = kept(tmp_path / "report", measured(bench, Sides(always(4))))
    assert r"|raw, file|`curl \| dd`|not measured|||||" in lines


@pytest.mark.usefixtures("declared")
def test_releases_are_beside_one_another(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "report"
    report.save(folder, [measured(bench, Sides(always(1), always(2)))])
    (own,) = folder.iterdir()
    system = report.load(own).facts["system"]
    own.rename(folder / "debian-0.jsonl")
    report.save(folder, [measured(bench, Sides(always(2), always(3)))])
    lines = page.page([report.load(path) for path in sorted(folder.iterdir())]).splitlines()
    (row,) = [line for line in lines if line.startswith("|raw, ")]
    assert row.endswith("|1.00|**2.00** ± 0.00|0.50|0|CPU|2.00|**1.50** ± 0.00|0.67|0|CPU|")
    versions = report.load(own).facts["versions"]
    assert all(re.fullmatch(r"\d+(\.\d+)+", version) for version in versions.values())
    assert sum(line.startswith(f"- {system}, ") for line in lines) == 2


@pytest.mark.usefixtures("declared")
def test_figures_of_rows_that_exist_stay(bench: Bench, tmp_path: Path) -> None:
    """The two lists are measured in different runs; a row may have left since."""
    report.save(tmp_path, [measured(bench, Sides(always(1)))])
    upload = dataclasses.replace(measured(bench, Sides(always(2))), row=benches.ROWS[1])
    report.save(tmp_path, [upload])
    (path,) = tmp_path.iterdir()
    assert report.load(path).found.keys() == {"raw, file", "upload, file"}
    del benches.ROWS[0]
    assert report.load(path).found.keys() == {"upload, file"}


@pytest.mark.usefixtures("declared")
def test_program_without_version_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(report, "_TOOLS", ["no-such-program"])
    report.save(tmp_path, [])
    (path,) = tmp_path.iterdir()
    assert report.load(path).facts["versions"]["no-such-program"] == "of unknown version"


@pytest.mark.usefixtures("declared")
def test_worker_of_cdi_has_a_column_where_it_was_measured(bench: Bench, tmp_path: Path) -> None:
    def fail() -> Cost:
        raise AssertionError("no such option")

    with_cdi = measured(bench, Sides(always(2), always(4), always(3)))
    failed = dataclasses.replace(measured(bench, Sides(always(2), always(4), fail)), row=benches.ROWS[1])
    without = dataclasses.replace(measured(bench, Sides(always(2))), row=benches.ROWS[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(go.PROGRAMS, str(tmp_path))
        lines = kept(tmp_path / "report", with_cdi, failed, without)
    column = [line.split("|")[-2] for line in lines if line.startswith("|")]
    assert column == [CDI, "---", "3.00 (1.50)", "failed", "", ""]
    assert failed.is_right


def test_failure_of_a_side_is_its_result(bench: Bench) -> None:
    fail = bench.command(["sh", "-c", "echo no such disk; exit 1"], bench.file)
    found = measured(bench, Sides(fail, always(1)))
    assert f"{OURS} failed: " in str(found)
    assert "no such disk" in found.failures[OURS]
    found = measured(bench, Sides(always(1), fail))
    assert "no such disk" in found.failures[RIVAL]
    assert not found.is_right


def test_failure_to_start_a_row_does_not_end_the_run(bench: Bench) -> None:
    @contextlib.contextmanager
    def opening(_: Bench) -> Iterator[Sides]:
        pytest.skip("needs a server")
        yield Sides(always(1))

    found = compare.row(bench, Row("row", opening))
    assert str(found) == "row, file\n  cdi-worker failed: not run: needs a server"
    assert not found.is_right


def test_server_that_does_not_end_leaves_the_figures(bench: Bench) -> None:
    @contextlib.contextmanager
    def opening(_: Bench) -> Iterator[Sides]:
        yield Sides(always(1))
        raise AssertionError("did not end")

    found = compare.row(bench, Row("row", opening))
    assert found.figures[OURS].mean == 1
    assert found.is_right


def test_row_killed_for_memory_says_so(bench: Bench) -> None:
    with limits.cgroup(memory=32 * MiB, cpus=1) as group:
        pod = dataclasses.replace(bench, setting=POD, group=group, rounds=1)
        eat = pod.command([sys.executable, "-c", "bytearray(128 << 20)"], pod.file)
        assert measured(pod, Sides(eat, always(1))).failures[OURS].startswith("killed for memory")


def test_another_version_is_measured_in_turn_with_this_one(bench: Bench, tmp_path: Path) -> None:
    earlier = tmp_path / "installed" / "cdi_worker"
    earlier.mkdir(parents=True)
    (earlier / "__main__.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'a').write('x')")
    compared = dataclasses.replace(bench, before=earlier.parent)
    found = measured(compared, Sides(bench.command([*worker.COMMAND, "--version"], bench.file)))
    assert (tmp_path / "ran").read_text() == "xxxx"
    assert {OURS, BEFORE} == found.figures.keys()
    assert "of the time and" in str(found)
    report.save(tmp_path / "report", [found])
    assert BEFORE not in next((tmp_path / "report").iterdir()).read_text()
    (earlier / "__main__.py").write_text("exit('too old')")
    found = measured(compared, Sides(bench.command([*worker.COMMAND, "--version"], bench.file)))
    assert found.failures[BEFORE].endswith("too old")


def test_checkout_is_another_version(bench: Bench, tmp_path: Path) -> None:
    """Its links to the folders beside are followed."""
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    for name in ("importer", "sources", "formats", "images", "scratch"):
        (checkout / name).symlink_to(repository.ROOT / name)
    processes.run("cp", "-r", repository.ROOT / "cdi_worker", checkout)
    compared = dataclasses.replace(bench, before=checkout)
    code = "import cdi_worker.units, sys; sys.exit(cdi_worker.__file__)"
    found = measured(compared, Sides(compared.command([sys.executable, "-c", code], bench.file)))
    assert found.failures[OURS].endswith(str(repository.ROOT / "cdi_worker" / "__init__.py"))
    assert found.failures[BEFORE].endswith(str(checkout / "cdi_worker" / "__init__.py"))


def test_rows_have_names_of_their_own() -> None:
    assert rows
    keys = [row.key for row in benches.ROWS]
    assert len(keys) == len({*keys})
    assert all(row.rival for row in benches.ROWS if not (row.more or row.scale))
