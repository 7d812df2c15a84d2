"""NFC, the protocol by which VDDK reads from an ESXi host: its buffers, and the host's memory for them.

A host has 48 MB for the buffers of all NFC sessions (VDDK guide, NFC Session Limits), and refuses more. VDDK
has so many buffers of so many 64 KiB for each disk that it has open: ``vixDiskLib.nfcAio.Session.BufCount``
and ``BufSizeIn64KB``.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import random
import re
import socket
from collections.abc import Iterator

from cdi_worker.sources import base

log = logging.getLogger(__name__)

MIB = 1 << 20
#: MiB of buffers that all sessions with one host may have.
BUDGET = 48
#: VMware's guide and virt-v2v's measurements: 505 MB/s for ten disks instead of 347 MB/s with its defaults.
CONFIGURATION = "vixDiskLib.nfcAio.Session.BufSizeIn64KB=16\nvixDiskLib.nfcAio.Session.BufCount=4\n"
#: Seconds between two looks for free memory, at least; and between two lines of the log about it.
TURN, SAID = 0.5, 60.0

_SETTING = re.compile(
    r"^\s*vixDiskLib\.nfcAio\.Session\.(BufSizeIn64KB|BufCount)\s*=\s*\"?(\d+)", re.MULTILINE
)
_DEFAULTS: dict[str, int] = {"BufSizeIn64KB": 1, "BufCount": 4}


def session_size(configuration: str) -> int:
    """Return the MiB of buffers of one session with this configuration of VDDK, at least 1."""
    found = _DEFAULTS | {str(name): int(value) for name, value in _SETTING.findall(configuration)}
    size = found["BufSizeIn64KB"] * found["BufCount"] * (64 << 10)
    return min(max(1, -(-size // MIB)), BUDGET)


@contextlib.contextmanager
def sessions(host: str, most: int, each: int, cancel: base.Cancel) -> Iterator[int]:
    """Reserve memory of ``host`` for 1 to ``most`` sessions of ``each`` MiB; yield their number.

    Waits until there is memory for one. The reservations are seen by all workers in this network namespace,
    and end with the process.
    """
    with contextlib.ExitStack() as stack:
        waited = 0.0
        while not (found := _reserve(host, most, each, stack)):
            if waited % SAID < TURN:
                log.info("waiting for NFC memory of the host=%r: other imports use all of it", host)
            waited += TURN
            # Two workers that each found a part of the rest do not collide again.
            cancel.pause(TURN * random.uniform(1, 2))  # noqa: S311  (jitter, not a secret)
        log.info("nfc host=%r sessions=%d of=%d MiB=%d", host, found, most, found * each)
        yield found


def _reserve(host: str, most: int, each: int, stack: contextlib.ExitStack) -> int:
    """Reserve memory for as many sessions as possible; return their number."""
    taken = 0
    free = iter(range(BUDGET))
    while taken < most:
        with contextlib.ExitStack() as session:
            for _ in range(each):
                unit = next((unit for number in free if (unit := _unit(host, number))), None)
                if unit is None:
                    return taken
                session.enter_context(unit)
            stack.enter_context(session.pop_all())
        taken += 1
    return taken


def _unit(host: str, number: int) -> socket.socket | None:
    """Reserve one MiB; None if it is reserved already.

    An abstract unix socket has one owner, leaves no file, and is released when the process ends (unix(7)).
    """
    unit = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        unit.bind(f"\0cdi-worker/nfc/{hashlib.sha256(host.encode()).hexdigest()[:32]}/{number}")
    except OSError:
        unit.close()
        return None
    return unit
