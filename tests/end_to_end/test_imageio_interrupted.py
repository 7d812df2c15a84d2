"""Stages of a migration from oVirt that are killed at any point, or stopped, and run again."""

from __future__ import annotations

import dataclasses
import json
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images import targets
from cdi_worker.sources.ovirt import engine
from tests.support import devices, engine_states, forked, imageiod, kills, oracle, ovirt_stages, processes
from tests.support import engine as engine_module

target = devices.targets("file", "512", "4096", size=ovirt_stages.SIZE + ovirt_stages.MIB)


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look every half second whether a locked disk is free again."""
    monkeypatch.setattr(engine, "LONGEST_LOOK", 0.5)


# -- killed at any point, and run again ----------------------------------------------------------------


def killable(request: cdi_worker.Request) -> cdi_worker.Request:
    """Return the request with a journal that is saved all the time, and ranges of which several are noted."""
    fetch = cdi_worker.FetchOptions(connections=2, chunk=256 << 10)
    return dataclasses.replace(request, journal_interval=0.05, fetch=fetch)


def give_up(ovirt: ovirt_stages.Setup) -> None:
    """End the transfer of a worker that was killed after its last read, as the engine does after a minute."""
    if ovirt.engine.last.phase not in engine_states.ENDED:
        ovirt.engine.enter(ovirt.engine.last, "cancelled_system")


def journal_saved_twice(target: Path) -> bool:
    """Report whether a journal was saved twice: the first may cover only the withheld start."""
    notes = targets.journal_slots(target, ovirt_stages.SIZE)
    assert notes
    if not Path(notes.path).exists():
        return False
    with Path(notes.path).open("rb", buffering=0) as stream:
        stream.seek(notes.offset)
        return stream.read(512 << 10).count(b"cdi-worker journal") > 1


@pytest.mark.parametrize(("target", "phase"), [("4096", "transfer"), ("file", "sync")], indirect=["target"])
def test_killed_full_copy_is_resumed(ovirt: ovirt_stages.Setup, target: Path, phase: str) -> None:
    chain = ovirt.chain()
    first = chain.active.id
    chain.snapshot(*ovirt_stages.FIRST)
    ovirt.engine.inactivity, ovirt.engine.delay = 2.0, "100ms"
    request = ovirt.request(chain, target, first)
    when = lambda: journal_saved_twice(target)  # noqa: E731  (one expression)
    assert kills.kill(killable(request), when, phase=phase, hold=phase == "sync") == -signal.SIGKILL
    oracle.unusable(target)
    ovirt.engine.delay = ""
    result = cdi_worker.run(request)
    oracle.same(target, ovirt.content(chain, first))
    assert result.resumed > 0
    ovirt.check_settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_killed_full_copy_is_not_resumed_with_other_data(ovirt: ovirt_stages.Setup, target: Path) -> None:
    """The disk is found before it is locked; a snapshot may be removed in between."""
    chain = ovirt.chain()
    first = chain.active.id
    chain.snapshot(*ovirt_stages.FIRST)
    chain.snapshot()
    ovirt.engine.inactivity, ovirt.engine.delay = 2.0, "100ms"
    request = ovirt.request(chain, target, first)
    assert kills.kill(killable(request), lambda: journal_saved_twice(target)) == -signal.SIGKILL
    ovirt.engine.delay = ""
    ovirt.engine.ending = lambda: chain.remove(first)
    with pytest.raises(errors.SourceChanged, match="snapshot was"):
        cdi_worker.run(request)
    oracle.unusable(target)
    result = cdi_worker.run(request)
    oracle.same(target, ovirt.content(chain, first))
    assert not result.resumed
    ovirt.check_settled()


@pytest.mark.parametrize(
    ("target", "phase"),
    [("file", "merge"), ("4096", "merge"), ("file", "sync")],
    indirect=["target"],
)
def test_killed_delta_can_be_run_again(ovirt: ovirt_stages.Setup, target: Path, phase: str) -> None:
    chain = ovirt.chain()
    chain.snapshot(*ovirt_stages.FIRST)
    first, second = (volume.id for volume in chain.volumes)
    chain.write("write -P 9 2M 8M")
    cdi_worker.run(ovirt.request(chain, target, first))
    request = ovirt.request(chain, target, second, first)
    for delay in (0.0, 0.05) if phase == "merge" else (0.0,):
        with kills.started(killable(request), hold=phase if phase == "sync" else "") as run:
            assert run.stdout is not None
            assert any(line.rstrip() == phase for line in run.stdout)
            # Not an event: the kill may come at any moment.
            time.sleep(delay)
        give_up(ovirt)
    cdi_worker.run(request)
    oracle.same(target, ovirt.content(chain, second))
    if not target.is_block_device():
        assert [path.name for path in target.parent.glob("disk.img*")] == ["disk.img"]
    ovirt.check_settled()


#: Bytes of a disk whose commit takes far longer than detecting its start.
LARGE = 64 * ovirt_stages.MIB


def test_killed_commit_can_be_run_again(ovirt: ovirt_stages.Setup, tmp_path: Path) -> None:
    """Killed when the first cluster is on the target: some of the others are not."""
    chain, target = ovirt.chain(LARGE), tmp_path / "disk.img"
    # Apart from each other: what the kernel got in one call is written whatever happens.
    pieces = range(0, LARGE, 128 << 10)
    chain.snapshot(*(f"write -P 9 {offset} 64k" for offset in pieces))
    first, second = (volume.id for volume in chain.volumes)
    cdi_worker.run(ovirt.request(chain, target, first))
    request = ovirt.request(chain, target, second, first)
    changing = Path(f"{target}.changing")

    def commit_started() -> bool:
        while not changing.exists() or nines(changing, 0) == 0:
            # Shorter than a piece takes to be written.
            time.sleep(0.0005)
        return True

    for _ in range(20):
        assert kills.kill(killable(request), commit_started, phase="merge") == -signal.SIGKILL
        give_up(ovirt)
        written = sum(nines(changing, offset) for offset in pieces)
        if written < len(pieces):
            break
    assert 0 < written < len(pieces)
    cdi_worker.run(request)
    oracle.same(target, ovirt.content(chain, second))
    ovirt.check_settled()


def nines(path: Path, offset: int) -> int:
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        return stream.read(512) == bytes([9]) * 512


def test_pod_requests_scratch(ovirt: ovirt_stages.Setup, tmp_path: Path) -> None:
    chain = ovirt.chain()
    chain.snapshot(*ovirt_stages.FIRST)
    first, second = (volume.id for volume in chain.volumes)
    env = {"IMPORTER_CURRENT_CHECKPOINT": first}
    assert pod(ovirt, tmp_path, chain, env) == (0, "Import Complete", False)
    env = {"IMPORTER_CURRENT_CHECKPOINT": second, "IMPORTER_PREVIOUS_CHECKPOINT": first}
    assert pod(ovirt, tmp_path, chain, env, scratch=False) == (0, "Import Complete", True)
    oracle.same(tmp_path / "disk.img", ovirt.content(chain, first))
    assert pod(ovirt, tmp_path, chain, env) == (0, "Import Complete", False)
    oracle.same(tmp_path / "disk.img", ovirt.content(chain, second))
    ovirt.check_settled()


def test_stopped_pod_closes_the_transfer(ovirt: ovirt_stages.Setup, tmp_path: Path) -> None:
    chain = ovirt.chain()
    first = chain.active.id
    chain.snapshot(*ovirt_stages.FIRST)
    env = {"IMPORTER_CURRENT_CHECKPOINT": first}
    ovirt.engine.delay = "2000ms"
    assert pod(ovirt, tmp_path, chain, env, stop=True) == (1, "Unable to process data: cancelled", False)
    oracle.unusable(tmp_path / "disk.img")
    assert ovirt.engine.last.phase == "finished_cleanup"
    ovirt.engine.delay = ""
    assert pod(ovirt, tmp_path, chain, env) == (0, "Import Complete", False)
    oracle.same(tmp_path / "disk.img", ovirt.content(chain, first))
    ovirt.check_settled()


def pod(
    ovirt: ovirt_stages.Setup, volume: Path, chain: imageiod.Chain, env: dict[str, str],
    *, scratch: bool = True, stop: bool = False,
) -> tuple[int, str, bool]:  # fmt: skip
    """Run a stage as a controller does; return status, message, and whether scratch is requested."""
    scratch_directory = ovirt.directory / ("scratch" if scratch else "none")
    (ovirt.directory / "scratch").mkdir(exist_ok=True)
    message, none, certificates = volume / "message", volume / "none", ovirt.directory / "certificates"
    certificates.mkdir(exist_ok=True)
    shutil.copy(ovirt.authority.certificate, certificates)
    argv = [
        sys.executable,
        "-m",
        "cdi_worker",
        "-v=5",
        f"--data-dir={volume}",
        f"--scratch-dir={scratch_directory}",
    ]
    argv += [f"--termination-log={message}", f"--block-device={none}"]
    env = {
        **forked.ENVIRONMENT,
        "IMPORTER_SOURCE": "imageio",
        "IMPORTER_ENDPOINT": ovirt.engine.url,
        "IMPORTER_DISK_ID": chain.disk,
        "IMPORTER_ACCESS_KEY_ID": engine_module.USER,
        "IMPORTER_SECRET_KEY": engine_module.PASSWORD,
        "IMPORTER_CERT_DIR": str(certificates),
        **env,
    }
    count = len(ovirt.engine.transfers)
    with forked.Popen[str](argv, env=env, stderr=subprocess.PIPE, text=True) as worker:
        if stop:
            transfers = ovirt.engine.transfers
            processes.wait_for(lambda: len(transfers) > count and transfers[-1].admitted, "a transfer")
            # Into the transfer: nothing shows which request is under way.
            time.sleep(0.5)
            worker.terminate()
        _, errors = worker.communicate(timeout=60)
    assert engine_module.PASSWORD not in errors
    assert not any(transfer.ticket in errors for transfer in ovirt.engine.transfers if transfer.ticket)
    text = message.read_text()
    if not text.startswith("{"):
        return worker.returncode, text, False
    document = json.loads(text)
    return worker.returncode, document["message"], document["scratchSpaceRequired"]


def test_cancel_interrupts_zeroing_of_what_a_disk_has_grown_by(
    ovirt: ovirt_stages.Setup, tmp_path: Path
) -> None:
    """A pod has 30 seconds from SIGTERM to its end."""
    chain, size = ovirt.chain(), 300 * ovirt_stages.MIB
    first = chain.active.id
    chain.snapshot("write -P 7 4k 4k", size=size)
    cancel = threading.Event()

    class Told(cdi_worker.NullProgress):
        def phase(self, name: str, _total: int | None) -> None:
            if name == "merge":
                threading.Timer(0.5, cancel.set).start()

    with devices.slow(tmp_path, size, bytes_per_second=10 * ovirt_stages.MIB) as device:
        cdi_worker.run(ovirt.request(chain, device, first))
        delta = dataclasses.replace(ovirt.request(chain, device, chain.active.id, first), preallocation=True)
        started = time.monotonic()
        with pytest.raises(errors.Cancelled):
            cdi_worker.run(delta, Told(), cancel)
        assert time.monotonic() - started < processes.PATIENCE  # the whole takes 30 s
    assert not ovirt.engine.locked
