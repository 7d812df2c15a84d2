"""Run programs: once to their end, or in the background of a block."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import forked, repository

#: Seconds that a start, a stop or the end of a wait may take on a busy machine. What a test proves not to be
#: waited for must take longer.
PATIENCE = 20.0


def need(*tools: str) -> None:
    """Skip the running test unless every tool is installed."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}")


def need_root() -> None:
    """Skip the running test unless it runs as root, which devices and mounts require."""
    if os.geteuid() != 0:
        pytest.skip("needs root")


def run(
    *argv: str | Path, timeout: float = 60, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end; raise ``AssertionError`` with its output if it fails."""
    done = subprocess.run(argv, capture_output=True, text=True, timeout=timeout, check=False, env=env)
    if done.returncode:
        raise AssertionError(f"{argv} ended with {done.returncode}: {done.stderr or done.stdout}")
    return done


def script(code: str, *argv: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in an environment of ``variables`` only: no credentials, no metadata server."""
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent"}
    # A policy of the machine (tests/support/policy).
    env |= {
        each: forked.ENVIRONMENT[each]
        for each in ("OPENSSL_CONF", "PYTHONPATH")
        if each in forked.ENVIRONMENT
    }
    env |= {"AWS_EC2_METADATA_DISABLED": "true", "NO_GCE_CHECK": "true", **variables}
    command = (sys.executable, "-W", "error", "-c", code, *argv)
    return subprocess.run(
        command, cwd=repository.ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def wait_for(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Poll until the condition holds; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"{what}: not within {seconds} s")
        time.sleep(0.01)


def written(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> int:
    """Return how many bytes a process has passed to write(2), whether or not they are on storage."""
    counts = Path(f"/proc/{process.pid}/io").read_text()
    return int(counts.partition("\nwchar: ")[2].split()[0])


def descriptors() -> set[str]:
    """Return the open descriptors of this process, and what each is open for.

    Compare sets, not their sizes: meanwhile a thread of an earlier test may close one of its own.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # of the listing
            found.add(f"{number} {Path(f'/proc/self/fd/{number}').readlink()}")
    return found


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1, reserved for this process until it ends.

    The server that the port is for listens later: meanwhile another test process, perhaps of another run on
    this machine, would find the port free. The ports are below the kernel's ephemeral ones
    (ip_local_port_range), so no connection takes them.
    """
    while True:
        port = next(_ports)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            if reserve(port):
                return port


#: The descriptors that hold reservations.
reservations: list[int] = []


def reserve(port: int) -> bool:
    """Reserve a port of 127.0.0.1 until this process ends; return whether no other process has it.

    The reservation is a name in the abstract namespace of unix sockets, which like ports belongs to the
    network namespace, and is released with the last descriptor.
    """
    with socket.socket(socket.AF_UNIX) as name:
        try:
            name.bind(f"\0cdi-tests-port-{port}")
        except OSError:
            return False
        reservations.append(name.detach())
    return True


# Start elsewhere in each process: most ports are then free at the first try.
_ports = itertools.cycle([*range(10_000 + 97 * os.getpid() % 20_000, 30_000), *range(10_000, 30_000)])


def is_listening(address: int | Path) -> bool:
    """Report whether a server accepts connections on a port, or on a unix socket.

    A socket that exists may not accept connections yet: bind(2) creates it, before listen(2).
    """
    with contextlib.suppress(OSError), contextlib.closing(_connection(address)):
        return True
    return False


def has_listener(path: Path) -> bool:
    """Report the same of a unix socket without a connection, which the only client of a server would be.

    ``__SO_ACCEPTCON`` (1 << 16) in the flags of /proc/net/unix, since Linux 2.6.
    """
    rows = (line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:])
    return any(row[7:] == [str(path)] and int(row[3], 16) & 1 << 16 for row in rows)


def _connection(address: int | Path) -> socket.socket:
    if isinstance(address, int):
        return socket.create_connection(("127.0.0.1", address), timeout=5)
    with contextlib.ExitStack() as undo:
        made = undo.enter_context(socket.socket(socket.AF_UNIX))
        made.settimeout(5)
        made.connect(str(address))
        undo.pop_all()
        return made


@contextlib.contextmanager
def running(
    argv: Sequence[str | Path],
    *,
    log: Path,
    ready: Callable[[], object],
    env: Mapping[str, str] | None = None,
    patience: float = PATIENCE,
    end: signal.Signals = signal.SIGTERM,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program beside the block: ``ready`` when the block begins, stopped by pid after it.

    ``patience``: seconds that the start may take. ``end``: the signal that stops it.
    """
    with log.open("ab") as output:
        process = forked.Popen[bytes](argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
    try:
        wait_for(lambda: process.poll() is not None or ready(), f"{argv[0]} to be ready", patience)
        if process.poll() is not None:
            raise AssertionError(f"{argv} ended with {process.returncode}: {log.read_text()[-2000:]}")
        yield process
    finally:
        stop(process, end)


def stop(process: subprocess.Popen[bytes], end: signal.Signals = signal.SIGTERM) -> None:
    """Stop a process; fail if it needs SIGKILL after ``PATIENCE``, as with a client left open."""
    process.send_signal(end)
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"{process.args!r} did not end within {PATIENCE} s of SIGTERM") from None
