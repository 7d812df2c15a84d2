"""The imageio source against the real daemon and a fake engine: what it reads, and how transfers end."""

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
from tests.support import ovirt_disks, processes


def test_the_disk_as_it_is(ovirt_disk: ovirt_disks.Place) -> None:
    with ovirt_disk.source() as source:
        assert (source.size, source.format, source.identity) == (ovirt_disks.SIZE, "raw", None)
        assert source.head == ovirt_disk.now.read_bytes()[: len(source.head)]
        assert ovirt_disks.read(source) == ovirt_disk.now.read_bytes()
        extents = list(source.extents() or ())
        assert any(extent.zero for extent in extents)
        assert sum(extent.length for extent in extents) == ovirt_disks.SIZE
        for extent in extents:
            if extent.zero:
                piece = ovirt_disk.now.read_bytes()[extent.offset : extent.offset + extent.length]
                assert not any(piece)
        source.verify()
    ovirt_disk.ended("finished_success")


def test_a_host_that_is_this_one_is_read_by_its_unix_socket(tmp_path: Path) -> None:
    with ovirt_disks.placed(tmp_path, local=True) as place:
        with place.source() as source:
            assert ovirt_disks.read(source) == place.now.read_bytes()
            source.verify()
        assert "[local" in place.engine.daemon.log()
        place.ended("finished_success")


def test_a_host_that_knows_no_zeros(ovirt_disk: ovirt_disks.Place, tmp_path: Path) -> None:
    ovirt_disk.engine.flat = True
    target = tmp_path / "disk.img"
    result = cdi_worker.run(
        cdi_worker.Request(source="imageio", location=ovirt_disk.location(), target=str(target))
    )
    assert result.plan.route is cdi_worker.Route.STREAM
    processes.run("cmp", target, ovirt_disk.now)
    assert target.stat().st_blocks * 512 < ovirt_disks.SIZE
    ovirt_disk.ended("finished_success")


@pytest.mark.parametrize(
    ("options", "longest"),
    [(fetch.Options(), 4 * ovirt_disks.MIB), (fetch.Options(chunk=ovirt_disks.MIB), ovirt_disks.MIB)],
    ids=["4M", "1M"],
)
def test_no_request_is_longer_than_a_chunk(
    ovirt_disk: ovirt_disks.Place, tmp_path: Path, options: fetch.Options, longest: int
) -> None:
    """A connection that ends costs no more than that, be the run of data ever so long."""
    ovirt_disk.engine.flat = True
    target, before = tmp_path / "disk.img", len(ovirt_disk.engine.daemon.log())
    cdi_worker.run(
        cdi_worker.Request(
            source="imageio", location=ovirt_disk.location(), target=str(target), fetch=options
        )
    )
    said = ovirt_disk.engine.daemon.log()[before:]
    assert max(int(size) for size in re.findall(r"READ size=(\d+)", said)) == longest
    processes.run("cmp", target, ovirt_disk.now)


def test_a_disk_that_does_not_fit_is_let_go(ovirt_disk: ovirt_disks.Place, tmp_path: Path) -> None:
    wanted = cdi_worker.Request(
        source="imageio",
        location=ovirt_disk.location(),
        target=str(tmp_path / "disk.img"),
        image_size=ovirt_disks.MIB,
    )
    with pytest.raises(errors.TooLarge):
        cdi_worker.run(wanted)
    ovirt_disk.ended("finished_cleanup")
    cdi_worker.inspect(dataclasses.replace(wanted, image_size=None))
    ovirt_disk.ended("finished_cleanup", "finished_cleanup")


def test_the_disk_at_a_snapshot(ovirt_disk: ovirt_disks.Place) -> None:
    with ovirt_disk.source("disk-0") as source:
        assert source.identity is not None
        assert ovirt_disks.read(source) == ovirt_disk.before.read_bytes()
        source.verify()
        source.verify()
    source.close()
    ovirt_disk.ended("finished_success")
    assert ovirt_disk.engine.last.form == "raw"


def test_the_active_disk_as_a_checkpoint(ovirt_disk: ovirt_disks.Place) -> None:
    with ovirt_disk.source("disk-1", "disk-0") as source:
        assert (source.format, source.identity) == ("qcow2", None)
        assert source.head.startswith(b"QFI\xfb")
        assert ovirt_disks.read(source) == ovirt_disk.engine.chains["disk"].active.path.read_bytes()
        assert source.extents() is None
        source.verify()
    ovirt_disk.ended("finished_success")
    assert ovirt_disk.engine.last.form == "cow"


def test_what_is_not_verified_is_cancelled(ovirt_disk: ovirt_disks.Place) -> None:
    with ovirt_disk.source() as source:
        source.close()
    with pytest.raises(ZeroDivisionError), ovirt_disk.source():
        1 / 0  # noqa: B018
    ovirt_disk.ended("finished_cleanup", "finished_cleanup")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"disk_id": "none"}, "disk none: the engine has no such thing"),
        ({"current": "none"}, "the disk has no snapshot none"),
        ({"access": base.Access(user="x", password="secret", insecure=True)}, "check user, password"),
        ({"access": base.Access(user="x", password="secret")}, "certificate"),
    ],
)
def test_what_cannot_be(ovirt_disk: ovirt_disks.Place, changes: dict[str, object], words: str) -> None:
    location = dataclasses.replace(ovirt_disk.location(), **changes)  # type: ignore[arg-type]
    with pytest.raises(errors.Unreachable, match=words) as caught:
        imageio.ImageioSource(location, cancelling.Cancel()).__enter__()
    assert "secret" not in str(caught.value)
    ovirt_disk.ended()


def test_a_disk_has_to_be_named() -> None:
    assert any("IMPORTER_DISK_ID" in fault for fault in locations.Imageio("https://x/").faults())


def test_no_certificates_are_asked_for_when_insecure(ovirt_disk: ovirt_disks.Place) -> None:
    access = dataclasses.replace(ovirt_disk.location().access, ca_files=(), insecure=True)
    location = dataclasses.replace(ovirt_disk.location(), access=access)
    with imageio.ImageioSource(location, cancelling.Cancel(), ovirt_disks.QUICK) as source:
        assert ovirt_disks.read(source) == ovirt_disk.now.read_bytes()
