"""What the benchmark makes of its figures: comparisons, failures and the page."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bench import bench as benches
from tests.bench import compare, page, rows
from tests.bench.bench import Bench, Row, Sides
from tests.bench.compare import BEFORE, CDI, OURS, Comparison
from tests.bench.measure import Cost
from tests.bench.settings import POD
from tests.support import limits, processes, repository, servers, worker

MiB = 1 << 20
RIVAL = "curl | dd"


def measured(bench: Bench, sides: Sides, **declared: bool) -> Comparison:
    return compare.row(bench, Row("raw", lambda _: contextlib.nullcontext(sides), rival=RIVAL, **declared))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    web = servers.Web("http", 1, tmp_path, tmp_path)
    return Bench(tmp_path, web, tmp_path / "target", tmp_path / "block", rounds=3)


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


def test_page_has_a_line_for_each_row(bench: Bench) -> None:
    walls = iter([9.0, 2.0, 4.0, 3.0])
    sides = Sides(lambda: Cost(1, 0.5, 30 * MiB), lambda: Cost(next(walls), 1.0, 0))
    least = measured(bench, Sides(always(8), always(1)), is_least=True)
    text = page.page([measured(bench, sides), least], 3, 0.2)
    assert (
        r"| raw, file | `curl \| dd` | 3.00 ± 1.00 s | 1.00 ± 0.00 s | **3.00** ± 1.00 | 0.50 | 30 MiB |"
        in text
    )
    assert r"| raw, file | `curl \| dd`¹ | 1.00 ± 0.00 s | 8.00 ± 0.00 s | **0.12** ± 0.00 |  |  |" in text
    assert "**3.0 times as fast**" in text
    assert CDI not in text


def test_worker_of_cdi_has_a_column_where_it_was_measured(bench: Bench) -> None:
    def fail() -> Cost:
        raise AssertionError("no such option")

    with_cdi = measured(bench, Sides(always(2), always(4), always(3)))
    failed = measured(bench, Sides(always(2), always(4), fail))
    without = measured(bench, Sides(always(2), always(4)))
    lines = page.page([with_cdi, failed, without], 3, 0.2).splitlines()
    column = [line.split(" | ")[-1] for line in lines if line.startswith("| ")]
    assert column == [f"{CDI} |", "--- |", "3.00 ± 0.00 s (1.50) |", "failed |", " |"]
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
    assert all(row.rival for row in benches.ROWS)
