"""Remove one check of the product after the other, and run the tests that must fail then.

    make mutants                        all of them
    python -m tests.proofs.mutation registry   those of an area, or with this text in their description
    python -m tests.proofs.mutation --list

Each runs in a copy of the checkout. Exits with 1 if a mutant is not caught, or a test fails without any.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import os
import queue
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

from tests.proofs.mutation import mutants
from tests.proofs.mutation.mutant import Mutant

ROOT = Path(__file__).parents[3]
SLOTS = ROOT / "build" / "mutation"
#: Seconds for the tests of one mutant. One that ends by this has hung, which is caught, too.
TIMEOUT = 600
#: Compiling every module again took a fifth of the time.
_UNSET = frozenset({"TMPDIR", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE"})
_DATES = itertools.count(1_000_000_000)
#: pytest's exit statuses: tests have failed, or were interrupted.
FAILED = frozenset({1, 2})


class Verdict(NamedTuple):
    """``word``: caught, survived, equivalent, or broken. ``detail``: the last lines of the tests' output."""

    area: str
    mutant: Mutant
    word: str
    seconds: float
    detail: str = ""


def main() -> int:
    """Run the requested mutants; print a line for each, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("only", nargs="*", help="areas, or parts of a description")
    parser.add_argument("--list", action="store_true", help="list the mutants")
    parser.add_argument("--slots", type=int, default=os.cpu_count() or 1, help="run so many at a time")
    given = parser.parse_args()
    chosen = [
        (area, each)
        for area, found in mutants.AREAS.items()
        for each in found
        if not given.only or any(word == area or word in each.what for word in given.only)
    ]
    if given.list:
        print("\n".join(f"{area}: {each.what} ({each.file})" for area, each in chosen))
        return 0
    verdicts = run(chosen, given.slots)
    counts = {word: sum(each.word == word for each in verdicts) for word in ("caught", "equivalent")}
    wrong = [each for each in verdicts if each.word not in counts]
    caught, equivalent = counts["caught"], counts["equivalent"]
    print(f"{len(verdicts)} mutants: {caught} caught, {equivalent} equivalent, {len(wrong)} not caught")
    return bool(wrong)


def run(chosen: list[tuple[str, Mutant]], slots: int) -> list[Verdict]:
    """Run mutants in copies of the checkout, ``slots`` at a time."""
    trees: queue.Queue[Path] = queue.Queue()
    for number in range(min(slots, len(chosen))):
        trees.put(_copy(SLOTS / str(number)))

    def one(area: str, each: Mutant) -> Verdict:
        tree = trees.get()
        try:
            verdict = _run(tree, area, each)
        finally:
            trees.put(tree)
        print(f"{verdict.word:<10} {verdict.seconds:5.1f} s  {area}: {each.what}{verdict.detail}", flush=True)
        return verdict

    with concurrent.futures.ThreadPoolExecutor(max(1, slots)) as pool:
        verdicts = list(pool.map(lambda pair: one(*pair), chosen))
    shutil.rmtree(SLOTS, ignore_errors=True)
    return verdicts


def _run(tree: Path, area: str, each: Mutant) -> Verdict:
    began = time.monotonic()
    try:
        before = each.apply(tree)
    except (ValueError, OSError) as err:
        return Verdict(area, each, "broken", 0, f"\n    {err}")
    _date(tree / each.file)
    try:
        status, output = _tests(tree, each.tests)
    finally:
        (tree / each.file).write_text(before)
        _date(tree / each.file)
    word = {True: "caught", False: "survived"}.get(status in FAILED, "broken")
    if status not in {*FAILED, 0}:
        word = "broken"
    if each.equivalent and word == "survived":
        word = "equivalent"
    elif each.equivalent:
        word = "not equivalent"
    lines = (
        "".join(f"\n    {line}" for line in output.splitlines()[-8:])
        if word not in {"caught", "equivalent"}
        else ""
    )
    return Verdict(area, each, word, time.monotonic() - began, lines)


def _date(path: Path) -> None:
    """Give a file a date of its own: Python takes a compiled module by the date in seconds and the size."""
    date = next(_DATES)
    os.utime(path, (date, date))


def _tests(tree: Path, tests: tuple[str, ...]) -> tuple[int, str]:
    """Run tests in ``tree``; return pytest's exit status, 1 after a hang, and the output."""
    command = [tree / ".venv/bin/python", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {name: value for name, value in os.environ.items() if name not in _UNSET}
    try:
        done = subprocess.run(
            command,
            cwd=tree,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=TIMEOUT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return 1, "hung"
    return done.returncode, done.stdout.decode(errors="replace")


def _copy(tree: Path) -> Path:
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
    if (ROOT / "build/vmware").is_dir():
        subprocess.run(["cp", "-al", "--parents", "build/vmware", tree], cwd=ROOT, check=True)
    for path in [
        *(tree / ".venv/bin").iterdir(),
        *(tree / ".venv/lib").glob("python3*/site-packages/*editable*"),
    ]:
        if path.is_file() and not path.is_symlink() and str(ROOT).encode() in (text := path.read_bytes()):
            # Not in place: the files are links to those of the environment.
            mode = path.stat().st_mode
            path.unlink()
            path.write_bytes(text.replace(str(ROOT).encode(), str(tree).encode()))
            path.chmod(mode)
    return tree


if __name__ == "__main__":
    sys.exit(main())
