"""``--update``: a disk of an earlier import is compared with the source, and only what differs is written."""

from __future__ import annotations

import hashlib
import json
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import fetch
from cdi_worker.images.sinks import compared
from cdi_worker.images.targets import checkpoint, storage
from cdi_worker.sources.web import locations as web_locations
from tests.support import devices, disks, kills, misbehave, oracle, pairs, processes, worker

MIB = 1 << 20
SIZE = 12 * MIB
OLD = bytearray(random.Random(1).randbytes(4 * MIB) + bytes(4 * MIB) + random.Random(2).randbytes(4 * MIB))
#: What the machine has written since: data over data and over holes, zeros over data, at both ends.
NEW = bytearray(OLD)
for offset, data in (
    (0, b"boot"),
    (3 * MIB + 100, b"x" * 5000),
    (5 * MIB, b"y" * 70_000),
    (2 * MIB, bytes(MIB)),
    (9 * MIB, bytes(4096)),
    (SIZE - 512, b"z" * 512),
):
    NEW[offset : offset + len(data)] = data


target = devices.targets("file", "block512", "block4096", size=16 * MIB)


def image(content: bytes | bytearray, form: str, tmp_path: Path) -> bytes:
    """Return a disk in a format."""
    if form == "raw":
        return bytes(content)
    if form == "raw.gz":
        import gzip

        return gzip.compress(content, 1)
    raw, made = tmp_path / "made.raw", tmp_path / "made"
    raw.write_bytes(content)
    disks.convert(raw, made, disks.FORMATS[form])
    return made.read_bytes()


def request(url: str, target: Path, **options: Any) -> cdi_worker.Request:
    return cdi_worker.Request(
        source="http",
        location=options.pop("location", cdi_worker.Location(url)),
        target=str(target),
        existing=options.pop("existing", "update"),
        fetch=fetch.FetchOptions(connections=2, chunk=MIB, no_progress=options.pop("no_progress", 20)),
        **options,
    )


def imported(server: misbehave.Server, target: Path, content: bytes | bytearray = OLD) -> None:
    url = server.serve("/old", misbehave.Page(bytes(content)))
    cdi_worker.run(request(url, target, existing="replace"))


def same(target: Path, content: bytes | bytearray, tmp_path: Path) -> None:
    expected = tmp_path / "expected"
    expected.write_bytes(content)
    oracle.same(target, expected, beyond=devices.beyond(target))
    if not target.is_block_device():
        assert target.stat().st_size == len(content)
        assert [path.name for path in target.parent.glob("disk.img*")] == ["disk.img"]


@pytest.mark.parametrize(
    ("form", "target"),
    pairs.dealt(["raw", "raw.gz", "qcow2", "vhdx", "vhdx-log"], ["block512", "file", "block4096"]),
    indirect=["target"],
)
def test_only_what_differs_is_written(
    server: misbehave.Server, target: Path, tmp_path: Path, scratch: Path, form: str
) -> None:
    imported(server, target)
    url = server.serve("/new", misbehave.Page(image(NEW, form, tmp_path)))
    result = cdi_worker.run(request(url, target, scratch=str(scratch)))
    same(target, NEW, tmp_path)
    assert result.changes is not None
    assert result.changes.compared == SIZE
    assert 1_100_000 < result.changes.differed <= result.changes.written < 4 * MIB
    assert not [*scratch.iterdir()]


@pytest.mark.parametrize(("form", "target"), [("raw", "file"), ("qcow2", "block4096")], indirect=["target"])
def test_unchanged_disk_is_not_touched(
    server: misbehave.Server, target: Path, tmp_path: Path, form: str
) -> None:
    imported(server, target)
    before = target.stat()
    written = sectors_written(target)
    result = cdi_worker.run(request(server.serve("/new", misbehave.Page(image(OLD, form, tmp_path))), target))
    same(target, OLD, tmp_path)
    assert result.changes == compared.Changes(SIZE, 0, 0)
    assert sectors_written(target) == written
    if not target.is_block_device():
        after = target.stat()
        assert (after.st_mtime_ns, after.st_ino, after.st_blocks) == (
            before.st_mtime_ns,
            before.st_ino,
            before.st_blocks,
        )


def sectors_written(target: Path) -> int:
    if not target.is_block_device():
        return 0
    return int((Path("/sys/class/block") / target.name / "stat").read_text().split()[6])


def test_zeros_free_the_storage_of_a_file_and_leave_its_holes(
    server: misbehave.Server, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    imported(server, target)
    blocks = target.stat().st_blocks
    empty = bytearray(OLD)
    empty[: 4 * MIB] = bytes(4 * MIB)
    cdi_worker.run(request(server.serve("/new", misbehave.Page(bytes(empty))), target))
    same(target, empty, tmp_path)
    assert target.stat().st_blocks <= blocks - 4 * MIB // 512


@pytest.mark.parametrize(
    ("size", "target"),
    [
        (10 * MIB, "block4096"),
        (SIZE + 3 * MIB, "block512"),
        (MIB // 2 + 512, "block4096"),
        (100_000, "file"),
    ],
    indirect=["target"],
)
def test_disk_of_another_size_is_as_after_an_import(
    server: misbehave.Server, target: Path, tmp_path: Path, size: int
) -> None:
    imported(server, target, (OLD + OLD)[: 15 * MIB])
    content = (NEW + OLD)[:size]
    cdi_worker.run(request(server.serve("/new", misbehave.Page(bytes(content))), target))
    content += bytes(-size % 512)
    expected = tmp_path / "expected"
    expected.write_bytes(content)
    oracle.same(target, expected, beyond=None if target.is_block_device() else b"\0")
    if not target.is_block_device():
        assert target.stat().st_size == len(content)


@pytest.mark.parametrize("target", ["block512"], indirect=True)
def test_failure_before_the_first_difference_leaves_the_disk(
    server: misbehave.Server, target: Path, tmp_path: Path
) -> None:
    imported(server, target)
    url = server.serve("/new", misbehave.Page(bytes(NEW), silent=False, status=500))
    with pytest.raises(errors.SourceError):
        cdi_worker.run(request(url, target, connect_patience=0.1))
    same(target, OLD, tmp_path)


def broken(server: misbehave.Server) -> str:
    """Serve the new disk up to 10 MiB."""
    return server.serve("/new", misbehave.Page(bytes(NEW), cut_at=10 * MIB))


@pytest.mark.parametrize("target", ["file", "block4096"], indirect=True)
def test_interrupted_update_is_unusable_until_the_next_has_ended(
    server: misbehave.Server, target: Path, tmp_path: Path
) -> None:
    imported(server, target)
    url = broken(server)
    with pytest.raises(errors.TransferFailed):
        cdi_worker.run(request(url, target, no_progress=0.5))
    oracle.unusable(target)
    with pytest.raises(errors.TransferFailed):
        cdi_worker.run(request(url, target, no_progress=0.5))
    oracle.unusable(target)
    server.serve("/new", misbehave.Page(bytes(NEW)))
    result = cdi_worker.run(request(url, target))
    same(target, NEW, tmp_path)
    # What the first attempt has written is not written again.
    assert result.changes is not None
    assert result.changes.written < 3 * MIB


@pytest.mark.parametrize("target", ["block512"], indirect=True)
def test_wrong_checksum_leaves_no_usable_disk(server: misbehave.Server, target: Path) -> None:
    imported(server, target)
    url = server.serve("/new", misbehave.Page(bytes(NEW)))
    wrong = f"sha256:{hashlib.sha256(b'other').hexdigest()}"
    with pytest.raises(errors.ChecksumMismatch):
        cdi_worker.run(request(url, target, checksum=wrong))
    oracle.unusable(target)


def test_interrupted_update_is_not_a_disk_for_other_imports(server: misbehave.Server, tmp_path: Path) -> None:
    """Neither for a plain import nor for a delta, although it was at a checkpoint."""
    target = tmp_path / "disk.img"
    url = server.serve("/old", misbehave.Page(bytes(OLD)))
    location = web_locations.Http(url, current="one")
    cdi_worker.run(request(url, target, existing="replace", location=location))
    assert checkpoint.of_disk(str(target)) == checkpoint.Checkpoint(frozenset({"one"}))
    with pytest.raises(errors.TransferFailed):
        cdi_worker.run(request(broken(server), target, no_progress=0.5))
    with pytest.raises(errors.TargetExists):
        cdi_worker.run(request(url, target, existing="refuse"))
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", tmp_path / "delta.qcow2", str(SIZE))
    delta = server.serve("/delta", misbehave.Page((tmp_path / "delta.qcow2").read_bytes()))
    staged = web_locations.Http(delta, previous="one", current="two")
    with pytest.raises(errors.TargetError, match="it is in the middle of an update, which must be run again"):
        cdi_worker.run(request(delta, target, existing="refuse", location=staged))
    server.serve("/new", misbehave.Page(bytes(NEW)))
    cdi_worker.run(request(server.url("/new"), target))
    assert checkpoint.of_disk(str(target)) is None
    same(target, NEW, tmp_path / "..")


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_import_with_force_replaces_an_interrupted_update(
    server: misbehave.Server, target: Path, tmp_path: Path
) -> None:
    imported(server, target)
    with pytest.raises(errors.TransferFailed):
        cdi_worker.run(request(broken(server), target, no_progress=0.5))
    imported(server, target, NEW)
    same(target, NEW, tmp_path)


def test_missing_disk_is_imported(server: misbehave.Server, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    result = cdi_worker.run(request(server.serve("/new", misbehave.Page(bytes(NEW))), target))
    same(target, NEW, tmp_path)
    assert result.changes is None


def test_disk_with_another_name_is_not_changed_in_place(server: misbehave.Server, tmp_path: Path) -> None:
    """A hard link stays usable while the disk is changed, and two runs could change it by two names."""
    target, link = tmp_path / "disk.img", tmp_path / "copy.img"
    imported(server, target)
    link.hardlink_to(target)
    url = server.serve("/new", misbehave.Page(bytes(NEW)))
    with pytest.raises(errors.TargetError, match="several hard links"):
        cdi_worker.run(request(url, target))
    assert link.read_bytes() == target.read_bytes() == OLD
    cdi_worker.run(request(url, target, existing="replace"))
    assert (target.read_bytes(), link.read_bytes()) == (NEW, OLD)


def test_device_of_somebody_else_is_refused(server: misbehave.Server, device: Path) -> None:
    processes.run("mkswap", device)
    with pytest.raises(errors.TargetExists, match="holds swap"):
        cdi_worker.run(request(server.serve("/new", misbehave.Page(bytes(MIB))), device))


@pytest.mark.parametrize("target", ["block512"], indirect=True)
def test_second_run_waits_for_the_first(server: misbehave.Server, target: Path) -> None:
    imported(server, target)
    from cdi_worker.images import targets

    url = server.serve("/new", misbehave.Page(bytes(NEW)))
    with targets.take(str(target)), pytest.raises(errors.TargetBusy):
        cdi_worker.run(request(url, target))


@pytest.mark.parametrize("target", ["block4096"], indirect=True)
def test_stream_that_needs_scratch_is_relayed(
    server: misbehave.Server, target: Path, tmp_path: Path, scratch: Path
) -> None:
    """A qcow2 stream whose tables come last is converted in scratch, not on the disk."""
    from tests.support import qcow2_images

    content = random.Random(4).randbytes(SIZE)
    imported(server, target)
    last = qcow2_images.tables_last(image(content, "qcow2", tmp_path))
    url = server.serve("/new", misbehave.Page(last, ranges=False))
    cdi_worker.run(request(url, target, scratch=str(scratch)))
    same(target, content, tmp_path)


# -- the command line and pods --------------------------------------------------------------


def test_result_says_how_much_was_written(server: misbehave.Server, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    imported(server, target)
    url = server.serve("/new", misbehave.Page(bytes(NEW)))
    dry = worker.call("import", "--dry-run", "--update", url, target)
    assert "compared with the target, only what differs is written" in dry.output
    done = worker.call("import", "--json", "--update", url, target)
    assert done.status == 0, done.errors
    found = json.loads(done.output)
    assert found["read"] >= SIZE
    assert found["update"]["compared"] == SIZE
    again = worker.call("import", url, target, env={"CDI_WORKER_UPDATE": "true"})
    assert again.status == 0, again.errors
    assert "updated  0 B of 12.0 MiB differed, 0 B written" in again.output
    for options in (("--force", "--update"), ("--update", "--content-type", "archive")):
        refused = worker.call("import", *options, url, target)
        assert refused.status == 2, refused


def test_disk_of_a_pod_that_is_text_is_updated(server: misbehave.Server, pod: worker.Pod) -> None:
    text = b"a line of text\n" * 100
    pod.env["IMPORTER_ENDPOINT"] = server.serve("/disk", misbehave.Page(text))
    for _ in range(2):
        done = pod.call()
        assert done.status == 0, done.errors
        assert "the source is plain text, imported as it is" in done.errors
        pod.env["CDI_WORKER_UPDATE"] = "true"
    assert pod.disk.read_bytes().startswith(text)


def test_pod_updates_its_volume(server: misbehave.Server, pod: worker.Pod, tmp_path: Path) -> None:
    pod.env["IMPORTER_ENDPOINT"] = server.serve("/disk", misbehave.Page(bytes(OLD)))
    pod.env |= {"CDI_WORKER_UPDATE": "true", "IMPORTER_IMAGE_SIZE": "12Mi"}
    assert pod.call().status == 0
    inode = pod.disk.stat().st_ino
    server.serve("/disk", misbehave.Page(bytes(NEW)))
    done = pod.call()
    assert done.status == 0, done.errors
    assert "differed=" in done.errors
    same(pod.disk, NEW, tmp_path)
    assert pod.disk.stat().st_ino == inode


# -- what a disk has got since, and what cannot be read of it ------------------------------------------


def test_bytes_behind_the_image_are_zeroed_as_by_an_import(server: misbehave.Server, tmp_path: Path) -> None:
    """The image is the same, the machine has written behind it, where the disk has grown."""
    target = tmp_path / "disk.img"
    url = server.serve("/same", misbehave.Page(bytes(OLD)))
    size = {"image_size": 15 * MIB}
    cdi_worker.run(request(url, target, existing="replace", **size))
    with target.open("r+b") as disk:
        disk.seek(14 * MIB)
        disk.write(b"written by the machine")
    cdi_worker.run(request(url, target, **size))
    same(target, OLD + bytes(3 * MIB), tmp_path)


def test_note_of_an_update_outlives_what_is_not_on_storage(
    server: misbehave.Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power cut may keep the removal of the note, and lose the writes: a delta would be accepted."""
    target, order = tmp_path / "disk.img", list[str]()
    imported(server, target)
    put, flush, forget = storage.Storage._put, storage.Storage.sync, checkpoint.forget

    def written(self: storage.Storage, offset: int, data: memoryview) -> None:
        put(self, offset, data)
        order.append("written")

    def synced(self: storage.Storage) -> None:
        flush(self)
        order.append("on storage")

    def forgotten(path: str) -> None:
        order.append("forgotten")
        forget(path)

    monkeypatch.setattr(storage.Storage, "_put", written)
    monkeypatch.setattr(storage.Storage, "sync", synced)
    monkeypatch.setattr(checkpoint, "forget", forgotten)
    cdi_worker.run(request(server.serve("/new", misbehave.Page(bytes(NEW))), target))
    same(target, NEW, tmp_path)
    assert "written" in order
    assert order[order.index("forgotten") - 1] == "on storage"


@pytest.mark.parametrize("case", ["grown", "killed"])
def test_complete_disk_is_not_in_the_middle_of_an_update(
    server: misbehave.Server, tmp_path: Path, case: str
) -> None:
    target = tmp_path / "disk.img"
    imported(server, target)
    if case == "killed":  # when all was written, before the disk had its name again
        target.rename(f"{target}.changing")
        checkpoint.Checkpoint(frozenset(), frozenset({"an update"})).write(f"{target}.changing")
    size = 15 * MIB if case == "grown" else SIZE
    cdi_worker.run(request(server.url("/old"), target, image_size=size))
    same(target, OLD + bytes(size - SIZE), tmp_path)
    assert checkpoint.of_disk(str(target)) is None


def test_part_that_cannot_be_read_is_not_taken_for_zeros(server: misbehave.Server, tmp_path: Path) -> None:
    """A read that ends in front of a bad sector returns what is before it, without an error."""
    backing = tmp_path / "backing"
    content = b"x" * (8 * MIB + 4096) + bytes(8192)
    backing.write_bytes(content)
    with devices.attached(backing) as device:
        os.truncate(backing, 8 * MIB + 4096)
        url = server.serve("/new", misbehave.Page(content))
        with pytest.raises(errors.TargetError):
            cdi_worker.run(request(url, device))


def test_device_is_compared_past_the_page_cache(server: misbehave.Server, tmp_path: Path) -> None:
    """Another machine has written to a shared device, which a program holds open here."""
    backing = tmp_path / "backing"
    backing.write_bytes(OLD)
    with devices.attached(backing) as device, device.open("rb") as held:
        held.read()
        with backing.open("r+b") as other:
            other.seek(10 * MIB)
            other.write(b"written by another machine")
        cdi_worker.run(request(server.serve("/old", misbehave.Page(bytes(OLD))), device))
        assert backing.read_bytes() == OLD


@pytest.mark.parametrize("end", ["failed", "killed"])
def test_delta_is_not_applied_to_a_half_updated_device(
    server: misbehave.Server, tmp_path: Path, end: str
) -> None:
    with devices.loop(tmp_path, SIZE) as device:
        imported(server, device)
        interrupt(server, device, end)
        refuse_delta(server, device, tmp_path)
        server.serve("/new", misbehave.Page(bytes(NEW)))
        cdi_worker.run(request(server.url("/new"), device))
        same(device, NEW, tmp_path)


@pytest.mark.parametrize("end", ["checksum", "interrupted", "cancelled"])
def test_delta_is_not_applied_to_a_device_after_a_failed_import(
    server: misbehave.Server, tmp_path: Path, end: str
) -> None:
    with devices.loop(tmp_path, SIZE) as device:
        imported(server, device)
        fail_to_import(server, device, end)
        oracle.unusable(device)
        refuse_delta(server, device, tmp_path)
        imported(server, device)
        same(device, OLD, tmp_path)


def is_claimed(device: Path) -> bool:
    with device.open("rb", buffering=0) as disk:
        return disk.read(len(oracle.RECORD)) == oracle.RECORD


def fail_to_import(server: misbehave.Server, device: Path, end: str) -> None:
    """Run a new import that fails after its first write, or is cancelled."""
    if end == "checksum":
        url = server.serve("/new", misbehave.Page(bytes(NEW)))
        with pytest.raises(errors.ChecksumMismatch):
            cdi_worker.run(request(url, device, existing="replace", checksum="sha256:" + "0" * 64))
    elif end == "interrupted":
        with pytest.raises(errors.TransferFailed):
            cdi_worker.run(request(broken(server), device, existing="replace", no_progress=0.5))
    else:
        url = server.serve("/new", misbehave.Page(bytes(NEW), stall_at=10 * MIB))
        cancelled = request(url, device, existing="replace")
        kills.kill(cancelled, lambda: is_claimed(device), signal.SIGTERM)


def interrupt(server: misbehave.Server, device: Path, end: str) -> None:
    """Begin an update that fails or is killed after the first changes."""
    if end == "killed":
        url = server.serve("/new", kills.slow(misbehave.Page(bytes(NEW))))
        kills.kill(request(url, device), lambda: is_claimed(device))
    else:
        with pytest.raises(errors.TransferFailed):
            cdi_worker.run(request(broken(server), device, no_progress=0.5))


def refuse_delta(server: misbehave.Server, device: Path, tmp_path: Path) -> None:
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", tmp_path / "delta.qcow2", str(SIZE))
    delta = server.serve("/delta", misbehave.Page((tmp_path / "delta.qcow2").read_bytes()))
    staged = web_locations.Http(delta, previous="one", current="two")
    with pytest.raises(errors.TargetError, match="incomplete"):
        cdi_worker.run(request(delta, device, existing="refuse", location=staged))
