"""One simulated world: from a seed to a schedule of runs and faults, and through it.

The law is checked in ``law``; everything here only makes trouble.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.proofs.simulation import disk as disks
from tests.proofs.simulation import kernel, law, product, server, threads
from tests.proofs.simulation import scheduler as schedulers

ROOT = Path(__file__).resolve().parents[3]
#: Longest time of one run, in virtual seconds, and its longest course in turns of threads.
LONGEST = 12 * 3600.0
TURNS = 300_000


@dataclasses.dataclass
class Run:
    """One process that imports. ``job``: which image. ``after``: seconds after the
    one before began; None: as soon as that one stands still or has ended.

    ``kill_at``, ``freeze_at``, ``cancel_at``: at this step it is killed, stands still for ``freeze`` seconds,
    or is asked to end; ``existing``: what becomes of a disk (None: as in all runs of the world);
    ``checksum``: none, right or wrong;
    ``kill_after``, ``freeze_after``: after so many of such events (``save``: of the journal, ``head``: a
    write to the beginning of a device), and so many steps more.
    ``reads``: it does not import, but compares the target with the image.
    """

    name: str
    job: int = 0
    node: int = 0
    after: float | None = 0.0
    wait: float = 0.0
    kill_at: int | None = None
    kill_after: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    freeze_after: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    freeze_at: int | None = None
    freeze: float = 0.0
    cancel_at: int | None = None
    existing: str | None = None
    checksum: str = "none"
    reads: bool = False
    serving: server.Serving = dataclasses.field(default_factory=server.Serving)
    storing: kernel.Storing = dataclasses.field(default_factory=kernel.Storing)


@dataclasses.dataclass
class Round:
    """Runs at the same time, and what happens after the last has ended.

    ``power``: everything that is not synced is lost. ``reuse``: somebody else writes to the device.
    """

    runs: list[Run]
    power: bool = False
    reuse: bool = False
    replace: bool = False


@dataclasses.dataclass
class Plan:
    """The schedule of a seed.

    ``gap``: zeros in the middle of the disk, up to the border of 4 GiB. ``grow``: bytes by which the size
    that is asked for is larger than the largest disk. ``shared``: both images have one address but for its
    query, the same identity, and often the same beginning. ``stages``: the second image is a delta of the
    first.
    """

    target: str
    sizes: tuple[int, int]
    forms: tuple[str, str]
    identities: tuple[str, str]
    replicas: bool
    lead: int
    sector: int
    ranges: str
    gap: int
    grow: int
    shared: bool
    stages: bool
    options: dict[str, Any]
    rounds: list[Round]

    @property
    def grown(self) -> int:
        """The requested size, or 0. A device keeps what is behind the disk."""
        is_grown = self.grow and not self.target.startswith("/dev/")
        return max(self.sizes) + self.gap + self.grow if is_grown else 0

    def __str__(self) -> str:
        lines = [
            f"target={self.target} forms={self.forms} sizes={self.sizes}",
            f"identities={self.identities} replicas={self.replicas} ranges={self.ranges}",
            f"lead={self.lead} sector={self.sector} gap={self.gap} grow={self.grow} shared={self.shared}",
            f"stages={self.stages}",
            f"options={self.options}",
        ]
        for number, each in enumerate(self.rounds):
            lines.append(f"round {number}: power={each.power} reuse={each.reuse} replace={each.replace}")
            lines += [f"  {run}" for run in each.runs]
        return "\n".join(lines)


class Dice(random.Random):
    """A generator of schedules."""

    def happens(self, chance: float) -> bool:
        """Return whether an event of this probability happens."""
        return self.random() < chance


def plan(seed: int) -> Plan:
    """Return the schedule of a seed."""
    dice = Dice(f"plan {seed}")
    made = _plan(dice)
    made = _staged(dice, made) if dice.happens(0.08) else made
    if made.shared and Dice(f"other {seed}").happens(0.5):
        # What was left of the one disk is there when the other is asked for at its address.
        made.rounds[-1].runs[0].job = 1
    _compare_first(Dice(f"compare {seed}"), made)
    _add_readers(Dice(f"readers {seed}"), made)
    return made


def _compare_first(dice: Dice, made: Plan) -> None:
    """Let a run that compares the disk stand still, while another node writes another one."""
    if made.stages or not dice.happens(0.04):
        return
    job = dice.randrange(2)
    ability = dataclasses.replace(made.rounds[-1].runs[0].storing, locks=False, fails=0.0, full=0.0, slow=0.0)
    stopped = Run("stopped", job, storing=ability, existing="update", freeze=1000.0)
    stopped.freeze_at = dice.randrange(30, 330)
    other = Run("other", 1 - job, 1, after=None, storing=ability)
    other.checksum = dice.choice(("none", "wrong"))
    other.kill_after = _saved(dice) if dice.happens(0.3) else {}
    made.rounds[-1:-1] = [Round([Run("whole", job, storing=ability)]), Round([stopped, other])]


def _add_readers(dice: Dice, made: Plan) -> None:
    """Let other processes verify the target while runs import, and after them."""
    ability = dataclasses.replace(made.rounds[-1].runs[0].storing, fails=0.0, full=0.0)
    if made.stages or not dice.happens(0.25):
        return
    for number, each in enumerate(made.rounds):
        if dice.happens(0.6):
            reader = Run(f"{number}r", int(dice.happens(0.2)), dice.choice((0, 1)), reads=True)
            reader.after = dice.choice((0.0, 0.5, 5.0, 60.0)) * dice.random()
            reader.storing = dataclasses.replace(ability, fails_read=dice.choice((0.0, 0.0, 0.01)))
            if dice.happens(0.5):
                # Without changes and lies: what differs is not to be the server's fault.
                reader.serving = dataclasses.replace(_serving(dice, is_strong=False), lies=0.0)
            each.runs.append(reader)
    if dice.happens(0.5):
        made.rounds.append(Round([Run("reader", made.rounds[-1].runs[0].job, reads=True, storing=ability)]))


def _staged(dice: Dice, made: Plan) -> Plan:
    """Return a schedule with two stages: the runs of the second one are killed, meet faults, and run again.

    On a file: a device holds parts of both stages until the second has ended.
    """
    ability = made.rounds[-1].runs[0].storing
    form = dice.choice(("raw", "qcow2"))
    rounds = [Round([Run("first", storing=ability)])]
    for number in range(dice.choice((0, 1, 2, 3))):
        serving = _serving(dice, is_strong=True) if dice.happens(0.5) else server.Serving(latency=1.0)
        serving.changes = 0.0
        run = Run(f"{number}a", 1, serving=serving, storing=ability, kill_at=_step(dice))
        rounds.append(Round([run], power=dice.happens(0.3)))
    rounds.append(Round([Run("last", 1, storing=ability)]))
    return dataclasses.replace(
        made,
        target="/data/disk.img",
        forms=(form, "delta"),
        sizes=(made.sizes[0], made.sizes[0]),
        identities=("strong", "strong"),
        ranges="right",
        gap=0,
        grow=0,
        shared=False,
        stages=True,
        options={**made.options, "existing": "replace"},
        rounds=rounds,
    )


def _plan(dice: Dice) -> Plan:
    sector = dice.choice((512, 512, 4096))
    # Most disks end within a unit of the journal, some within a sector.
    size = dice.choice((3 << 19, 2 << 20, 3 << 20)) + dice.choice((0, 4096, 8192, 512, 1536, 1, 700, 4097))
    same = dice.happens(0.6)
    form = dice.choice(("raw", "raw", "raw", "raw", "gz", "qcow2"))
    ability = functools.partial(
        kernel.Storing,
        direct=dice.happens(0.8),
        punch=dice.happens(0.7),
        zero=dice.happens(0.7),
        allocate=dice.happens(0.7),
        # Not a fault: what is left is written again.
        short=0.1 if dice.happens(0.2) else 0.0,
        sector=sector,
    )
    identity = dice.choice(("strong", "strong", "weak", "date", "none"))
    # In half of the worlds most runs continue what the one before has left.
    is_resuming = dice.happens(0.5)
    if is_resuming:
        form, identity = (
            dice.choice(("raw", "raw", "qcow2")),
            dice.choice(("strong", "strong", "weak", "date")),
        )
    identities = (identity, identity if same else dice.choice(("strong", "date")))
    if is_resuming:
        rounds = [_killed(dice, number, ability) for number in range(dice.choice((1, 2, 3)))]
        if dice.happens(0.3):
            rounds.append(_round(dice, len(rounds), identities, ability))
    else:
        rounds = [_round(dice, number, identities, ability) for number in range(dice.choice((0, 1, 1, 2, 3)))]
    last = Run("last", int(dice.happens(0.05 if is_resuming else 0.2)), storing=ability())
    last.checksum = "right" if dice.happens(0.2) else "none"
    last.existing = "update" if dice.happens(0.1) else None
    rounds.append(Round([last]))
    forms = (form, form if same else dice.choice(("raw", "gz", "qcow2")))
    has_gap = forms == ("qcow2", "qcow2") and dice.happens(0.15)
    return Plan(
        target=dice.choice(("/data/disk.img", "/dev/vda")),
        sizes=(size, size if same else size + 64 * 1024),
        forms=forms,
        identities=identities,
        replicas=dice.happens(0.3),
        lead=dice.choice((0, 0, 512, 1024, 4096, 32768)),
        sector=sector,
        ranges=dice.choice(("right", "right", "none")) if is_resuming else _ranges(dice),
        gap=(4 << 30) - (2 << 20) if has_gap else 0,
        grow=dice.choice((0, 0, 0, 512, 1536, 64 << 10)),
        shared=same and dice.happens(0.3),
        stages=False,
        options={
            "chunk": dice.choice((64, 128, 256)) << 10,
            "connections": dice.choice((1, 2, 4)),
            "interval": dice.choice((0.005, 0.01) if is_resuming else (0.01, 0.05, 0.5, 10.0)),
            "granules": dice.choice((8192, 16, 6, 2)),
            "direct": dice.happens(0.5),
            "preallocation": dice.happens(0.3) and not has_gap,
            "existing": dice.choice(("replace", "replace", "remove", "remove", "refuse")),
        },
        rounds=rounds,
    )


def _ranges(dice: Dice) -> str:
    if dice.happens(0.15):
        return dice.choice(("shifted", "elsewhere"))
    if dice.happens(0.05):
        return "cut"
    return "none" if dice.happens(0.15) else "right"


def _killed(dice: Dice, number: int, ability: Callable[..., kernel.Storing]) -> Round:
    """Return a run that is killed after its journal was saved, and what happens to the target then."""
    serving = server.Serving(latency=dice.choice((0.05, 1.0)))
    run = Run(f"{number}a", serving=serving, storing=ability(), kill_after=_saved(dice))
    event = dice.choice(("power", "power", "reuse", "reuse", "replace", "", "", ""))
    return Round([run], power=event == "power", reuse=event == "reuse", replace=event == "replace")


def _round(
    dice: Dice, number: int, identities: tuple[str, str], ability: Callable[..., kernel.Storing]
) -> Round:
    job = int(dice.happens(0.15))
    if dice.happens(0.3):
        # What a killed run has left, or what it was read from, becomes something else.
        slow = server.Serving(latency=1.0)
        left = Run(f"{number}a", job, serving=slow, storing=ability(), kill_after=_saved(dice))
        left.kill_at = None if dice.happens(0.7) else dice.randrange(80, 300)
        is_reused = dice.happens(0.5)
        return Round([left], power=dice.happens(0.3), reuse=is_reused, replace=not is_reused)
    runs = [_run(dice, f"{number}a", job, identities, ability)]
    if dice.happens(0.4):
        other = _run(dice, f"{number}b", job if dice.happens(0.5) else 1 - job, identities, ability)
        other.after = dice.choice((0.0, 0.5, 5.0, 400.0)) * dice.random()
        other.wait = dice.choice((0.0, 60.0, 1000.0))
        runs.append(other)
    elif dice.happens(0.2):
        other = _run(dice, f"{number}b", job if dice.happens(0.5) else 1 - job, identities, ability)
        # No lock keeps the other node out, so that a run which still writes is let in: the one before must
        # have been stopped. A slow write would be on its way then.
        other.node, other.after = 1, None
        # Stopped itself, it would begin when the one before continues. That both write is not promised.
        other.freeze_at, other.freeze_after = None, {}
        runs[0].freeze = 1000.0
        if dice.happens(0.5):
            runs[0].freeze_at = dice.randrange(30, 330)
        else:
            # Also while it finishes the disk.
            runs[0].freeze_at = None
            runs[0].freeze_after = {"head": (dice.choice((1, 2, 2, 3, 3)), dice.randrange(1, 16))}
        runs[0].storing.locks = other.storing.locks = False
        runs[0].storing.slow = 0.0
        # After the stop it falls back to another route.
        runs[0].serving.lies = dice.choice((runs[0].serving.lies, 0.3))
        runs.append(other)
    killed = any(run.kill_at or run.kill_after for run in runs)
    return Round(
        runs,
        power=dice.happens(0.5) and killed,
    )


def _run(
    dice: Dice, name: str, job: int, identities: tuple[str, str], ability: Callable[..., kernel.Storing]
) -> Run:
    made = Run(name, job, storing=ability())
    made.checksum = dice.choice(("none", "none", "none", "right", "wrong"))
    made.existing = "update" if dice.happens(0.15) else None
    made.cancel_at = _step(dice) if dice.happens(0.15) else None
    if identities[job] == "strong" and dice.happens(0.3):
        # Any other fault would end the run, or make it read again, before it has mixed two versions.
        made.serving = server.Serving(changes=dice.choice((0.1, 0.3)))
        return made
    if dice.happens(0.8):
        made.kill_after = _saved(dice) if dice.happens(0.7) else {}
        made.kill_at = None if made.kill_after else _step(dice)
    if dice.happens(0.3):
        made.freeze_at, made.freeze = _step(dice), dice.choice((10.0, 1000.0))
    trouble = dice.choice(("none", "none", "server", "server", "disk", "both"))
    if trouble in {"server", "both"}:
        made.serving = _serving(dice, is_strong=identities[job] == "strong")
    if trouble in {"disk", "both"}:
        made.storing.fails = dice.choice((0.0, 0.01, 0.1))
        made.storing.full = dice.choice((0.0, 0.0, 0.02))
        made.storing.fails_read = dice.choice((0.0, 0.0, 0.01))
        made.storing.short = dice.choice((0.0, 0.1))
        made.storing.slow = dice.choice((0.0, 0.05))
    return made


def _saved(dice: Dice) -> dict[str, tuple[int, int]]:
    """Return a kill soon after the journal was saved, or at the end of a run."""
    if dice.happens(0.2):
        return {"head": (dice.choice((1, 2, 2, 3)), dice.randrange(1, 12))}
    return {"save": (dice.choice((1, 2, 3, 5, 8)), int(2 ** dice.uniform(0, 6)))}


def _step(dice: Dice) -> int:
    """Return the number of a step: one of the first ones as often as one of the last."""
    return int(2 ** dice.uniform(0, 9)) if dice.happens(0.5) else dice.randrange(30, 330)


def _serving(dice: Dice, *, is_strong: bool) -> server.Serving:
    some = functools.partial(dice.choice, (0.0, 0.0, 0.05, 0.3))
    return server.Serving(
        resets=some(),
        cuts=some(),
        stalls=dice.choice((0.0, 0.0, 0.05)),
        errors=dice.choice((0.0, 0.0, 0.05)),
        whole=dice.choice((0.0, 0.0, 0.05)),
        lies=dice.choice((0.0, 0.0, 0.05)),
        # Without a strong ETag, nothing shows that the object was replaced in the middle of a run.
        changes=dice.choice((0.0, 0.0, 0.03)) if is_strong else 0.0,
        encodes=1.0 if dice.happens(0.3) else 0.0,
        busy=dice.choice((1.0, 30.0, 600.0)) if dice.happens(0.1) else 0.0,
        latency=dice.choice((0.05, 1.0)),
    )


class Machines:
    """The product, loaded for each process that runs at the same time, and the processes' system calls."""

    def __init__(self, root: Path = ROOT, edits: product.Edits | None = None) -> None:
        self._edits = edits
        self.calls: dict[schedulers.Process, kernel.Machine] = {}
        self._root = root
        self._products: dict[int, product.Product] = {}

    def product(self, slot: int) -> product.Product:
        if slot not in self._products:
            simulated: dict[str, types.ModuleType] = {
                **kernel.modules(self.calls),
                "threading": threads.threading(),
                "time": threads.time(),
                "datetime": threads.datetime(),
                "random": threads.random(),
                "secrets": threads.secrets(),
                "cdi_worker.images.tools.wipefs": _wipefs(),
            }
            made = product.Product(self._root, f"simulated{slot}", simulated, self._edits)
            for name in MODULES:
                made.load(name)
            self._products[slot] = made
            gc.collect()
            gc.freeze()
        return self._products[slot]


def _wipefs() -> types.ModuleType:
    """Return the module that looks for signatures with a program: no device here has any."""
    made = types.ModuleType("wipefs")
    made.__dict__["contents"] = lambda _: []
    return made


#: Loaded before the first run: what is imported when used.
MODULES = (
    "concurrent.futures.thread",
    "cdi_worker.importer.execute",
    "cdi_worker.importer.disk",
    "cdi_worker.images.disks.following",
    "cdi_worker.images.sinks.compared",
    "cdi_worker.images.sinks.verified",
    "cdi_worker.importer.verification",
    "cdi_worker.sources.web.http",
    "cdi_worker.formats.vhd",
)


class World:
    """A plan, and the machines on which it runs. ``tell``: receives each event of the trace."""

    def __init__(
        self, made: Plan, seed: int, machines: Machines, tell: Callable[[str], object] | None = None
    ) -> None:
        self.plan = made
        self.machines = machines
        self.scheduler = schedulers.Scheduler(f"run {seed}", tell=tell)
        dice = random.Random(f"content {seed}")
        self.objects: list[server.Object] = []
        for number, (form, identity, size) in enumerate(
            zip(made.forms, made.identities, made.sizes, strict=True)
        ):
            self.objects.append(
                server.Object(
                    f"image{number}",
                    form=form,
                    identity=identity,
                    ranges=made.ranges,
                    size=size,
                    has_replicas=made.replicas,
                    lead=made.lead,
                    gap=made.gap,
                    grown=made.grown,
                    shared=made.shared,
                    base=self.objects[0] if form == "delta" else None,
                    # The first bytes, too, would tell the two apart.
                    like=self.objects[0] if made.shared and self.objects else None,
                    dice=dice,
                )
            )
        self.disk = disks.Disk()
        # Bytes of an earlier owner: what the image says is zero must read as zero.
        length = (max(made.sizes) + (1 << 20)) // 4096 * 4096
        before = disks.Sparse(b"\xff" * length)
        if made.gap:
            before.write(made.gap, b"\xff" * length)
        self.device = self.disk.add_device("/dev/vda", before, made.sector)
        #: The last process that imports.
        self._last = schedulers.Process("none", 0)
        self.law = law.Law(self.disk, made.target, self.objects, f"law {seed}")

    def go(self) -> int:
        """Run all rounds; return the checksum of the trace. Raises ``AssertionError`` for a broken law."""
        for slot in range(max(len(each.runs) for each in self.plan.rounds)):
            loaded = self.machines.product(slot)
            # So that a granule of a small disk has several units.
            options = loaded.load("cdi_worker.scratch.digests").Digests.__init__.__kwdefaults__
            options["granules"] = self.plan.options["granules"]
        schedulers.running = self.scheduler
        try:
            for each in self.plan.rounds:
                self._round(each, is_last=each is self.plan.rounds[-1])
        finally:
            schedulers.running = None
        return self.scheduler.trace

    def _round(self, each: Round, *, is_last: bool) -> None:
        world = self.scheduler
        self.law.round()
        processes: list[schedulers.Process] = []
        for slot, run in enumerate(each.runs):
            processes.append(self._start(run, slot, processes[-1:]))
        try:
            world.run(
                lambda: all(process.is_dead for process in processes),
                until=world.now + LONGEST,
                steps=TURNS,
            )
        finally:
            for process in processes:
                if not process.is_dead:
                    world.kill(process)
                self.machines.calls.pop(process)
        if is_last:
            runs = [run for each in self.plan.rounds for run in each.runs]
            has_lied = self.plan.stages and any(run.serving.lies for run in runs)
            self.law.must_have_finished(self._last, has_lied=has_lied)
        if each.power:
            world.note("power failure")
            self.disk.lose(world.dice)
            self.law.lost_power()
        if each.reuse:
            self._reuse()
        if each.replace:
            world.note("replaced")
            self.objects[0].replace()

    def _reuse(self) -> None:
        """Write to a device, or to the left-over of a file, what belongs to somebody else."""
        world = self.scheduler
        inode = self.device
        if not self.plan.target.startswith("/dev"):
            left_over = self.disk.directory.entries.get("disk.img.part")
            if left_over is None:
                return
            inode = left_over
        world.note("reused")
        share = world.dice.choice((0.3, 0.05, 0.02))
        for at in range(0, min(len(inode.data.view), 8 << 20), 1 << 16):
            if world.dice.random() < share:
                inode.data.write(at, b"other" * 100)
        inode.data.sync()
        self.law.reused()

    def _start(self, run: Run, slot: int, before: list[schedulers.Process]) -> schedulers.Process:
        process = schedulers.Process(run.name, run.node)
        process.kill_at, process.freeze_at, process.freeze = run.kill_at, run.freeze_at, run.freeze
        process.kill_after, process.freeze_after = dict(run.kill_after), dict(run.freeze_after)
        process.cancel_at = run.cancel_at
        self.machines.calls[process] = kernel.Machine(process, self.disk, run.storing, self.law)
        served = self.objects[run.job]

        def work() -> None:
            while run.after is None and not (before[0].was_frozen or before[0].is_dead):
                self.scheduler.sleep(0.01)
            self.scheduler.sleep(run.after or 0.0)
            loaded = self.machines.product(slot)
            if run.reads:
                self._read(run, loaded, served, process)
            else:
                self._last = process
                self.law.begin(process, served, run.existing or self.plan.options["existing"], run.checksum)
                try:
                    resumed = self._import(run, loaded, served, process)
                except Exception as err:  # noqa: BLE001 (the law judges it)
                    self.law.failed(process, err)
                else:
                    self.law.succeeded(process, resumed)
            # The process ends; its threads, if any are left, end with it.
            process.is_dead = True
            self.scheduler._dying.append(process)

        self.scheduler.start(process, work, "main")
        return process

    def _read(
        self, run: Run, loaded: product.Product, served: server.Object, process: schedulers.Process
    ) -> None:
        """Verify as ``verification.verify`` does, with the simulated session below."""
        options, location = self.plan.options, self._location(loaded, served)
        request, fetch = (
            loaded.load("cdi_worker.importer.request"),
            loaded.load("cdi_worker.images.engine.fetch"),
        )
        wanted = request.Comparison(
            source="http",
            location=location,
            target=self.plan.target,
            existing="replace",
            fetch=fetch.FetchOptions(connections=options["connections"], chunk=options["chunk"]),
        )
        cancelling = loaded.load("cdi_worker.images.engine.cancelling")
        verification = loaded.load("cdi_worker.importer.verification")
        progress = loaded.load("cdi_worker.importer.progress").NullProgress()
        is_clean = run.serving == server.Serving() and not run.storing.fails_read
        self.law.reads(process, served)
        try:
            with cancelling.adapt(None) as stop, cancelling.Reads(stop) as reads:
                demanded = loaded.load("cdi_worker.sources.trust").Demanded()
                runs = loaded.load("cdi_worker.importer.execute").Run(progress, reads, demanded)
                connect = self._opener(loaded, run, served, reads)
                found = verification.compare(connect, wanted, runs)
        except Exception as err:  # noqa: BLE001 (the law judges it)
            self.law.read(process, None, err, is_clean=is_clean)
        else:
            self.law.read(process, found.is_equal, None, is_clean=is_clean)

    def _opener(
        self, loaded: product.Product, run: Run, served: server.Object, reads: Any
    ) -> Callable[[], Any]:
        """Return what opens the source of a run again, each time over a new session."""
        http, pinned = (
            loaded.load("cdi_worker.sources.web.http"),
            loaded.load("cdi_worker.sources.web.pinned"),
        )
        location = self._location(loaded, served)

        def source() -> Any:
            session = server.session(served, run.serving)
            return http.HttpSource(pinned.Resource(location.endpoint, location.access, session, cancel=reads))

        return source

    def _import(
        self, run: Run, loaded: product.Product, served: server.Object, process: schedulers.Process
    ) -> int:
        """Import as ``execute.run`` does, with the simulated session below; return the bytes resumed."""
        request = loaded.load("cdi_worker.importer.request")
        cancelling, fetch = (
            loaded.load("cdi_worker.images.engine.cancelling"),
            loaded.load("cdi_worker.images.engine.fetch"),
        )
        options = self.plan.options
        wanted = request.Request(
            source="http",
            location=self._location(loaded, served),
            target=self.plan.target,
            direct=options["direct"],
            preallocation=options["preallocation"],
            existing=run.existing or options["existing"],
            image_size=served.grown or None,
            checksum=served.checksum(run.checksum),
            wait=run.wait,
            journal_interval=options["interval"],
            # At a terminal nothing but the address says which of the two disks is asked for.
            room=loaded.load("cdi_worker.importer.request").Room(
                owner="" if self.plan.shared else f"uid-{run.job}"
            ),
            fetch=fetch.FetchOptions(
                connections=options["connections"], chunk=options["chunk"], window=options["connections"] + 2
            ),
        )
        with cancelling.adapt(None) as stop, cancelling.Reads(stop) as reads:
            if run.cancel_at:
                process.cancelling = self.scheduler.start(
                    process, lambda: self._cancel(process, stop), "signal"
                )
            source = self._opener(loaded, run, served, reads)()
            if served.is_delta:
                source = loaded.load("cdi_worker.sources.chained").Files([source])
            progress = loaded.load("cdi_worker.importer.progress").NullProgress()
            execute = loaded.load("cdi_worker.importer.execute")
            result = execute.run_source(source, wanted, progress, reads, accepted=lambda: None)
        return int(result.resumed)

    def _location(self, loaded: product.Product, served: server.Object) -> Any:
        """Return the address of an image, at its stage."""
        if not self.plan.stages:
            return loaded.load("cdi_worker.sources.base").Location(served.url)
        http = loaded.load("cdi_worker.sources.web.locations").Http
        if served.is_delta:
            return http(served.url, previous=server.BASE, current="after.qcow2")
        return http(served.url, current=server.BASE)

    def _cancel(self, process: schedulers.Process, stop: Any) -> None:
        """Ask a run to end when its time has come, as the handler of SIGTERM does."""
        if process.cancelled is None:  # its time may come before this thread's first turn
            self.scheduler.park()
        stop.set("terminated")
