"""The memory of an ESXi host for NFC buffers, shared by workers on one machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources.vmware import nfc
from tests.support import processes, repository


@pytest.fixture
def host() -> str:
    return f"host-{os.urandom(4).hex()}"


@pytest.mark.parametrize(
    ("configuration", "size"),
    [
        (nfc.CONFIGURATION, 4),
        ("", 1),
        ('vixDiskLib.nfcAio.Session.BufSizeIn64KB = 32\n# x\nvixDiskLib.nfcAio.Session.BufCount="16"', 32),
        ("vixDiskLib.nfcAio.Session.BufSizeIn64KB=64\nvixDiskLib.nfcAio.Session.BufCount=64", 48),
        ("#vixDiskLib.nfcAio.Session.BufCount=400", 1),
        ("vixDiskLib.transport.LogLevel=4", 1),
    ],
)
def test_session_has_the_memory_of_its_configuration(configuration: str, size: int) -> None:
    assert nfc.session_size(configuration) == size


def test_four_workers_with_three_sessions_use_a_host(host: str) -> None:
    with contextlib.ExitStack() as workers:
        for _ in range(4):
            assert workers.enter_context(nfc.sessions(host, 3, 4, cancelling.NEVER)) == 3
        with nfc.sessions(f"{host} another", 3, 4, cancelling.NEVER) as found:
            assert found == 3
        cancel = cancelling.Cancel()
        threading.Timer(0.3, cancel.set).start()
        began = time.monotonic()
        with pytest.raises(errors.Cancelled), nfc.sessions(host, 3, 4, cancel):
            pass
        assert time.monotonic() - began < processes.PATIENCE
    with nfc.sessions(host, 12, 4, cancelling.NEVER) as found:
        assert found == 12


def test_late_worker_gets_what_is_left(host: str) -> None:
    with nfc.sessions(host, 10, 4, cancelling.NEVER), nfc.sessions(host, 3, 4, cancelling.NEVER) as found:
        assert found == 2


def test_part_of_a_session_is_not_kept(host: str) -> None:
    with nfc.sessions(host, 9, 5, cancelling.NEVER) as found:
        assert found == 9
        with nfc.sessions(host, 5, 1, cancelling.NEVER) as rest:
            assert rest == 3


HOLD = """
import sys, time
from cdi_worker.images.engine import cancelling
from cdi_worker.sources.vmware import nfc
with nfc.sessions(sys.argv[1], 12, 4, cancelling.NEVER):
    print("held", flush=True)
    time.sleep(600)
"""


def test_killed_worker_leaves_nothing_reserved(host: str) -> None:
    command = [sys.executable, "-c", HOLD, host]
    with subprocess.Popen(command, cwd=repository.ROOT, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        other.kill()
        other.wait()
        with nfc.sessions(host, 12, 4, cancelling.NEVER) as found:
            assert found == 12
