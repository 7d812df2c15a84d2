"""Mutants: the product with one of its protections removed. The simulator must find every one.

``python -m tests.simulation.mutants`` runs each until a seed breaks the law, and prints how many it took.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys

from tests.simulation import __main__ as simulation
from tests.simulation import product
from tests.simulation import world as worlds


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A protection that is missing. ``what``: what the product does without it."""

    name: str
    what: str
    edits: product.Edits


MUTANTS = (
    Mutant(
        "retry-after",
        "waits for ever for a server that asks to wait",
        {
            "images/engine/retry.py": (
                "min(self._allowed + asked, self._longest)",
                "self._allowed + 2 * asked",
            )
        },
    ),
    Mutant(
        "content-encoding",
        "writes what a server has compressed on the way",
        {"formats/coding.py": ("    if coding == IDENTITY:\n        return", "    return")},
    ),
    Mutant(
        "journal-before-data",
        "notes ranges as finished before they are synced",
        {"scratch/journal.py": ("        flush()\n", "")},
    ),
    Mutant(
        "journal-of-another",
        "resumes what another source has written",
        {
            "scratch/journal.py": (
                '(record["identity"], record["total"]) != (identity, total)',
                'record["total"] != total',
            )
        },
    ),
    Mutant(
        "short-write",
        "takes a short write for a complete one",
        {
            "images/target/base.py": (
                "        done += os.pwrite(",
                "        done += len(data) + 0 * os.pwrite(",
            )
        },
    ),
    Mutant(
        "zeros-of-a-device",
        "leaves old data where the image has zeros",
        {
            "images/target/base.py": (
                "                    self._clear(start, end)",
                "                    pass",
            )
        },
    ),
    Mutant(
        "file-not-synced",
        "renames a file that is not synced",
        {"images/target/file.py": ("        os.fsync(self._fd)\n", "")},
    ),
    Mutant(
        "directory-not-synced",
        "reports a disk whose name a power failure undoes",
        {"images/target/file.py": ("            os.fsync(self._directory)", "            pass")},
    ),
    Mutant(
        "device-not-synced",
        "reports a disk whose first MiB a power failure undoes",
        {
            "images/target/block.py": (
                "        self._put(0, memoryview(self._head))\n        os.fsync(self._fd)",
                "        self._put(0, memoryview(self._head))",
            )
        },
    ),
    Mutant(
        "failed-write",
        "goes on after a failed write",
        {"images/target/base.py": ("            raise self._failure from err", "            pass")},
    ),
    Mutant(
        "changed-object",
        "continues with another version of the object",
        {"sources/web/http.py": ("        if changed:\n", "        if False:\n")},
    ),
)


def find(mutant: Mutant, seeds: range) -> int | None:
    """Return the first seed that breaks the law, None if there is none."""
    machines = worlds.Machines(edits=mutant.edits)
    for seed in seeds:
        if simulation.run(seed, machines, worlds.NOT_YET)[2]:
            return seed
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, default=3000, help="give up after so many")
    given = parser.parse_args()
    logging.disable()
    survivors = 0
    for mutant in MUTANTS:
        if given.names and mutant.name not in given.names:
            continue
        seed = find(mutant, range(given.seeds))
        survivors += seed is None
        found = "NOT FOUND" if seed is None else f"found by seed {seed}, after {seed + 1} seeds"
        print(f"{mutant.name}: {mutant.what}: {found}", flush=True)
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
