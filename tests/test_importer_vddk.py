"""Warm migration from VMware, stage by stage: after each the target is what the snapshot holds.

vcsim, nbdkit and its vddk plugin are the real ones; the VDDK library is a stand-in.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyVmomi")

import importer
from importer import errors
from tests import devices, oracle, processes, vmware

MiB, GiB = 1 << 20, 1 << 30
REPOSITORY = Path(__file__).parents[1]
SIZE = 24 * MiB
STAGES = 5


def noise(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def migration(directory: Path, size: int = SIZE) -> vmware.Estate:
    """Make a disk with a full copy, three deltas and a final one to come: data, holes, zeros, the edges."""
    estate = vmware.Estate(directory, size)
    estate.take((0, noise(1, 5 * MiB)), (10 * MiB, noise(2, 3 * MiB)), (size - 512, b"end " * 128))
    estate.take((MiB, noise(3, 70_000)), (11 * MiB, MiB))
    estate.take((11 * MiB, noise(4, 4096)), (0, bytes(MiB)), (20 * MiB, noise(5, 100)))
    estate.take((5 * MiB - 4096, noise(6, 8192)), (2 * MiB, 512 * 1024))
    estate.take((size - 1024, bytes(1024)), (512, noise(7, 512)))
    return estate


@pytest.fixture(scope="module")
def estate(tmp_path_factory: pytest.TempPathFactory) -> Iterator[vmware.Estate]:
    made = migration(tmp_path_factory.mktemp("vmware"))
    with made.running():
        yield made


@pytest.fixture(params=["file", "block512", "block4096"])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Give a new file, or a device full of 0xFF."""
    if request.param == "file":
        yield tmp_path / "disk.img"
        return
    with devices.loop(tmp_path, SIZE + MiB, sector=int(request.param[5:])) as device:
        yield device


def wanted(estate: vmware.Estate, target: Path, stage: int, **changes: Any) -> importer.Request:
    options = importer.FetchOptions(no_progress=1)
    location = estate.location(**estate.stage(stage) | changes, final=stage == STAGES - 1)
    return importer.Request(
        source="vddk", location=location, target=str(target), fetch=options, connect_patience=1
    )


def check(estate: vmware.Estate, target: Path, stage: int) -> None:
    oracle.same(target, estate.content(stage), beyond=devices.DIRT if target.is_block_device() else None)


def test_every_stage_is_what_the_snapshot_holds(estate: vmware.Estate, target: Path) -> None:
    for stage in range(STAGES):
        result = importer.run(wanted(estate, target, stage))
        assert result.plan.route == ("update" if stage else "extents")
        check(estate, target, stage)
    assert result.read <= 4 * vmware.BLOCK
    assert result.vddk_info == {"Version": "8.0.1", "Host": "esx12.test.local"}


def test_a_delta_by_change_id_of_a_snapshot_that_is_gone(tmp_path: Path, target: Path) -> None:
    estate = migration(tmp_path / "estate")
    estate.gone = {0, 1}
    with estate.running():
        with target.open("r+b" if target.is_block_device() else "xb") as out:
            out.write(estate.content(1).read_bytes())
        importer.run(wanted(estate, target, 3, previous=estate.change_id(1)))
        check(estate, target, 3)


def test_the_first_stage_grows_the_disk_and_deltas_leave_it(estate: vmware.Estate, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    for stage in range(2):
        request = wanted(estate, target, stage)
        importer.run(dataclasses.replace(request, image_size=40 * MiB))
        oracle.same(target, estate.content(stage))
        assert target.stat().st_size == 40 * MiB


@pytest.mark.parametrize(
    ("there", "reason"), [(None, "no disk of an earlier stage"), (SIZE - 512, "is larger than the reported")]
)
def test_a_delta_wants_the_last_stage(
    estate: vmware.Estate, tmp_path: Path, there: int | None, reason: str
) -> None:
    target = tmp_path / "disk.img"
    if there is not None:
        devices.fill(target, there)
    with pytest.raises(errors.TargetError, match=reason):
        importer.run(wanted(estate, target, 1))


def test_allocation_that_vddk_does_not_know(tmp_path: Path, target: Path) -> None:
    estate = migration(tmp_path / "estate")
    estate.settings["fail"] = "qab"
    with estate.running():
        for stage in range(2):
            importer.run(wanted(estate, target, stage))
            check(estate, target, stage)


def test_a_stage_is_stopped_in_the_middle(tmp_path: Path) -> None:
    estate = migration(tmp_path / "estate")
    estate.settings["delay"] = 500_000
    target, cancel = tmp_path / "disk.img", threading.Event()

    def stop() -> None:
        processes.wait_for(lambda: reads(estate), "a read")
        cancel.set()

    with estate.running():
        threading.Thread(target=stop).start()
        with pytest.raises(errors.Cancelled):
            importer.run(wanted(estate, target, 0), cancel=cancel)
        calls = [line.split()[0] for line in estate.said()]
        assert calls.count("ConnectEx") == calls.count("Disconnect") > 1
        oracle.unusable(target)


def test_a_disk_without_snapshot(estate: vmware.Estate, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    importer.run(wanted(estate, target, 0, current="", backing_file=estate.file(STAGES)))
    check(estate, target, STAGES)


def test_short_reads_but_many_at_once(tmp_path: Path) -> None:
    """2 MiB each, which a vCenter bears; as many as fill the memory of longer ones, on all connections."""
    estate = vmware.Estate(tmp_path / "estate", 96 * MiB)
    estate.take((0, noise(1, 80 * MiB)))
    estate.settings["delay"] = 300_000
    with estate.running():
        importer.run(wanted(estate, tmp_path / "disk.img", 0))
        check(estate, tmp_path / "disk.img", 0)
    under_way = most = 0
    for call in estate.said():
        under_way += call.startswith("Read") - call.startswith("Done")
        most = max(most, under_way)
        if call.startswith("Read"):
            assert int(call.rpartition("+")[2]) * 512 <= 2 * MiB
    assert 6 < most <= 12
    calls = [call.split()[0] for call in estate.said()]
    assert calls.count("Open") == 3 + 1  # one more tells what is allocated


def test_longer_reads_from_a_host_by_itself(tmp_path: Path) -> None:
    estate = migration(tmp_path / "estate")
    target = tmp_path / "disk.img"
    with estate.running("-esx"):
        for stage in range(2):
            importer.run(wanted(estate, target, stage))
            check(estate, target, stage)
    assert max(int(call.rpartition("+")[2]) * 512 for call in estate.said() if call[:5] == "Read ") == 4 * MiB


# -- long lists, large disks -----------------------------------------------------------------------


def test_thousands_of_areas_and_lost_sessions(tmp_path: Path) -> None:
    size = 320 * MiB
    estate = vmware.Estate(tmp_path / "estate", size)
    estate.take((0, noise(1, MiB)))
    places = [*range(0, size - vmware.BLOCK, 2 * vmware.BLOCK)]
    estate.take(*((place, noise(place, 512)) for place in places))
    assert len(places) > 2000
    estate.answers = 1
    target = tmp_path / "disk.img"
    with estate.running():
        for stage in range(2):
            importer.run(wanted(estate, target, stage))
            check(estate, target, stage)


def test_a_disk_larger_than_32_bits(tmp_path: Path) -> None:
    size = 9 * GiB
    edge = 4 * GiB
    estate = vmware.Estate(tmp_path / "estate", size)
    estate.take((0, noise(1, MiB)), (edge - MiB, noise(2, 2 * MiB)), (size - MiB, noise(3, MiB)))
    estate.take((edge - vmware.BLOCK, noise(4, 2 * vmware.BLOCK)), (edge + MiB // 2, MiB // 2))
    estate.take((8 * GiB, noise(5, 4096)), (edge - MiB, MiB // 2))
    target = tmp_path / "disk.img"
    with estate.running():
        for stage in range(3):
            importer.run(wanted(estate, target, stage))
            sparsely_same(target, estate.content(stage))


def sparsely_same(target: Path, expected: Path) -> None:
    """Compare what is data in either of two files that are almost all holes."""
    assert target.stat().st_size == expected.stat().st_size
    with target.open("rb") as have, expected.open("rb") as want:
        for holder in (have, want):
            end = 0
            while True:
                try:
                    start = os.lseek(holder.fileno(), end, os.SEEK_DATA)
                except OSError:
                    break
                end = os.lseek(holder.fileno(), start, os.SEEK_HOLE)
                assert os.pread(have.fileno(), end - start, start) == os.pread(
                    want.fileno(), end - start, start
                )


# -- what goes wrong -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "settings", "reason"),
    [
        (0, {"fail": "connect"}, "VDDK: VixDiskLib_ConnectEx: Unknown error"),
        (0, {"fail": "open"}, "VDDK: VixDiskLib_Open: .*Unknown error"),
        (0, {"fail": "read@2050"}, r"transfer failed at byte \d+: .*VDDK: .*read failed"),
        (1, {"fail": "read@2050"}, r"transfer failed at byte \d+: .*VDDK: .*read failed"),
        (0, {"password": "another"}, "wrong user name or password"),
        (0, {"thumbprint": "AB"}, "the host's certificate has another thumbprint"),
        (0, {"snapshot": "snapshot-7"}, "the host has no such disk or snapshot"),
    ],
)
def test_what_the_library_says_is_passed_on(
    tmp_path: Path, stage: int, settings: dict[str, str], reason: str
) -> None:
    estate = migration(tmp_path / "estate")
    target = tmp_path / "disk.img"
    with estate.running():
        for earlier in range(stage):
            importer.run(wanted(estate, target, earlier))
        kept = dict(estate.settings)
        estate.settings |= settings
        estate.save()
        with pytest.raises(errors.SourceError, match=reason) as caught:
            importer.run(wanted(estate, target, stage))
        assert vmware.PASSWORD not in str(caught.value)
        estate.settings = kept
        estate.save()
        importer.run(wanted(estate, target, stage))
        check(estate, target, stage)


def test_an_error_that_passes_is_outlasted(tmp_path: Path) -> None:
    estate = migration(tmp_path / "estate")
    estate.settings |= {"fail": "read@2050", "delay": "20000"}
    target = tmp_path / "disk.img"
    with estate.running():
        argv = [sys.executable, "-c", STAGE, *arguments(estate, target, 0)]
        with subprocess.Popen(argv, cwd=REPOSITORY) as running:
            processes.wait_for(lambda: sum("Read 0+" in line for line in estate.said()) > 1, "a second try")
            del estate.settings["fail"]
            estate.save()
            assert running.wait(30) == 0
        check(estate, target, 0)


def test_no_library(estate: vmware.Estate, tmp_path: Path) -> None:
    with pytest.raises(errors.SourceError, match=f"no VDDK library in {tmp_path}"):
        importer.run(wanted(estate, tmp_path / "disk.img", 0, vddk_libdir=str(tmp_path)))


def test_a_library_that_cannot_be_loaded(estate: vmware.Estate, tmp_path: Path) -> None:
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64/libvixDiskLib.so.8").write_bytes(b"not ELF")
    with pytest.raises(errors.SourceError, match="the VDDK library cannot be loaded"):
        importer.run(wanted(estate, tmp_path / "disk.img", 0, vddk_libdir=str(tmp_path)))


def test_all_that_is_missing_is_said_at_once(tmp_path: Path) -> None:
    location = importer.Location("https://localhost")
    with pytest.raises(errors.RequestError, match=r"IMPORTER_UUID.*IMPORTER_BACKING_FILE"):
        importer.run(importer.Request(source="vddk", location=location, target=str(tmp_path / "disk.img")))


# -- killed at any moment --------------------------------------------------------------------------

STAGE = """
import sys, importer
port, libdir, thumbprint, uuid, file, user, password, previous, current, target = sys.argv[1:]
location = importer.Location(
    f"https://localhost:{port}/sdk", importer.Access(user, password), uuid=uuid, backing_file=file,
    thumbprint=thumbprint, vddk_libdir=libdir, previous=previous, current=current,
)
importer.run(importer.Request(source="vddk", location=location, target=target, journal_interval=0.1))
"""


def arguments(estate: vmware.Estate, target: Path, stage: int) -> list[str]:
    known = estate.location(**estate.stage(stage))
    return [
        *(str(estate.port), known.vddk_libdir, known.thumbprint, known.uuid, known.backing_file),
        *(vmware.USER, vmware.PASSWORD, known.previous, known.current, str(target)),
    ]


@pytest.mark.parametrize(("target", "later"), [("file", 0.0), ("block512", 0.15)], indirect=["target"])
def test_a_kill_at_any_stage_costs_nothing_but_time(tmp_path: Path, target: Path, later: float) -> None:
    estate = migration(tmp_path / "estate")
    with estate.running():
        for stage in range(STAGES):
            argv = [sys.executable, "-c", STAGE, *arguments(estate, target, stage)]
            slow(estate, 100_000)
            before = reads(estate)
            with subprocess.Popen(argv, cwd=REPOSITORY) as first:
                processes.wait_for(lambda before=before: reads(estate) > before, "a read")  # type: ignore[misc]
                time.sleep(later)
                first.kill()
            slow(estate, 0)
            importer.run(wanted(estate, target, stage))
            check(estate, target, stage)


def test_a_killed_copy_goes_on(tmp_path: Path) -> None:
    data = 48 * MiB
    estate = vmware.Estate(tmp_path / "estate", 64 * MiB)
    estate.take((4 * MiB, noise(1, data)))
    estate.settings["delay"] = 1_500_000
    target, part = tmp_path / "disk.img", tmp_path / "disk.img.part"
    with estate.running():
        with subprocess.Popen(
            [sys.executable, "-c", STAGE, *arguments(estate, target, 0)], cwd=REPOSITORY
        ) as first:
            # The journal follows the last byte.
            processes.wait_for(lambda: part.exists() and part.stat().st_size > estate.size, "a journal")
            first.kill()
        slow(estate, 0)
        result = importer.run(wanted(estate, target, 0))
        check(estate, target, 0)
    assert result.resumed > 0
    assert result.read < data


def slow(estate: vmware.Estate, microseconds: int) -> None:
    estate.settings["delay"] = microseconds
    estate.save()


def reads(estate: vmware.Estate) -> int:
    return sum(line.startswith("Read") for line in estate.said())


# -- as a pod --------------------------------------------------------------------------------------


def test_a_pod_migrates(estate: vmware.Estate, tmp_path: Path) -> None:
    message, nothing = tmp_path / "message", tmp_path / "none"
    config = tmp_path / "vddk-config"
    config.write_text("vixDiskLib.nfcAio.Session.BufCount=4\n")
    argv = [sys.executable, "-m", "importer", "-v=3", f"--data-dir={tmp_path}", f"--scratch-dir={nothing}"]
    argv += [f"--termination-log={message}", f"--block-device={nothing}", "--metrics-port=0"]
    argv += [f"--vddk-libdir={estate.libdir}", f"--vddk-config={config}"]
    for stage in range(2):
        known = estate.location(**estate.stage(stage))
        env = {
            "PATH": os.environ["PATH"],
            "IMPORTER_SOURCE": "vddk",
            "IMPORTER_ENDPOINT": known.endpoint,
            "IMPORTER_ACCESS_KEY_ID": vmware.USER,
            "IMPORTER_SECRET_KEY": vmware.PASSWORD,
            "IMPORTER_UUID": known.uuid,
            "IMPORTER_BACKING_FILE": known.backing_file,
            "IMPORTER_THUMBPRINT": known.thumbprint,
            "IMPORTER_CURRENT_CHECKPOINT": known.current,
            "IMPORTER_PREVIOUS_CHECKPOINT": known.previous,
            "IMPORTER_FINAL_CHECKPOINT": "false",
        }
        done = subprocess.run(
            argv, cwd=REPOSITORY, env=env, capture_output=True, text=True, timeout=60, check=False
        )
        told = message.read_text()
        assert done.returncode == 0, told + done.stderr
        assert json.loads(told)["vddkInfo"] == {"Version": "8.0.1", "Host": "esx12.test.local"}
        assert vmware.PASSWORD not in told + done.stderr
        assert "power=poweredOn" in done.stderr
        check(estate, tmp_path / "disk.img", stage)
    assert any(line.endswith(f"config={config}") for line in estate.said())
    env["IMPORTER_SECRET_KEY"] = "wrong"
    done = subprocess.run(argv, cwd=REPOSITORY, env=env, capture_output=True, timeout=60, check=False)
    assert done.returncode == 1
    assert message.read_text().startswith("Unable to connect to vddk data source: https://localhost")
    assert "wrong user name or password" in message.read_text()
