"""Change the product at places that a seed draws, and list the changes that no test of their area notices.

    make mutants COUNT=40 SEED=17
    python -m tests.proofs.mutants --only images/targets

cosmic-ray knows the changes: another operator, a condition turned round, a loop that does not run, an
exception that is not caught. Each is made in a copy of the checkout. One that survives is of a line that no
test needs, or changes nothing: look at each.
"""

from __future__ import annotations

import argparse
import ast
import concurrent.futures
import contextlib
import difflib
import itertools
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import cosmic_ray.ast
import cosmic_ray.mutating
import cosmic_ray.plugins

ROOT = Path(__file__).parents[2]
SLOTS = ROOT / "build" / "mutants"
#: Where a fault makes a wrong disk, or trusts a wrong one: modules, and what must notice a change of them.
AREAS = {
    "images/targets/*.py": ("tests/images/targets", "tests/end_to_end/test_one_writer.py"),
    "images/engine/*.py": ("tests/images/engine",),
    "scratch/*.py": ("tests/scratch", "tests/images/targets", "tests/images/engine"),
    "formats/safety.py": ("tests/formats",),
    "formats/checksum*.py": ("tests/formats", "tests/contract/test_checksum_files.py"),
    "formats/signature/*.py": ("tests/formats/signature", "tests/sources/trust"),
    "sources/trust/*.py": ("tests/sources/trust", "tests/contract/test_checksum_files.py"),
}
#: Changes that say little: most decorators are of dataclasses and properties, most numbers are measured, and
#: ``is`` instead of an equality is a warning.
LEFT_OUT = re.compile(r"RemoveDecorator|NumberReplacer|_(Not)?(Eq|LtE?|GtE?)_Is(Not)?$")
#: Python takes a compiled module by the date in seconds and the size.
_DATES = itertools.count(1_000_000_000)
_UNSET = frozenset({"TMPDIR", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"})
#: pytest's exit statuses: tests have failed, or were interrupted.
FAILED = frozenset({1, 2})


class Mutant(NamedTuple):
    """A change of a file: its new text, and the tests that must notice it."""

    file: str
    text: str
    tests: tuple[str, ...]

    @property
    def diff(self) -> str:
        """Return the changed lines."""
        before = (ROOT / self.file).read_text().splitlines()
        lines = difflib.unified_diff(before, self.text.splitlines(), self.file, self.file, n=0, lineterm="")
        return "\n".join(itertools.islice(lines, 2, None))


def main() -> int:
    """Run mutants; print those that survive, and the counts. Return 1 if tests fail without a change."""
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.mutants")
    parser.add_argument("--count", type=int, default=40, help="so many, drawn by the seed")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="run so many at a time")
    given = parser.parse_args()
    print(f"repeat: python -m tests.proofs.mutants --seed {given.seed} --count {given.count}", flush=True)
    chosen = drawn(random.Random(given.seed), given.only, given.count)
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(given.slots):
        trees.put(copy(SLOTS / str(number)))
    with concurrent.futures.ThreadPoolExecutor(given.slots) as pool:
        suites = sorted({each.tests for each in chosen})
        limits = dict(zip(suites, pool.map(lambda tests: duration(trees, tests), suites), strict=True))
        survived = sum(pool.map(lambda each: survives(trees, each, limits[each.tests]), chosen))
    shutil.rmtree(SLOTS, ignore_errors=True)
    print(f"{len(chosen)} mutants of seed {given.seed}: {len(chosen) - survived} caught, {survived} survived")
    return 0


def files(only: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the files of the areas, and their tests."""
    for pattern, tests in AREAS.items():
        for path in ROOT.glob(pattern):
            if only in (file := str(path.relative_to(ROOT))):
                yield file, tests


def drawn(dice: random.Random, only: str, count: int) -> list[Mutant]:
    """Draw mutants: one of each file in turn, else a long file has most of them."""
    every = [mutants(file, tests, random.Random(dice.random())) for file, tests in sorted(files(only))]
    dice.shuffle(every)
    rounds = itertools.zip_longest(*every)
    return list(itertools.islice((each for found in rounds for each in found if each), count))


def mutants(file: str, tests: tuple[str, ...], dice: random.Random) -> Iterator[Mutant]:
    """Yield the changes of a file that mean another program, in an order drawn by ``dice``."""
    source = (ROOT / file).read_text()
    nodes = list(cosmic_ray.ast.ast_nodes(cosmic_ray.ast.get_ast(source)))
    places = []
    for name in cosmic_ray.plugins.operator_names():
        kind = cosmic_ray.plugins.get_operator(name)
        if not LEFT_OUT.search(name) and not kind.arguments():
            count = sum(len(list(kind().mutation_positions(node))) for node in nodes)
            places += [(kind(), number) for number in range(count)]
    for operator, number in dice.sample(places, len(places)):
        # Some operators fail where an exception has a dotted name, or write what is not Python.
        with contextlib.suppress(AttributeError, SyntaxError):
            text = cosmic_ray.mutating.mutate_code(source, operator, number)
            if text and meaning(text) != meaning(source):
                yield Mutant(file, text, tests)


def meaning(source: str) -> str:
    """Return the program without its annotations, which are not run."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def duration(trees: queue.Queue[Path], tests: tuple[str, ...]) -> float:
    """Return the seconds that tests take without a change; raise ``AssertionError`` if they fail."""
    tree, began = trees.get(), time.monotonic()
    try:
        status, output = run(tree, tests, 1200)
    finally:
        trees.put(tree)
    assert status == 0, f"{tests} without any change:\n{output[-3000:]}"
    return time.monotonic() - began


def survives(trees: queue.Queue[Path], mutant: Mutant, seconds: float) -> bool:
    """Report whether no test notices a change; a hang is noticed."""
    tree = trees.get()
    path = tree / mutant.file
    before = path.read_text()
    try:
        write(path, mutant.text)
        status, output = run(tree, mutant.tests, 3 * seconds + 60)
    finally:
        write(path, before)
        trees.put(tree)
    word = "caught" if status in FAILED else "SURVIVED" if status == 0 else f"broken\n{output[-2000:]}"
    print(f"{word}: {mutant.file}\n{mutant.diff}", flush=True)
    return status == 0


def write(path: Path, text: str) -> None:
    """Write a module, with a date of its own."""
    path.write_text(text)
    os.utime(path, (date := next(_DATES), date))


def run(tree: Path, tests: tuple[str, ...], seconds: float) -> tuple[int, str]:
    """Run tests in ``tree``; return pytest's exit status, 1 after a hang, and the output."""
    command = [tree / ".venv/bin/python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    env = {name: value for name, value in os.environ.items() if name not in _UNSET}
    # Ended by SIGTERM, with the servers that it has started.
    with subprocess.Popen(
        command, cwd=tree, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as pytest:
        try:
            output, _ = pytest.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            pytest.terminate()
            return 1, "hung"
    return pytest.returncode, output.decode(errors="replace")


def copy(tree: Path) -> Path:
    """Return a copy of the checkout, with an environment that finds the product there."""
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0"):
        source, target = ROOT / os.fsdecode(name), tree / os.fsdecode(name)
        if name and os.path.lexists(source):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    subprocess.run(["cp", "-al", ROOT / ".venv", tree / ".venv"], check=True)
    found = [*(tree / ".venv/bin").iterdir(), *(tree / ".venv/lib").glob("python3*/site-packages/*editable*")]
    for path in found:
        if path.is_file() and not path.is_symlink() and str(ROOT).encode() in (text := path.read_bytes()):
            # Not in place: the files are links to those of the environment.
            mode = path.stat().st_mode
            path.unlink()
            path.write_bytes(text.replace(str(ROOT).encode(), str(tree).encode()))
            path.chmod(mode)
    return tree


if __name__ == "__main__":
    sys.exit(main())
