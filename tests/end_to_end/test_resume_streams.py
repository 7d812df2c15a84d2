"""A killed import of an ordered stream: the next run reads all of it again, and writes what storage lacks."""

from __future__ import annotations

import dataclasses
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import (
    devices,
    disks,
    kills,
    misbehave,
    oracle,
    ovas,
    processes,
    vhd_images,
    vmdk_stream,
)

MIB, SIZE = kills.MIB, kills.SIZE
#: Noise with a hole of 2 MiB, which an import zeroes.
DATA = kills.DATA[: 4 * MIB] + bytes(2 * MIB) + kills.DATA[6 * MIB :]
OTHER = random.Random(8).randbytes(SIZE)
#: The least that a run killed by ``kill_late`` has noted: images with tables are read in pieces of 4 MiB.
KEPT = 2 * MIB


@pytest.fixture(params=["file"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Yield a target: as ``devices.target`` does, or the path of a ``qcow2`` file."""
    kind = "file" if request.param == "qcow2" else request.param
    with devices.target(kind, tmp_path, 16 * MIB) as path:
        yield path.with_name("disk.qcow2") if request.param == "qcow2" else path


def image(tmp_path: Path, form: str, data: bytes = DATA) -> bytes:
    if form == "esxi":
        return vmdk_stream.streamed(data, progress=1)
    if form == "vhd-fixed":
        return vhd_images.fixed(data, b"vpc ")
    if form == "raw":
        return data
    if form == "ova":
        return ovas.ova(ovas.Disk(data, "disk.raw"))
    form, _, compression = form.partition(".")
    (tmp_path / "raw").write_bytes(data)
    disks.convert(tmp_path / "raw", tmp_path / "image", disks.FORMATS[form])
    made = (tmp_path / "image").read_bytes()
    return disks.COMPRESSIONS[compression](made) if compression else made


def stream(body: bytes, **options: object) -> misbehave.Page:
    return misbehave.Page(body, ranges=False, **options)


def request(url: str, target: Path, **options: object) -> cdi_worker.Request:
    if target.suffix == ".qcow2":
        options["format"] = "qcow2"
    return kills.request(url, target, scratch=target.parent, **options)


def kill_late(
    server: misbehave.Server, page: misbehave.Page, target: Path, **options: object
) -> cdi_worker.Request:
    """Kill an import of the page, which is then served at full speed; return the request."""
    wanted = request(server.url("/disk"), target, **options)
    server.serve("/disk", kills.slow(page))
    kills.midway(server, wanted, sent=len(page.body) * 3 // 4, kept=KEPT - MIB)
    oracle.unusable(target, disk=DATA)
    server.serve("/disk", page)
    # The next run writes its journal rarely.
    return dataclasses.replace(wanted, journal_interval=10.0)


def check(target: Path, tmp_path: Path, data: bytes = DATA) -> None:
    """Compare the target with the disk; nothing is beside it."""
    (tmp_path / "expected").write_bytes(data)
    if target.suffix == ".qcow2":
        processes.run("qemu-img", "check", "-q", "-f", "qcow2", target)
        guest = tmp_path / "guest"
        disks.to_raw(target, "qcow2", guest)
        oracle.same(guest, tmp_path / "expected")
        assert guest.stat().st_size == len(data)
    else:
        oracle.same(target, tmp_path / "expected", beyond=devices.beyond(target))
    if not target.is_block_device():
        assert target.suffix == ".qcow2" or target.stat().st_size == len(data)
        assert [each.name for each in target.parent.glob(f"{target.name}*")] == [target.name]


def bytes_written(device: Path) -> int:
    return 512 * int((Path("/sys/class/block") / device.name / "stat").read_text().split()[6])


def written(target: Path) -> Path:
    return target if target.is_block_device() else target.with_name(f"{target.name}.part")


# -- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("form", "target"),
    [
        ("raw", "file"),
        ("raw", "block4096"),
        ("raw", "qcow2"),
        ("vhd-fixed", "file"),
        ("vhd-fixed", "qcow2"),
        ("vmdk-stream", "block512"),
        ("vmdk-stream", "qcow2"),
        ("esxi", "file"),
        ("esxi", "block4096"),
        ("qcow2", "file"),
        ("qcow2.gz", "block512"),
        ("ova", "file"),
    ],
    indirect=["target"],
)
def test_killed_stream_continues(server: misbehave.Server, target: Path, tmp_path: Path, form: str) -> None:
    wanted = kill_late(server, stream(image(tmp_path, form)), target)
    noted = kills.noted(target)
    before = bytes_written(target) if target.is_block_device() else 0
    result = cdi_worker.run(wanted)
    assert not result.plan.random
    assert result.resumed > 0
    assert result.written <= SIZE - noted
    assert result.refetched == 0
    if target.is_block_device():
        # With the first MiB, which is written twice, and what vouches for it.
        assert bytes_written(target) - before <= SIZE - noted + 2 * MIB
    check(target, tmp_path)


def test_download_to_scratch_continues(server: misbehave.Server, target: Path, tmp_path: Path) -> None:
    """Its file has a journal, too; what was changed in it is written again."""
    page, scratch = stream(image(tmp_path, "vhdx-log")), tmp_path / "scratch"
    scratch.mkdir()
    wanted = kills.request(server.serve("/disk", kills.slow(page)), target, scratch=scratch)

    def file() -> Path:
        return next(scratch.rglob("image.part"), target).with_suffix("")

    assert kills.kill(wanted, lambda: kills.noted(file()) > 6 * MIB) == -signal.SIGKILL
    devices.change(file().with_name("image.part"), 3 * MIB, b"changed")
    server.serve("/disk", page)
    result = cdi_worker.run(wanted)
    assert result.plan.route is cdi_worker.Route.SPOOL
    assert result.resumed > 5 * MIB
    assert 0 < result.refetched <= 64 << 10
    check(target, tmp_path)
    assert not [*scratch.iterdir()]


@pytest.mark.parametrize(("form", "target"), [("raw", "file"), ("esxi", "block4096")], indirect=["target"])
def test_third_run_continues_after_two_kills(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str
) -> None:
    page = stream(image(tmp_path, form))
    wanted = request(server.url("/disk"), target)
    first = 0
    for stall_at in (5 * MIB, 9 * MIB):
        server.serve("/disk", dataclasses.replace(kills.slow(page), stall_at=stall_at))
        # Where a sync is slow, the second run saves once while it writes all that comes before the stall.
        kills.midway(server, wanted, sent=stall_at - MIB, kept=max(0, first - MIB))
        first = kills.noted(target)
    server.serve("/disk", page)
    assert cdi_worker.run(wanted).written <= SIZE - first
    check(target, tmp_path)


def test_cancelled_stream_says_what_is_kept_and_continues(
    server: misbehave.Server, target: Path, tmp_path: Path
) -> None:
    page = stream(image(tmp_path, "esxi"))
    wanted = request(server.serve("/disk", kills.slow(page)), target)
    kills.midway(server, wanted, signal.SIGTERM, sent=8 * MIB, kept=KEPT - MIB)
    server.serve("/disk", page)
    assert cdi_worker.run(wanted).resumed > MIB
    check(target, tmp_path)


def test_stream_that_failed_for_good_continues(
    server: misbehave.Server, target: Path, tmp_path: Path
) -> None:
    page = stream(image(tmp_path, "vmdk-stream"))
    wanted = request(
        server.serve("/disk", dataclasses.replace(page, cut_at=9 * MIB)),
        target,
        fetch=cdi_worker.FetchOptions(no_progress=1),
    )
    with pytest.raises(errors.TransferFailed):
        cdi_worker.run(wanted)
    oracle.unusable(target)
    server.serve("/disk", page)
    assert cdi_worker.run(wanted).resumed > MIB
    check(target, tmp_path)


@pytest.mark.parametrize(
    ("form", "target"),
    [("raw", "file"), ("vmdk-stream", "block512"), ("esxi", "file"), ("esxi", "block4096"), ("raw", "qcow2")],
    indirect=["target"],
)
def test_kills_at_random_moments_of_a_stream(
    server: misbehave.Server, target: Path, tmp_path: Path, pytestconfig: pytest.Config, form: str
) -> None:
    """The target is not usable, and the next run makes it the disk; some are killed twice."""
    page = stream(image(tmp_path, form))
    for number, moment in enumerate(kills.moments(pytestconfig)):
        if target.is_block_device():
            devices.fill(target, 16 * MIB)
        else:
            target.unlink(missing_ok=True)
        wanted = request(server.serve("/disk", dataclasses.replace(page, **kills.SLOW)), target)
        for _ in range(1 + number % 2):
            kills.after(moment, wanted)
        server.serve("/disk", page)
        cdi_worker.run(wanted)
        check(target, tmp_path)


# -- what must not be kept -----------------------------------------------------------------------


@pytest.mark.parametrize(("form", "target"), [("raw", "block4096"), ("esxi", "file")], indirect=["target"])
def test_changed_source_starts_over(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str
) -> None:
    wanted = kill_late(server, stream(image(tmp_path, form)), target)
    server.serve("/disk", stream(image(tmp_path, form, OTHER), etag='"two"'))
    result = cdi_worker.run(wanted)
    assert result.resumed == 0
    assert result.written == SIZE
    check(target, tmp_path, OTHER)


@pytest.mark.parametrize("form", ["raw", "vmdk-stream"])
@pytest.mark.parametrize("identity", [{"etag": 'W/"1"'}, {"etag": None}, {"etag": None, "modified": None}])
def test_weak_identity_keeps_nothing(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str, identity: dict[str, str | None]
) -> None:
    page = stream(image(tmp_path, form), **identity)
    wanted = request(server.serve("/disk", kills.slow(page)), target)
    kills.midway(server, wanted, sent=8 * MIB)
    assert kills.noted(target) == 0
    server.serve("/disk", page)
    result = cdi_worker.run(wanted)
    assert (result.resumed, result.written) == (0, SIZE - 2 * MIB)
    check(target, tmp_path)


@pytest.mark.parametrize(
    ("form", "part", "target"),
    [
        ("raw", "sector", "file"),
        ("raw", "hole", "block512"),
        ("esxi", "sector", "block4096"),
        ("esxi", "all", "file"),
        ("vmdk-stream", "hole", "file"),
    ],
    indirect=["target"],
)
def test_storage_that_was_changed_is_repaired(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str, part: str
) -> None:
    wanted = kill_late(server, stream(image(tmp_path, form)), target)
    start, length = {"sector": (2 * MIB + 512, 512), "hole": (5 * MIB, 512), "all": (MIB, 9 * MIB)}[part]
    devices.change(written(target), start, b"x" * length)
    result = cdi_worker.run(wanted)
    if part == "sector":
        assert 0 < result.refetched <= 64 << 10
    check(target, tmp_path)


@pytest.mark.parametrize(("form", "target"), [("esxi", "file"), ("qcow2", "block4096")], indirect=["target"])
def test_ranges_do_not_trust_a_stream_whose_tables_came_last(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str
) -> None:
    """The server lied, and was killed before the end that shows it. Then it is honest, and has ranges."""
    honest = image(tmp_path, form)
    lie = image(tmp_path, form, DATA[:MIB] + OTHER[MIB : 3 * MIB] + DATA[3 * MIB :])
    assert len(lie) == len(honest)
    wanted = kill_late(server, stream(lie), target)
    server.serve("/disk", misbehave.Page(honest))
    result = cdi_worker.run(wanted)
    assert result.plan.random
    assert result.resumed == 0
    check(target, tmp_path)


@pytest.mark.parametrize(("form", "target"), [("esxi", "file"), ("raw", "block512")], indirect=["target"])
def test_stream_replaces_what_a_stream_that_lied_has_written(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str
) -> None:
    """Under the same ETag, with the same first bytes."""
    lie = image(tmp_path, form, DATA[:MIB] + OTHER[MIB : 3 * MIB] + DATA[3 * MIB :])
    wanted = kill_late(server, stream(lie), target)
    server.serve("/disk", stream(image(tmp_path, form)))
    result = cdi_worker.run(wanted)
    assert result.refetched >= 2 * MIB - 64
    check(target, tmp_path)


def test_second_run_with_the_target_of_a_stream_fails(
    server: misbehave.Server, target: Path, tmp_path: Path
) -> None:
    page = stream(image(tmp_path, "esxi"))
    wanted = request(server.serve("/disk", kills.slow(page)), target)
    with kills.started(wanted):
        processes.wait_for(lambda: kills.noted(target) > MIB, "the first run to write")
        with pytest.raises(errors.TargetBusy):
            cdi_worker.run(wanted)
    server.serve("/disk", page)
    assert cdi_worker.run(wanted).resumed > MIB
    check(target, tmp_path)
