"""What a server takes away from a client that is silent: renewed by a thread, until it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cdi_worker import errors
from cdi_worker.images.engine import cancelling

log = logging.getLogger(__name__)


class Renewal:
    """A thread that calls ``renew`` every ``interval`` seconds until ``end``. A failure is left to the reads.

    ``what``: the name of what is renewed.
    """

    def __init__(self, what: str, renew: Callable[[], object], interval: float) -> None:
        self._what = what
        self._renew = renew
        self._interval = interval
        self._ending = cancelling.Cancel()
        self._thread = threading.Thread(target=self._run, name=f"renew-{what}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def end(self, limit: float = 0) -> None:
        """End it, and wait ``limit`` seconds for a call that is under way. Safe to call twice."""
        self._ending.set()
        if self._thread.is_alive():
            self._thread.join(limit)

    def pause(self, seconds: float, cancel: cancelling.Cancel) -> None:
        """Sleep. Raises ``errors.Cancelled`` when it ends, or when ``cancel`` is set."""
        turn = threading.Event()
        with self._ending.on_set(turn.set), cancel.on_set(turn.set):
            if turn.wait(seconds):
                raise errors.Cancelled

    def _run(self) -> None:
        while not self._ending.wait(self._interval):
            try:
                self._renew()
            except errors.Error as err:
                log.debug("renew %s reason=%s", self._what, err)
