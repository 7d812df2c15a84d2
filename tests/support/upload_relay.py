"""A relay between a client and the upload server that cuts connections."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self

from tests.support import processes


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

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in (self._thread, *self._pumps):
            thread.join(processes.PATIENCE)

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
                with contextlib.suppress(OSError):
                    client.sendall(data)
        with contextlib.suppress(OSError):
            client.shutdown(socket.SHUT_WR)
