"""What the processes of a test run share: the first that needs it makes it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def locked(path: Path, how: int = fcntl.LOCK_EX) -> Iterator[None]:
    """Hold a lock (flock) on a file, which is created if need be."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(descriptor, how)
        yield
    finally:
        os.close(descriptor)


class Shared:
    """The servers that this process uses together with the others, below one directory of the run.

    Each user of a server holds a shared lock. ``close`` releases those of this process, and then waits for
    the other users of what it has started: no two processes wait for each other.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir(exist_ok=True)
        self._used = contextlib.ExitStack()
        self._started = contextlib.ExitStack()

    def directory(self, name: str) -> Path:
        """Return a directory that all processes use."""
        path = self._directory / name
        path.mkdir(exist_ok=True)
        return path

    def get(self, name: str, start: Callable[[Path], AbstractContextManager[T]]) -> T:
        """Return what ``start`` yielded in the first process that called this; it can be pickled.

        ``start`` is called with a new directory.
        """
        users, description = self._directory / f"{name}.users", self._directory / f"{name}.pickle"
        with locked(self._directory / f"{name}.lock"):
            if not description.exists():
                running = self._started.enter_context(start(self.directory(name)))
                self._started.callback(_wait_for_users, users)
                description.write_bytes(pickle.dumps(running))
            self._used.enter_context(locked(users, fcntl.LOCK_SH))
        found: T = pickle.loads(description.read_bytes())
        return found

    def close(self) -> None:
        """Stop what this process has started as soon as no other process uses it."""
        self._used.close()
        self._started.close()


def _wait_for_users(users: Path) -> None:
    with locked(users):
        pass
