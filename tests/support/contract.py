"""Check the outcome of an importer pod as the controllers do."""

from __future__ import annotations

from pathlib import Path

from tests.support import devices, oracle, worker

COMPLETE = '{"scratchSpaceRequired":false,"preallocationApplied":false,"message":"Import Complete"}'
PREALLOCATED = '{"scratchSpaceRequired":false,"preallocationApplied":true,"message":"Import Complete"}'
BLANK = '{"preallocationApplied":false,"message":"Import Complete"}'
NEEDS_SCRATCH = '{"scratchSpaceRequired":true,"preallocationApplied":false,"message":"Import Complete"}'


def check_failure(pod: worker.Pod, done: worker.Completed, beginning: str, *phrases: str) -> None:
    """Check that a run failed with a one-line message and left nothing usable."""
    assert done.status == 1, done.errors
    assert pod.message.startswith(beginning)
    for phrase in phrases:
        assert phrase in pod.message
    assert "\n" not in pod.message
    assert len(pod.message.encode()) <= 4096
    assert "Traceback" not in done.errors
    oracle.unusable(pod.disk)


def check_disk(pod: worker.Pod, expected: Path, size: int | None = None) -> None:
    """Check that the volume holds the disk and nothing else; ``size`` of the file in bytes."""
    oracle.same(pod.disk, expected, beyond=devices.DIRT if pod.block else b"\0")
    if not pod.block:
        assert pod.disk.stat().st_size == (size or expected.stat().st_size)
        assert [path.name for path in pod.data.iterdir()] == ["disk.img"]
