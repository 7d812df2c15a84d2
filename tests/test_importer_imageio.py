"""Warm migration from oVirt, stage by stage: after each, the target is the disk at its checkpoint."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import importer
from images import target as target_module
from importer import errors
from tests import devices, engine_states, imageiod, oracle, processes, tls
from tests import engine as engine_module

MIB = 1 << 20
SIZE = 16 * MIB
REPOSITORY = Path(__file__).parents[1]
#: What a guest does between two checkpoints: data and zeros, over each other, at both ends, unaligned.
FIRST = ("write -P 1 0 64k", "write -P 2 1000k 300k", "write -z 4M 1M", "write -P 3 15M 1M")
SECOND = ("write -P 4 512 512", "write -P 5 4500k 1k", "discard 1M 64k", "write -z 0 4k", "write -z 15M 64k")
FINAL = ("write -P 6 7M 3M", "write -z 8M 64k")


@dataclasses.dataclass
class Place:
    engine: engine_module.Engine
    authority: tls.Authority
    directory: Path

    def chain(self, size: int = SIZE) -> imageiod.Chain:
        """Make a disk that runs, with nothing frozen yet."""
        name = f"disk{len(self.engine.chains)}"
        raw = self.directory / f"{name}.raw"
        with raw.open("wb") as file:
            file.truncate(size)
            for offset, length in ((0, 100_000), (MIB, 3 * MIB), (size // 2, size // 8), (size - 700, 700)):
                file.seek(offset)
                file.write(random.Random(offset).randbytes(length))
        return self.engine.add_disk(name, raw)

    def request(
        self, chain: imageiod.Chain, target: Path, current: str, previous: str = ""
    ) -> importer.Request:
        scratch = self.directory / "scratch"
        scratch.mkdir(exist_ok=True)
        access = importer.Access(
            user=engine_module.USER,
            password=engine_module.PASSWORD,
            ca_files=(str(self.authority.certificate),),
        )
        location = importer.Location(
            self.engine.url, access, disk_id=chain.disk, current=current, previous=previous
        )
        return importer.Request(
            source="imageio",
            location=location,
            target=str(target),
            scratch=str(scratch),
            fetch=importer.FetchOptions(connections=2, chunk=MIB, no_progress=20),
        )

    def content(self, chain: imageiod.Chain, number: str) -> Path:
        return chain.content(number, self.directory / f"{number}.content")

    def settled(self) -> None:
        """Check that every transfer has ended, no disk is locked, and nothing is left in scratch."""
        assert all(transfer.phase in engine_states.ENDED for transfer in self.engine.transfers)
        assert not self.engine.locked
        assert not list((self.directory / "scratch").iterdir())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    directory = tmp_path_factory.mktemp("ovirt")
    with engine_module.running(directory) as (engine, authority):
        yield Place(engine, authority, directory)


@pytest.fixture
def place(running: Place) -> Place:
    running.engine.transfers.clear()
    running.engine.inactivity, running.engine.delay = 60.0, ""
    return running


@pytest.fixture(params=["file", 512, 4096])
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "file":
        yield tmp_path / "disk.img"
        return
    with devices.loop(tmp_path, SIZE + MIB, sector=request.param) as device:
        yield device


def beyond(target: Path) -> bytes:
    return devices.DIRT if target.is_block_device() else b"\0"


def test_two_deltas_and_a_final_one(place: Place, target: Path) -> None:
    chain = place.chain()
    frozen = chain.active.id
    chain.snapshot(*FIRST)
    result = importer.run(place.request(chain, target, frozen))
    assert result.plan.route is importer.Route.EXTENTS
    oracle.same(target, place.content(chain, frozen), beyond=beyond(target))
    for writes in (SECOND, FINAL):
        previous, frozen = frozen, chain.active.id
        chain.snapshot(*writes)
        result = importer.run(place.request(chain, target, frozen, previous))
        assert result.plan.route is importer.Route.MERGE
        assert result.size == (SIZE if target.is_file() else result.size)
        oracle.same(target, place.content(chain, frozen), beyond=beyond(target))
    final = place.request(chain, target, chain.active.id, frozen)
    final = dataclasses.replace(final, location=dataclasses.replace(final.location, final=True))
    for _ in range(2):  # a stage that has ended may be asked for again, too
        importer.run(final)
        oracle.same(target, place.content(chain, chain.active.id), beyond=beyond(target))
    assert [transfer.form for transfer in place.engine.transfers] == ["raw", "cow", "cow", "cow", "cow"]
    assert {transfer.phase for transfer in place.engine.transfers} == {"finished_success"}
    place.settled()


def test_the_first_stage_grows_the_disk_and_deltas_leave_its_size(place: Place, tmp_path: Path) -> None:
    chain, target = place.chain(), tmp_path / "disk.img"
    first = chain.active.id
    chain.snapshot(*FIRST)
    wanted = place.request(chain, target, first)
    importer.run(dataclasses.replace(wanted, image_size=SIZE + 3 * MIB))
    assert target.stat().st_size == SIZE + 3 * MIB
    wanted = place.request(chain, target, chain.active.id, first)
    importer.run(dataclasses.replace(wanted, image_size=SIZE + 8 * MIB))
    assert target.stat().st_size == SIZE + 3 * MIB
    oracle.same(target, place.content(chain, chain.active.id))


# -- what must not be merged -------------------------------------------------------------------------


@pytest.fixture
def staged(place: Place, target: Path) -> imageiod.Chain:
    """Bring the first stage of a disk with two more volumes to the target."""
    chain = place.chain()
    chain.snapshot(*FIRST)
    chain.snapshot(*SECOND)
    importer.run(place.request(chain, target, chain.volumes[0].id))
    return chain


@pytest.mark.parametrize("target", ["file", 512], indirect=True)
def test_a_delta_of_another_checkpoint(place: Place, target: Path, staged: imageiod.Chain) -> None:
    first, _, last = (volume.id for volume in staged.volumes)
    with pytest.raises(errors.Refused, match=f"backing file is '{staged.volumes[1].id}', not '{first}'"):
        importer.run(place.request(staged, target, last, first))
    oracle.same(target, place.content(staged, first), beyond=beyond(target))
    place.settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_a_delta_that_is_none(place: Place, target: Path, staged: imageiod.Chain) -> None:
    first = staged.volumes[0].id
    with pytest.raises(errors.Refused, match="no backing file"):
        importer.run(place.request(staged, target, first, "something"))
    oracle.same(target, place.content(staged, first))
    place.settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_a_delta_needs_scratch(place: Place, target: Path, staged: imageiod.Chain) -> None:
    first, second, _ = (volume.id for volume in staged.volumes)
    wanted = place.request(staged, target, second, first)
    with pytest.raises(errors.ScratchRequired):
        importer.run(dataclasses.replace(wanted, scratch=None))
    oracle.same(target, place.content(staged, first))
    place.settled()


def test_a_delta_needs_a_disk(place: Place, tmp_path: Path) -> None:
    chain = place.chain()
    first = chain.active.id
    chain.snapshot(*FIRST)
    (tmp_path / "disk.img.part").write_bytes(b"of a first stage that was killed" * MIB)
    with pytest.raises(errors.TargetError, match="no disk of an earlier stage"):
        importer.run(place.request(chain, tmp_path / "disk.img", chain.active.id, first))
    place.settled()


@pytest.mark.parametrize("target", ["file", 512], indirect=True)
def test_a_disk_that_was_grown_between_checkpoints(
    place: Place, target: Path, staged: imageiod.Chain
) -> None:
    second, third = staged.volumes[1].id, staged.volumes[2].id
    importer.run(place.request(staged, target, second, staged.volumes[0].id))
    processes.run("qemu-img", "resize", "-q", "-f", "qcow2", staged.active.path, str(SIZE + 2 * MIB))
    with pytest.raises(errors.TooLarge, match="A larger PVC is required"):
        importer.run(place.request(staged, target, third, second))
    oracle.same(target, place.content(staged, second), beyond=beyond(target))
    place.settled()


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_a_guest_that_makes_its_disk_look_like_an_image(place: Place, target: Path) -> None:
    chain = place.chain()
    hostile = place.directory / "hostile"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", "/etc/passwd", "-F", "raw", hostile, "1M")
    chain.write(f"write -s {hostile} 0 64k")
    result = importer.run(place.request(chain, target, chain.active.id))
    assert result.format == "raw"
    oracle.same(target, place.content(chain, chain.active.id))


# -- killed at any point, and run again ----------------------------------------------------------------

WORKER = """
import sys, time, importer
from importer import progress
kind, endpoint, user, password, ca, disk, current, previous, target, scratch = sys.argv[1:]

class Told(progress.NullProgress):
    def phase(self, name, total):
        print(name, flush=True)
        if name == kind and kind == "sync":
            time.sleep(60)

access = importer.Access(user=user, password=password, ca_files=(ca,))
location = importer.Location(endpoint, access, disk_id=disk, current=current, previous=previous)
options = importer.FetchOptions(connections=2, chunk=256 << 10)
importer.run(importer.Request(source="imageio", location=location, target=target, scratch=scratch,
    fetch=options, journal_interval=0.05), Told())
"""


def kill(wanted: importer.Request, phase: str, when: Callable[[], object]) -> int:
    """Start a worker of its own and kill it in a phase, once ``when`` holds; return its exit status."""
    where = wanted.location
    argv = [
        phase, where.endpoint, where.access.user, where.access.password, where.access.ca_files[0],
        where.disk_id, where.current, where.previous, wanted.target, wanted.scratch or "",
    ]  # fmt: skip
    command = [sys.executable, "-c", WORKER, *argv]
    with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as worker:
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
    notes = target_module.notes(target, SIZE)
    assert notes
    if not Path(notes.path).exists():
        return False
    with Path(notes.path).open("rb", buffering=0) as stream:
        stream.seek(notes.offset)
        return stream.read(512 << 10).count(b"cdi-worker journal") > 1


@pytest.mark.parametrize(
    ("target", "phase"), [("file", "transfer"), (4096, "transfer"), ("file", "sync")], indirect=["target"]
)
def test_a_full_copy_that_is_killed(place: Place, target: Path, phase: str) -> None:
    chain = place.chain()
    first = chain.active.id
    chain.snapshot(*FIRST)
    place.engine.inactivity, place.engine.delay = 2.0, "200ms"
    wanted = place.request(chain, target, first)
    assert kill(wanted, phase, lambda: noted(target)) == -signal.SIGKILL
    oracle.unusable(target)
    place.engine.delay = ""
    result = importer.run(wanted)
    oracle.same(target, place.content(chain, first), beyond=beyond(target))
    assert result.resumed > 0
    place.settled()


@pytest.mark.parametrize(
    ("target", "phase"),
    [("file", "merge"), (4096, "merge"), ("file", "sync"), (4096, "spool")],
    indirect=["target"],
)
def test_a_delta_that_is_killed(place: Place, target: Path, phase: str) -> None:
    chain = place.chain()
    chain.snapshot(*FIRST)
    first, second = (volume.id for volume in chain.volumes)
    chain.write("write -P 9 2M 8M")
    importer.run(place.request(chain, target, first))
    place.engine.inactivity = 2.0
    wanted = place.request(chain, target, second, first)
    for delay in (0.0, 0.05) if phase == "merge" else (0.0,):
        assert kill(wanted, phase, after(delay)) in {-signal.SIGKILL, 0}
    importer.run(wanted)
    oracle.same(target, place.content(chain, second), beyond=beyond(target))
    if not target.is_block_device():
        assert [path.name for path in target.parent.glob("disk.img*")] == ["disk.img"]
    place.settled()


def test_a_commit_that_is_killed_half_way(place: Place, tmp_path: Path) -> None:
    """Killed when the first cluster is on the target: some of the others are then not."""
    chain, target = place.chain(), tmp_path / "disk.img"
    # Apart from each other: what the kernel has been given in one call is written whatever happens.
    pieces = range(0, SIZE, 128 << 10)
    chain.snapshot(*(f"write -P 9 {offset} 64k" for offset in pieces))
    first, second = (volume.id for volume in chain.volumes)
    importer.run(place.request(chain, target, first))
    place.engine.inactivity = 2.0
    wanted = place.request(chain, target, second, first)
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
    importer.run(wanted)
    oracle.same(target, place.content(chain, second))
    place.settled()


def nines(path: Path, offset: int) -> int:
    with path.open("rb", buffering=0) as stream:
        stream.seek(offset)
        return stream.read(512) == bytes([9]) * 512


def test_a_pod_is_asked_for_with_scratch(place: Place, tmp_path: Path) -> None:
    chain = place.chain()
    chain.snapshot(*FIRST)
    first, second = (volume.id for volume in chain.volumes)
    env = {"IMPORTER_CURRENT_CHECKPOINT": first}
    assert pod(place, tmp_path, chain, env) == (0, "Import Complete", False)
    env = {"IMPORTER_CURRENT_CHECKPOINT": second, "IMPORTER_PREVIOUS_CHECKPOINT": first}
    assert pod(place, tmp_path, chain, env, scratch=False) == (0, "Import Complete", True)
    oracle.same(tmp_path / "disk.img", place.content(chain, first))
    assert pod(place, tmp_path, chain, env) == (0, "Import Complete", False)
    oracle.same(tmp_path / "disk.img", place.content(chain, second))
    place.settled()


def test_a_pod_that_is_stopped(place: Place, tmp_path: Path) -> None:
    chain = place.chain()
    first = chain.active.id
    chain.snapshot(*FIRST)
    env = {"IMPORTER_CURRENT_CHECKPOINT": first}
    place.engine.delay = "2000ms"
    assert pod(place, tmp_path, chain, env, stop=True) == (1, "Unable to process data: cancelled", False)
    oracle.unusable(tmp_path / "disk.img")
    assert place.engine.last.phase == "finished_cleanup"
    place.engine.delay = ""
    assert pod(place, tmp_path, chain, env) == (0, "Import Complete", False)
    oracle.same(tmp_path / "disk.img", place.content(chain, first))
    place.settled()


def pod(
    place: Place, volume: Path, chain: imageiod.Chain, env: dict[str, str], *, scratch: bool = True,
    stop: bool = False,
) -> tuple[int, str, bool]:  # fmt: skip
    """Run a stage as a controller does; return status, message, and whether scratch is asked for."""
    where = place.directory / ("scratch" if scratch else "none")
    (place.directory / "scratch").mkdir(exist_ok=True)
    message, none, certificates = volume / "message", volume / "none", place.directory / "certificates"
    certificates.mkdir(exist_ok=True)
    shutil.copy(place.authority.certificate, certificates)
    argv = [sys.executable, "-m", "importer", "-v=5", f"--data-dir={volume}", f"--scratch-dir={where}"]
    argv += [f"--termination-log={message}", f"--block-device={none}"]
    env = {
        "PATH": os.environ["PATH"],
        "IMPORTER_SOURCE": "imageio",
        "IMPORTER_ENDPOINT": place.engine.url,
        "IMPORTER_DISK_ID": chain.disk,
        "IMPORTER_ACCESS_KEY_ID": engine_module.USER,
        "IMPORTER_SECRET_KEY": engine_module.PASSWORD,
        "IMPORTER_CERT_DIR": str(certificates),
        **env,
    }
    count = len(place.engine.transfers)
    with subprocess.Popen(argv, cwd=REPOSITORY, env=env, stderr=subprocess.PIPE, text=True) as worker:
        if stop:
            begun = place.engine.transfers
            processes.wait_for(lambda: len(begun) > count and begun[-1].admitted, "a transfer")
            time.sleep(0.5)
            worker.terminate()
        _, said = worker.communicate(timeout=60)
    assert engine_module.PASSWORD not in said
    assert not any(transfer.ticket in said for transfer in place.engine.transfers if transfer.ticket)
    text = message.read_text()
    if not text.startswith("{"):
        return worker.returncode, text, False
    told = json.loads(text)
    return worker.returncode, told["message"], told["scratchSpaceRequired"]
