"""Warm migration from oVirt, stage by stage: after each, the target is the disk at its checkpoint."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import devices, imageiod, meters, oracle, ovirt_stages, processes

SECOND = ("write -P 4 512 512", "write -P 5 4500k 1k", "discard 1M 64k", "write -z 0 4k", "write -z 15M 64k")
FINAL = ("write -P 6 7M 3M", "write -z 8M 64k")


target = devices.targets("file", "512", "4096", size=ovirt_stages.SIZE + ovirt_stages.MIB)


def test_stages_of_a_migration_reproduce_each_checkpoint(ovirt: ovirt_stages.Setup, target: Path) -> None:
    chain = ovirt.chain()
    frozen = chain.active.id
    chain.snapshot(*ovirt_stages.FIRST)
    result = cdi_worker.run(ovirt.request(chain, target, frozen))
    assert result.plan.route is cdi_worker.Route.EXTENTS
    oracle.same(target, ovirt.content(chain, frozen))
    for writes in (SECOND, FINAL):
        previous, frozen = frozen, chain.active.id
        chain.snapshot(*writes)
        result = cdi_worker.run(ovirt.request(chain, target, frozen, previous))
        assert result.plan.route is cdi_worker.Route.MERGE
        assert result.size == (ovirt_stages.SIZE if target.is_file() else result.size)
        oracle.same(target, ovirt.content(chain, frozen))
    final = ovirt.request(chain, target, chain.active.id, frozen)
    final = dataclasses.replace(final, location=dataclasses.replace(final.location, final=True))
    for _ in range(2):  # a finished stage may be requested again, too
        cdi_worker.run(final)
        oracle.same(target, ovirt.content(chain, chain.active.id))
    assert [transfer.form for transfer in ovirt.engine.transfers] == ["raw", "cow", "cow", "cow", "cow"]
    assert {transfer.phase for transfer in ovirt.engine.transfers} == {"finished_success"}
    ovirt.check_settled()


def test_progress_is_that_of_the_allocated_data(ovirt: ovirt_stages.Setup, tmp_path: Path) -> None:
    chain, shown = ovirt.chain(), meters.Totals()
    frozen = chain.active.id
    chain.snapshot(*ovirt_stages.FIRST)
    cdi_worker.run(ovirt.request(chain, tmp_path / "disk.img", frozen), shown)
    assert shown.totals == {shown.moved}
    assert 0 < shown.moved < ovirt_stages.SIZE


def test_first_stage_grows_the_disk_and_deltas_do_not(ovirt: ovirt_stages.Setup, tmp_path: Path) -> None:
    chain, target = ovirt.chain(), tmp_path / "disk.img"
    first = chain.active.id
    chain.snapshot(*ovirt_stages.FIRST)
    request = ovirt.request(chain, target, first)
    cdi_worker.run(dataclasses.replace(request, image_size=ovirt_stages.SIZE + 3 * ovirt_stages.MIB))
    assert target.stat().st_size == ovirt_stages.SIZE + 3 * ovirt_stages.MIB
    request = ovirt.request(chain, target, chain.active.id, first)
    cdi_worker.run(dataclasses.replace(request, image_size=ovirt_stages.SIZE + 8 * ovirt_stages.MIB))
    assert target.stat().st_size == ovirt_stages.SIZE + 3 * ovirt_stages.MIB
    oracle.same(target, ovirt.content(chain, chain.active.id))


@pytest.mark.parametrize(
    ("target", "final"), [("file", False), ("512", True), ("4096", False)], indirect=["target"]
)
def test_disk_that_grows_between_stages(ovirt: ovirt_stages.Setup, target: Path, final: bool) -> None:
    """The new space is zero, except for what the delta writes to it; a device has old data there."""
    chain = ovirt.chain(ovirt_stages.SIZE // 2)
    first = chain.active.id
    chain.snapshot(size=ovirt_stages.SIZE)
    chain.write("write -P 7 4k 4k", f"write -P 8 {ovirt_stages.SIZE * 3 // 4} 70000")
    request = ovirt.request(chain, target, first)
    location = dataclasses.replace(request.location, final=final)
    cdi_worker.run(dataclasses.replace(request, location=location, image_size=ovirt_stages.SIZE))
    for _ in range(2):
        cdi_worker.run(ovirt.request(chain, target, chain.active.id, first))
        oracle.same(target, ovirt.content(chain, chain.active.id), beyond=None)


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_space_by_which_a_disk_grows_is_preallocated(ovirt: ovirt_stages.Setup, target: Path) -> None:
    """A delta changes the disk that exists, whatever becomes of the disk of another run."""
    chain = ovirt.chain(ovirt_stages.SIZE // 2)
    first = chain.active.id
    chain.snapshot("write -P 7 4k 4k", size=ovirt_stages.SIZE)
    cdi_worker.run(dataclasses.replace(ovirt.request(chain, target, first), image_size=ovirt_stages.SIZE))
    delta = ovirt.request(chain, target, chain.active.id, first)
    result = cdi_worker.run(dataclasses.replace(delta, existing="remove", preallocation=True))
    assert result.plan.route is cdi_worker.Route.MERGE
    oracle.same(target, ovirt.content(chain, chain.active.id))
    assert target.stat().st_blocks * 512 >= ovirt_stages.SIZE // 2


# -- deltas that must not be merged --------------------------------------------------------------


@pytest.fixture
def first_stage(ovirt: ovirt_stages.Setup, target: Path) -> imageiod.Chain:
    """Import the first stage of a disk with two more volumes to the target."""
    chain = ovirt.chain()
    chain.snapshot(*ovirt_stages.FIRST)
    chain.snapshot(*SECOND)
    cdi_worker.run(ovirt.request(chain, target, chain.volumes[0].id))
    return chain


@pytest.mark.parametrize("target", ["512"], indirect=True)
def test_delta_of_another_checkpoint_is_refused(
    ovirt: ovirt_stages.Setup, target: Path, first_stage: imageiod.Chain
) -> None:
    first, _, last = (volume.id for volume in first_stage.volumes)
    with pytest.raises(
        errors.Refused, match=f"backing file is '{first_stage.volumes[1].id}', expected '{first}'"
    ):
        cdi_worker.run(ovirt.request(first_stage, target, last, first))
    oracle.same(target, ovirt.content(first_stage, first))
    ovirt.check_settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_stage_is_not_applied_to_another_checkpoint(
    ovirt: ovirt_stages.Setup, target: Path, first_stage: imageiod.Chain
) -> None:
    first, second, third = (volume.id for volume in first_stage.volumes)
    with pytest.raises(
        errors.TargetError, match=f"holds the disk at checkpoint {first} of snapshot .*, the delta is from"
    ):
        cdi_worker.run(ovirt.request(first_stage, target, third, second))
    oracle.same(target, ovirt.content(first_stage, first))
    for previous, current in ((first, second), (second, third), (second, third)):
        cdi_worker.run(ovirt.request(first_stage, target, current, previous))
        oracle.same(target, ovirt.content(first_stage, current))
    with pytest.raises(errors.TargetError, match=f"holds the disk at checkpoint {third}"):
        cdi_worker.run(ovirt.request(first_stage, target, second, first))
    ovirt.check_settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
@pytest.mark.parametrize("late", [False, True], ids=["before", "just before the disk is locked"])
def test_stage_is_not_applied_to_a_checkpoint_that_got_other_data(
    ovirt: ovirt_stages.Setup, target: Path, first_stage: imageiod.Chain, late: bool
) -> None:
    """Removing a snapshot merges the data above into its image, which keeps its id."""
    first, second, third = (volume.id for volume in first_stage.volumes)
    first_stage.snapshot(*FINAL)
    fourth = first_stage.active.id
    cdi_worker.run(ovirt.request(first_stage, target, second, first))
    before = ovirt.content(first_stage, second).read_bytes()
    if late:
        ovirt.engine.ending = lambda: first_stage.remove(second)
    else:
        first_stage.remove(second)
    for current, previous in ((fourth, second), (second, first)):
        with pytest.raises(
            errors.TargetError, match=f"at checkpoint {second} of snapshot vm-snapshot-{second},"
        ):
            cdi_worker.run(ovirt.request(first_stage, target, current, previous))
        assert target.read_bytes() == before
    assert first_stage.volume(third) is None
    cdi_worker.run(ovirt.request(first_stage, target, second))
    cdi_worker.run(ovirt.request(first_stage, target, fourth, second))
    oracle.same(target, ovirt.content(first_stage, fourth))
    ovirt.check_settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_disk_that_was_copied_while_it_was_active_is_no_checkpoint(
    ovirt: ovirt_stages.Setup, target: Path
) -> None:
    """The machine may have written to the image since then, before its snapshot."""
    chain = ovirt.chain()
    active = chain.active.id
    cdi_worker.run(ovirt.request(chain, target, active))
    before = target.read_bytes()
    chain.write(*ovirt_stages.FIRST)
    chain.snapshot(*SECOND)
    with pytest.raises(errors.TargetError, match=f"at checkpoint {active}, the delta is from"):
        cdi_worker.run(ovirt.request(chain, target, chain.active.id, active))
    assert target.read_bytes() == before
    ovirt.check_settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_volume_without_backing_file_is_not_a_delta(
    ovirt: ovirt_stages.Setup, target: Path, first_stage: imageiod.Chain
) -> None:
    first = first_stage.volumes[0].id
    with pytest.raises(errors.Refused, match="no backing file"):
        cdi_worker.run(ovirt.request(first_stage, target, first, "something"))
    oracle.same(target, ovirt.content(first_stage, first))
    ovirt.check_settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_truncated_delta_is_refused(
    ovirt: ovirt_stages.Setup, target: Path, first_stage: imageiod.Chain
) -> None:
    first, second, _ = (volume.id for volume in first_stage.volumes)
    ovirt.engine.short = 512
    with pytest.raises(errors.ImageError, match="truncated qcow2"):
        cdi_worker.run(ovirt.request(first_stage, target, second, first))
    oracle.same(target, ovirt.content(first_stage, first))
    ovirt.check_settled()


def test_delta_needs_a_disk(ovirt: ovirt_stages.Setup, tmp_path: Path) -> None:
    chain = ovirt.chain()
    first = chain.active.id
    chain.snapshot(*ovirt_stages.FIRST)
    (tmp_path / "disk.img.part").write_bytes(b"of a first stage that was killed" * ovirt_stages.MIB)
    with pytest.raises(errors.TargetError, match="no disk of an earlier stage"):
        cdi_worker.run(ovirt.request(chain, tmp_path / "disk.img", chain.active.id, first))
    ovirt.check_settled()


@pytest.mark.parametrize("target", ["512"], indirect=True)
def test_delta_grows_the_disk(ovirt: ovirt_stages.Setup, target: Path, first_stage: imageiod.Chain) -> None:
    second, third = first_stage.volumes[1].id, first_stage.volumes[2].id
    cdi_worker.run(ovirt.request(first_stage, target, second, first_stage.volumes[0].id))
    processes.run(
        "qemu-img",
        "resize",
        "-q",
        "-f",
        "qcow2",
        first_stage.active.path,
        str(ovirt_stages.SIZE + 2 * ovirt_stages.MIB),
    )
    with pytest.raises(errors.TooLarge, match="A larger PVC is required"):
        cdi_worker.run(ovirt.request(first_stage, target, third, second))
    oracle.same(target, ovirt.content(first_stage, second))
    ovirt.check_settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_disk_that_looks_like_an_image_stays_raw(ovirt: ovirt_stages.Setup, target: Path) -> None:
    chain = ovirt.chain()
    hostile = ovirt.directory / "hostile"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", hostile, "1M")
    chain.write(f"write -s {hostile} 0 64k")
    result = cdi_worker.run(ovirt.request(chain, target, chain.active.id))
    assert result.format == "raw"
    oracle.same(target, ovirt.content(chain, chain.active.id))
