"""``threading``, ``time`` and ``random`` in the simulation."""

from __future__ import annotations

import datetime as dt
import itertools
import random as real_random
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from tests.proofs.simulation import scheduler as schedulers

TIMEOUT_MAX = 1e9


class Lock:
    """A lock, reentrant if ``reentrant``. While modules are loaded there is only one thread."""

    reentrant = False

    def __init__(self) -> None:
        self._owner: object = None
        self._depth = 0
        self._waiters: list[schedulers.Task] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        world = schedulers.running
        me = world.current if world else "loader"
        if world and world.current:
            world.step("lock")
        if self._owner is me and self.reentrant:
            self._depth += 1
            return True
        if self._owner is not None and not (world and blocking and self._wait(world, timeout)):
            return False
        self._owner = me
        return True

    def _wait(self, world: schedulers.Scheduler, timeout: float) -> bool:
        deadline = None if timeout < 0 else world.now + timeout
        while self._owner is not None:
            me = world.current
            assert me is not None
            left = None if deadline is None else deadline - world.now
            if left is not None and left <= 0:
                return False
            self._waiters.append(me)
            world.park(left)
            if me in self._waiters:
                self._waiters.remove(me)
        return True

    def release(self) -> None:
        if self._depth:
            self._depth -= 1
            return
        self._owner = None
        if self._waiters and schedulers.running:
            schedulers.running.wake(self._waiters.pop(0))

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class RLock(Lock):
    reentrant = True


class Condition:
    """See ``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = lock or RLock()
        self._waiters: list[schedulers.Task] = []
        self.acquire, self.release = self._lock.acquire, self._lock.release

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        world = schedulers.active()
        me = world.current
        assert me is not None
        self._waiters.append(me)
        self._lock.release()
        try:
            return world.park(timeout)
        finally:
            if me in self._waiters:
                self._waiters.remove(me)
            self._lock.acquire()

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        deadline = None if timeout is None else schedulers.active().now + timeout
        while not (result := predicate()):
            left = None if deadline is None else deadline - schedulers.active().now
            if left is not None and left <= 0:
                break
            self.wait(left)
        return result

    def notify(self, n: int = 1) -> None:
        for _ in range(min(n, len(self._waiters))):
            schedulers.active().wake(self._waiters.pop(0))

    def notify_all(self) -> None:
        self.notify(len(self._waiters))


class Semaphore:
    """See ``threading.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        self._value = value
        self._changed = Condition(Lock())

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._value, timeout if blocking else 0):
                return False
            self._value -= 1
            return True

    def release(self, n: int = 1) -> None:
        with self._changed:
            self._value += n
            self._changed.notify(n)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class Event:
    """See ``threading.Event``."""

    def __init__(self) -> None:
        self._changed = Condition(Lock())
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        with self._changed:
            return bool(self._changed.wait_for(lambda: self._is_set, timeout))


class Thread:
    """See ``threading.Thread``."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] = lambda: None,
        name: str = "thread",
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        self.name = name
        self.daemon = daemon
        self._call = lambda: target(*args, **(kwargs or {}))
        self._task: schedulers.Task | None = None
        self._number = schedulers.active().number()

    def __hash__(self) -> int:
        # concurrent.futures iterates over a set of threads: the default hash, an address, is not repeatable.
        return self._number

    def start(self) -> None:
        world = schedulers.active()
        world.step("start", self.name)
        assert world.current is not None
        self._task = world.start(world.current.process, self.run, self.name)

    def run(self) -> None:
        self._call()

    def is_alive(self) -> bool:
        return self._task is not None and not self._task.is_done

    @property
    def ident(self) -> int | None:
        return None if self._task is None else id(self._task)

    def join(self, timeout: float | None = None) -> None:
        world = schedulers.active()
        assert self._task is not None
        assert world.current is not None
        world.step("join", self.name)
        if not self._task.is_done:
            self._task.waiters.append(world.current)
            world.park(timeout)


class _Local:
    """See ``threading.local``."""

    _numbers = itertools.count()

    def __init__(self) -> None:
        object.__setattr__(self, "_number", next(self._numbers))

    def _mine(self) -> dict[str, object]:
        task = schedulers.active().current
        assert task is not None
        return task.locals.setdefault(object.__getattribute__(self, "_number"), {})

    def __getattr__(self, name: str) -> object:
        try:
            return self._mine()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: object) -> None:
        self._mine()[name] = value


def _get_ident() -> object:
    return id(schedulers.running.current) if schedulers.running else 0


def threading() -> types.ModuleType:
    """Return the module ``threading``."""
    made = types.ModuleType("threading")
    made.__dict__.update(
        Lock=Lock,
        RLock=RLock,
        Condition=Condition,
        Semaphore=Semaphore,
        Event=Event,
        Thread=Thread,
        local=_Local,
        TIMEOUT_MAX=TIMEOUT_MAX,
        get_ident=_get_ident,
        # For concurrent.futures: a simulated process ends without its exit handlers.
        _register_atexit=lambda *_: None,
    )
    return made


#: The date at the start of every simulation, in seconds since 1970.
EPOCH = 1_700_000_000.0


def time() -> types.ModuleType:
    """Return the module ``time``."""
    made = types.ModuleType("time")
    made.__dict__.update(
        monotonic=lambda: schedulers.running.now if schedulers.running else 0.0,
        perf_counter=lambda: schedulers.running.now if schedulers.running else 0.0,
        time=lambda: EPOCH + (schedulers.running.now if schedulers.running else 0.0),
        sleep=lambda seconds: schedulers.active().sleep(seconds),
    )
    return made


class _Datetime(dt.datetime):
    """``datetime.datetime`` on the clock of the world."""

    @classmethod
    def now(cls, tz: dt.tzinfo | None = None) -> Self:
        return cls.fromtimestamp(EPOCH + schedulers.active().now, tz)


def datetime() -> types.ModuleType:
    """Return the module ``datetime``."""
    made = types.ModuleType("datetime")
    made.__dict__.update({name: getattr(dt, name) for name in dt.__all__})
    made.__dict__["datetime"] = _Datetime
    return made


class _Dice(types.ModuleType):
    """The module ``random``: every function is one of the world's generator."""

    Random = real_random.Random

    def __getattr__(self, name: str) -> object:
        return getattr(schedulers.active().dice, name)


def random() -> types.ModuleType:
    return _Dice("random")


def secrets() -> types.ModuleType:
    """Return the module ``secrets``."""
    made = types.ModuleType("secrets")
    made.__dict__.update(
        token_bytes=lambda n=32: schedulers.active().dice.randbytes(n),
        token_hex=lambda n=32: schedulers.active().dice.randbytes(n).hex(),
        token_urlsafe=lambda n=32: schedulers.active().dice.randbytes(n).hex(),
        randbelow=lambda below: schedulers.active().dice.randrange(below),  # noqa: PLW0108 (not active yet)
    )
    return made
