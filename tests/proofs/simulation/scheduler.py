"""Run threads one at a time, in an order chosen by a seeded random generator, on a virtual clock.

A thread runs until it waits, sleeps, or makes a step at which the dice let another one run; all others stand
still. The clock advances only while all threads wait. So a run depends on nothing but the seed.
"""

from __future__ import annotations

import heapq
import itertools
import random
import sys
import threading
import traceback
import zlib
from collections.abc import Callable

#: One of so many steps lets another thread run. A lower value finds races sooner, and takes longer.
TURN = 4


class Crash(BaseException):
    """Ends a thread of a killed process."""


class Broken(Exception):
    """A law is broken. Every other exception that leaves a world is an error of the simulator."""


class Harness(Exception):
    """The product needs something that is not simulated, or not right."""


class Stuck(Broken):
    """No thread can ever run again, or a run exceeds its limits."""


class Process:
    """The threads of one simulated process. ``node``: the machine that it runs on.

    ``kill_at``: the process is killed at this step. ``freeze_at``: at this step it stands still, like a
    stopped container, for ``freeze`` seconds. ``frozen``: its threads do not run before this time.
    """

    def __init__(self, name: str, node: int = 0) -> None:
        self.name = name
        self.node = node
        self.tasks: dict[Task, None] = {}
        self.steps = 0
        self.kill_at: int | None = None
        self.freeze_at: int | None = None
        self.freeze = 0.0
        #: By event (``kernel.Machine._meet``): how many of them, and the steps between the last and its fate.
        self.kill_after: dict[str, tuple[int, int]] = {}
        self.freeze_after: dict[str, tuple[int, int]] = {}
        #: At this step the process is asked to end.
        self.cancel_at: int | None = None
        self.cancelling: Task | None = None
        #: When it was asked to end.
        self.cancelled: float | None = None
        self.frozen = 0.0
        self.was_frozen = False
        self.is_dead = False
        #: Called once when the process has ended, to release what a kernel releases.
        self.at_end: list[Callable[[], object]] = []

    def meets(self, event: str) -> None:
        """Count an event, at which its fate may wait."""
        left, steps = self.kill_after.get(event, (0, 0))
        self.kill_after[event] = left - 1, steps
        if left == 1:
            self.kill_at = self.steps + steps
        left, steps = self.freeze_after.get(event, (0, 0))
        self.freeze_after[event] = left - 1, steps
        if left == 1:
            self.freeze_at = self.steps + steps


class Task:
    """A thread. ``turn`` and ``pause`` hand over the control between it and the scheduler."""

    def __init__(self, process: Process, job: Callable[[], object], name: str) -> None:
        self.process = process
        self.name = name
        self.locals: dict[int, dict[str, object]] = {}
        self.is_started = False
        self.is_done = False
        self.failure: BaseException | None = None
        self.waiters: list[Task] = []
        self.is_waiting = False
        self.was_woken = False
        #: Number of the current wait: a timer of an earlier one has no effect.
        self.wait = 0
        self._job = job
        # Locks as semaphores of at most one: ``threading.Semaphore`` takes ten times as long.
        self._turn, self._pause = threading.Lock(), threading.Lock()
        self._turn.acquire()
        self._pause.acquire()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def turn(self) -> None:
        """Let it run until it pauses or ends. Raises what it has raised."""
        if self.is_started:
            self._turn.release()
        else:
            self.is_started = True
            self._thread.start()
        self._pause.acquire()
        if self.failure is not None:
            raise self.failure

    def pause(self) -> None:
        """Called by the thread itself: return at its next turn."""
        self._pause.release()
        self._turn.acquire()

    def stack(self) -> str:
        """Return where it waits."""
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "".join(traceback.format_stack(frame)[:-1]) if frame and not self.is_done else ""

    def _run(self) -> None:
        try:
            self._job()
        except Crash:
            pass
        except BaseException as err:  # noqa: BLE001 (raised again in ``turn``)
            self.failure = err
        self.is_done = True
        self._pause.release()


class Scheduler:
    """The processes of one world, their threads, and the clock."""

    def __init__(self, seed: str, *, tell: Callable[[str], object] | None = None) -> None:
        #: Decides the order of threads and each fault.
        self.dice = random.Random(seed)
        self.now = 0.0
        self.current: Task | None = None
        #: Checksum over all events: the trace of a seed in one number.
        self.trace = 0
        self._tell = tell
        self._ready: list[Task] = []
        self._timers: list[tuple[float, int, Task, int]] = []
        self._numbers = itertools.count()
        self._processes: dict[Process, None] = {}
        self._dying: list[Process] = []
        self._failure: Exception | None = None

    # -- called by threads

    def step(self, what: str, *details: object) -> None:
        """Note an event of the current thread; perhaps kill its process, perhaps let another thread run."""
        process = self._here().process
        process.steps += 1
        self.note(what, *details)
        if process.steps == process.kill_at:
            self.note("killed")
            self._dying.append(process)
            process.is_dead = True
            raise Crash
        if process.steps == process.cancel_at and process.cancelling is not None:
            self.note("cancelled")
            process.cancelled = self.now
            self.wake(process.cancelling)
        if process.steps == process.freeze_at:
            self.note("frozen", process.freeze)
            process.frozen, process.was_frozen = self.now + process.freeze, True
            self.turn()
        elif self.dice.random() * TURN < 1:
            self.turn()

    def note(self, what: str, *details: object) -> None:
        """Add an event to the trace."""
        task = self.current
        who = f"{task.process.name}/{task.name}" if task else "-"
        line = f"{self.now:.6f} {who} {what} {' '.join(map(str, details))}"
        self.trace = zlib.crc32(line.encode(), self.trace)
        self.say(line)

    def unsupported(self, what: str) -> Harness:
        """Return the error for what is not simulated."""
        error = Harness(what)
        self.fails(error)
        return error

    def fails(self, error: Exception) -> None:
        """End the world, also if the product hides the error."""
        self._failure = self._failure or error

    def say(self, line: str) -> None:
        """Print a line to whoever reads the trace, without making it a part of it."""
        if self._tell is not None:
            self._tell(line)

    def turn(self) -> None:
        """Let other threads run."""
        self._ready.append(self._here())
        self._leave()

    def park(self, seconds: float | None = None) -> bool:
        """Wait for ``wake``, at most ``seconds``; return whether it was called."""
        task = self._here()
        task.wait += 1
        task.is_waiting, task.was_woken = True, False
        if seconds is not None:
            self._timer(self.now + max(0.0, seconds), task)
        self._leave()
        return task.was_woken

    def sleep(self, seconds: float) -> None:
        self.park(seconds)

    def number(self) -> int:
        """Return a number that is unique in this world."""
        return next(self._numbers)

    def _here(self) -> Task:
        assert self.current is not None, "outside of the simulation"
        if self.current.process.is_dead:
            raise Crash
        return self.current

    def _leave(self) -> None:
        task = self.current
        assert task is not None
        task.pause()
        if task.process.is_dead:
            raise Crash

    # -- called by threads and by the world

    def wake(self, task: Task) -> None:
        """End the wait of a thread."""
        if task.is_waiting:
            task.is_waiting, task.was_woken = False, True
            self._ready.append(task)

    def start(self, process: Process, job: Callable[[], object], name: str) -> Task:
        """Start a thread."""
        task = Task(process, job, name)
        process.tasks[task] = None
        self._processes[process] = None
        self._ready.append(task)
        return task

    def kill(self, process: Process) -> None:
        """End a process: none of its threads makes another step. Called by the world only."""
        process.is_dead = True
        for task in list(process.tasks):
            if task.is_started and not task.is_done:
                self.current = task
                task.turn()
                assert task.is_done, f"{task.name} survives a kill"
        self.current = None
        process.tasks.clear()
        self._ready = [task for task in self._ready if task.process is not process]
        del self._processes[process]
        for call in process.at_end:
            call()
        process.at_end.clear()

    # -- called by the world

    def run(self, is_over: Callable[[], bool], *, until: float, steps: int) -> None:
        """Run threads until ``is_over``. Raises ``Stuck`` after the time ``until``, or ``steps`` turns."""
        for _ in range(steps):
            if is_over():
                return
            if not self._ready:
                self._advance()
                if self.now > until:
                    raise Stuck(f"not over after {self.now:.0f} virtual seconds\n{self.stacks()}")
                continue
            self._resume(self._pick())
            if self._failure is not None:
                raise self._failure
        raise Stuck(f"not over after {steps} turns\n{self.stacks()}")

    def stacks(self) -> str:
        """Return what each thread waits for."""
        return "\n".join(
            f"{task.process.name}/{task.name}:\n{task.stack()}"
            for process in self._processes
            for task in process.tasks
        )

    def _pick(self) -> Task:
        at = int(self.dice.random() * len(self._ready))
        task = self._ready[at]
        self._ready[at] = self._ready[-1]
        self._ready.pop()
        return task

    def _resume(self, task: Task) -> None:
        if task.process.frozen > self.now:
            task.wait += 1
            task.is_waiting = True
            self._timer(task.process.frozen, task)
            return
        self.current = task
        task.turn()
        self.current = None
        if task.is_done:
            task.process.tasks.pop(task, None)
            for waiter in task.waiters:
                self.wake(waiter)
        while self._dying:
            self.kill(self._dying.pop())

    def _timer(self, when: float, task: Task) -> None:
        heapq.heappush(self._timers, (when, next(self._numbers), task, task.wait))

    def _advance(self) -> None:
        if not self._timers:
            raise Stuck(f"deadlock: every thread waits for another one\n{self.stacks()}")
        when, _, task, wait = heapq.heappop(self._timers)
        if task.is_done or not task.is_waiting or task.wait != wait:
            return
        self.now = max(self.now, when)
        task.is_waiting = False
        self._ready.append(task)


#: The scheduler of the world that runs; None while modules are loaded.
running: Scheduler | None = None


def active() -> Scheduler:
    """Return the scheduler of the world that runs."""
    assert running is not None, "outside of the simulation"
    return running
