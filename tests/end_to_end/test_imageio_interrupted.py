"""Stages of a migration from oVirt that are killed at any point, or stopped, and run again."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker.images import target as target_module
from tests.support import devices, imageiod, oracle, ovirt_stages, processes, repository
from tests.support import engine as engine_module


@pytest.fixture(params=["file", 512, 4096])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    with devices.target(str(request.param), tmp_path, ovirt_stages.SIZE + ovirt_stages.MIB) as path:
        yield path


# -- killed at any point, and run again ----------------------------------------------------------------

WORKER = """
import sys, time, cdi_worker
from cdi_worker import progress
from cdi_worker.sources.ovirt import locations
kind, endpoint, user, password, ca, disk, current, previous, target, scratch = sys.argv[1:]

class Told(progress.NullProgress):
    def phase(self, name, total):
        print(name, flush=True)
        if name == kind and kind == "sync":
            time.sleep(60)

access = cdi_worker.Access(user=user, password=password, ca_files=(ca,))
location = locations.Imageio(endpoint, access, disk_id=disk, current=current, previous=previous)
options = cdi_worker.FetchOptions(connections=2, chunk=256 << 10)
cdi_worker.run(cdi_worker.Request(source="imageio", location=location, target=target, scratch=scratch,
    fetch=options, journal_interval=0.05), Told())
"""


def kill(wanted: cdi_worker.Request, phase: str, when: Callable[[], object]) -> int:
    """Start a worker of its own and kill it in a phase, once ``when`` holds; return its exit status."""
    where = wanted.location
    argv = [
        phase, where.endpoint, where.access.user, where.access.password, where.access.ca_files[0],
        where.disk_id, where.current, where.previous, wanted.target, wanted.scratch or "",
    ]  # fmt: skip
    command = [sys.executable, "-c", WORKER, *argv]
    with subprocess.Popen(command, cwd=repository.ROOT, stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        for line in worker.stdout:
            if line.strip() == phase:
                break
        processes.wait_for(when, f"the moment in {phase}")
        worker.kill()
    return worker.returncode


def after(seconds: float) -> Callable[[], object]:
    """Return a condition that holds so many seconds after it was first asked."""
    first: list[float] = []

    def condition() -> bool:
        first.append(time.monotonic())
        return first[-1] - first[0] >= seconds

    return condition


def noted(target: Path) -> bool:
    """Tell whether a journal was saved twice: at first it may speak of the withheld beginning only."""
    notes = target_module.journal_slots(target, ovirt_stages.SIZE)
    assert notes
    if not Path(notes.path).exists():
        return False
    with Path(notes.path).open("rb", buffering=0) as stream:
        stream.seek(notes.offset)
        return stream.read(512 << 10).count(b"cdi-worker journal") > 1


@pytest.mark.parametrize(
    ("target", "phase"), [("file", "transfer"), (4096, "transfer"), ("file", "sync")], indirect=["target"]
)
def test_a_full_copy_that_is_killed(ovirt: ovirt_stages.Place, target: Path, phase: str) -> None:
    chain = ovirt.chain()
    first = chain.active.id
    chain.snapshot(*ovirt_stages.FIRST)
    ovirt.engine.inactivity, ovirt.engine.delay = 2.0, "200ms"
    wanted = ovirt.request(chain, target, first)
    assert kill(wanted, phase, lambda: noted(target)) == -signal.SIGKILL
    oracle.unusable(target)
    ovirt.engine.delay = ""
    result = cdi_worker.run(wanted)
    oracle.same(target, ovirt.content(chain, first), beyond=devices.beyond(target))
    assert result.resumed > 0
    ovirt.settled()


@pytest.mark.parametrize(
    ("target", "phase"),
    [("file", "merge"), (4096, "merge"), ("file", "sync"), (4096, "spool")],
    indirect=["target"],
)
def test_a_delta_that_is_killed(ovirt: ovirt_stages.Place, target: Path, phase: str) -> None:
    chain = ovirt.chain()
    chain.snapshot(*ovirt_stages.FIRST)
    first, second = (volume.id for volume in chain.volumes)
    chain.write("write -P 9 2M 8M")
    cdi_worker.run(ovirt.request(chain, target, first))
    ovirt.engine.inactivity = 2.0
    wanted = ovirt.request(chain, target, second, first)
    for delay in (0.0, 0.05) if phase == "merge" else (0.0,):
        assert kill(wanted, phase, after(delay)) in {-signal.SIGKILL, 0}
    cdi_worker.run(wanted)
    oracle.same(target, ovirt.content(chain, second), beyond=devices.beyond(target))
    if not target.is_block_device():
        assert [path.name for path in target.parent.glob("disk.img*")] == ["disk.img"]
    ovirt.settled()


#: Bytes of a disk whose commit takes far longer than to see that it has begun.
LARGE = 64 * ovirt_stages.MIB


def test_a_commit_that_is_killed_half_way(ovirt: ovirt_stages.Place, tmp_path: Path) -> None:
    """Killed when the first cluster is on the target: some of the others are then not."""
    chain, target = ovirt.chain(LARGE), tmp_path / "disk.img"
    # Apart from each other: what the kernel has been given in one call is written whatever happens.
    pieces = range(0, LARGE, 128 << 10)
    chain.snapshot(*(f"write -P 9 {offset} 64k" for offset in pieces))
    first, second = (volume.id for volume in chain.volumes)
    cdi_worker.run(ovirt.request(chain, target, first))
    ovirt.engine.inactivity = 2.0
    wanted = ovirt.request(chain, target, second, first)
    changing = Path(f"{target}.changing")

    def begun() -> bool:
        while not changing.exists() or nines(changing, 0) == 0:
            time.sleep(0.0005)
        return True

    for _ in range(20):
        assert kill(wanted, "merge", begun) == -signal.SIGKILL
        written = sum(nines(changing, offset) for offset in pieces)
        if written < len(pieces):
            break
    assert 0 < written < len(pieces)
    cdi_worker.run(wanted)
    oracle.same(target, ovirt.content(chain, second))
    ovirt.settled()


def nines(path: Path, offset: int) -> int:
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        return stream.read(512) == bytes([9]) * 512


def test_a_pod_is_asked_for_with_scratch(ovirt: ovirt_stages.Place, tmp_path: Path) -> None:
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
    ovirt.settled()


def test_a_pod_that_is_stopped(ovirt: ovirt_stages.Place, tmp_path: Path) -> None:
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
    ovirt.settled()


def pod(
    ovirt: ovirt_stages.Place, volume: Path, chain: imageiod.Chain, env: dict[str, str],
    *, scratch: bool = True, stop: bool = False,
) -> tuple[int, str, bool]:  # fmt: skip
    """Run a stage as a controller does; return status, message, and whether scratch is asked for."""
    where = ovirt.directory / ("scratch" if scratch else "none")
    (ovirt.directory / "scratch").mkdir(exist_ok=True)
    message, none, certificates = volume / "message", volume / "none", ovirt.directory / "certificates"
    certificates.mkdir(exist_ok=True)
    shutil.copy(ovirt.authority.certificate, certificates)
    argv = [sys.executable, "-m", "cdi_worker", "-v=5", f"--data-dir={volume}", f"--scratch-dir={where}"]
    argv += [f"--termination-log={message}", f"--block-device={none}"]
    env = {
        "PATH": os.environ["PATH"],
        "IMPORTER_SOURCE": "imageio",
        "IMPORTER_ENDPOINT": ovirt.engine.url,
        "IMPORTER_DISK_ID": chain.disk,
        "IMPORTER_ACCESS_KEY_ID": engine_module.USER,
        "IMPORTER_SECRET_KEY": engine_module.PASSWORD,
        "IMPORTER_CERT_DIR": str(certificates),
        **env,
    }
    count = len(ovirt.engine.transfers)
    with subprocess.Popen(argv, cwd=repository.ROOT, env=env, stderr=subprocess.PIPE, text=True) as worker:
        if stop:
            begun = ovirt.engine.transfers
            processes.wait_for(lambda: len(begun) > count and begun[-1].admitted, "a transfer")
            time.sleep(0.5)
            worker.terminate()
        _, said = worker.communicate(timeout=60)
    assert engine_module.PASSWORD not in said
    assert not any(transfer.ticket in said for transfer in ovirt.engine.transfers if transfer.ticket)
    text = message.read_text()
    if not text.startswith("{"):
        return worker.returncode, text, False
    told = json.loads(text)
    return worker.returncode, told["message"], told["scratchSpaceRequired"]
