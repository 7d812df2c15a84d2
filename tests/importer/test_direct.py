"""The result of each route with unusual sources or storage."""

from __future__ import annotations

import random
import threading
import time
import types
from pathlib import Path
from typing import cast

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.importer import stage
from cdi_worker.importer.attempt import Attempt
from cdi_worker.sources import base
from tests.support import devices, misbehave, processes, ways

MIB = 1 << 20
NOISE = random.Random(3).randbytes(2 * MIB + 100)


@pytest.mark.parametrize(("size", "ranges"), [(2 * MIB + 100, True), (MIB + 1, False)])
def test_disk_of_odd_size_is_padded_with_zeros(
    server: misbehave.Server, tmp_path: Path, size: int, ranges: bool
) -> None:
    """The last sector must not keep bytes that were on the device before."""
    url = server.serve("/disk", misbehave.Page(NOISE[:size], ranges=ranges))
    with devices.loop(tmp_path, 4 * MIB) as device:
        cdi_worker.run(ways.request(url, device))
        there = device.read_bytes()
    padding = -size % 512
    assert there == NOISE[:size] + bytes(padding) + devices.DIRT * (4 * MIB - size - padding)


@pytest.mark.parametrize(
    ("failure", "weak", "outlives"),
    [
        (errors.Cancelled(), True, True),
        (errors.Transient(url="u", reason="r"), True, True),
        (errors.SourceChanged(url="u", what="backup", before=1, now=2), False, True),
        (errors.SourceChanged(url="u", what="backup", before=1, now=2), True, False),
        (errors.NoRanges(url="u", reason="r"), False, True),
        (errors.NoRanges(url="u", reason="r"), True, False),
        (errors.WrongRanges(url="u", reason="r"), False, False),
        (errors.DigestMismatch(url="u", expected="e", calculated="c"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, errors.Error) else None,
)
def test_what_was_written_outlives_a_failure(failure: errors.Error, *, weak: bool, outlives: bool) -> None:
    attempt = types.SimpleNamespace(facts=types.SimpleNamespace(weak=weak))
    assert Attempt.outlives(cast("Attempt", attempt), failure) == outlives


def test_note_of_a_delta_is_on_storage_before_anything_is_zeroed(tmp_path: Path) -> None:
    """A power cut would leave a disk at its old checkpoint that is neither the old nor the new one."""
    order: list[str] = []
    opened = types.SimpleNamespace(
        written_path=str(tmp_path / "disk.img.changing"),
        flush=lambda: order.append("flush"),
        zero_rest=lambda _: order.append("zero"),
    )
    attempt = types.SimpleNamespace(
        request=types.SimpleNamespace(stage=base.Stage(previous="a", current="b")),
        facts=base.Facts(name="source"),
        image=types.SimpleNamespace(source=base.Source()),
        survey=types.SimpleNamespace(chain=()),
        plan=types.SimpleNamespace(virtual_size=1, compared=False),
    )
    stage.begin(cast("Attempt", attempt), cast("targets.Target", opened))
    assert order[:2] == ["flush", "zero"]


def test_cancel_interrupts_zeroing_of_a_slow_device(tmp_path: Path) -> None:
    """A pod has 30 seconds from SIGTERM to its end."""
    cancel = threading.Event()
    with devices.slow(tmp_path, 600 * MIB, bytes_per_second=10 * MIB) as device:
        request = cdi_worker.Request(
            existing="replace",
            source="none",
            location=cdi_worker.Location(""),
            target=str(device),
            preallocation=True,
            direct=True,
        )
        threading.Timer(1, cancel.set).start()
        started = time.monotonic()
        with pytest.raises(errors.Cancelled):
            cdi_worker.run(request, cancel=cancel)
        assert time.monotonic() - started < processes.PATIENCE  # the whole takes 60 s
