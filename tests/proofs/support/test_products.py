"""`make test` leaves out combinations of parameters, but no test and no value."""

from __future__ import annotations

import collections
import subprocess
import sys
from collections.abc import Sequence

import pytest

from tests.support import repository

#: Files with tests of two and three parameters, of one, and of none.
FILES = (
    "tests/end_to_end/test_read_back.py",
    "tests/end_to_end/test_liars.py",
    "tests/formats/test_checksum_file.py",
)
#: Parameters of a test, and its sample: one case for each value of the longest one.
THREE = ("test_range_that_differs_is_fetched_again", ("sector", "hole", "all"), 3)
TWO = ("test_ranges_that_wrap_are_never_taken_for_the_disk", ("behind-the-head", "in-the-middle"), 10)


def collected(*options: str, files: Sequence[str] = FILES) -> dict[str, list[str]]:
    """Return the cases of each test, and as many as are left out under an empty name."""
    argv = [sys.executable, "-m", "pytest", "--collect-only", "-q", *options, *files]
    found = collections.defaultdict(list)
    done = subprocess.run(argv, cwd=repository.ROOT, capture_output=True, text=True, check=True)
    for line in done.stdout.splitlines():
        name, _, case = line.rpartition("::")[2].partition("[")
        if name.startswith("test_"):
            found[name].append(case.removesuffix("]"))
        elif line.startswith("combinations of parameters left"):
            found[""] = [""] * int(line.rpartition(" ")[2])
    return found


@pytest.fixture(scope="module")
def sample() -> dict[str, list[str]]:
    """Return what is collected without options."""
    return collected()


@pytest.fixture(scope="module")
def whole() -> dict[str, list[str]]:
    """Return what is collected with ``--whole``."""
    return collected("--whole")


def test_no_test_is_left_out(sample: dict[str, list[str]], whole: dict[str, list[str]]) -> None:
    assert whole.keys() == sample.keys() - {""}


@pytest.mark.parametrize(("name", "values", "count"), [THREE, TWO])
def test_every_value_occurs(
    sample: dict[str, list[str]], name: str, values: tuple[str, ...], count: int
) -> None:
    assert len(sample[name]) == count
    assert all(any(value in case for case in sample[name]) for value in values)


def test_values_meet_in_any_way(sample: dict[str, list[str]]) -> None:
    """Not the first with the first, and so on: in each test others meet."""
    name, values, _ = TWO
    assert len({case[: case.index(values[0])] for case in sample[name] if values[0] in case}) > 1


def test_what_is_left_out_is_counted(sample: dict[str, list[str]], whole: dict[str, list[str]]) -> None:
    cases = sum(map(len, whole.values()))
    assert 0 < len(sample[""]) < cases
    assert sum(map(len, sample.values())) == cases


def test_one_parameter_is_not_sampled(sample: dict[str, list[str]], whole: dict[str, list[str]]) -> None:
    for name in ("test_line_of_a_name_is_found", "test_doubt_is_refused"):
        assert sample[name] == whole[name]
        assert len(whole[name]) > 1


def test_case_that_is_named_is_run(whole: dict[str, list[str]]) -> None:
    name, *_ = THREE
    case = whole[name][0]
    assert collected(files=[f"{FILES[0]}::{name}[{case}]"])[name] == [case]
    assert collected("-k", f"{name} and file")[name]
