"""Mutants: the product with one of its protections removed. The simulator must find every one.

``python -m tests.proofs.simulation.mutants`` runs each until a seed breaks the law, and prints how many it
took.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from collections.abc import Iterable

from tests.proofs.simulation import __main__ as simulation
from tests.proofs.simulation import product
from tests.proofs.simulation import scheduler as schedulers
from tests.proofs.simulation import world as worlds


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A protection that is missing. ``what``: what the product does without it.

    ``is_rare``: more than 50 seeds are needed to find it. ``seed``: one that finds it, if the first ones do
    not; the tests begin there.
    """

    name: str
    what: str
    edits: product.Edits
    is_rare: bool = False
    seed: int = 0


MUTANTS = (
    # One writer
    Mutant(
        "two-runs",
        "lets two runs write to one file",
        {
            "images/kernel.py": {
                "if err.errno in {errno.EACCES, errno.EAGAIN}:\n            return False": "if False: pass",
                "if err.errno in _NO_LOCKS:": "if True:",
            },
            "images/targets/claim.py": {"reason = self._taken()": "reason = None"},
            "images/targets/file.py": {
                "if not is_same:": "if False:",
                "if not os.path.samestat(os.lstat(self.path), self._inode):": "if False:",
            },
        },
        is_rare=True,
    ),
    Mutant(
        "no-token",
        "lets a stopped run on another node continue where another has written",
        {"images/targets/claim.py": {"reason = self._taken()": "reason = None"}},
        is_rare=True,
    ),
    Mutant(
        "stale-comparison",
        "changes a device that another node has written since it was compared",
        {
            "images/targets/block.py": {
                "                self.storage.require_unchanged()\n": "                pass\n",
                "        self.storage.require_unchanged()\n        self.storage.withhold()\n": (
                    "        self.storage.withhold()\n"
                ),
                "        self._device.expect(bytes(self.head[: claim.RECORD]))\n": "",
            }
        },
        is_rare=True,
    ),
    Mutant(
        "finished-file-removed",
        "removes a finished disk before its replacement is complete",
        {"images/targets/file.py": {' if options.existing == "remove" else ()': ""}},
        is_rare=True,
    ),
    # Read back before it is trusted
    Mutant(
        "not-read-back",
        "resumes on a device that somebody else has used",
        {
            "scratch/journal.py": {"if digest == record.digest:": "if True:"},
        },
        is_rare=True,
    ),
    Mutant(
        "stream-not-compared",
        "does not compare what a stream has written with the stream",
        {"images/sinks/compared.py": {"in spans.joined(wrong(first, after), _GAP):": "in ():"}},
        is_rare=True,
    ),
    Mutant(
        "weak-identity",
        "resumes an object that was replaced in the same second",
        {
            "importer/execute.py": {
                "if noted is not None and noted.covered and made.resumes and attempt.facts.weak:": "if False:"
            }
        },
        is_rare=True,
    ),
    Mutant(
        "replicas",
        "takes another date of the same strong ETag for another object",
        {"sources/web/http.py": {'("size",) if is_same else (': "("}},
        seed=14,
    ),
    # Servers that lie or never end
    Mutant(
        "retry-after",
        "waits for ever for a server that asks to wait",
        {
            "images/engine/retry.py": {
                "min(self._allowed + asked, self._longest)": "self._allowed + 9 * asked",
            }
        },
        is_rare=True,
    ),
    Mutant(
        "shifted-ranges",
        "writes ranges that begin at another byte than they say",
        {"images/image.py": {"if isinstance(reader, readers.RequestReader):": "if False:"}},
        seed=41,
    ),
    Mutant(
        "cut-ranges",
        "never reads in order where ranges end at once",
        {"images/engine/seams.py": {"if self._thread.fruitless >= _FRUITLESS:": "if False:"}},
        seed=46,
    ),
    Mutant(
        "content-encoding",
        "writes what a server has compressed on the way",
        {"formats/coding.py": {"    if coding == IDENTITY:\n        return": "    return"}},
        is_rare=True,
    ),
    # What was right before
    Mutant(
        "changed-object",
        "continues with another version of the object",
        {"sources/web/http.py": {"        if changed := known.difference(now):\n": "        if False:\n"}},
        is_rare=True,
    ),
    Mutant(
        "journal-before-data",
        "notes ranges as finished before they are synced, and does not read them back",
        {
            "scratch/journal.py": {
                "        flush()\n": "",
                "if digest == record.digest:": "if True:",
            }
        },
        is_rare=True,
    ),
    Mutant(
        "short-write",
        "takes a short write for a complete one",
        {
            "images/targets/storage.py": {
                "        done += os.pwrite(": "        done += len(data) + 0 * os.pwrite("
            }
        },
    ),
    Mutant(
        "zeros-of-a-device",
        "leaves old data where the image has zeros",
        {
            "images/targets/storage.py": {
                "                    self._ladder.add(*part)\n": "                    pass\n"
            }
        },
    ),
    Mutant(
        "file-not-synced",
        "renames a file that is not synced",
        {
            "images/targets/file.py": {
                "        self.storage.sync()\n        self.storage.close()": "        self.storage.close()"
            }
        },
    ),
    Mutant(
        "directory-not-synced",
        "reports a disk whose name a power failure undoes",
        {
            "images/targets/file.py": {
                "kernel.sync_directory(self._directory)\n        except": "pass\n        except"
            }
        },
    ),
    Mutant(
        "device-not-synced",
        "reports a disk whose first MiB a power failure undoes",
        {
            "images/targets/block.py": {
                "self._put(last.start, memoryview(data))\n        self.fsync()": (
                    "self._put(last.start, memoryview(data))"
                )
            }
        },
    ),
    Mutant(
        "renamed-before-sync",
        "syncs a file after it has its name",
        {
            "images/targets/file.py": {
                "        self.storage.sync()\n        self.storage.close()\n": "",
                ".replace(self.path)\n        if not": (
                    ".replace(self.path)\n        self.storage.sync()\n"
                    "        self.storage.close()\n        if not"
                ),
            }
        },
    ),
    Mutant(
        "head-in-one-write",
        "writes the sector that makes a device usable together with others",
        {"images/targets/block.py": {"self.head[last] = self._no_data(last)\n": "pass\n"}},
    ),
    Mutant(
        "head-without-sync",
        "writes the sector that makes a device usable before the others are on storage",
        {
            "images/targets/block.py": {
                "(0, memoryview(self.head))\n        self.fsync()\n        self._put(": (
                    "(0, memoryview(self.head))\n        self._put("
                )
            }
        },
    ),
    Mutant(
        "old-head",
        "overwrites an old disk with one write, which a power cut may tear",
        {"images/targets/block.py": {"self._disable(len(head))\n": "bytes(len(head))\n"}},
    ),
    Mutant(
        "failed-write",
        "goes on after a failed write",
        {
            "images/targets/storage.py": {
                "            raise self._failure from err": (
                    "            if doing == 'read back':\n                raise self._failure from err"
                )
            }
        },
        is_rare=True,
    ),
    Mutant(
        "head-from-cache",
        "looks in the page cache for the sector that makes an old disk usable, also after a kill",
        {
            "images/targets/block.py": {
                "        self.fsync()\n        self.drop_cache()\n        try:": "        try:"
            }
        },
        is_rare=True,
    ),
    Mutant(
        "delta-before-rename",
        "changes a finished disk before its new name is durable",
        {
            "images/targets/file.py": {
                "        # The old name must be gone before the first change, also after a power cut.\n"
                "        kernel.sync_directory(self._directory)\n": ""
            }
        },
        is_rare=True,
    ),
    Mutant(
        "one-address",
        "takes two disks at one address, and with one identity, for one",
        {
            "importer/attempt.py": {
                "            *map(selection.digest, (asked.location, *asked.layers)),\n": ""
            }
        },
        is_rare=True,
    ),
    Mutant(
        "no-grown-size",
        "leaves a disk as small as the image",
        {"importer/execute.py": {"        out.commit(grow_to)": "        out.commit()"}},
    ),
    Mutant(
        "no-checksum",
        "does not compare the checksum",
        {"formats/checksum.py": {"if calculated != each.digest:": "if False:"}},
    ),
    Mutant(
        "refused-disk-replaced",
        "replaces a disk that it was to refuse",
        {
            "importer/destination.py": {'force=request.existing in {"replace", "update"}': "force=True"},
            "importer/execute.py": {
                'existing=asked.existing if asked.existing in ("refuse", "remove") else "replace",': (
                    'existing="remove" if asked.existing == "remove" else "replace",'
                )
            },
        },
        is_rare=True,
    ),
    # Verification
    Mutant(
        "blind-reader",
        "says that a disk is equal without comparing data",
        {"images/sinks/verified.py": {"in spans.joined(compared.unlike(stored, start, data)):": "in ():"}},
        is_rare=True,
    ),
)


def find(mutant: Mutant, seeds: Iterable[int]) -> int | None:
    """Return the first seed that breaks the law, None if there is none."""
    machines = worlds.Machines(edits=mutant.edits)
    for seed in seeds:
        fault = simulation.run(seed, machines).fault
        if fault is not None:
            if not fault.is_law:
                raise schedulers.Harness(fault.text)
            return seed
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.proofs.simulation.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these")
    parser.add_argument("--seeds", type=int, default=10_000, help="give up after so many")
    given = parser.parse_args()
    logging.disable()
    simulation.be_quiet()
    chosen = [each for each in MUTANTS if not given.names or each.name in given.names]
    survivors = 0
    for mutant in chosen:
        seed = find(mutant, range(given.seeds))
        survivors += seed is None
        found = "NOT FOUND" if seed is None else f"found by seed {seed}, after {seed + 1} seeds"
        print(f"{mutant.name}: {mutant.what}: {found}", flush=True)
    print(f"{len(chosen)} mutants: {len(chosen) - survivors} found")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
