"""What an attempt of an import may keep of an earlier one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker.images import image
from cdi_worker.importer import attempt
from cdi_worker.importer.plan import Plan, Route
from cdi_worker.sources import base

MiB = 1 << 20


def made(target: Path, **facts: Any) -> attempt.Attempt:
    """Return an attempt of an image with these facts."""
    location = base.Location("http://images.example.org/disk")
    request = cdi_worker.Request(source="http", location=location, target=str(target))
    unused: Any = None
    stated = base.Facts(name="disk", identity="one", **facts)
    opened = image.Image(image.Readable(), stated, image.Engine())
    plan = Plan(Route.PLACE, "")
    return attempt.Attempt(request, unused, unused, opened, unused, plan, unused, unused)


@pytest.mark.parametrize(
    ("facts", "is_kept"),
    [
        ({"format": "raw"}, False),
        ({"format": "vmdk", "digest": "image:1"}, False),
        # Exported anew by each request: the same disk has other bytes.
        ({"format": "vmdk"}, True),
    ],
)
def test_first_bytes_complete_the_identity(tmp_path: Path, facts: dict[str, Any], is_kept: bool) -> None:
    target = tmp_path / "disk.img"
    (tmp_path / "disk.img.part").write_bytes(bytes(2 * MiB))
    before = made(target, head=b"one", **facts).journal(str(target), MiB)
    assert before
    before.zeroed([(0, MiB)])
    before.save(lambda: None)
    after = made(target, head=b"two", **facts).journal(str(target), MiB)
    assert after
    assert after.was_loaded is is_kept
