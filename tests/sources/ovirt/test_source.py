"""The imageio source with the real daemon and a fake engine: the bytes read, and the end of transfers."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling, fetch
from cdi_worker.sources import base
from cdi_worker.sources.ovirt import locations
from cdi_worker.sources.ovirt import source as imageio
from tests.support import engine, ovirt_disks, processes


def test_current_disk_is_read(ovirt_disk: ovirt_disks.Setup) -> None:
    with ovirt_disk.opened() as image:
        assert (image.facts.size, image.facts.format, image.facts.identity) == (ovirt_disks.SIZE, "raw", None)
        assert image.facts.head == ovirt_disk.now.read_bytes()[: len(image.facts.head)]
        assert ovirt_disks.read(image) == ovirt_disk.now.read_bytes()
        extents = list(image.source.extents())
        assert any(extent.zero for extent in extents)
        assert sum(extent.length for extent in extents) == ovirt_disks.SIZE
        for extent in extents:
            if extent.zero:
                piece = ovirt_disk.now.read_bytes()[extent.offset : extent.offset + extent.length]
                assert not any(piece)
        image.verify()
    ovirt_disk.check_ended("finished_success")


def test_local_host_is_read_by_unix_socket(tmp_path: Path) -> None:
    with engine.running(tmp_path) as (running, authority):
        setup = ovirt_disks.added(running, authority, tmp_path)
        with setup.opened() as image:
            assert ovirt_disks.read(image) == setup.now.read_bytes()
            image.verify()
        assert "[local" in setup.engine.daemon.log()
        setup.check_ended("finished_success")


def test_host_without_extents_is_read(ovirt_disk: ovirt_disks.Setup, tmp_path: Path) -> None:
    ovirt_disk.engine.flat = True
    target = tmp_path / "disk.img"
    result = cdi_worker.run(
        cdi_worker.Request(
            existing="replace", source="imageio", location=ovirt_disk.location(), target=str(target)
        )
    )
    assert result.plan.route is cdi_worker.Route.STREAM
    processes.run("cmp", target, ovirt_disk.now)
    assert target.stat().st_blocks * 512 < ovirt_disks.SIZE
    ovirt_disk.check_ended("finished_success")


def test_requests_are_not_longer_than_a_chunk(ovirt_disk: ovirt_disks.Setup, tmp_path: Path) -> None:
    """A broken connection must not cost more than one chunk, however long the run of data is."""
    ovirt_disk.engine.flat = True
    target, before = tmp_path / "disk.img", len(ovirt_disk.engine.daemon.log())
    cdi_worker.run(
        cdi_worker.Request(
            source="imageio",
            location=ovirt_disk.location(),
            target=str(target),
            fetch=fetch.FetchOptions(chunk=ovirt_disks.MIB),
        )
    )
    log = ovirt_disk.engine.daemon.log()[before:]
    # The first bytes of a transfer may come in shorter pieces.
    longest = max(int(size) for size in re.findall(r"READ size=(\d+)", log))
    assert ovirt_disks.MIB // 4 <= longest <= ovirt_disks.MIB
    processes.run("cmp", target, ovirt_disk.now)


def test_transfer_is_cancelled_if_the_disk_does_not_fit(
    ovirt_disk: ovirt_disks.Setup, tmp_path: Path
) -> None:
    request = cdi_worker.Request(
        existing="replace",
        source="imageio",
        location=ovirt_disk.location(),
        target=str(tmp_path / "disk.img"),
        image_size=ovirt_disks.MIB,
    )
    with pytest.raises(errors.TooLarge):
        cdi_worker.run(request)
    ovirt_disk.check_ended("finished_cleanup")
    cdi_worker.inspect(dataclasses.replace(request, image_size=None))
    ovirt_disk.check_ended("finished_cleanup", "finished_cleanup")


def test_disk_at_a_snapshot_is_read(ovirt_disk: ovirt_disks.Setup) -> None:
    with ovirt_disk.opened("disk-0") as image:
        assert image.facts.identity is not None
        assert ovirt_disks.read(image) == ovirt_disk.before.read_bytes()
        image.verify()
        image.verify()
    image.source.close()
    ovirt_disk.check_ended("finished_success")
    assert ovirt_disk.engine.last.form == "raw"


def test_active_disk_is_read_as_a_checkpoint(ovirt_disk: ovirt_disks.Setup) -> None:
    with ovirt_disk.opened("disk-1", "disk-0") as image:
        assert (image.facts.format, image.facts.identity) == ("qcow2", None)
        assert image.facts.head.startswith(b"QFI\xfb")
        assert ovirt_disks.read(image) == ovirt_disk.engine.chains["disk"].active.path.read_bytes()
        assert image.source.extents is None
        image.verify()
    ovirt_disk.check_ended("finished_success")
    assert ovirt_disk.engine.last.form == "cow"


def test_transfer_without_verify_is_cancelled(ovirt_disk: ovirt_disks.Setup) -> None:
    with ovirt_disk.opened() as image:
        image.source.close()
    with pytest.raises(ZeroDivisionError), ovirt_disk.opened():
        1 / 0  # noqa: B018  (raises)
    ovirt_disk.check_ended("finished_cleanup", "finished_cleanup")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"disk_id": "none"}, "disk none: not found in the engine; check the id"),
        ({"current": "none"}, "the disk has no snapshot none"),
        ({"access": base.Access(user="x", password="secret", insecure=True)}, "check user, password"),
        ({"access": base.Access(user="x", password="secret")}, "certificate"),
    ],
)
def test_invalid_request_is_refused(
    ovirt_disk: ovirt_disks.Setup, changes: dict[str, object], message: str
) -> None:
    location = dataclasses.replace(ovirt_disk.location(), **changes)
    with pytest.raises(errors.Unreachable, match=message) as caught:
        imageio.ImageioSource(location, cancelling.Cancel()).open(base.Opening())
    assert "secret" not in str(caught.value)
    ovirt_disk.check_ended()


def test_disk_id_is_required() -> None:
    assert any("IMPORTER_DISK_ID" in fault for fault in locations.Imageio("https://x/").faults())


def test_insecure_access_needs_no_certificates(ovirt_disk: ovirt_disks.Setup) -> None:
    access = dataclasses.replace(ovirt_disk.location().access, ca_files=(), insecure=True)
    location = dataclasses.replace(ovirt_disk.location(), access=access)
    with base.open_image(imageio.ImageioSource(location, cancelling.Cancel(), ovirt_disks.QUICK)) as image:
        assert ovirt_disks.read(image) == ovirt_disk.now.read_bytes()
