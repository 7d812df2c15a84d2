"""The streams between the ends of a clone, also with upstream's worker at the other end."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import cramjam
import pytest

from cdi_worker import errors
from cdi_worker.formats import clone as extents
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import snappy
from cdi_worker.images import volume
from cdi_worker.images.engine import ahead
from cdi_worker.importer import contract, progress
from cdi_worker.importer.send import extents as clone_stream
from cdi_worker.importer.send import volume as clone
from tests.formats.compressed.test_snappy import plain as plain_chunk
from tests.support import clones, disks, oracle, pairs, processes, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
SIZE = clones.SIZE
DONE = clones.DONE
server = uploads.server
receiver = clones.receiver


@pytest.mark.parametrize(
    "kept",
    [
        "",
        "65536",
        "65536-",
        "-65536",
        "0-100",
        "131072-65536",
        f"0-{'9' * 5000}",
        f"{'9' * 5000}-1",
        "\u0660-65536",
    ],
)
def test_nothing_is_left_out_for_a_malformed_answer(original: Path, kept: str) -> None:
    with volume.Volume(str(original)) as disk:
        stream = clone_stream.Stream(disk, progress.NullProgress())
        stream.restart(kept)
        whole = clone_stream.Stream(disk, progress.NullProgress())
        assert b"".join(map(bytes, stream.chunks(0))) == b"".join(map(bytes, whole.chunks(0)))


# -- upstream's worker at the other end


def test_server_without_extensions_gets_snappy_frames(original: Path, server: uploads.Server) -> None:
    with uploads.MinimalServer.serving() as port:
        env = clones.environment(
            server, "block", original, UPLOAD_URL=f"http://127.0.0.1:{port}/v1beta1/upload"
        )
        assert clones.run(env) == "Clone Complete"
    (probe, _, _, _), (method, path, headers, body) = uploads.MinimalServer.requests
    assert (probe, method, path) == ("HEAD", "POST", SYNC)
    assert headers["x-cdi-content-type"] == "blockdevice-clone"
    # Read the whole stream by the library itself.
    assert bytes(cramjam.snappy.decompress(body)) == original.read_bytes()
    assert body.startswith(snappy.IDENTIFIER)
    assert len(body) < SIZE // 5


def test_server_that_refuses_the_stream_is_a_failure(original: Path, server: uploads.Server) -> None:
    with uploads.MinimalServer.serving() as port:
        env = clones.environment(
            server, "block", original, UPLOAD_URL=f"http://127.0.0.1:{port}/v1beta1/other"
        )
        with pytest.raises(errors.UploadFailed, match="404 Not Found"):
            clones.run(env)
    assert [request[0] for request in uploads.MinimalServer.requests] == ["HEAD", "POST"]


@pytest.mark.parametrize("sparse", [True, False])
def test_server_without_extensions_gets_a_tar(
    folder: Path, server: uploads.Server, tmp_path: Path, sparse: bool
) -> None:
    preallocation = str(not sparse).lower()
    with uploads.MinimalServer.serving() as port:
        url = f"http://127.0.0.1:{port}/v1beta1/upload"
        clones.run(
            clones.environment(server, "filesystem", folder, UPLOAD_URL=url, PREALLOCATION=preallocation)
        )
    (*_, (_, _, headers, body)) = uploads.MinimalServer.requests
    assert headers["x-cdi-content-type"] == "filesystem-clone"
    archive = tmp_path / "archive"
    archive.write_bytes(cramjam.snappy.decompress(body))
    assert (archive.stat().st_size < SIZE) is sparse
    (tmp_path / "unpacked").mkdir()
    processes.run("tar", "--extract", f"--file={archive}", f"--directory={tmp_path / 'unpacked'}")
    clones.same_tree(folder, tmp_path / "unpacked")
    listed = processes.run("tar", "--list", f"--file={archive}").stdout.splitlines()
    names = ["-dash", "disk.img", "more/", "more/above", "more/absolute"]
    assert listed == [*names, "more/deep/", "more/deep/file", "more/empty", "more/hard", "more/link"]


# -- streams of upstream's worker


def foreign_stream(data: bytes) -> bytes:
    """Return a stream as another implementation may write it: plain chunks, padding, repeated identifiers."""
    stream = snappy.IDENTIFIER
    for start in range(0, len(data), 65_536):
        piece = data[start : start + 65_536]
        stream += b"".join(snappy.frames([memoryview(piece)])) if start % 3 else b"\xfe\x02\x00\x00xx"
        stream += b"" if start % 3 else plain_chunk(piece)
    return stream


@pytest.mark.parametrize("chunked", [True, False])
def test_device_stream_of_upstream_is_received(
    server: uploads.Server, disk: Path, disks: disks.Disks, chunked: bool
) -> None:
    # A qcow2 image on the device is content, not a format.
    data = disks.image("qcow2").read_bytes()[: 3 * 65_536]
    stream = foreign_stream(data)
    body = [stream[start : start + 10_001] for start in range(0, len(stream), 10_001)] if chunked else stream
    headers = {"x-cdi-content-type": "blockdevice-clone"}
    assert server.ask("POST", SYNC, body, headers).status == 200
    assert server.result().message == DONE
    assert disk.read_bytes() == data


@pytest.mark.parametrize("names", [[b"disk.img"], [b"./"], [b"./disk.img", b"./more"]])
def test_tar_of_upstream_is_received(
    server: uploads.Server, disk: Path, folder: Path, names: list[bytes]
) -> None:
    (folder / "lost+found" / "secret").unlink()
    made = subprocess.run(
        ["tar", "--create", "--sparse", "--file=-", *names], cwd=folder, check=True, capture_output=True
    )
    headers = {"x-cdi-content-type": "filesystem-clone"}
    assert server.ask("POST", SYNC, foreign_stream(made.stdout), headers).status == 200
    assert server.result().message == clones.FOLDER_DONE
    oracle.same(disk, folder / "disk.img")


@pytest.mark.parametrize(
    ("kind", "path"), [("blockdevice-clone", "upload-archive"), ("filesystem-clone", "upload-async")]
)
def test_clone_header_overrides_the_path(
    server: uploads.Server, paths: contract.Paths, folder: Path, kind: str, path: str
) -> None:
    """The clone header overrides the path, as in CDI; nothing is written beside the volume."""
    beside = set(Path(paths.data).parent.iterdir())
    body = clones.body(folder, "filesystem" if kind == "filesystem-clone" else "block", ours=False)
    answer = server.ask("POST", f"/v1beta1/{path}", body, {"x-cdi-content-type": kind})
    assert answer.status == 200, answer.text
    assert server.result().message == (DONE if kind == "blockdevice-clone" else clones.FOLDER_DONE)
    assert set(Path(paths.data).parent.iterdir()) == beside
    oracle.same(Path(paths.data, "disk.img"), folder / "disk.img")


@pytest.mark.parametrize("fault", ["cut", "changed", "no snappy"])
def test_broken_stream_is_refused(
    server: uploads.Server, paths: contract.Paths, original: Path, fault: str
) -> None:
    stream = bytearray(foreign_stream(original.read_bytes()[: 2 * MIB]))
    if fault == "cut":
        del stream[-5:]
    elif fault == "changed":
        stream[1_000_000] ^= 1
    else:
        stream[0] = 0
    for kind in ("blockdevice-clone", "filesystem-clone"):
        answer = server.ask("POST", SYNC, bytes(stream), {"x-cdi-content-type": kind})
        assert answer.status == 400
    assert not list(Path(paths.data).iterdir())


# -- our own streams


@pytest.mark.parametrize(
    ("mode", "ours", "kind"), pairs.covering(["block", "filesystem"], [False, True], clones.PLACES)
)
def test_checksum_of_a_clone_is_verified(
    receiver: clones.Receiver, folder: Path, tmp_path: Path, mode: str, ours: bool, kind: str
) -> None:
    """A checksum requested with a clone is verified as with every upload."""
    body = clones.body(folder, mode, ours=ours)
    headers = {"x-cdi-content-type": clone.MODES[mode]} | (clones.OURS if ours else {})
    right = hashlib.sha256(body).hexdigest()
    with clones.place(kind, tmp_path, receiver.paths) as place:
        with receiver.server(place.env) as server:
            answer = server.ask("POST", SYNC, body, {**headers, "x-cdi-checksum": f"sha256:{'0' * 64}"})
            assert (answer.status, "checksum mismatch" in answer.text) == (400, True)
            oracle.unusable(place.disk)
            verified = {**headers, "x-cdi-checksum": f"sha256:{right}"}
            assert server.ask("POST", SYNC, body, verified).status == 200
            into_folder = mode == "filesystem" and kind == "folder"
            assert server.result().message == (clones.FOLDER_DONE if into_folder else DONE)
        oracle.same(place.disk, folder / "disk.img", beyond=place.beyond)


@pytest.mark.parametrize(
    ("packed", "packing", "sending", "pays"),
    [
        (0.3, 1.0, 3.0, True),  # a slow network, or a slow volume at the other end
        (0.3, 1.0, 0.1, False),  # a fast network
        (1.0, 1.0, 9.0, False),  # data that does not compress
    ],
)
def test_compression_continues_while_it_saves_time(
    packed: float, packing: float, sending: float, pays: bool
) -> None:
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
def test_stream_with_changing_compression_is_valid(original: Path, sending: float) -> None:
    """Whether or not parts are compressed, the receiver reads one complete stream."""
    with volume.Volume(str(original)) as device:
        stream = clone_stream.Stream(device, progress.NullProgress())
        stream.step = 2 * MIB
        first = b"".join(bytes(part) for part in stream.chunks(0))
        for cut in (0, 15, 16, 17, *range(1, len(first), 250_007), len(first)):
            stream._pays.encoded(clone_stream.STEP, 0, 1.0)
            stream._pays.sent(1, sending)
            rest = b"".join(bytes(part) for part in stream.chunks(cut))
            runs = extents.Decoder(readers.BytesReader(first[:cut] + rest), ahead.buffers)
            assert sum(run if isinstance(run, int) else len(run) for run in runs) == SIZE
            first = first[:cut] + rest
