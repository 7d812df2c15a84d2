"""Progress in phases and bytes, and its reporters: log lines and JSON."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from typing import NamedTuple, Self, TextIO

from cdi_worker import errors, units

log = logging.getLogger(__name__)

#: The percentages at which a phase begins and ends. The last 0.1 is for the sync.
SHARES = {"transfer": (0.0, 99.9), "spool": (0.0, 60.0), "convert": (60.0, 99.9), "merge": (60.0, 99.9)}
#: Seconds between two lines at first; later a tenth of the time so far, but at most ``LONGEST``.
INTERVAL = 5.0
LONGEST = 60.0
#: A speed is the mean of this many seconds, of arrivals at least ``STEP`` seconds apart.
WINDOW = 10.0
STEP = 0.5
#: A time left is estimated from the arrivals of so many seconds.
SAMPLE = 2.0


class Progress:
    """Receives progress. Methods are called from several threads and must not raise.

    A phase counts the bytes to be moved: without holes. Here, each method does nothing.
    """

    def phase(self, name: str, total: int | None) -> None:
        """Begin a phase such as ``transfer`` or ``sync``, of at most ``total`` bytes (None: unknown)."""

    def advance(self, count: int) -> None:
        """Count ``count`` more bytes of this phase as moved."""

    def skip(self, count: int) -> None:
        """Take ``count`` bytes off the total of this phase: they need not be moved. May be negative."""

    def keep(self, count: int) -> None:
        """Count ``count`` bytes of this phase that an earlier attempt has moved."""

    def resume(self, kept: int, total: int) -> None:
        """Report that an earlier attempt has moved ``kept`` of ``total`` bytes.

        Precedes the phase, and so may ``keep`` and ``skip`` after it: the phase begins with what they count.
        """

    def disk(self, size: int) -> None:
        """Report the size of the disk in bytes."""

    def read(self, count: int) -> None:
        """Count ``count`` bytes on the wire, read from the source, or sent by an upload or clone."""

    def stored(self, count: int) -> None:
        """Count ``count`` bytes read from the disk that is compared with the source."""

    def retry(self, failure: errors.Error) -> None:
        """Count ``failure``, after which the work is retried or falls back to another route.

        ``failure.pause`` says when it is retried (``errors.Pause``), if it is.
        """

    def done(self) -> None:
        """End: everything is on storage. Never called after a failure."""


class NullProgress(Progress):
    """Progress that is ignored, and base class of reporters that need only some of it."""


class Numbers(NamedTuple):
    """What all reporters show. Sizes in bytes.

    ``done`` of ``total``: of the phase, without holes. ``read``: on the wire. ``speed``: bytes per second on
    the wire, or of the phase if it reads nothing from the wire. ``left``: seconds to the end of the phase.
    ``resumed``: moved by an earlier attempt. ``size``: of the disk. ``trouble``: the last failure and its
    retry, until bytes arrive; else empty. ``disk_speed``: bytes per second read from the disk that is
    compared, None if none is.
    """

    phase: str
    percent: float
    done: int
    total: int | None
    read: int
    speed: float
    left: float | None
    resumed: int
    size: int | None
    retries: int
    trouble: str = ""
    disk_speed: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether there is a percentage: without the size of the phase there is none."""
        return self.total is not None or self.percent > 0

    def parts(self) -> list[str]:
        """Return the bytes, the retries, the speed and the time left as text for people."""
        parts = []
        if self.total is not None:
            parts.append(f"{units.format_size(self.done)} of {units.format_size(self.total)}")
        elif self.done:
            parts.append(units.format_size(self.done))
        if self.retries:
            parts.append(f"{self.retries} {'retry' if self.retries == 1 else 'retries'}")
        if self.disk_speed is not None:
            ends = units.format_size(self.speed), units.format_size(self.disk_speed)
            parts.append("source {}/s, disk {}/s".format(*ends))
        elif self.done or self.total is not None:
            parts.append(f"{units.format_size(self.speed)}/s")
        if self.left is not None:
            minutes, seconds = divmod(round(self.left), 60)
            hours, minutes = divmod(minutes, 60)
            time_left = f"{hours}:{minutes:02}" if hours else f"{minutes}"
            parts.append(f"{time_left}:{seconds:02} left")
        return parts


class Speed:
    """The speed of a growing count: the mean of the last ``WINDOW`` seconds, longer if little arrives.

    On a slow wire pieces of 1 MiB arrive every minute, those of all connections at once. So the time that is
    measured begins and ends with an arrival.
    """

    def __init__(self, now: float, count: int = 0) -> None:
        #: The time of each arrival and the count after it. Arrivals within ``STEP`` seconds are one.
        self._points = collections.deque([(now, count)])

    def note(self, now: float, count: int) -> None:
        """Note an arrival; cheap enough to call after every read."""
        points = self._points
        last, _ = points[-1]
        if now - last < STEP and len(points) > 1:
            points[-1] = last, count
            return
        points.append((now, count))
        while len(points) > 2 and points[1][0] <= now - WINDOW:
            points.popleft()

    @property
    def is_settled(self) -> bool:
        """Whether enough has arrived for an estimate: the first pieces are late, or those of a buffer."""
        return len(self._points) > 2 and self._points[-1][0] - self._points[1][0] >= SAMPLE

    def now(self, now: float) -> float:
        """Return the count per second; 0 if nothing has arrived for longer than usual."""
        points = self._points
        while len(points) > 2 and points[1][0] <= now - WINDOW:
            points.popleft()
        (since, before), (last, count) = points[0], points[-1]
        usual = last - points[-2][0] if len(points) > 1 else 0
        if now - last > max(WINDOW, 3 * usual):
            return 0.0
        # Less than a second shows the size of buffers, not a speed.
        return (count - before) / max(1.0, now - since)


class Meter(NullProgress):
    """Counts for the reporters below; thread-safe. The percentage never falls, and is 100 only when done.

    A phase that begins again (after falling back to another route) counts from 0 again, while the percentage
    stays until it is exceeded. Without a total the percentage does not change. What is kept and skipped
    between ``resume`` and the next phase is counted when that begins: no smaller percentage is ever shown.
    """

    def __init__(self) -> None:
        now = time.monotonic()
        self.name = ""
        self.total: int | None = None
        #: Bytes of the phase that are done: moved, or kept from an earlier attempt.
        self.count = 0
        self.percent = 0.0
        #: Whether it is known what an earlier attempt has done: before, 0 % may be wrong.
        self.begun = False
        self.finished = False
        self._kept = 0
        #: Bytes kept and skipped that are reported before their phase begins; None: the phase has begun.
        self._ahead: tuple[int, int] | None = None
        self._read = 0
        self._read_before = 0
        self._stored = 0
        self._resumed = 0
        self._size: int | None = None
        self._retries = 0
        self._failure: errors.Error | None = None
        self._wire = Speed(now)
        self._moving = Speed(now)
        self._storage = Speed(now)
        self._lock = threading.Lock()

    def phase(self, name: str, total: int | None) -> None:
        with self._lock:
            kept, skipped = self._ahead or (0, 0)
            self._ahead = None
            self.name, self.total = name, None if total is None else max(0, total - skipped)
            self.begun = self.begun or name in SHARES
            self.count = self._kept = kept
            self._update()
            self._read_before = self._read
            now = time.monotonic()
            self._wire, self._moving = Speed(now, self._read), Speed(now)
        self.changed(new_phase=True)

    def advance(self, count: int) -> None:
        with self._lock:
            self.count += count
            self._failure = None
            self._moving.note(time.monotonic(), self.count - self._kept)
            self._update()
        self.changed(new_phase=False)

    def skip(self, count: int) -> None:
        self._spare(0, count)

    def keep(self, count: int) -> None:
        self._spare(count, 0)

    def _spare(self, kept: int, skipped: int) -> None:
        """Count bytes that are not moved, of the phase that is to begin or of the current one."""
        with self._lock:
            if self._ahead is not None:
                self._ahead = self._ahead[0] + kept, self._ahead[1] + skipped
                return
            self.count += kept
            self._kept += kept
            if self.total is not None:
                self.total = max(0, self.total - skipped)
            self._update()
        self.changed(new_phase=False)

    def resume(self, kept: int, total: int) -> None:
        with self._lock:
            self._resumed = kept
            self._ahead = 0, 0

    def disk(self, size: int) -> None:
        with self._lock:
            self._size = size

    def read(self, count: int) -> None:
        with self._lock:
            self._read += count
            self._wire.note(time.monotonic(), self._read)

    def stored(self, count: int) -> None:
        with self._lock:
            self._stored += count
            self._storage.note(time.monotonic(), self._stored)

    def retry(self, failure: errors.Error) -> None:
        with self._lock:
            self._retries += 1
            self._failure = failure

    def done(self) -> None:
        self.percent, self.begun, self.finished = 100.0, True, True
        self.changed(new_phase=True)

    def changed(self, *, new_phase: bool) -> None:
        """Report a change; overridden by the reporters."""

    def numbers(self) -> Numbers:
        """Return the current numbers."""
        with self._lock:
            now = time.monotonic()
            wire, moving = self._wire.now(now), self._moving.now(now)
            total = self.total
            left = None
            if total is not None and moving and self._moving.is_settled and not self.finished:
                left = max(0, total - self.count) / moving
            trouble = ""
            if self._failure is not None:
                reason = self._failure.fields.get("reason") or self._failure.message()
                trouble = str(reason).removeprefix("server answers ")
                if pause := self._failure.pause:
                    when = f"next try in {pause.until - now:.0f} s" if pause.until > now else "trying again"
                    trouble += f", {when} ({now - pause.since:.0f} of {pause.limit:.0f} s without data)"
            return Numbers(
                phase="done" if self.finished else self.name or "start",
                percent=self.percent,
                done=self.count if total is None else min(self.count, total),
                total=total,
                read=self._read,
                speed=wire if self._read > self._read_before else moving,
                left=left,
                resumed=self._resumed,
                size=self._size,
                retries=self._retries,
                trouble=trouble,
                disk_speed=self._storage.now(now) if self._stored else None,
            )

    def _update(self) -> None:
        if self.total and self.name in SHARES:
            start, end = SHARES[self.name]
            self.percent = max(self.percent, start + (end - start) * min(1.0, self.count / self.total))


class Lines(Meter):
    """Progress as lines of text: during its ``with`` block, and at the end.

    A line has the percentage, the phase, the bytes, the speed and the time left, and while a failure is
    retried its reason: then, and with ``as_json``, there is one every ``interval`` seconds, and otherwise
    fewer after a while. With ``as_json`` it is a JSON object, also at each phase. Use it for one import. An
    error of ``stream`` is ignored.
    """

    def __init__(self, stream: TextIO, *, as_json: bool = False, interval: float = INTERVAL) -> None:
        super().__init__()
        self._stream = stream
        self._json = as_json
        self._interval = interval
        self._began = self._printed = time.monotonic()
        self._over = threading.Event()
        self._printing = threading.Lock()
        # A transfer that stalls calls no method.
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def changed(self, *, new_phase: bool) -> None:
        # A text about an import of a second is one line; the thread shows a phase that lasts.
        if new_phase and (self._json or self.finished):
            self._print_numbers()

    def resume(self, kept: int, total: int) -> None:
        super().resume(kept, total)
        if self._json:
            self._print_numbers()
        else:
            sizes = f"{units.format_size(kept)} of {units.format_size(total)}"
            self._print(f"resumed: {sizes} are kept from an earlier attempt")

    def _run(self) -> None:
        while not self._over.wait(self._interval):
            if not self.finished and (self._failure or self._is_due(time.monotonic())):
                self._print_numbers()

    def _is_due(self, now: float) -> bool:
        """Return whether it is time for the next line."""
        return self._json or now - self._printed >= min(LONGEST, (now - self._began) / 10)

    def _print_numbers(self) -> None:
        self._printed = time.monotonic()
        numbers = self.numbers()
        if self._json:
            left, disk_speed = numbers.left, numbers.disk_speed
            document = {
                "phase": numbers.phase,
                "bytes": numbers.done,
                "total": numbers.total,
                "percent": round(numbers.percent, 1),
                "read": numbers.read,
                "bytesPerSecond": round(numbers.speed),
                "secondsLeft": None if left is None else round(left),
                "resumed": numbers.resumed,
                "size": numbers.size,
                "retries": numbers.retries,
                "trouble": numbers.trouble,
                "diskBytesPerSecond": None if disk_speed is None else round(disk_speed),
            }
            self._print(json.dumps(document))
        elif numbers.phase == "done":
            self._print("100.0% done")
        else:
            percent = f"{numbers.percent:5.1f}%" if numbers.is_known else ""
            text = numbers.trouble or ", ".join(numbers.parts())
            self._print(" ".join(filter(None, (percent, numbers.phase, text))))

    def _print(self, line: str) -> None:
        # A reader that has closed its end (``2>&1 | head``) does not end the import.
        with self._printing, contextlib.suppress(OSError):
            print(line, file=self._stream, flush=True)


class Logged(Lines):
    """Progress as lines of the log, for a log whose other lines have times, too."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)

    def _print(self, line: str) -> None:
        log.info("%s", line)


def _passed(name: str) -> Callable[..., None]:
    """Return the method of ``PassedOn`` that calls ``name`` of the reporter."""

    def method(self: PassedOn, *args: object) -> None:
        getattr(self._to, name)(*args)

    return method


class PassedOn(Progress):
    """Progress that another reporter gets; a base class of those that change a part of it."""

    def __init__(self, to: Progress) -> None:
        self._to = to

    phase = _passed("phase")
    advance = _passed("advance")
    skip = _passed("skip")
    keep = _passed("keep")
    resume = _passed("resume")
    disk = _passed("disk")
    read = _passed("read")
    stored = _passed("stored")
    retry = _passed("retry")
    done = _passed("done")


class Continued(PassedOn):
    """Passes on the progress of a transfer that continues an earlier one.

    ``moved``, ``skipped``: bytes of the earlier attempt, reported by ``begin``. Later only what exceeds them
    is reported as kept and skipped.
    """

    def __init__(self, to: Progress, moved: int = 0, skipped: int = 0) -> None:
        super().__init__(to)
        self._kept, self._skipped = Exceeding(moved), Exceeding(skipped)
        self._counting = threading.Lock()

    def begin(self, phase: str, total: int | None, *, is_resumed: bool) -> None:
        """Begin ``phase``, of at most ``total`` bytes; before it, report what is kept of an earlier attempt.

        ``total`` None: unknown.
        """
        if is_resumed:
            kept, skipped = self.figures()
            self.resume(kept, max(kept, (total or 0) - skipped))
            super().skip(self._skipped.passed)
            super().keep(self._kept.passed)
        self.phase(phase, total)

    def figures(self) -> tuple[int, int]:
        """Return the number of bytes that are kept, and of those that need not be moved."""
        with self._counting:
            return self._kept.passed, self._skipped.passed

    def skip(self, count: int) -> None:
        with self._counting:
            count = self._skipped.add(count)
        super().skip(count)

    def keep(self, count: int) -> None:
        with self._counting:
            count = self._kept.add(count)
        super().keep(count)


class Exceeding:
    """Counter with a credit of ``passed``: reports only growth beyond it."""

    def __init__(self, passed: int) -> None:
        self.passed = self._advance = passed
        self._count = 0

    def add(self, count: int) -> int:
        """Add ``count``, which may be negative; return how much to report."""
        self._count += count
        before, self.passed = self.passed, max(self._advance, self._count)
        return self.passed - before


class Local(PassedOn):
    """Passes on the progress of a disk whose image was transferred before."""

    def read(self, count: int) -> None:
        """Do nothing: these bytes are not on the wire."""


class Share(PassedOn):
    """Passes on the progress of one import of several, which together are one phase.

    ``left``: bytes in the total of that phase which this import has not moved yet, until its own total is
    known.
    """

    def __init__(self, to: Progress, left: int) -> None:
        super().__init__(to)
        self._left = left
        #: Bytes that are reported before their phase begins; None: the phase has begun.
        self._ahead: int | None = None
        self._counting = threading.Lock()

    def phase(self, name: str, total: int | None) -> None:
        if name not in SHARES or total is None:
            return
        with self._counting:
            left = total - (self._ahead or 0)
            spared, self._left, self._ahead = self._left - left, left, None
        super().skip(spared)

    def advance(self, count: int) -> None:
        self._spend(count)
        super().advance(count)

    def skip(self, count: int) -> None:
        self._spend(count)
        super().skip(count)

    def keep(self, count: int) -> None:
        self._spend(count)
        super().keep(count)

    def _spend(self, count: int) -> None:
        with self._counting:
            self._left -= count
            if self._ahead is not None:
                self._ahead += count

    def resume(self, kept: int, total: int) -> None:
        self._ahead = 0

    def disk(self, size: int) -> None:
        """Do nothing: it is one disk of several."""

    def done(self) -> None:
        """Do nothing: its end is not the end of all."""
