"""A killed transfer resumes as its journal says."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from cdi_worker.images import targets
from tests.support import devices, oracle, repository

MiB = 1 << 20


KILLED = """
import sys
from cdi_worker.images import targets
from cdi_worker.scratch import journal

path, content = sys.argv[1], open(sys.argv[2], "rb").read()
notes = targets.journal_slots(path, len(content))
kept = journal.Journal(notes, "etag", len(content), seconds=0)
with targets.open(path, len(content), targets.TargetOptions(resume=kept.covered > 0)) as disk:
    for start, end in kept.missing(0, len(content)):
        for at in range(start, end, 65536):
            stop = min(end, at + 65536)
            print(at, flush=True)
            sys.stdin.readline()
            disk.write(at, memoryview(content)[at:stop])
            piece = memoryview(content)[at:stop]
            kept.wrote(at, piece, kept.digest(at, piece))
            kept.checkpoint(disk.flush)
    disk.commit()
"""


@pytest.mark.parametrize("kind", ["file", "block512", "block4096"])
def test_killed_transfer_resumes(tmp_path: Path, kind: str) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(4 * MiB + 300 * 512))
    with devices.target(kind, tmp_path, 8 * MiB) as path:
        kill_until_done(path, source)


def unusable(path: Path) -> None:
    """Check that firmware and kernels would not accept a disk with a journal in it."""
    if not path.is_block_device():
        oracle.unusable(path)
        return
    head = path.read_bytes()[:MiB]
    assert head[512 : 256 << 10] == bytes((256 << 10) - 512)
    assert head.isascii()
    assert subprocess.run(["blkid", "--probe", path], check=False).returncode == 2


def kill_until_done(path: Path, source: Path) -> None:
    written = 0
    for lives in itertools.count(1):
        killed = subprocess.Popen(
            [sys.executable, "-c", KILLED, path, source],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=repository.ROOT,
        )
        assert killed.stdin is not None
        assert killed.stdout is not None
        with killed.stdin, killed.stdout:
            for line in killed.stdout:
                written += 65536
                # The process waits for a signal to continue, so it is never killed after its end.
                if int(line) >= MiB and lives < 5 and random.random() < 0.2:
                    killed.kill()
                    break
                killed.stdin.write(b"\n")
                killed.stdin.flush()
        if killed.wait() == 0:
            break
        unusable(path)
    again = 2 * (targets.journal_slots(path, 4 * MiB) or pytest.fail("no place")).withheld
    assert written <= source.stat().st_size + lives * (again + 4 * 65536) + 65536
    oracle.same(path, source, beyond=devices.beyond(path))
