"""Outages and streams of other lengths over HTTP: what was fetched is kept, and patience lasts."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import kills, misbehave, processes, vhdx_images, ways

KIB, MIB = 1 << 10, 1 << 20
DATA = random.Random(5).randbytes(12 * MIB)
FEW = cdi_worker.FetchOptions(connections=2, chunk=512 * KIB, no_progress=60.0)


def test_answers_that_end_at_the_same_byte_are_an_outage(server: misbehave.Server, tmp_path: Path) -> None:
    """As of a file that is still copied to the server. Nothing that was fetched is fetched again."""
    good = misbehave.Page(DATA)
    torn = dataclasses.replace(good, cut_at=9 * MIB + 1)
    url = server.serve("/disk", (torn, 12), good)
    done = ways.import_disk(url, tmp_path / "disk.img", fetch=FEW)
    assert (tmp_path / "disk.img").read_bytes() == DATA
    assert str(done.plan.route) == "stream"
    assert done.plan.random
    assert done.read < 1.2 * len(DATA)


@pytest.mark.parametrize(("framing", "more"), [("length", 1), ("chunked", MIB)])
def test_stream_longer_than_the_first_answer_stated_is_refused(
    server: misbehave.Server, tmp_path: Path, framing: str, more: int
) -> None:
    """Ranges fail after the first answer, which states a size; the stream that replaces them is longer."""
    first = misbehave.Page(DATA[:-more], etag=None, modified=None)
    longer = misbehave.Page(DATA, etag=None, modified=None, ranges=False, framing=framing)
    url = server.serve("/disk", (first, 1), longer)
    with pytest.raises(errors.SourceChanged, match="size"):
        ways.import_disk(url, tmp_path / "disk.img", fetch=FEW)
    assert not (tmp_path / "disk.img").exists()


#: Gives up a reply of a server after a second, not after a minute.
IMPATIENT = """
import functools
from cdi_worker.sources.nbd import client
client.Limits = functools.partial(client.Limits, stall=1.0)
"""


@pytest.mark.slow
def test_outage_longer_than_a_reply_may_take_is_waited_for_by_a_conversion(
    server: misbehave.Server, tmp_path: Path
) -> None:
    """QEMU, which reads the source through the worker, does not answer meanwhile."""
    good = misbehave.Page(vhdx_images.logged(DATA), drip=(64 * KIB, 0.02))
    request = ways.request(server.serve("/disk", good), tmp_path / "disk.img", fetch=FEW)
    with kills.started(request, before=IMPATIENT) as worker:
        processes.wait_for(lambda: server.sent("/disk") > 8 * MIB, "a part of the image")
        server.serve("/disk", dataclasses.replace(good, status=503))
        time.sleep(3)
        server.serve("/disk", good)
        assert worker.wait(60) == 0
    assert (tmp_path / "disk.img").read_bytes() == DATA
