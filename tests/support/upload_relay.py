"""A relay between a client and a server that cuts connections, or holds back what passes."""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Callable
from typing import Self

from tests.support import processes

MIB = 1 << 20


class Relay:
    """Relay TCP connections to ``port``; cut each one after the number of bytes given in ``cuts``, in turn.

    None, and connections after the last number, are not cut. The server has read everything sent before
    a cut, except an incomplete TLS record. ``relays_response``: the client gets the server's response to it.
    """

    #: Bytes besides those of bodies: of a handshake and a request head, and of the TLS record that is cut.
    REQUEST, RECORD = 6000, 16 << 10

    def __init__(self, port: int, *cuts: int | None, relays_response: bool = False) -> None:
        self._target_port = port
        self._relays_response = relays_response
        self._cuts = list(cuts)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._pumps: list[threading.Thread] = []
        #: Bytes sent by clients.
        self.sent = 0
        #: Bytes that may pass in both directions together.
        self._allowed = math.inf
        self._passing = threading.Condition()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.allow(math.inf)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._thread, *self._pumps):
            thread.join(processes.PATIENCE)

    def hold(self, after: int) -> None:
        """Hold back everything once ``after`` more bytes have passed."""
        self._allowed = after

    def allow(self, count: float) -> None:
        """Let ``count`` more bytes pass."""
        with self._passing:
            self._allowed += count
            self._passing.notify_all()

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds; let a MiB pass from time to time while all is held back.

        The pauses grow: however slow the machine, the transfer does not end before the condition holds.
        """
        pause = 1.0
        latest = time.monotonic() + pause
        while not condition():
            if self._allowed <= 0 and time.monotonic() > latest:
                self.allow(MIB)
                pause *= 1.5
                # From now on: the MiB may have passed before the next look.
                latest = time.monotonic() + pause
            elif self._allowed > 0:
                latest = time.monotonic() + pause
            # Not more often: the condition may read a slow device, which is written to meanwhile.
            time.sleep(0.1)

    def _pass(self, count: int) -> None:
        with self._passing:
            self._passing.wait_for(lambda: self._allowed > 0)
            self._allowed -= count

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                cut = self._cuts.pop(0) if self._cuts else None
                try:
                    server = socket.create_connection(("127.0.0.1", self._target_port))
                except ConnectionError:
                    client.close()
                    continue
                cutting = threading.Event()
                back = threading.Thread(target=self._back, args=(server, client, cutting), daemon=True)
                pair = (client, server, cut, back, cutting)
                forth = threading.Thread(target=self._forth, args=pair, daemon=True)
                self._pumps += [back, forth]
                back.start()
                forth.start()

    def _forth(
        self,
        client: socket.socket,
        server: socket.socket,
        cut: int | None,
        back: threading.Thread,
        cutting: threading.Event,
    ) -> None:
        left = float("inf") if cut is None else cut
        with contextlib.suppress(OSError):
            while left and (data := client.recv(int(min(left, 65536)))):
                self._pass(len(data))
                server.sendall(data)
                self.sent += len(data)
                left -= len(data)
            if not left:
                cutting.set()
            server.shutdown(socket.SHUT_WR)
        if not left:
            # The server has read everything when it closes; only then may the client reconnect.
            back.join(processes.PATIENCE)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_RDWR)
        back.join(processes.PATIENCE)
        client.close()
        server.close()

    def _back(self, server: socket.socket, client: socket.socket, cutting: threading.Event) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                if cutting.is_set() and not self._relays_response:
                    continue
                self._pass(len(data))
                with contextlib.suppress(OSError):
                    client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
