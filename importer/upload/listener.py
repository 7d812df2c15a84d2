"""The upload server's listening socket: one thread per connection, at most ``MOST`` connections."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from typing import TypeAlias

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer.upload import http
from cdi_worker.importer.upload.connection import Connection

log = logging.getLogger(__name__)

#: Seconds for a TLS handshake.
HANDSHAKE = 10.0
#: Seconds for the last answers to be sent when the server ends.
SHUTDOWN = 10.0
#: Connections at once. For one more, the oldest idle one is closed; ``LEAVING`` may still be closing.
MOST, LEAVING = 256, 16

Handle: TypeAlias = Callable[[http.Request, http.Exchange], http.Answer]


class Listener:
    """Accept connections and answer requests by ``handle``."""

    def __init__(self, context: ssl.SSLContext, handle: Handle, limits: http.Limits) -> None:
        self._context = context
        self._handle = handle
        self._limits = limits
        self._changed = threading.Condition()
        #: Whether a request is being processed, by connection, the oldest first.
        self._connections: dict[Connection, bool] = {}
        self._ending = False

    @contextlib.contextmanager
    def listen(self, host: str, port: int, end: Callable[[], object]) -> Iterator[int]:
        """Yield the port while connections are accepted.

        Afterwards ``end`` must end the work that requests wait for; then the last answers are sent.
        """
        address = host
        # As in Go, and so in CDI's server, both mean every address of the pod: clusters may be IPv6 only.
        if both := host in {"0.0.0.0", "::"} and socket.has_dualstack_ipv6():
            address = "::"
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        try:
            listener = socket.create_server((address, port), family=family, backlog=MOST, dualstack_ipv6=both)
        except OSError as err:
            raise errors.RequestError(f"cannot listen on {host}:{port}: {err.strerror or err}") from err
        accepting = threading.Thread(target=self._accept, args=(listener,), name="accept", daemon=True)
        accepting.start()
        try:
            yield listener.getsockname()[1]
        finally:
            with self._changed:
                self._ending = True
                self._changed.notify_all()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
            listener.close()
            end()
            with self._changed:
                for connection in self._idle():
                    connection.interrupt()
                self._changed.wait_for(lambda: not self._connections, SHUTDOWN)

    def _accept(self, listener: socket.socket) -> None:
        while not self._ending:
            try:
                self._start(listener.accept()[0])
            except (OSError, RuntimeError) as err:
                # No descriptor or no thread is left.
                if not self._ending:
                    log.warning("cannot accept a connection: %s", err)
                    # The kernel does not report that a descriptor is free again.
                    with self._changed:
                        self._changed.wait_for(lambda: self._ending, cancelling.TURN)

    def _idle(self) -> list[Connection]:
        """Return the connections without a request, the oldest first. The lock is held."""
        return [each for each, busy in self._connections.items() if not busy and not each.interrupted]

    def _start(self, plain: socket.socket) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(plain.close)
            with self._changed:
                if len(self._connections) >= MOST:
                    for oldest in self._idle()[:1]:
                        oldest.interrupt()
                self._changed.wait_for(lambda: len(self._connections) < MOST + LEAVING or self._ending)
            connection = Connection(plain, self._context)
            stack.callback(connection.close)
            with self._changed:
                self._connections[connection] = False
                if self._ending:
                    connection.interrupt()
            stack.callback(self._forget, connection)
            serving = threading.Thread(target=self._serve, args=(connection,), name="connection", daemon=True)
            serving.start()
            stack.pop_all()

    def _serve(self, connection: Connection) -> None:
        try:
            # A client that disconnects, breaks TLS or is too slow needs no log message of ours.
            with contextlib.suppress(OSError), contextlib.closing(connection):
                connection.handshake(HANDSHAKE)
                while self._exchange(connection) and not self._ending:
                    pass
        finally:
            self._forget(connection)

    def _forget(self, connection: Connection) -> None:
        with self._changed:
            del self._connections[connection]
            self._changed.notify_all()

    def _exchange(self, connection: Connection) -> bool:
        """Answer one request; return whether the connection stays open."""
        exchange = http.Exchange(connection, self._limits)
        try:
            request = exchange.receive()
            if request is None:
                return False
            self._connections[connection] = True
            try:
                answer = self._handle(request, exchange)
            except http.Refusal:
                raise
            except Exception:
                log.exception("internal error")
                answer = http.Answer(500, "internal error")
        except http.Refusal as refusal:
            answer = refusal.answer
        stays_open = exchange.answer(answer)
        self._connections[connection] = False
        return stays_open
