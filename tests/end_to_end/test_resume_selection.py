"""A killed import is not continued with another object that has the same ETag, date and size."""

from __future__ import annotations

import dataclasses
import functools
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker.images.engine import fetch
from cdi_worker.scratch import journal
from cdi_worker.sources.web import locations
from tests.support import forked, misbehave, processes

SIZE = 24 << 20
#: 8 MiB a second for each connection.
SLOW = {"drip": (256 << 10, 0.03)}
OPTIONS = fetch.FetchOptions(connections=2, chunk=1 << 20, no_progress=20)
WORKER = """
import sys, cdi_worker
from cdi_worker.images.engine import fetch
from cdi_worker.sources import base
from cdi_worker.sources.web import locations
cdi_worker.run(cdi_worker.Request(
    existing="replace", source="http", target=sys.argv[2], journal_interval=0.05,
    location=locations.Http(sys.argv[1], base.Access(headers=eval(sys.argv[3]))),
    fetch=fetch.FetchOptions(connections=2, chunk=1 << 20),
))
"""
#: The sample is all that is kept.
KILLED_AFTER_THE_SAMPLE = """
import os
from cdi_worker.importer import execute
from cdi_worker.scratch import journal
journal._places = lambda records: (span for each in records for span in each.spans)
execute._rounds = lambda *_: os._exit(9)
"""

Headers = tuple[tuple[str, str], ...]


@functools.cache
def disk(name: str) -> bytes:
    """Return disk "a", "b" or "c". Only the address tells the second from the first one."""
    data = random.Random(name).randbytes(SIZE)
    return disk("a")[: 1 << 20] + data[1 << 20 :] if name == "b" else data


def location(url: str, headers: Headers = ()) -> locations.Http:
    return locations.Http(url, cdi_worker.Access(headers=headers))


def run(where: locations.Http, target: Path) -> cdi_worker.Result:
    return cdi_worker.run(
        cdi_worker.Request(
            existing="replace",
            source="http",
            location=where,
            target=str(target),
            journal_interval=0.05,
            fetch=OPTIONS,
        )
    )


def kill_midway(server: misbehave.Server, path: str, where: locations.Http, target: Path) -> None:
    """Kill a worker that has received more than half of the disk at ``path``."""
    argv = [sys.executable, "-c", WORKER, where.endpoint, target, repr(where.access.headers)]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as worker:
        processes.wait_for(lambda: server.sent(path) > 17 << 20, "a good part of the disk")
        worker.send_signal(signal.SIGKILL)
    processes.wait_for(server.is_quiet, "the connections of the killed")


def serve(server: misbehave.Server, paths: Mapping[str, str], **faults: object) -> None:
    """Serve each disk at its path, all with the same ETag, date and size."""
    for name, path in paths.items():
        server.serve(path, dataclasses.replace(misbehave.Page(disk(name)), **faults))


def test_other_query_starts_over(server: misbehave.Server, tmp_path: Path) -> None:
    paths = {"a": "/disk?file=a", "b": "/disk?file=b"}
    serve(server, paths, **SLOW)
    target = tmp_path / "disk.img"
    kill_midway(server, paths["a"], location(server.url(paths["a"])), target)
    serve(server, paths)
    result = run(location(server.url(paths["b"])), target)
    assert target.read_bytes() == disk("b")
    assert not result.resumed


def test_redirect_to_another_disk_starts_over(server: misbehave.Server, tmp_path: Path) -> None:
    paths = {"a": "/1/disk", "c": "/2/disk"}
    serve(server, paths, **SLOW)
    url = server.serve("/latest", misbehave.Page(to=(paths["a"],)))
    target = tmp_path / "disk.img"
    kill_midway(server, paths["a"], location(url), target)
    server.serve("/latest", misbehave.Page(to=(paths["c"],)))
    serve(server, paths)
    result = run(location(url), target)
    assert target.read_bytes() == disk("c")
    assert not result.resumed


def test_change_that_a_sample_has_shown_is_not_forgotten(
    server: misbehave.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run finds it, and is killed at once; the sample of the next one does not show it."""
    changed = bytearray(disk("a"))
    changed[4 << 20 : (4 << 20) + 1000] = bytes(1000)
    page = misbehave.Page(disk("a"), etag=None)
    url, target = server.serve("/disk", dataclasses.replace(page, **SLOW)), tmp_path / "disk.img"
    kill_midway(server, "/disk", location(url), target)
    server.serve("/disk", dataclasses.replace(page, body=bytes(changed)))
    argv = [sys.executable, "-c", KILLED_AFTER_THE_SAMPLE + WORKER, url, target, "()"]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as killed:
        assert killed.wait(60) == 9
    monkeypatch.setattr(journal, "_places", lambda _: ())
    run(location(url), target)
    assert target.read_bytes() == changed


def test_other_signature_resumes(server: misbehave.Server, tmp_path: Path) -> None:
    signed = "/disk?versionId=1&X-Amz-Credential=k&X-Amz-Date={0}&X-Amz-Expires=60&X-Amz-Signature={0}"
    serve(server, {"a": signed.format(1)}, **SLOW)
    target = tmp_path / "disk.img"
    kill_midway(server, signed.format(1), location(server.url(signed.format(1))), target)
    serve(server, {"a": signed.format(2)})
    result = run(location(server.url(signed.format(2))), target)
    assert target.read_bytes() == disk("a")
    assert result.resumed > 3 << 20


@pytest.mark.parametrize(("header", "resumes"), [("X-Disk", False), ("Authorization", True)])
def test_header_that_may_select_starts_over(
    server: misbehave.Server, tmp_path: Path, header: str, *, resumes: bool
) -> None:
    serve(server, {"a": "/disk"}, **SLOW)
    target = tmp_path / "disk.img"
    kill_midway(server, "/disk", location(server.url("/disk"), ((header, "first"),)), target)
    now = "a" if resumes else "b"
    serve(server, {now: "/disk"})
    result = run(location(server.url("/disk"), ((header, "second"),)), target)
    assert target.read_bytes() == disk(now)
    assert bool(result.resumed) == resumes
