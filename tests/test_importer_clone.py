"""Clones from volume to volume: our source, our target, and streams as upstream's source sends them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import cramjam
import pytest

from formats import extents, readers, snappy
from images import ahead, volume
from importer import clone, clone_stream, contract, errors, progress
from tests import devices, disks, oracle, processes, tls, uploads
from tests.test_formats_snappy import plain as plain_chunk

MIB = 1 << 20
SYNC = "/v1beta1/upload"
SIZE = 24 * MIB
DONE = '{"preallocationApplied":false,"message":"Clone Complete"}'


@pytest.fixture
def server(certificates: uploads.Certificates, paths: contract.Paths) -> Iterator[uploads.Server]:
    with uploads.Server(certificates, {}, paths) as running:
        yield running


def content(path: Path, size: int = SIZE) -> Path:
    """Write a disk of data, text and long zeros onto a file or a device."""
    dice = random.Random(5)
    with path.open("r+b" if path.exists() else "wb") as stream:
        if not path.is_block_device():
            stream.truncate(size)
        else:
            for _ in range(size // MIB):
                stream.write(bytes(MIB))
        for offset, data in ((0, dice.randbytes(MIB + 5000)), (5 * MIB + 512, b"text " * 300_000)):
            stream.seek(offset)
            stream.write(data)
        stream.seek(size - 512)
        stream.write(b"end!" * 128)
    return path


@pytest.fixture
def original(tmp_path: Path) -> Path:
    return content(tmp_path / "original")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Make a volume of a file system with a disk and other things in it."""
    place = tmp_path / "volume"
    for name in ("lost+found", "more/deep"):
        (place / name).mkdir(parents=True)
    content(place / "disk.img").chmod(0o660)
    (place / "lost+found" / "secret").write_text("not content")
    (place / "more" / "deep" / "file").write_text("text\n" * 100)
    (place / "more" / "empty").touch()
    (place / "-dash").write_text("an unfriendly name")
    (place / "more" / "link").symlink_to("deep/file")
    return place


def environment(server: uploads.Server, mode: str, place: Path, **more: str) -> dict[str, str]:
    made = server.certificates
    return {
        "CLIENT_KEY": made.client.key.read_text(),
        "CLIENT_CERT": made.client.certificate.read_text(),
        "SERVER_CA_CERT": made.authority.certificate.read_text(),
        "UPLOAD_URL": server.url(SYNC),
        "VOLUME_MODE": mode,
        "MOUNT_POINT": str(place),
        **more,
    }


def play(env: dict[str, str]) -> str:
    ended = clone.play(env, contract.Paths(metrics_port=0), threading.Event())
    assert ended.status == 0
    return ended.message


def same_tree(source: Path, target: str | Path) -> None:
    processes.run("diff", "-r", "--no-dereference", "--exclude=lost+found", source, target)


# -- both ends


@pytest.mark.parametrize("preallocation", ["false", "true"])
def test_file_system_to_file_system(
    certificates: uploads.Certificates, paths: contract.Paths, folder: Path, preallocation: str
) -> None:
    env = {"PREALLOCATION": preallocation}
    with uploads.Server(certificates, env, paths) as server:
        said = play(environment(server, "filesystem", folder, PREALLOCATION=preallocation))
        ended = json.loads(server.result().message)
    same_tree(folder, paths.data)
    copied = Path(paths.data, "disk.img").stat()
    assert not Path(paths.data, "lost+found").exists()
    assert copied.st_mode & 0o777 == 0o660
    if preallocation == "true":
        assert said == "Clone Complete, Preallocation applied"
        assert copied.st_blocks * 512 >= SIZE
    else:
        assert said == "Clone Complete"
        assert copied.st_blocks * 512 < SIZE // 2
    assert ended == {"preallocationApplied": preallocation == "true", "message": "Clone Complete"}


@pytest.mark.parametrize("sector", [512, 4096])
@pytest.mark.parametrize("preallocation", ["false", "true"])
def test_block_to_block(
    certificates: uploads.Certificates,
    paths: contract.Paths,
    tmp_path: Path,
    sector: int,
    preallocation: str,
) -> None:
    with (
        devices.loop(tmp_path, SIZE, sector=sector) as source,
        devices.loop(tmp_path, SIZE + MIB, sector=4608 - sector) as target,
    ):
        content(source)
        env = {"DESTINATION": str(target), "PREALLOCATION": preallocation}
        with uploads.Server(certificates, env, paths) as server:
            play(environment(server, "block", source, PREALLOCATION=preallocation))
            assert server.result().status == 0
        oracle.same(target, content(tmp_path / "expected"), beyond=devices.DIRT)


def test_file_system_to_block(
    certificates: uploads.Certificates, paths: contract.Paths, folder: Path, block: Path
) -> None:
    with uploads.Server(certificates, {"DESTINATION": str(block)}, paths) as server:
        play(environment(server, "filesystem", folder))
        assert server.result().message == DONE
    oracle.same(block, folder / "disk.img", beyond=devices.DIRT)


def test_block_to_file_system(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    env = {"UPLOAD_IMAGE_SIZE": "32Mi"}
    target = Path(paths.data, "disk.img")
    target.write_bytes(b"an older disk")
    with devices.loop(tmp_path, SIZE) as source:
        content(source)
        with uploads.Server(certificates, env, paths) as server:
            play(environment(server, "block", source))
            assert server.result().message == DONE
    oracle.same(target, content(tmp_path / "expected"))
    assert target.stat().st_size == 32 * MIB
    assert target.stat().st_blocks * 512 < SIZE // 2


def test_an_empty_volume(server: uploads.Server, paths: contract.Paths, tmp_path: Path) -> None:
    (tmp_path / "empty" / "lost+found").mkdir(parents=True)
    play(environment(server, "filesystem", tmp_path / "empty"))
    assert not list(Path(paths.data).iterdir())


def test_a_volume_too_small(
    certificates: uploads.Certificates, paths: contract.Paths, original: Path
) -> None:
    with uploads.Server(certificates, {"UPLOAD_IMAGE_SIZE": "8Mi"}, paths) as server:
        with pytest.raises(errors.Error, match=r"400|reset|broken") as caught:
            play(environment(server, "block", original))
        assert caught.value.status == 3
        oracle.unusable(Path(paths.data, "disk.img"))


def test_a_file_system_without_a_disk(
    certificates: uploads.Certificates, paths: contract.Paths, folder: Path, block: Path
) -> None:
    (folder / "disk.img").unlink()
    with (
        uploads.Server(certificates, {"DESTINATION": str(block)}, paths) as server,
        pytest.raises(errors.UploadFailed, match="no file named"),
    ):
        play(environment(server, "filesystem", folder))
    oracle.unusable(block)


def test_a_client_of_another_name(server: uploads.Server, original: Path) -> None:
    other = server.certificates.authority.issue(common_name="somebody", client=True)
    keys = {"CLIENT_KEY": other.key.read_text(), "CLIENT_CERT": other.certificate.read_text()}
    with pytest.raises(errors.Error, match=r"401|reset|broken"):
        play({**environment(server, "block", original), **keys})


def test_a_server_of_another_authority(server: uploads.Server, original: Path, tmp_path: Path) -> None:
    other = tls.Authority(tmp_path / "other").certificate.read_text()
    with pytest.raises(errors.Unreachable, match="certificate"):
        play({**environment(server, "block", original), "SERVER_CA_CERT": other})


def test_faults_of_the_environment_come_together() -> None:
    with pytest.raises(errors.RequestError) as caught:
        clone.read({"UPLOAD_URL": "https://x/v1beta1/upload", "VOLUME_MODE": "tape", "PREALLOCATION": "1"})
    for name in (
        "MOUNT_POINT",
        "CLIENT_KEY",
        "CLIENT_CERT",
        "SERVER_CA_CERT",
        "VOLUME_MODE",
        "PREALLOCATION",
    ):
        assert name in str(caught.value)


def test_progress_never_falls_and_ends_at_100(
    server: uploads.Server, original: Path, paths: contract.Paths
) -> None:
    meter = progress.Meter()
    clone.send(clone.read(environment(server, "block", original)), meter, threading.Event())
    assert meter.finished
    assert meter.count == SIZE


# -- the other end is upstream's


def test_frames_for_a_server_that_offers_nothing(original: Path, server: uploads.Server) -> None:
    with uploads.OneRequest.serving() as port:
        env = environment(server, "block", original, UPLOAD_URL=f"http://127.0.0.1:{port}/v1beta1/upload")
        assert play(env) == "Clone Complete"
    (probe, _, _, _), (method, path, headers, body) = uploads.OneRequest.seen
    assert (probe, method, path) == ("HEAD", "POST", SYNC)
    assert headers["x-cdi-content-type"] == "blockdevice-clone"
    # The library's own reader of whole streams.
    assert bytes(cramjam.snappy.decompress(body)) == original.read_bytes()
    assert body.startswith(snappy.IDENTIFIER)
    assert len(body) < SIZE // 5


@pytest.mark.parametrize("sparse", [True, False])
def test_a_tar_for_a_server_that_offers_nothing(
    folder: Path, server: uploads.Server, tmp_path: Path, sparse: bool
) -> None:
    preallocation = str(not sparse).lower()
    with uploads.OneRequest.serving() as port:
        url = f"http://127.0.0.1:{port}/v1beta1/upload"
        play(environment(server, "filesystem", folder, UPLOAD_URL=url, PREALLOCATION=preallocation))
    (*_, (_, _, headers, body)) = uploads.OneRequest.seen
    assert headers["x-cdi-content-type"] == "filesystem-clone"
    archive = tmp_path / "archive"
    archive.write_bytes(cramjam.snappy.decompress(body))
    assert (archive.stat().st_size < SIZE) is sparse
    (tmp_path / "unpacked").mkdir()
    processes.run("tar", "--extract", f"--file={archive}", f"--directory={tmp_path / 'unpacked'}")
    same_tree(folder, tmp_path / "unpacked")
    listed = processes.run("tar", "--list", f"--file={archive}").stdout.splitlines()
    assert listed == ["-dash", "disk.img", "more/", "more/deep/", "more/deep/file", "more/empty", "more/link"]


# -- both ends are ours


def test_zeros_are_not_sent(server: uploads.Server, paths: contract.Paths, tmp_path: Path) -> None:
    with devices.loop(tmp_path, SIZE, dirt=b"\0") as source, uploads.Relay(server.port) as relay:
        play(environment(server, "block", source, UPLOAD_URL=f"https://localhost:{relay.port}{SYNC}"))
        assert relay.sent < 20_000
    found = Path(paths.data, "disk.img").stat()
    assert (found.st_size, found.st_blocks) == (SIZE, 0)


def test_an_empty_device_takes_seconds(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """Of a device every byte is read: 100 GiB in under a minute, on a machine that does other things too."""
    size = 100 << 30
    backing = [tmp_path / "source", tmp_path / "target"]
    for path in backing:
        with path.open("wb") as stream:
            stream.truncate(size)
    with (
        devices.attached(backing[0]) as source,
        devices.attached(backing[1]) as target,
        uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server,
    ):
        started = time.monotonic()
        play(environment(server, "block", source))
        assert time.monotonic() - started < 60
        assert server.result().message == DONE
    assert all(path.stat().st_blocks * 512 < 2 * MIB for path in backing)


@pytest.mark.parametrize("mode", ["block", "filesystem"])
def test_a_clone_goes_on_after_breaks(
    server: uploads.Server, paths: contract.Paths, tmp_path: Path, mode: str
) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    noise = folder / "disk.img"
    noise.write_bytes(random.Random(6).randbytes(8 * MIB))
    meter = progress.Meter()
    with uploads.Relay(server.port, None, 1000, None, 3 * MIB, 5000, 2 * MIB, 40_000) as relay:
        url = f"https://localhost:{relay.port}{SYNC}"
        place = noise if mode == "block" else folder
        settings = clone.read(environment(server, mode, place, UPLOAD_URL=url))
        clone.send(settings, meter, threading.Event())
        assert relay.sent < 10 * MIB
    assert meter.finished
    assert Path(paths.data, "disk.img").read_bytes() == noise.read_bytes()


# -- the other end's streams


def recorded(data: bytes) -> bytes:
    """Make a stream as another implementation may: plain chunks, padding, identifiers in between."""
    stream = snappy.IDENTIFIER
    for start in range(0, len(data), 65_536):
        piece = data[start : start + 65_536]
        stream += b"".join(snappy.frames([memoryview(piece)])) if start % 3 else b"\xfe\x02\x00\x00xx"
        stream += b"" if start % 3 else plain_chunk(piece)
    return stream


@pytest.mark.parametrize("chunked", [True, False])
def test_a_device_from_upstream(
    server: uploads.Server, paths: contract.Paths, disks: disks.Disks, chunked: bool
) -> None:
    # A qcow2 image inside the device is content, not a format.
    data = disks.image("qcow2").read_bytes()[: 3 * 65_536]
    stream = recorded(data)
    body = [stream[start : start + 10_001] for start in range(0, len(stream), 10_001)] if chunked else stream
    headers = {"x-cdi-content-type": "blockdevice-clone"}
    assert server.ask("POST", SYNC, body, headers).status == 200
    assert server.result().message == DONE
    assert Path(paths.data, "disk.img").read_bytes() == data


@pytest.mark.parametrize("names", [[b"disk.img"], [b"./"], [b"./disk.img", b"./more"]])
def test_a_tar_from_upstream(
    server: uploads.Server, paths: contract.Paths, folder: Path, names: list[bytes]
) -> None:
    (folder / "lost+found" / "secret").unlink()
    made = subprocess.run(
        ["tar", "--create", "--sparse", "--file=-", *names], cwd=folder, check=True, capture_output=True
    )
    headers = {"x-cdi-content-type": "filesystem-clone"}
    assert server.ask("POST", SYNC, recorded(made.stdout), headers).status == 200
    assert server.result().message == DONE
    oracle.same(Path(paths.data, "disk.img"), folder / "disk.img")


@pytest.mark.parametrize("fault", ["cut", "changed", "no snappy"])
def test_a_broken_stream(server: uploads.Server, paths: contract.Paths, original: Path, fault: str) -> None:
    stream = bytearray(recorded(original.read_bytes()[: 2 * MIB]))
    if fault == "cut":
        del stream[-5:]
    elif fault == "changed":
        stream[1_000_000] ^= 1
    else:
        stream[0] = 0
    for kind in ("blockdevice-clone", "filesystem-clone"):
        answer = server.ask("POST", SYNC, bytes(stream), {"x-cdi-content-type": kind})
        assert answer.status == 500
    assert not list(Path(paths.data).iterdir())


# -- kills


def cloner(env: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    argv = [sys.executable, "-m", "importer", "-v=3", "-alsologtostderr", f"--termination-log={log}"]
    argv += ["--metrics-port=0"]
    return subprocess.Popen(argv, env={**os.environ, **env})


def test_pod(server: uploads.Server, folder: Path, paths: contract.Paths, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with cloner(environment(server, "filesystem", folder), log) as process:
        assert process.wait(30) == 0
    assert log.read_text() == "Clone Complete"
    same_tree(folder, paths.data)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_source_that_is_killed(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, number: int
) -> None:
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(devices.slow(tmp_path, SIZE, bytes_per_second=8 * MIB))
        source = tmp_path / "noise"
        source.write_bytes(random.Random(1).randbytes(SIZE))
        server = stack.enter_context(uploads.Server(certificates, {"DESTINATION": str(target)}, paths))
        with cloner(environment(server, "block", source), log) as process:
            server.wait_until_busy()
            process.send_signal(number)
            assert process.wait(20)
        if number == signal.SIGTERM:
            assert log.read_text() == "Unable to process data: cancelled"
        headers = {"x-cdi-content-type": "blockdevice-clone"}
        short = b"".join(snappy.frames([memoryview(b"short" * 1024)]))
        processes.wait_for(lambda: server.ask("POST", SYNC, short, headers).status == 200, "the next one")


@pytest.mark.parametrize(
    ("packed", "packing", "sending", "pays"),
    [
        (0.3, 1.0, 3.0, True),  # a slow network, or a slow volume at the other end
        (0.3, 1.0, 0.1, False),  # a fast one
        (1.0, 1.0, 9.0, False),  # nothing saved
    ],
)
def test_compression_goes_on_where_it_pays(packed: float, packing: float, sending: float, pays: bool) -> None:
    decision = clone_stream.Pays()
    decision.encoded(1000, 1000, 0.0)
    assert decision.decide() == clone_stream.TRIED, "too little to tell"
    decision.encoded(clone_stream.STEP, int(packed * clone_stream.STEP), packing)
    decision.sent(int(packed * clone_stream.STEP), sending)
    assert decision.decide() == int(pays)
    later = [decision.decide() for _ in range(clone_stream.PAUSE)]
    assert later[-1] == (1 if pays else clone_stream.TRIED), "never tried again"
    assert all(later) is pays


@pytest.mark.parametrize("sending", [0.0, 1e9])
def test_a_stream_that_changes_its_mind_still_joins(original: Path, sending: float) -> None:
    """Whatever was decided for what was not received, the other end reads one whole stream."""
    with volume.Volume(str(original)) as device:
        stream = clone_stream.Device(device, progress.NullProgress())
        stream.step = 2 * MIB
        first = b"".join(bytes(part) for part in stream.wire(0))
        for cut in (0, 15, 16, 17, *range(1, len(first), 250_007), len(first)):
            stream._pays.encoded(clone_stream.STEP, 0, 1.0)
            stream._pays.sent(1, sending)
            rest = b"".join(bytes(part) for part in stream.wire(cut))
            runs = extents.Decoder(readers.Bytes(first[:cut] + rest), ahead.buffers(extents.LONGEST))
            assert sum(run if isinstance(run, int) else len(run) for run in runs) == SIZE
            first = first[:cut] + rest


def test_a_target_that_is_killed(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """The same source goes on with the pod that is started in its place."""
    source = tmp_path / "noise"
    source.write_bytes(random.Random(2).randbytes(SIZE))
    with devices.slow(tmp_path, SIZE, bytes_per_second=16 * MIB) as target:
        env = {"DESTINATION": str(target)}
        first = uploads.Server(certificates, env, paths)
        second = uploads.Server(certificates, {**env, "LISTEN_PORT": str(first.port)}, paths)
        second.port = first.port
        argv = [sys.executable, "-m", "importer", "--termination-log=/dev/null"]
        ready = functools.partial(processes.answers, first.port)
        log = tmp_path / "log"
        with processes.running(argv, log=log, ready=ready, env={**os.environ, **first.env}) as pod:
            sender = cloner(environment(first, "block", source), tmp_path / "message")
            processes.wait_for(lambda: "transfer" in log.read_text(), "the clone to begin")
            pod.kill()
        with second, sender:
            assert sender.wait(30) == 0
            assert second.result().message == DONE
        oracle.same(target, source)
