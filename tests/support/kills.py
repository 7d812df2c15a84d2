"""Kill an import in a process of its own, at a moment that a test chooses.

    url = server.serve("/disk", kills.slow(page))
    kills.midway(server, kills.request(url, target))
    server.serve("/disk", page)
    result = cdi_worker.run(kills.request(url, target))

The disk of ``SIZE`` bytes takes half a second.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import json
import os
import pickle
import random
import re
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib import parse

import pytest

import cdi_worker
from cdi_worker.importer import progress
from cdi_worker.scratch import digests
from tests.support import forked, misbehave, processes, ways

MIB = 1 << 20
SIZE = 12 * MIB
#: Noise: nothing compresses, and there are no holes.
DATA = random.Random(7).randbytes(SIZE)
#: 12 MiB a second for each connection.
SLOW = {"drip": (64 << 10, 0.005)}
#: A journal that is saved after each write, and ranges of which several are noted midway.
OPTIONS = {
    "journal_interval": 0.0,
    "fetch": cdi_worker.FetchOptions(connections=2, chunk=MIB, no_progress=20),
}
#: The least that a run killed by ``late`` has noted.
KEPT = 5 * MIB


def request(address: str, target: Path | str, **options: object) -> cdi_worker.Request:
    """Return ``ways.request`` with ``OPTIONS``: the same for the run that is killed and for the next one."""
    return ways.request(address, target, **{**OPTIONS, **options})


@contextlib.contextmanager
def started(
    request: cdi_worker.Request, *, before: str = "", hold: str = "", stderr: int | None = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """Run a request in a process of its own, which is killed at the end of the block.

    ``before``: Python code that is run first. ``hold``: a phase that the process stays in.
    Standard output has the names of the phases, one a line. SIGTERM cancels the run.
    """
    known = base64.b64encode(pickle.dumps((request, before, hold))).decode()
    argv = [sys.executable, "-m", "tests.support.kills", known]
    process = forked.Popen[str](
        argv,
        env=forked.ENVIRONMENT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def kill(
    request: cdi_worker.Request,
    when: Callable[[], object],
    number: int = signal.SIGKILL,
    *,
    phase: str = "",
    before: str = "",
    hold: bool = False,
) -> int:
    """Start a run, and send it a signal once it is in ``phase`` and ``when`` holds; return its status.

    ``hold``: the run stays in this phase.
    """
    with started(request, before=before, hold=phase if hold else "") as run:
        assert run.stdout is not None
        if phase:
            assert any(line.rstrip() == phase for line in run.stdout), f"no phase {phase!r}"
        processes.wait_for(lambda: when() or run.poll() is not None, "the moment to kill")
        run.send_signal(number)
        run.wait(processes.PATIENCE)
    assert run.returncode, "the import had ended"
    return run.returncode


def midway(
    server: misbehave.Server,
    request: cdi_worker.Request,
    number: int = signal.SIGKILL,
    *,
    sent: int = SIZE * 3 // 4,
    kept: int = 0,
    before: str = "",
) -> None:
    """Kill a run when its server has sent so many bytes; return when the server is quiet.

    ``kept``: wait also until the journal has so many, and a MiB that the next run may fetch again (the head
    of a device). What was sent may wait in the socket of a busy worker.
    """
    path, target = path_of(request), Path(str(request.target))
    already = server.sent(path)
    status = kill(
        request,
        lambda: server.sent(path) - already > sent and (not kept or noted(target) >= kept + MIB),
        number,
        before=before,
    )
    assert number != signal.SIGKILL or status == -signal.SIGKILL
    processes.wait_for(server.is_quiet, "the connections of the killed")


def slow(page: misbehave.Page) -> misbehave.Page:
    """Return a page that is sent slowly, and stalls near its end: a run does not end before it is killed."""
    return dataclasses.replace(page, **SLOW, stall_at=len(page.body) * 7 // 8)


def late(server: misbehave.Server, page: misbehave.Page, request: cdi_worker.Request) -> None:
    """Serve a page slowly, kill the run when most was sent and some kept, then serve it at full speed."""
    path = path_of(request)
    server.serve(path, slow(page))
    midway(server, request, sent=len(page.body) * 3 // 4, kept=KEPT)
    server.serve(path, page)


def noted(target: Path) -> int:
    """Return how many bytes are on storage by the journal of an import to a file or device."""
    found = [0]
    for path in (target, *(target.with_name(f"{target.name}{end}") for end in (".part", ".journal.part"))):
        with contextlib.suppress(FileNotFoundError), path.open("rb") as stream:
            slots = stream.read(MIB)
            stream.seek(max(MIB, stream.seek(0, os.SEEK_END) - MIB))
            for text in re.findall(rb"cdi-worker journal \d+\n(\{[^\n]*\})\n", slots + stream.read()):
                spans = struct.iter_unpack(digests._PAIR, base64.b64decode(json.loads(text)["done"]))
                found.append(sum(end - start for start, end in spans))
    return max(found)


def moments(config: pytest.Config) -> Iterator[float]:
    """Yield moments of a run, in seconds from its start, for as long as ``--kills-for`` says.

    ``--first-seed`` draws them. Only for tests whose name begins with ``test_kills_at_random``: without the
    option they are not collected.
    """
    dice = random.Random(config.getoption("--first-seed"))
    ends = time.monotonic() + config.getoption("--kills-for")
    while time.monotonic() < ends:
        yield dice.uniform(0.05, 1.0)


def after(seconds: float, request: cdi_worker.Request, *, before: str = "") -> None:
    """Start a run, and kill it so many seconds later; it may have ended. ``before``: see ``started``."""
    with started(request, before=before) as run, contextlib.suppress(subprocess.TimeoutExpired):
        run.wait(seconds)


def stuck(server: misbehave.Server, path: str) -> Callable[[], bool]:
    """Return a moment: half of the disk was sent, and nothing for longer than the journal takes.

    For a page with ``SLOW`` and ``stall_at``, whose import cannot end before it is killed. ``SLOW``, as the
    journal is saved when data is written, not by a clock: it has nothing of a fast answer that stalls.
    """
    last = [0.0, 0.0]

    def is_stuck() -> bool:
        sent, now = server.sent(path), time.monotonic()
        if sent != last[0]:
            last[:] = sent, now
        return sent > SIZE // 2 and now - last[1] > 0.3

    return is_stuck


def path_of(request: cdi_worker.Request) -> str:
    """Return the path and the query of the request's URL, which a ``misbehave.Server`` serves."""
    url = parse.urlsplit(request.location.endpoint)
    return f"{url.path}?{url.query}" if url.query else url.path


class _Phases(progress.NullProgress):
    """Prints the name of each phase, and stays in one."""

    def __init__(self, hold: str) -> None:
        self._hold = hold

    def phase(self, name: str, total: int | None) -> None:
        print(name, flush=True)
        if name == self._hold:
            time.sleep(10 * processes.PATIENCE)


def _main() -> None:
    request, before, hold = pickle.loads(base64.b64decode(sys.argv[1]))
    exec(before, {})
    cancel = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: cancel.set())
    cdi_worker.run(request, _Phases(hold), cancel)


if __name__ == "__main__":
    _main()
