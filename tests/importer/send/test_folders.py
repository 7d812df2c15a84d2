"""Clones of file systems between two of our workers: the disk as extents, other files in an archive."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cramjam
import pytest

from cdi_worker import errors
from cdi_worker.formats import clone, readers
from cdi_worker.images import volume as devices_volume
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, progress
from cdi_worker.importer.send import client as upload_client
from cdi_worker.importer.send import extents, sender, volume
from tests.support import clones, devices, oracle, processes, reading, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
SIZE = clones.SIZE
HEADERS = {"x-cdi-content-type": "filesystem-clone", **clones.OURS}
server = uploads.server
receiver = clones.receiver


def buffers(size: int) -> Iterator[memoryview]:
    return itertools.repeat(memoryview(bytearray(size)))


def run_both(receiver: clones.Receiver, env: dict[str, str], source: Path, **more: str) -> str:
    """Clone a file system to the volume of an upload server; return the message of the source."""
    with receiver.server(env) as server:
        message = clones.run(clones.environment(server, "filesystem", source, **more))
        assert server.result().status == 0
    return message


# -- what is sent


@pytest.mark.parametrize("others", [False, True])
def test_disk_is_sent_as_extents_beside_the_archive(folder: Path, tmp_path: Path, others: bool) -> None:
    if not others:
        alone(folder)
    sent = clone.FolderDecoder(readers.BytesReader(clones.body(folder, "filesystem", ours=True)), buffers)
    disk = (folder / "disk.img").stat()
    assert sent.disk == clone.FolderDisk(SIZE, 0o660, int(disk.st_mtime), preallocated=False)
    runs = [run if isinstance(run, int) else bytes(run) for run in sent.runs()]
    content = b"".join(bytes(run) if isinstance(run, int) else run for run in runs)
    assert content == (folder / "disk.img").read_bytes()
    assert sum(run for run in runs if isinstance(run, int)) > SIZE // 2, "holes are sent as data"
    rest = sent.archive()
    assert (rest is not None) is others
    if rest is not None:
        (tmp_path / "archive").write_bytes(reading.read_all(rest))
        names = processes.run("tar", "--list", f"--file={tmp_path / 'archive'}").stdout.splitlines()
        assert "more/deep/file" in names
        assert not [name for name in names if "disk.img" in name]
    sent.finish()


# -- what arrives


def alone(source: Path) -> None:
    for path in ("more/deep/file", "more/link", "more/hard", "more/absolute", "more/above", "more/empty"):
        (source / path).unlink()
    (source / "-dash").unlink()
    (source / "more" / "deep").rmdir()
    (source / "more").rmdir()


def hard_link(source: Path) -> None:
    os.link(source / "disk.img", source / "more" / "the same disk")


def part_of_a_sector(source: Path) -> None:
    with (source / "disk.img").open("ab") as stream:
        stream.write(b"a few bytes more")


def empty(source: Path) -> None:
    (source / "disk.img").write_bytes(b"")


def without_disk(source: Path) -> None:
    (source / "disk.img").unlink()


def names_of_ours(source: Path) -> None:
    """Left-overs of an import that was killed on the source's volume."""
    (source / "disk.img.part").write_bytes(b"incomplete")
    (source / "disk.img.changing").write_bytes(b"changing")


def modes(source: Path) -> None:
    (source / "disk.img").chmod(0o440)
    os.utime(source / "disk.img", (1e9, 1e9))
    (source / "-dash").chmod(0o751)


def holes_only(source: Path) -> None:
    (source / "disk.img").write_bytes(b"")
    os.truncate(source / "disk.img", SIZE)


CHANGES = [
    alone,
    hard_link,
    part_of_a_sector,
    empty,
    without_disk,
    names_of_ours,
    modes,
    holes_only,
]


@pytest.mark.parametrize("change", CHANGES)
def test_any_file_system_is_cloned(
    receiver: clones.Receiver, folder: Path, change: Callable[[Path], object]
) -> None:
    change(folder)
    assert run_both(receiver, {}, folder) == "Clone Complete"
    clones.same_tree(folder, receiver.data)
    data = receiver.data
    for found in sorted(folder.rglob("*")):
        if found.is_file() and not found.is_symlink() and "lost+found" not in found.parts:
            copy = data / found.relative_to(folder)
            before, after = found.stat(), copy.stat()
            assert (after.st_mode, int(after.st_mtime), after.st_nlink) == (
                before.st_mode,
                int(before.st_mtime),
                before.st_nlink,
            ), copy
    assert not [name for name in os.listdir(data) if name not in os.listdir(folder)]


def test_disk_that_is_a_link_is_not_cloned(receiver: clones.Receiver, folder: Path) -> None:
    """Whoever opens the disk of the clone would follow the link in its own mounts."""
    (folder / "disk.img").rename(folder / "more" / "disk.raw")
    # The length of the link itself is that of a sector, like the size of a disk.
    (folder / "disk.img").symlink_to("more//" + "./" * 249 + "disk.raw")
    with pytest.raises(errors.Error, match=r"'disk\.img' is a symlink"):
        run_both(receiver, {}, folder)
    oracle.unusable(receiver.disk)


@pytest.mark.parametrize(("env", "more"), [({"PREALLOCATION": "true"}, {}), ({}, {"PREALLOCATION": "true"})])
def test_disk_is_preallocated_if_either_end_asks(
    receiver: clones.Receiver, folder: Path, env: dict[str, str], more: dict[str, str]
) -> None:
    run_both(receiver, env, folder, **more)
    oracle.same(receiver.disk, folder / "disk.img")
    assert receiver.disk.stat().st_blocks * 512 >= SIZE


@pytest.mark.parametrize(
    ("block", "name", "others"),
    [
        (512, "disk.img", {"a-note": 9, "z-note": 4 * MIB}),
        (4096, "vm-disk.img.1", {"a-note": 9, "z-note": 4 * MIB}),
        (512, "disk.img", {"a-disk.img": 10_000}),
        (4096, "disk.img", {"a-note": 40 * MIB}),
    ],
    indirect=["block"],
)
def test_device_gets_the_disk_of_a_file_system(
    receiver: clones.Receiver, folder: Path, block: Path, name: str, others: dict[str, int]
) -> None:
    """Other files are discarded, before or after it in an archive, also those larger than the device."""
    (folder / "disk.img").rename(folder / name)
    for other, size in others.items():
        (folder / other).write_bytes(random.Random(1).randbytes(size))
    assert run_both(receiver, {"DESTINATION": str(block)}, folder) == "Clone Complete"
    oracle.same(block, folder / name, beyond=devices.DIRT)


def test_scattered_data_occupies_no_more_than_at_the_source(
    receiver: clones.Receiver, tmp_path: Path
) -> None:
    source = tmp_path / "volume"
    source.mkdir()
    with (source / "disk.img").open("wb") as stream:
        for offset in range(0, 64 * MIB, 48 << 10):
            stream.seek(offset)
            stream.write(os.urandom(4096))
        stream.truncate(64 * MIB)
    run_both(receiver, {}, source)
    copy = receiver.disk
    oracle.same(copy, source / "disk.img")
    assert copy.stat().st_blocks <= (source / "disk.img").stat().st_blocks


def test_disk_and_other_files_must_fit_together(receiver: clones.Receiver, tmp_path: Path) -> None:
    source = tmp_path / "volume"
    source.mkdir()
    for name in ("disk.img", "other"):
        (source / name).write_bytes(random.Random(name).randbytes(6 * MIB))
    made = receiver.server({"UPLOAD_IMAGE_SIZE": "10Mi"})
    with made as server:
        answer = server.ask("POST", SYNC, clones.body(source, "filesystem", ours=True), HEADERS)
        assert (answer.status, "effective image size is larger" in answer.text) == (400, True), answer.text
        assert not [name for name in os.listdir(receiver.data) if not name.endswith(".lock")]
        (source / "other").write_bytes(b"little")
        answer = server.ask("POST", SYNC, clones.body(source, "filesystem", ours=True), HEADERS)
        assert answer.status == 200, answer.text
    clones.same_tree(source, receiver.data)


def two_volumes(directory: Path) -> dict[str, Path]:
    """Make two volumes with the same amount of different data."""
    made = {name: directory / name for name in ("first", "second")}
    for name, path in made.items():
        path.mkdir()
        (path / "disk.img").write_bytes(random.Random(name).randbytes(SIZE))
        (path / "file").write_text(name)
    return made


def test_of_two_clones_to_one_target_one_succeeds(receiver: clones.Receiver, tmp_path: Path) -> None:
    made = receiver.server({})
    volumes = two_volumes(tmp_path)
    messages = {name: tmp_path / f"{name}.message" for name in volumes}
    with contextlib.ExitStack() as stack:
        receiving = stack.enter_context(clones.target(made, receiver.paths, tmp_path / "log"))
        sending = {
            name: stack.enter_context(
                clones.start_source(clones.environment(made, "filesystem", path), messages[name])
            )
            for name, path in volumes.items()
        }
        assert receiving.wait(60) == 0
        processes.wait_for(lambda: any(each.poll() is not None for each in sending.values()), "one to end")
        # The other one looks for the server until the pod is removed.
        time.sleep(1)
        done = {name for name, process in sending.items() if process.poll() is not None}
        for process in sending.values():
            process.terminate()
    complete = [name for name, message in messages.items() if message.read_text() == "Clone Complete"]
    assert complete == [name for name in done if sending[name].returncode == 0]
    assert len(complete) == 1, "a source reports success for what another has sent"
    clones.same_tree(volumes[complete[0]], receiver.data)


class Stopping(progress.NullProgress):
    """Stop a transfer after its first bytes."""

    def __init__(self) -> None:
        self.cancel = cancelling.Cancel()

    def advance(self, count: int) -> None:
        """Stop the transfer."""
        self.cancel.set()


def test_source_never_continues_the_clone_of_another(
    server: uploads.Server, paths: contract.Paths, tmp_path: Path
) -> None:
    """The first has begun when the second replaces it, sends a part, and is stopped."""
    volumes = two_volumes(tmp_path)
    with contextlib.ExitStack() as stack:
        senders = {}
        for name, path in volumes.items():
            stopping = Stopping()
            settings = volume.read(clones.environment(server, "filesystem", path))
            client = upload_client.Client(
                settings.url,
                upload_client.context(settings.authority, settings.certificate, settings.key),
                stopping.cancel if name == "second" else cancelling.Cancel(),
            )
            senders[name] = sender.Sender(
                client,
                f"{client.path}-resumable",
                cancelling.Cancel(),
                20,
                HEADERS,
                progress.NullProgress(),
            )
            assert senders[name].begin(None)
            reporter = stopping if name == "second" else progress.NullProgress()
            disk = stack.enter_context(extents.open_disk(str(path)))
            stream = extents.Directory(str(path), disk, reporter, sparse=True)
            if name == "first":
                waiting = stream
        with pytest.raises(errors.Cancelled):
            senders["second"].send(stream)
        processes.wait_for(lambda: server.received, "a part of the second")
        senders["first"].send(waiting)
    assert server.result().message == clones.FOLDER_DONE
    clones.same_tree(volumes["first"], paths.data)


# -- nothing is used before everything is verified


def damaged(body: bytes, part: str) -> bytes:
    """Return ``body`` with one bit changed, or cut."""
    if part == "cut":
        return body[:-40]
    places = {
        "mode of the disk": len(clone.MAGIC) + 16,
        "size of the disk": len(clone.MAGIC) + 9,
        "disk": body.index(b"text text text"),
        "archive": body.rindex(b"an unfriendly name"),
        "digest": len(body) - 1,
    }
    changed = bytearray(body)
    changed[places[part]] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    ("part", "kind"),
    [
        ("mode of the disk", "folder"),
        ("size of the disk", "folder"),
        ("disk", "folder"),
        ("disk", "512"),
        ("archive", "folder"),
        ("archive", "4096"),
        ("digest", "folder"),
        ("cut", "512"),
    ],
)
def test_damaged_stream_leaves_nothing(
    receiver: clones.Receiver, folder: Path, tmp_path: Path, part: str, kind: str
) -> None:
    body = plain_body(folder)
    with clones.place(kind, tmp_path, receiver.paths) as place:
        with receiver.server(place.env) as server:
            answer = server.ask("POST", SYNC, damaged(body, part), HEADERS)
            assert (answer.status, "clone stream" in answer.text) == (400, True), answer.text
            oracle.unusable(place.disk)
            assert not [name for name in os.listdir(receiver.data) if not name.endswith(".lock")]
            assert server.ask("POST", SYNC, body, HEADERS).status == 200
        oracle.same(place.disk, folder / "disk.img", beyond=place.beyond)


def plain_body(folder: Path) -> bytes:
    """Return the stream of a file system without compression."""
    with extents.open_disk(str(folder)) as disk:
        stream = extents.Directory(str(folder), disk, progress.NullProgress(), sparse=True)
        stream._first.encoder.every = 0
        return b"".join(bytes(part) for part in stream.chunks(0))


@pytest.mark.parametrize("kind", clones.PLACES)
def test_disk_is_unusable_until_the_digest_has_arrived(
    receiver: clones.Receiver, folder: Path, tmp_path: Path, kind: str
) -> None:
    body = plain_body(folder)
    with clones.place(kind, tmp_path, receiver.paths) as place:
        with receiver.server(place.env) as server, server.connect() as connection:
            connection.putrequest("POST", SYNC)
            for name, value in {**HEADERS, "Content-Length": str(len(body))}.items():
                connection.putheader(name, value)
            connection.endheaders(body[:-1])
            processes.wait_for(lambda: server.received == len(body) - 1, "all bytes but one")
            oracle.unusable(place.disk)
            connection.send(body[-1:])
            assert connection.getresponse().status == 200
        oracle.same(place.disk, folder / "disk.img", beyond=place.beyond)


class Changing(progress.NullProgress):
    """Change a file when the first bytes of the disk have been sent."""

    def __init__(self, change: Callable[[], object]) -> None:
        self._changes = [change]

    def advance(self, count: int) -> None:
        """Change the file."""
        while self._changes:
            self._changes.pop()()


@pytest.mark.parametrize("kind", ["written", "longer", "shorter", "same length and time"])
def test_disk_that_changes_ends_the_clone(
    server: uploads.Server, paths: contract.Paths, folder: Path, kind: str
) -> None:
    disk = folder / "disk.img"

    def change() -> None:
        found = disk.stat()
        with disk.open("r+b") as stream:
            stream.seek(SIZE - 512)
            stream.write(b"changed")
            stream.truncate({"longer": SIZE + MIB, "shorter": SIZE - MIB}.get(kind, SIZE))
        if kind == "same length and time":
            os.utime(disk, ns=(found.st_atime_ns, found.st_mtime_ns))

    settings = volume.read(clones.environment(server, "filesystem", folder))
    with pytest.raises(errors.SourceChanged):
        volume.send(settings, Changing(change), cancelling.Cancel())
    oracle.unusable(Path(paths.data, "disk.img"))


# -- resuming


class Recorded(devices_volume.Volume):
    """Record where reading begins."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.starts: list[int] = []

    def pieces(self, start: int = 0, end: int | None = None) -> Iterator[devices_volume.Part]:
        """See the base class."""
        self.starts.append(start)
        return super().pieces(start, end)


@pytest.mark.parametrize("scattered", [False, True])
def test_disk_is_resumed_where_a_device_is(folder: Path, scattered: bool) -> None:
    """The stream can be continued at any byte, and the disk is read again from the mark before it only."""
    if scattered:
        with (folder / "disk.img").open("r+b") as stream:
            for offset in range(7 * MIB, 20 * MIB, 72 << 10):
                stream.seek(offset)
                stream.write(b"data" * 1024)
    with Recorded(str(folder / "disk.img")) as disk:
        stream = extents.Directory(str(folder), disk, progress.NullProgress(), sparse=True)
        stream.step = MIB
        first = b"".join(bytes(part) for part in stream.chunks(0))
        for place in (0, 15, 16, 40, *range(50, len(first), 900_007), -700, -1):
            # The end moves: what was not received may be compressed differently.
            cut = place if place >= 0 else len(first) + place
            mark = max((mark for mark in stream._marks if mark.sent <= cut), default=stream._first)
            rest = b"".join(bytes(part) for part in stream.chunks(cut))
            assert disk.starts[-1] == mark.offset
            first = first[:cut] + rest
            found = clone.FolderDecoder(readers.BytesReader(first), buffers)
            assert sum(run if isinstance(run, int) else len(run) for run in found.runs()) == SIZE
            found.finish()
    assert disk.starts[-1] == SIZE, "the disk is read again for the archive"
    assert len(set(disk.starts)) >= 3, "always from the beginning"


# -- other versions and other workers


def test_source_of_another_version_is_not_understood_but_served(
    server: uploads.Server, paths: contract.Paths, folder: Path
) -> None:
    """A source that knows another stream format only sends snappy frames."""
    offer = server.ask("HEAD", "/v1beta1/upload-async").headers["x-cdi-worker-offer"]
    assert offer == "extents-3", "a source that looks for another one chooses CDI's format"
    headers = {"x-cdi-content-type": "filesystem-clone"}
    body = clones.body(folder, "filesystem", ours=True)
    for chosen in ("extents-2", "extents-4"):
        answer = server.ask("POST", SYNC, body, {**headers, "x-cdi-worker-stream": chosen})
        assert (answer.status, f"unknown clone format '{chosen}'" in answer.text) == (400, True)
    body = clones.body(folder, "filesystem", ours=False)
    assert server.ask("POST", SYNC, body, headers).status == 200
    clones.same_tree(folder, paths.data)


class OlderServer(uploads.MinimalServer):
    """A server of another version: it offers a stream format that the source does not know."""

    def send_response(self, code: int, message: str | None = None) -> None:
        """Add the offer."""
        super().send_response(code, message)
        self.send_header("x-cdi-worker-offer", "extents-2")


def test_server_of_another_version_gets_snappy_frames(original: Path, server: uploads.Server) -> None:
    with OlderServer.serving() as port:
        url = f"http://127.0.0.1:{port}/v1beta1/upload"
        assert clones.run(clones.environment(server, "block", original, UPLOAD_URL=url)) == "Clone Complete"
    (*_, (method, path, headers, body)) = uploads.MinimalServer.requests
    assert (method, path, headers["x-cdi-content-type"]) == ("POST", SYNC, volume.MODES["block"])
    assert headers["x-cdi-worker-stream"] is None
    assert bytes(cramjam.snappy.decompress(body)) == original.read_bytes()
