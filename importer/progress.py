"""Progress in phases and bytes, and its reporters: log lines, JSON, a bar on a terminal."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import Protocol, TextIO

from cdi_worker import errors, units

#: The percentages at which a phase begins and ends. The last 0.1 is for the sync.
SHARES = {"transfer": (0.0, 99.9), "spool": (0.0, 60.0), "convert": (60.0, 99.9), "merge": (60.0, 99.9)}
#: Seconds between two lines in a log.
INTERVAL = 5.0


class Progress(Protocol):
    """Receives progress. Methods are called from several threads and must not raise."""

    def phase(self, name: str, total: int | None) -> None:
        """Begin a phase such as ``transfer`` or ``sync``, of ``total`` bytes (None: unknown)."""

    def advance(self, count: int) -> None:
        """Count ``count`` more bytes of this phase."""

    def read(self, count: int) -> None:
        """Count ``count`` bytes read from the source, which may be fewer than the bytes of the phase."""

    def retry(self, failure: errors.Error) -> None:
        """Count ``failure``, after which the work is retried or falls back to another route."""

    def done(self) -> None:
        """End: everything is on storage. Never called after a failure."""


class NullProgress:
    """Progress that is ignored, and base class of reporters that need only some of it."""

    def phase(self, name: str, total: int | None) -> None: ...

    def advance(self, count: int) -> None: ...

    def read(self, count: int) -> None: ...

    def retry(self, failure: errors.Error) -> None: ...

    def done(self) -> None: ...


class Meter(NullProgress):
    """Counts for the reporters below; thread-safe. The percentage never falls, and is 100 only when done.

    A phase that begins again (after falling back to another route) counts from 0 again, while the percentage
    stays until it is exceeded. Without a total the percentage does not change.
    """

    def __init__(self) -> None:
        self.name = ""
        self.total: int | None = None
        self.count = 0
        self.started = time.monotonic()
        self.percent = 0.0
        self.finished = False
        self._lock = threading.Lock()

    def phase(self, name: str, total: int | None) -> None:
        with self._lock:
            self.name, self.total, self.count = name, total, 0
            self.started = time.monotonic()
        self.changed(new_phase=True)

    def advance(self, count: int) -> None:
        with self._lock:
            self.count += count
            if self.total and self.name in SHARES:
                start, end = SHARES[self.name]
                self.percent = max(self.percent, start + (end - start) * min(1.0, self.count / self.total))
        self.changed(new_phase=False)

    def done(self) -> None:
        self.percent, self.finished = 100.0, True
        self.changed(new_phase=True)

    def changed(self, *, new_phase: bool) -> None:
        """Report a change; overridden by the reporters."""

    def rate(self) -> float:
        """Return the bytes per second of this phase."""
        return self.count / max(1e-6, time.monotonic() - self.started)


class Lines(Meter):
    """Prints a line every ``interval`` seconds; with ``as_json`` a JSON object."""

    def __init__(self, stream: TextIO, *, as_json: bool = False, interval: float = INTERVAL) -> None:
        super().__init__()
        self._stream = stream
        self._json = as_json
        self._interval = interval
        self._next = 0.0
        self._print_lock = threading.Lock()

    def changed(self, *, new_phase: bool) -> None:
        now = time.monotonic()
        if not new_phase and now < self._next:
            return
        with self._print_lock:
            self._next = now + self._interval
            # A reader that has closed its end (``2>&1 | head``) does not end the import.
            with contextlib.suppress(BrokenPipeError):
                print(self._as_json() if self._json else self._as_text(), file=self._stream, flush=True)

    def _as_text(self) -> str:
        if self.finished:
            return "100.0% done"
        of = f" of {units.format_size(self.total)}" if self.total else ""
        return (
            f"{self.percent:5.1f}% {self.name} {units.format_size(self.count)}{of}"
            f" {units.format_size(self.rate())}/s"
        )

    def _as_json(self) -> str:
        return json.dumps(
            {
                "phase": "done" if self.finished else self.name,
                "bytes": self.count,
                "total": self.total,
                "percent": round(self.percent, 1),
                "bytesPerSecond": round(self.rate()),
            }
        )


class Bar(Meter):
    """A bar on a terminal, drawn by rich."""

    def __init__(self) -> None:
        super().__init__()
        from rich import console, progress

        self._progress = progress.Progress(
            progress.TextColumn("{task.description:>9}"),
            progress.BarColumn(),
            progress.TaskProgressColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=console.Console(stderr=True),
        )
        self._task: progress.TaskID | None = None

    def changed(self, *, new_phase: bool) -> None:
        if new_phase and not self.finished:
            if self._task is None:
                self._progress.start()
            else:
                self._progress.update(self._task, total=self._progress.tasks[self._task].completed)
            self._task = self._progress.add_task(self.name, total=self.total)
        elif self._task is not None and not self.finished:
            self._progress.update(self._task, completed=self.count)

    def close(self) -> None:
        """Stop drawing and restore the terminal."""
        self._progress.stop()


class Several:
    """Passes progress on to several reporters, such as a bar and the metrics."""

    def __init__(self, *each: Progress) -> None:
        self._each = each

    def phase(self, name: str, total: int | None) -> None:
        for one in self._each:
            one.phase(name, total)

    def advance(self, count: int) -> None:
        for one in self._each:
            one.advance(count)

    def read(self, count: int) -> None:
        for one in self._each:
            one.read(count)

    def retry(self, failure: errors.Error) -> None:
        for one in self._each:
            one.retry(failure)

    def done(self) -> None:
        for one in self._each:
            one.done()
