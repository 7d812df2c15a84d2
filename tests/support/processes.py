"""Run programs: once to their end, or in the background of a block."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from tests.support import repository

#: Seconds that a server may take to start or stop on a busy machine.
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


def free_port() -> int:
    """Return a free TCP port of 127.0.0.1 that no other test process is given.

    It is below the kernel's ephemeral ports (ip_local_port_range), so no connection can take it, and each
    pytest worker has a range of its own.
    """
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", next(_ports))) as listener:
            return int(listener.getsockname()[1])


def _own_ports() -> Iterator[int]:
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    start = os.getpid()
    while True:
        # Start elsewhere in each run: a server of the previous run may still be listening.
        yield 10000 + 2000 * worker + start % 2000
        start += 1


_ports = _own_ports()


def is_listening(port: int) -> bool:
    """Report whether a server accepts connections on the port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


@contextlib.contextmanager
def running(
    argv: Sequence[str | Path],
    *,
    log: Path,
    ready: Callable[[], object],
    env: Mapping[str, str] | None = None,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a program beside the block: ``ready`` when the block begins, stopped by pid after it."""
    with log.open("ab") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=env)
    try:
        wait_for(lambda: process.poll() is not None or ready(), f"{argv[0]} to be ready")
        if process.poll() is not None:
            raise AssertionError(f"{argv} ended with {process.returncode}: {log.read_text()[-2000:]}")
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Stop a process: SIGTERM, then SIGKILL after ``PATIENCE``."""
    process.terminate()
    try:
        process.wait(PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
