"""Signals set the cancel of the command line in a thread of its own."""

from __future__ import annotations

import pytest

from tests.support import processes

# A handler runs in the main thread, whatever lock that holds: here nearly always one that the callbacks need.
BUSY = """
import os, signal, threading
from cdi_worker.importer import cli
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


# The kernel may give a signal to any thread, and the main thread may have begun its wait just before.
WAITING = """
import signal, threading, time
from cdi_worker.importer import cli
cancel = cli.cancelled_by_signals()
woken = threading.Event()
cancel.on_set(woken.set)

def send():
    time.sleep(0.3)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    time.sleep(60)

threading.Thread(target=send, daemon=True).start()
woken.wait()
print(cancel.reason, flush=True)
"""


def test_signal_ends_a_wait_of_the_main_thread() -> None:
    done = processes.script(WAITING)
    assert done.stdout.strip() == "SIGTERM", done.stderr


HANGUP = """
import os, signal, sys
# The tests themselves may run under nohup.
signal.signal(signal.SIGHUP, signal.SIG_IGN if sys.argv[1] == "nohup" else signal.SIG_DFL)
from cdi_worker.importer import cli
cancel = cli.cancelled_by_signals()
os.kill(os.getpid(), signal.SIGHUP)
if sys.argv[1] == "nohup":
    os.kill(os.getpid(), signal.SIGTERM)
with cli.cancelling.wake_on(cancel) as wake:
    os.read(wake.fd, 8)
print(cancel.reason)
"""


@pytest.mark.parametrize(("how", "reason"), [("ssh", "SIGHUP"), ("nohup", "SIGTERM")])
def test_hangup_cancels_unless_it_is_ignored(how: str, reason: str) -> None:
    done = processes.script(HANGUP, how)
    assert done.stdout.strip() == reason, done.stderr


# Uninterruptible: nothing looks at the cancel.
DEAF = """
import os, signal, sys, time
from cdi_worker.importer import cli
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
cancel = cli.cancelled_by_signals()
for name in sys.argv[1:]:
    os.kill(os.getpid(), getattr(signal, name))
    time.sleep(1)
print("still here", flush=True)
"""


@pytest.mark.parametrize(
    ("names", "status"),
    [
        (("SIGTERM", "SIGTERM"), 143),
        (("SIGINT", "SIGINT"), 130),
        (("SIGTERM", "SIGINT"), 130),
        (("SIGHUP", "SIGTERM"), 143),
        # A terminal that closes, or its shell, may send several.
        (("SIGTERM", "SIGHUP"), 0),
    ],
)
def test_second_signal_ends_the_program(names: tuple[str, ...], status: int) -> None:
    done = processes.script(DEAF, *names)
    assert done.returncode == status, done.stderr
    assert done.stdout == ("" if status else "still here\n")


def test_two_signals_at_once_are_one() -> None:
    """As timeout(1) sends them: to its child, and to its process group."""
    program = DEAF.replace("time.sleep(1)", "time.sleep(0.05)")
    done = processes.script(program, "SIGTERM", "SIGTERM")
    assert (done.returncode, done.stdout) == (0, "still here\n"), done.stderr
