"""A loopback interface with a delay: ``python -m tests.bench.wire DELAY RATE``, in a network namespace of its
own.

Locally generated packets, also to 127.0.0.1, are routed to a TUN device, held for half of the round trip, and
written back, which delivers them. So servers and clients need no other addresses. ``DELAY`` is the round trip
in seconds, ``RATE`` the bytes per second of each direction together. Packets have up to 60000 bytes, which
Python can forward at 1 GB/s; TCP's slow start is therefore faster than on a real network. Needs root.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import functools
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.support import processes

TUNSETIFF = 0x400454CA
#: IFF_TUN | IFF_NO_PI of linux/if_tun.h.
_FLAGS = 0x1001
_DEVICE = "wire"
#: Packets of this machine look up the route to the device before the table of local addresses; packets from
#: the device are delivered by that table. Loopback addresses on a device need route_localnet.
_COMMANDS = f"""\
ip link set lo up
ip link set {_DEVICE} mtu 60000 txqueuelen 5000 up
sysctl -qw net.ipv4.conf.{_DEVICE}.route_localnet=1 net.ipv4.conf.{_DEVICE}.accept_local=1
sysctl -qw net.ipv4.conf.{_DEVICE}.rp_filter=0 net.ipv4.conf.all.rp_filter=0
ip route add default dev {_DEVICE} src 127.0.0.1 table 100
ip rule add pref 5 iif lo lookup 100
ip rule add pref 10 lookup local
ip rule del pref 0
"""


@contextlib.contextmanager
def delayed(directory: Path, delay: float, rate: int) -> Iterator[None]:
    """Delay the loopback interface of this network namespace during the block."""
    log = directory / "wire.log"
    log.unlink(missing_ok=True)
    argv = [sys.executable, "-m", "tests.bench.wire", str(delay), str(rate)]
    with processes.running(argv, log=log, ready=functools.partial(_is_ready, log)):
        yield


def _is_ready(log: Path) -> bool:
    return log.exists() and "ready" in log.read_text()


def forward(delay: float, rate: float) -> None:
    """Make the device and forward packets until killed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _FLAGS))
    for command in _COMMANDS.splitlines():
        subprocess.run(command.split(), check=True)
    print("ready", flush=True)
    queue: collections.deque[tuple[float, bytes]] = collections.deque()
    poll = select.poll()
    poll.register(device, select.POLLIN)
    sent = 0.0
    while True:
        poll.poll(max(0.0, (queue[0][0] - time.monotonic()) * 1000) if queue else None)
        for _ in range(64):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                break
            sent = max(sent, time.monotonic()) + len(packet) / rate
            queue.append((sent + delay / 2, packet))
        while queue and queue[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the kernel's queue is full: a lost packet
                os.write(device, queue[0][1])
            queue.popleft()


if __name__ == "__main__":
    forward(float(sys.argv[1]), float(sys.argv[2]))
