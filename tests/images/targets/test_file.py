"""A file as target: renamed when complete, with the right size and mode."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images import kernel, targets
from cdi_worker.images.engine import cancelling
from tests.support import devices, oracle, pairs, processes, repository, worker

MiB = 1 << 20


@pytest.mark.parametrize("completes", [True, False])
def test_file_is_renamed_only_when_complete(tmp_path: Path, completes: bool) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(b"of yesterday")
    with targets.open(path, MiB) as disk:
        disk.write(0, memoryview(b"boot"))
        assert path.read_bytes() == b"of yesterday"
        if completes:
            disk.commit()
    assert path.read_bytes() == (b"boot".ljust(MiB, b"\0") if completes else b"of yesterday")
    assert os.listdir(tmp_path) == ["disk.img"]


def test_old_disk_can_be_removed_first(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(b"of yesterday")
    with targets.open(path, MiB, targets.TargetOptions(existing="remove")):
        assert not path.exists()


@pytest.mark.parametrize(("permissions", "expected"), [(None, 0o640), (0o660, 0o660)])
def test_mode_is_the_one_given_or_that_of_the_umask(
    tmp_path: Path, permissions: int | None, expected: int
) -> None:
    path = tmp_path / "disk.img"
    old = os.umask(0o027)
    try:
        with targets.open(path, MiB, targets.TargetOptions(permissions=permissions)) as disk:
            disk.commit()
    finally:
        os.umask(old)
    assert stat.S_IMODE(path.stat().st_mode) == expected


@pytest.mark.parametrize(
    ("grown", "preallocate", "known"), pairs.covering([0, MiB // 2, 3 * MiB], [False, True], [False, True])
)
def test_file_is_grown_and_never_shrunk(tmp_path: Path, grown: int, preallocate: bool, known: bool) -> None:
    expected = max(grown, MiB)
    path = tmp_path / "disk.img"
    with targets.open(path, MiB if known else None, targets.TargetOptions(preallocate=preallocate)) as disk:
        disk.write(0, memoryview(b"x" * MiB))
        disk.commit(grown)
    assert path.stat().st_size == expected
    assert path.read_bytes() == b"x" * MiB + bytes(expected - MiB)
    assert path.stat().st_blocks * 512 >= (expected if preallocate else MiB)


@pytest.mark.parametrize(("kind", "size"), [("ext3", 2 * MiB), ("ext3", None), ("ramfs", 2 * MiB)])
def test_preallocation_works_without_fallocate(tmp_path: Path, kind: str, size: int | None) -> None:
    with devices.filesystem(kind, tmp_path) as point:
        path = point / "disk.img"
        with targets.open(path, size, targets.TargetOptions(preallocate=True)) as disk:
            disk.write(0, memoryview(b"x" * 4096))
            disk.zero(4096, 2 * MiB - 4096)
            disk.commit(3 * MiB)
        assert path.read_bytes() == b"x" * 4096 + bytes(3 * MiB - 4096)
        if kind == "ext3":
            assert path.stat().st_blocks * 512 >= 3 * MiB


def test_preallocation_keeps_storage_of_a_resumed_file(tmp_path: Path) -> None:
    for kind in ("ext4", "tmpfs"):
        with devices.filesystem(kind, tmp_path) as point:
            path = point / "disk.img"
            devices.fill(Path(f"{path}.part"), 2 * MiB)
            with targets.open(path, 2 * MiB, targets.TargetOptions(preallocate=True, resume=True)) as disk:
                disk.zero(0, 2 * MiB)
                disk.commit()
            assert path.read_bytes() == bytes(2 * MiB)
            assert path.stat().st_blocks * 512 >= 2 * MiB


def test_zeros_take_no_space(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    with targets.open(path, 1 << 40) as disk:
        disk.zero(0, 1 << 40)
        disk.commit()
    assert path.stat().st_size == 1 << 40
    assert path.stat().st_blocks * 512 < MiB


def test_longer_resumed_file_is_truncated(tmp_path: Path) -> None:
    """The journal behind the last byte is not part of the disk."""
    path = tmp_path / "disk.img"
    devices.fill(Path(f"{path}.part"), 2 * MiB)
    with targets.open(path, MiB + 100, targets.TargetOptions(resume=True)) as disk:
        disk.commit(3 * MiB)
    assert path.read_bytes() == b"\xff" * (MiB + 100) + bytes(2 * MiB - 100)


def test_preallocation_reports_missing_space_at_once(tmp_path: Path) -> None:
    with devices.filesystem("tmpfs", tmp_path) as point:
        with pytest.raises(errors.TargetError, match="no space left on device"):
            targets.open(point / "disk.img", 64 * MiB, targets.TargetOptions(preallocate=True))
        assert os.listdir(point) == []


def overfill(path: Path, direct: bool) -> None:
    piece = memoryview(os.urandom(4 * MiB))
    with targets.open(path, 128 * MiB, targets.TargetOptions(direct=direct)) as disk:
        for offset in range(0, 128 * MiB, len(piece)):
            disk.write(offset, piece)
        disk.commit()


@pytest.mark.parametrize(("kind", "direct"), [("ext4", False), ("ext4", True), ("tmpfs", False)])
def test_full_file_system_is_an_error(tmp_path: Path, kind: str, direct: bool) -> None:
    with devices.filesystem(kind, tmp_path) as point:
        path = point / "disk.img"
        with pytest.raises(errors.TargetError, match="no space left on device"):
            overfill(path, direct)
        oracle.unusable(path)
        assert targets.facts(path).available > 20 * MiB


@pytest.mark.parametrize(("hostile", "resume"), pairs.covering(["directory", "link", "fifo"], [False, True]))
def test_link_or_special_file_is_never_written_to(tmp_path: Path, hostile: str, *, resume: bool) -> None:
    path, part = tmp_path / "disk.img", tmp_path / "disk.img.part"
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    {"directory": part.mkdir, "link": lambda: part.symlink_to(victim), "fifo": lambda: os.mkfifo(part)}[
        hostile
    ]()
    try:
        with targets.open(path, MiB, targets.TargetOptions(resume=resume)) as disk:
            disk.write(0, memoryview(b"boot"))
            disk.commit()
    except errors.TargetError:
        assert not path.exists()
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize("has_begun", [False, True])
def test_update_needs_a_finished_disk(tmp_path: Path, has_begun: bool) -> None:
    path = tmp_path / "disk.img"
    if has_begun:
        with targets.open(path, MiB) as disk:
            disk.write(0, memoryview(b"a"))
            disk.keep()
    before = os.listdir(tmp_path)
    with pytest.raises(errors.TargetError, match="no such file"):
        targets.open(path, None, targets.TargetOptions(mode="delta"))
    assert os.listdir(tmp_path) == before


def test_failed_update_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(b"a" * 1024)
    with targets.open(path, None, targets.TargetOptions(mode="delta")) as disk:
        disk.write(0, memoryview(b"b"))
    oracle.unusable(path)
    with targets.open(path, None, targets.TargetOptions(mode="delta")) as disk:
        disk.write(0, memoryview(b"b"))
        disk.commit()
    assert path.read_bytes() == b"b" + b"a" * 1023


def test_new_disk_replaces_an_interrupted_update(tmp_path: Path) -> None:
    path = tmp_path / "disk.img"
    path.write_bytes(b"a" * 1024)
    with targets.open(path, None, targets.TargetOptions(mode="delta")):
        assert targets.facts(path).size == 1024
    with targets.open(path, 512) as disk:
        disk.commit()
    assert os.listdir(tmp_path) == ["disk.img"]
    assert targets.facts(path).size == 512


def test_no_descriptor_is_left_open(tmp_path: Path) -> None:
    before = processes.descriptors()
    for direct in (False, True):
        with targets.open(tmp_path / "a", MiB, targets.TargetOptions(direct=direct)) as disk:
            disk.commit()
        with targets.open(tmp_path / "b", MiB, targets.TargetOptions(direct=direct)):
            pass
    with pytest.raises(errors.TargetError):
        targets.open(tmp_path / "a" / "below a file", MiB)
    assert processes.descriptors() <= before


@pytest.fixture(scope="module")
def offload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a library that gives every device the offload of FALLOC_FL_WRITE_ZEROES: none here has it."""
    processes.need("gcc")
    library = tmp_path_factory.mktemp("offload") / "write_zeroes.so"
    source = repository.ROOT / "tests/support/write_zeroes.c"
    processes.run("gcc", "-shared", "-fPIC", "-O", "-o", library, source)
    return library


@pytest.mark.parametrize(("preallocate", "refuse"), [(True, ""), (True, "0"), (True, "1"), (False, "")])
def test_preallocated_file_is_zeroed_by_its_device_before_data_is_written(
    tmp_path: Path, offload: Path, preallocate: bool, refuse: str
) -> None:
    """Storage is allocated first. Nothing is zeroed when there is data, not even at the end of the import."""
    data, log = os.urandom(40 * MiB), tmp_path / "calls"
    (tmp_path / "disk.raw").write_bytes(data)
    log.touch()
    options = ["--size", "41Mi", *(["--preallocate"] if preallocate else [])]
    env = {"LD_PRELOAD": str(offload), "WRITE_ZEROES_LOG": str(log)}
    env |= {"WRITE_ZEROES_REFUSE": refuse} if refuse else {}
    done = worker.run("import", *options, str(tmp_path / "disk.raw"), str(tmp_path / "disk.img"), env=env)
    assert done.status == 0, done.errors
    assert (tmp_path / "disk.img").read_bytes() == data + bytes(MiB)
    calls = [tuple(map(int, line.split())) for line in log.read_text().splitlines()]
    zeroed = [(offset, length) for mode, offset, length in calls if mode == 0x80]
    first = (0, 16 * MiB)
    if not preallocate:
        assert not calls
    elif refuse:
        # How long the second one is depends on how long the first one took.
        assert [offset for offset, _ in zeroed] == [0, 16 * MiB][: int(refuse) + 1]
        assert zeroed[0] == first
    else:
        assert sum(length for _, length in zeroed) == len(data)
        assert zeroed[0] == first
    if preallocate:
        assert [mode for mode, *_ in calls] == [0, *[0x80] * len(zeroed), 0]
        assert (tmp_path / "disk.img").stat().st_blocks * 512 >= 41 * MiB


def test_cancel_interrupts_the_zeroing_of_a_new_file(tmp_path: Path) -> None:
    cancel = cancelling.Cancel()
    cancel.set()
    options = targets.TargetOptions(preallocate=True, cancel=cancel)
    with pytest.raises(errors.Cancelled):
        targets.open(tmp_path / "disk.img", MiB, options)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".part")]


def test_refresh_without_a_change_makes_the_name_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have been killed between its rename and the sync of the directory."""
    path = tmp_path / "disk.img"
    path.write_bytes(bytes(4096))
    synced: list[str] = []
    sync = kernel.sync_directory

    def noted(fd: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{fd}").readlink()))
        sync(fd)

    monkeypatch.setattr(kernel, "sync_directory", noted)
    with targets.open(path, 4096, targets.TargetOptions(mode="update")) as disk:
        disk.reach(4096)
        disk.commit()
    assert synced == [str(tmp_path)]
