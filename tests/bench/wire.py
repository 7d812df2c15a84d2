"""A network of its own with a delay, a rate and losses: ``python -m tests.bench.wire DELAY RATE LOSS MTU``.

Locally generated packets, also to 127.0.0.1, are routed to a TUN device, held for half of the round trip, and
written back, which delivers them. So servers and clients need no other addresses. Needs root.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import fcntl
import os
import random
import select
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.support import processes

TUNSETIFF = 0x400454CA
#: IFF_TUN | IFF_NO_PI of linux/if_tun.h.
_FLAGS = 0x1001
_DEVICE = "wire"
#: Packets of this machine look up the route to the device before the table of local addresses; packets from
#: the device are delivered by that table. Loopback addresses on a device need route_localnet.
_COMMANDS = f"""\
ip link set lo up
ip link set {_DEVICE} mtu {{mtu}} txqueuelen 5000 up
sysctl -qw net.ipv4.conf.{_DEVICE}.route_localnet=1 net.ipv4.conf.{_DEVICE}.accept_local=1
sysctl -qw net.ipv4.conf.{_DEVICE}.rp_filter=0 net.ipv4.conf.all.rp_filter=0
ip route add default dev {_DEVICE} src 127.0.0.1 table 100
ip rule add pref 5 iif lo lookup 100
ip rule add pref 10 lookup local
ip rule del pref 0
"""


#: Bytes of IPv4 and TCP with time stamps in each packet.
_HEADERS = 52


class Wire(NamedTuple):
    """A round trip in seconds, bytes a second, the share of lost packets, and the bytes of a packet.

    Python forwards 25 MB/s in packets of 1500 bytes, and 125 MB/s in those of 9000.
    """

    delay: float
    rate: int
    loss: float = 0
    mtu: int = 1500

    def seconds(self, count: int) -> float:
        """Return the time that so many bytes take."""
        return count / self.rate * self.mtu / (self.mtu - _HEADERS) / (1 - self.loss)

    @contextlib.contextmanager
    def laid(self, directory: Path) -> Iterator[None]:
        """Start all programs of the block in a network of its own, which is this wire."""
        log = directory / "wire.log"
        log.unlink(missing_ok=True)
        argv = ["unshare", "--net", sys.executable, "-m", "tests.bench.wire", *map(str, self)]
        with (
            open("/proc/thread-self/ns/net") as home,
            processes.running(argv, log=log, ready=lambda: "ready" in log.read_text()) as process,
        ):
            with open(f"/proc/{process.pid}/ns/net") as network:
                _enter(network.fileno())
            try:
                yield
            finally:
                _enter(home.fileno())


def _enter(network: int) -> None:
    """Move this thread to a network (Python 3.12 has os.setns)."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(network, 0):
        raise OSError(ctypes.get_errno(), "setns")


def forward(wire: Wire) -> None:
    """Make the device and forward packets until killed."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _FLAGS))
    for command in _COMMANDS.format(mtu=wire.mtu).splitlines():
        subprocess.run(command.split(), check=True)
    print("ready", flush=True)
    queue: collections.deque[tuple[float, bytes]] = collections.deque()
    poll = select.poll()
    poll.register(device, select.POLLIN)
    sent = 0.0
    # The same packets are lost in each run.
    chance = random.Random(0)
    while True:
        poll.poll(max(0.0, (queue[0][0] - time.monotonic()) * 1000) if queue else None)
        for _ in range(64):
            try:
                packet = os.read(device, 65536)
            except BlockingIOError:
                break
            # Acknowledgements go the other way.
            taken = len(packet) / wire.rate if len(packet) > _HEADERS * 2 else 0
            sent = max(sent, time.monotonic()) + taken
            if not wire.loss or chance.random() >= wire.loss:
                queue.append((sent + wire.delay / 2, packet))
        while queue and queue[0][0] <= time.monotonic():
            with contextlib.suppress(OSError):  # the kernel's queue is full: a lost packet
                os.write(device, queue[0][1])
            queue.popleft()


if __name__ == "__main__":
    forward(Wire(float(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])))
