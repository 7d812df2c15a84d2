"""Signals set the cancel of the command line in a thread of its own."""

from __future__ import annotations

from tests.support import processes

# A handler runs in the main thread, whatever lock that holds: here nearly always one that the callbacks need.
BUSY = """
import os, signal, threading
from cdi_worker import cli
cancel = cli.cancelled_by_signals()
lock, woken = threading.Lock(), threading.Event()

def wake():
    with lock:
        woken.set()

cancel.on_set(wake)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGTERM)).start()
while not woken.is_set():
    with lock, cancel.on_set(lambda: None), cancel.child():
        sum(range(1000))
print(cancel.reason)
"""


def test_signal_does_not_deadlock_with_a_held_lock() -> None:
    done = processes.script(BUSY)
    assert done.stdout.strip() == "SIGTERM", done.stderr
