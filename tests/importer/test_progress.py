"""What a worker shows of its progress, against what it has really read from a slow server."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
import random
import re
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker.importer import contract, progress
from cdi_worker.importer.send import volume
from tests.support import (
    clones,
    containers,
    devices,
    forked,
    meters,
    misbehave,
    oracle,
    processes,
    servers,
    uploads,
    worker,
)
from tests.support import disks as disks_module

MiB = 1 << 20
#: The disk, and the noise at its end: everything before it is a hole.
SIZE = 128 * MiB
DATA = 12 * MiB
#: Bytes per second of the server: of a connection, and of the connections that an import opens.
RATE = 500 << 10
WIRE = 6 * RATE
#: A boot sector: no warning says that the image may not be a disk.
HEAD = bytes(510) + b"\x55\xaa"
PERCENT = "kubevirt_cdi_import_progress_total"


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a disk whose data is at its end."""
    path = tmp_path_factory.mktemp("sparse") / "disk.raw"
    with path.open("wb") as stream:
        stream.truncate(SIZE)
        stream.seek(SIZE - DATA)
        stream.write(random.Random(1).randbytes(DATA))
    return path


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[servers.Web]:
    """Run nginx with a limited rate."""
    folder = tmp_path / "nginx"
    folder.mkdir()
    with servers.nginx(folder, tmp_path, servers.Settings(limit_rate=RATE)) as web:
        yield web


@pytest.fixture
def pod(tmp_path: Path) -> worker.Pod:
    env = {"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0", "OWNER_UID": "uid"}
    return worker.Pod(tmp_path / "pod", env=env, metrics_port=processes.free_port())


def image_of(sparse: Path, form: str, folder: Path) -> Path:
    path = folder / f"disk.{form}"
    disks_module.convert(sparse, path, disks_module.FORMATS[form])
    return path


def test_progress_of_a_sparse_image_follows_the_data(
    sparse: Path, slow: servers.Web, pod: worker.Pod, tmp_path: Path
) -> None:
    """A controller sees the percentage of what must be read, and a speed that the wire has."""
    image = image_of(sparse, "qcow2", tmp_path)
    seen: list[meters.Scrape] = []
    with worker.started(*pod.arguments, env={**pod.env, "IMPORTER_ENDPOINT": slow.url(image)}) as process:
        processes.wait_for(lambda: processes.is_listening(pod.metrics_port), "the metrics port")
        seen += meters.scrapes(process, pod.metrics_port)
        assert process.wait() == 0
    oracle.same(pod.disk, sparse)
    moving = [each for each in seen if each.phase == "transfer"]
    assert len(moving) > 8
    # While it connects there is none.
    percents = [each[PERCENT] for each in seen if each.phase != "connect"]
    assert percents == sorted(percents)
    assert moving[0][PERCENT] < 25
    for each in moving:
        # The sparse image has few bytes besides the data.
        assert DATA <= each["cdi_worker_phase_total_bytes"] <= image.stat().st_size < DATA + 16 * MiB
        expected = 100 * each["cdi_worker_read_bytes_total"] / each["cdi_worker_phase_total_bytes"]
        assert abs(each[PERCENT] - expected) < 5
        assert each["cdi_worker_speed_bytes_per_second"] < 1.5 * WIRE
        assert each["cdi_worker_disk_bytes"] == SIZE
    middle = moving[len(moving) // 2]
    assert middle["cdi_worker_speed_bytes_per_second"] > RATE / 2
    # There is none before arrivals of two seconds, and none while nothing arrives.
    name = "cdi_worker_remaining_seconds"
    left = [each[name] for each in moving if name in each.values]
    assert 0 <= left[-1] < left[0] < 5 * DATA / RATE


def test_disk_in_a_compressed_layer_counts_as_bytes_of_the_layer(
    server: misbehave.Server, pod: worker.Pod
) -> None:
    """The holes of the disk are a few bytes of the layer."""
    disk = bytes(64 * MiB) + random.Random(4).randbytes(8 * MiB)
    image = containers.Image((containers.layer(*containers.disk(disk)),))
    (layer,), (piece, pause) = image.layers, (64 << 10, 0.1)
    server.serve("/v2/r/manifests/latest", misbehave.Page(image.manifest.data))
    server.serve(f"/v2/r/blobs/{image.config_blob.digest}", misbehave.Page(image.config_blob.data))
    server.serve(f"/v2/r/blobs/{layer.digest}", misbehave.Page(layer.data, drip=(piece, pause)))
    env = {"IMPORTER_SOURCE": "registry", "INSECURE_TLS": "true"}
    env["IMPORTER_ENDPOINT"] = f"docker://127.0.0.1:{server.port}/r"
    with worker.started(*pod.arguments, env={**pod.env, **env}) as process:
        processes.wait_for(lambda: processes.is_listening(pod.metrics_port), "the metrics port")
        seen = list(meters.scrapes(process, pod.metrics_port))
        assert process.wait() == 0
    assert pod.disk.read_bytes() == disk
    moving = [each for each in seen if each.phase == "transfer"]
    assert len(moving) > 8
    for each in moving:
        assert each["cdi_worker_phase_total_bytes"] == len(layer.data)
        read = each["cdi_worker_read_bytes_total"]
        assert read <= len(layer.data)
        assert abs(each[PERCENT] - 100 * read / len(layer.data)) < 1
        assert each["cdi_worker_speed_bytes_per_second"] < 1.5 * 6 * piece / pause
    assert moving[0][PERCENT] < 50 < moving[-1][PERCENT]


def test_holes_of_a_local_file_are_not_progress(sparse: Path, tmp_path: Path) -> None:
    """The map of the file is known before anything is copied to a slow device."""
    shown = io.StringIO()
    with devices.slow(tmp_path, SIZE, bytes_per_second=6 * MiB) as target:
        location = cdi_worker.Location(str(sparse))
        wanted = cdi_worker.Request(source="local", location=location, target=str(target))
        wanted = dataclasses.replace(wanted, direct=True, existing="replace")
        with progress.Lines(shown, as_json=True, interval=0.1) as meter:
            cdi_worker.run(wanted, meter)
        with target.open("rb") as have, sparse.open("rb") as want:
            have.seek(SIZE - DATA), want.seek(SIZE - DATA)
            assert have.read() == want.read()
    lines = [json.loads(line) for line in shown.getvalue().splitlines()]
    moving = [line for line in lines if line["phase"] == "transfer"]
    assert len(moving) > 3
    assert moving[0]["percent"] == 0
    assert moving[-1]["total"] == DATA
    for line in moving:
        assert line["bytesPerSecond"] < 20 * MiB
        assert line["percent"] <= 100 * line["read"] / DATA + 0.1


def test_clone_of_a_sparse_device_follows_the_data(
    sparse: Path,
    certificates: uploads.Certificates,
    paths: contract.Paths,
    pod: worker.Pod,
    tmp_path: Path,
) -> None:
    """Zeros of a device are read, not moved."""
    with (
        devices.attached(sparse) as source,
        devices.slow(tmp_path, SIZE, bytes_per_second=6 * MiB) as target,
        uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server,
    ):
        env = clones.environment(server, "block", source, OWNER_UID="uid")
        seen: list[meters.Scrape] = []
        with worker.started(*pod.arguments, env=env) as process:
            processes.wait_for(lambda: processes.is_listening(pod.metrics_port), "the metrics port")
            seen += meters.scrapes(process, pod.metrics_port)
            assert process.wait() == 0
    moving = [each for each in seen if each.phase == "transfer"]
    assert len(moving) > 3
    for each in moving:
        sent = each["cdi_worker_read_bytes_total"]
        assert each["kubevirt_cdi_clone_progress_total"] <= 100 * (sent + 4 * MiB) / DATA
        assert each["cdi_worker_speed_bytes_per_second"] < 200 * MiB


def test_frames_of_a_sparse_device_follow_the_data(sparse: Path) -> None:
    """A receiver that knows only CDI's stream gets the zeros too, compressed."""
    meter, percents = progress.Meter(), []
    with volume.plain(volume.Settings("", volume.MODES["block"], str(sparse)), meter) as pieces:
        percents.extend(meter.numbers().percent for _ in pieces)
    assert (meter.numbers().done, meter.numbers().total) == (DATA, DATA)
    assert percents == sorted(percents)
    assert percents[len(percents) // 2] == 0  # the data is at the end


def test_percentage_does_not_fall_when_a_phase_begins_again() -> None:
    """After a fall-back to another route all bytes are read again."""
    meter = progress.Meter()
    meter.phase("transfer", 100)
    meter.advance(80)
    reached = meter.numbers().percent
    meter.phase("transfer", 100)
    meter.advance(70)
    assert meter.numbers().percent == reached
    meter.advance(20)
    assert meter.numbers().percent > reached


def test_speed_of_a_slow_wire_is_not_that_of_bursts() -> None:
    """Six connections share 100 KiB/s: after a minute 6 MiB have arrived at once."""
    speed, seen = progress.Speed(0.0), []
    for second in range(1, 600):
        if second % 60 == 0:
            for piece in range(6):
                speed.note(second + piece / 100, (second // 60 - 1) * 6 * MiB + (piece + 1) * MiB)
        seen.append(speed.now(second + 0.1))
    assert max(seen) < 1.05 * 6 * MiB / 60
    assert min(seen[120:]) > 0.4 * 6 * MiB / 60


def test_speed_of_a_fast_wire_falls_to_zero_when_it_halts() -> None:
    speed = progress.Speed(0.0)
    for tenth in range(1, 300):
        speed.note(tenth / 10, tenth * MiB)
    assert 9 * MiB < speed.now(30.0) < 11 * MiB
    assert 4 * MiB < speed.now(35.0) < 8 * MiB
    assert speed.now(41.0) == 0


# -- at the terminal and in logs ------------------------------------------------------------------------


def on_terminal(*arguments: str | Path) -> tuple[int, str]:
    """Run the command with a terminal as standard error; return its status and what it wrote there."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    env = {**worker.ENVIRONMENT, "TERM": "xterm"}
    shown = b""
    argv = [*worker.COMMAND, *arguments]
    with forked.Popen[bytes](argv, env=env, stdout=subprocess.DEVNULL, stderr=theirs) as process:
        os.close(theirs)
        # Linux reports the end of a terminal as an error.
        with contextlib.suppress(OSError):
            while part := os.read(ours, 1 << 16):
                shown += part
    os.close(ours)
    return process.returncode, shown.decode()


def speeds(text: str) -> list[float]:
    """Return the speeds in a text, in bytes per second."""
    powers = {"B": 0, "KiB": 10, "MiB": 20, "GiB": 30}
    return [float(size) * (1 << powers[unit]) for size, unit in re.findall(r"([\d.]+) ([KMG]?i?B)/s", text)]


def test_bar_is_one_line_with_the_speed_of_the_wire(sparse: Path, slow: servers.Web, tmp_path: Path) -> None:
    image = image_of(sparse, "qcow2", tmp_path)
    status, shown = on_terminal("import", slow.url(image), tmp_path / "disk.img")
    assert status == 0
    assert "\x1b[?25l" not in shown
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", frame) for frame in re.split(r"[\r\n]", shown)]
    moving = [frame for frame in frames if "transfer" in frame]
    assert len(moving) > 10
    # It is drawn where it was, and removed at the end.
    assert "\n" not in shown
    assert shown.endswith("\r\x1b[K")
    assert not [frame for frame in moving if "connect" in frame]
    percents = [float(found[1]) for frame in frames if (found := re.search(r"([\d.]+)%", frame))]
    assert percents == sorted(percents)
    assert percents[0] < 10
    assert 0 < max(speeds(shown)) < 1.5 * WIRE
    assert re.search(r"MiB of 12\.\d MiB, [\d.]+ [KM]iB/s, 0:\d\d left", moving[len(moving) // 2])


def test_interrupted_import_says_what_is_kept_and_continues(
    sparse: Path, server: misbehave.Server, tmp_path: Path
) -> None:
    page = misbehave.Page(image_of(sparse, "qcow2", tmp_path).read_bytes())
    url = server.serve("/disk", dataclasses.replace(page, drip=(64 << 10, 0.05)))
    target, part = tmp_path / "disk.img", tmp_path / "disk.img.part"
    command = ["import", url, str(target), "--progress"]
    with worker.started(*command, "json") as process:
        assert process.stderr is not None
        processes.wait_for(lambda: part.exists() and part.stat().st_blocks * 512 > DATA / 4, "data")
        process.send_signal(signal.SIGINT)
        *_, message = process.stderr
        assert process.wait(processes.PATIENCE) == 130
    kept = re.fullmatch(
        r"cdi-worker: interrupted: ([\d.]+ [KMG]iB) of ([\d.]+ MiB) are kept; the same command continues\n",
        message,
    )
    assert kept, message
    server.serve("/disk", page)
    done = worker.run(*command, "lines")
    assert done.status == 0
    first = done.errors.splitlines()[0]
    assert first == f"resumed: {kept[1]} of {kept[2]} are kept from an earlier attempt"
    assert re.search(
        r"^read .*, and .* from an earlier attempt$", done.output.replace("    ", ""), re.MULTILINE
    )
    oracle.same(target, sparse)


def test_interrupted_upload_says_that_it_continues(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    image = tmp_path / "noise"
    image.write_bytes(random.Random(2).randbytes(8 * MiB))
    with (
        devices.slow(tmp_path, 8 * MiB, bytes_per_second=3 * MiB) as target,
        uploads.Server(certificates, {"DESTINATION": str(target)}, paths) as server,
    ):
        client, authority = certificates.client, certificates.authority.certificate
        options = ["--ca-file", authority, "--cert", client.certificate, "--key", client.key]
        with worker.started("upload", image, server.url(""), *options, "--progress=json") as process:
            assert process.stderr is not None
            next(line for line in process.stderr if '"transfer"' in line)
            time.sleep(0.5)
            process.send_signal(signal.SIGINT)
            *_, message = process.stderr
            assert process.wait(processes.PATIENCE) == 130
        assert message == (
            "cdi-worker: interrupted: the server keeps what it has received; the same command continues\n"
        )


@pytest.mark.parametrize(("form", "options"), [("qcow2", ()), ("raw", ("--size=16Mi",))])
def test_image_of_unknown_length_has_a_percentage(
    server: misbehave.Server, tmp_path: Path, form: str, options: tuple[str, ...]
) -> None:
    """That of the data of its disk: by the tables of a qcow2 image, or of the requested size."""
    disk = tmp_path / "disk.raw"
    with disk.open("wb") as stream:
        stream.write(HEAD + random.Random(4).randbytes(8 * MiB - len(HEAD)))
        stream.truncate(16 * MiB)
    image = disk if form == "raw" else image_of(disk, form, tmp_path)
    page = misbehave.Page(image.read_bytes(), framing="chunked", ranges=False, drip=(64 << 10, 0.01))
    command = ["import", server.serve("/disk", page), tmp_path / "disk.img", "--progress=json", *options]
    done = worker.run(*command)
    assert done.status == 0, done.errors
    oracle.same(tmp_path / "disk.img", disk)
    lines = [json.loads(line) for line in done.errors.splitlines()]
    first = next(line for line in lines if line["phase"] == "transfer")
    last = next(line for line in lines if line["phase"] == "sync")
    assert first["total"] == 16 * MiB
    assert last["percent"] == 99.9


def test_done_is_the_end(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(MiB) + random.Random(1).randbytes(MiB)))
    done = worker.run("import", "--verify", "--progress=json", url, tmp_path / "disk.img")
    phases = [json.loads(line)["phase"] for line in done.errors.splitlines() if line.startswith("{")]
    assert phases[-2:] == ["readback", "done"]
    assert "sync" in phases


def test_lines_show_a_halt_and_become_fewer() -> None:
    """While nothing moves they continue, with a falling speed; but a day's log has no thousands of them."""
    printed = io.StringIO()
    with progress.Lines(printed, interval=0.01) as lines:
        lines.phase("transfer", 4 * MiB)
        lines.read(2 * MiB)
        lines.advance(2 * MiB)
        time.sleep(2.5)
    written = printed.getvalue().splitlines()
    # Not one for each of the 250 intervals: each is a tenth of the time so far.
    assert 10 < len(written) < 100
    halted = [line for line in written if "2.0 MiB of 4.0 MiB" in line]
    assert len(halted) > 10
    assert 0 < speeds(halted[-1])[0] < 0.6 * speeds(halted[0])[0]


def test_log_of_a_pod_has_one_format_of_lines(pod: worker.Pod, server: misbehave.Server) -> None:
    """That of klog, as the log of CDI's own pods."""
    page = misbehave.Page(random.Random(6).randbytes(4 * MiB), framing="close", ranges=False)
    with worker.started(
        *pod.arguments, env={**pod.env, "IMPORTER_ENDPOINT": server.serve("/disk", page)}
    ) as process:
        _, log = process.communicate(timeout=processes.PATIENCE)
    lines = log.splitlines()
    assert {line[0] for line in lines} == {"I", "W"}
    for line in lines:
        assert re.match(r"[IW]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ \w+\.py:\d+] .", line), line
    assert any(line.endswith("] 100.0% done") for line in lines)
