"""The bar at a terminal: one line, of any width."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TextIO

from cdi_worker.importer import commands, progress

#: Seconds between two drawings; cells of the widest bar, and of the narrowest that is drawn.
INTERVAL = 0.2
WIDEST = 30
NARROWEST = 5
#: Returns to the first column and erases the line.
ERASE = "\r\x1b[K"


class Bar(progress.Lines):
    """Progress as one line for the current phase.

    The cursor is never hidden: nothing must be restored after Ctrl-Z or a kill.
    """

    def __init__(self, stream: TextIO) -> None:
        super().__init__(stream, interval=INTERVAL)
        self._full, self._empty = "█", "░"
        try:
            "█░".encode(stream.encoding or "ascii")
        except (UnicodeEncodeError, LookupError):
            self._full, self._empty = "#", "."

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        commands.erase = ""
        self._write(ERASE)

    def changed(self, *, new_phase: bool) -> None:
        """Do nothing: the thread draws."""

    def _is_due(self, now: float) -> bool:
        return True

    def _print(self, line: str) -> None:
        self._write(f"{ERASE}{line}\n")

    def _print_numbers(self) -> None:
        try:
            terminal = self._stream.fileno()
            # 0 if the size is unknown.
            columns = os.get_terminal_size(terminal).columns or 80
        except OSError:
            return
        with contextlib.suppress(OSError):
            # In the background, the line belongs to the shell. The terminal of another session has no shell.
            if os.tcgetpgrp(terminal) != os.getpgrp():
                return
        commands.erase = ERASE
        self._write(f"{ERASE}{self.line(columns)}")

    def _write(self, text: str) -> None:
        with self._printing, contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()

    def line(self, columns: int) -> str:
        """Return the line for a terminal of so many columns, the last two of which stay empty.

        The terminal writes ``^C`` there. If that were wrapped, the first of two lines would not be erased.
        """
        columns -= 1
        numbers = self.numbers()
        percent = f"{numbers.percent:5.1f}%" if numbers.is_known else ""
        parts = [numbers.trouble] if numbers.trouble else numbers.parts()
        # A narrow line leaves out the first parts.
        while len(parts) > 1 and len(f"{numbers.phase:>8} {percent} {', '.join(parts)}") >= columns:
            parts.pop(0)
        text = f"{percent} {', '.join(parts)}".strip()
        room = min(WIDEST, columns - 1 - len(f"{numbers.phase:>8}  {text}"))
        bar = f"{self._bar(numbers, room)} " if room >= NARROWEST else ""
        return f"{numbers.phase:>8} {bar}{text}"[: columns - 1]

    def _bar(self, numbers: progress.Numbers, cells: int) -> str:
        if numbers.is_known:
            done = int(cells * numbers.percent / 100)
            return self._full * done + self._empty * (cells - done)
        # The size is unknown: three cells move back and forth.
        span = cells - 3
        at = int(time.monotonic() / INTERVAL) % (2 * span)
        at = min(at, 2 * span - at)
        return self._empty * at + self._full * 3 + self._empty * (span - at)
