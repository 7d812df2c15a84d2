"""The data of an image transfer: connections to its ticket (ovirt-imageio's client library)."""

from __future__ import annotations

import contextlib
import copy
import functools
import http.client
import logging
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, extents, responses, sockets, wire

log = logging.getLogger(__name__)

#: The largest offset of a file, in bytes.
_MOST_BYTES = (1 << 63) - 1
#: Statuses for an unknown or expired ticket.
_REFUSED = frozenset({401, 403, 404, 410})


class TicketRefused(errors.Transient):
    """The ticket is invalid or has expired. The engine knows the cause."""


def library() -> Any:
    """Import and return ``backend``, which loads the client library."""
    with errors.optional("the imageio source", package="ovirt-imageio", extra="imageio"):
        from cdi_worker.sources.ovirt import backend
    return backend


class Pool:
    """Connections to the data server of a transfer, one per reading thread, up to the server's limit.

    Thread-safe. The library uses the server's unix socket if it is on this machine.
    """

    def __init__(self, name: str, access: base.Access, authorities: str, cancel: base.Cancel) -> None:
        self._client = library()
        self._name = name
        self._access = access
        self._authorities = authorities
        self._cancel = cancel
        self._url = ""
        self._answered = False
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        #: An open connection that new ones are copied from.
        self._model: Any = None
        self._allowed = 1
        self._lendings = 0
        #: Connections of earlier generations are discarded.
        self.generation = 0
        self._changed = threading.Condition()

    def connect(self, urls: Sequence[str]) -> None:
        """Close all connections and connect to the first of ``urls`` that answers."""
        self.close()
        generation = self.generation
        failures: list[errors.Error] = []
        for url in urls:
            self._url = url
            try:
                client = self._connected(first=not self._answered)
            except errors.SourceError as err:
                log.info("no data at %r reason=%s", _host(url), err.fact)
                failures.append(err)
                continue
            self._answered = True
            with self._changed:
                if self.generation != generation:
                    client.close()
                    raise self._ended()
                self._allowed = max(1, min(client.max_readers, self._access.connections))
                self._idle.append(client)
                self._changed.notify_all()
            log.info("data at %r connections=%d", _host(url), self._allowed)
            return
        raise failures[0]

    def extents(self) -> extents.Kept:
        """Return the extents of the whole disk. A server without extents reports one data extent."""
        found = extents.Kept()
        with self._lent() as client, self._ending(client), self._translated():
            for run in client.extents("zero"):
                # ``index``: JSON may hold anything.
                start, length = operator.index(run.start), operator.index(run.length)
                if start != found.end or not 0 < length <= _MOST_BYTES - start:
                    reason = f"{self._name}: the extents have a gap at byte {found.end}"
                    raise errors.SourceError(reason=reason)
                found.add(base.Extent(start, length, bool(operator.index(run.zero))))
        return found

    def read(self, offset: int, into: memoryview) -> int:
        """Read ``into`` at ``offset``; return the number of bytes read before the connection broke."""
        count = 0
        try:
            with self._lent() as client, self._ending(client), self._translated():
                for received in client.read_into(offset, into):
                    count += received
        except errors.Transient:
            # The bytes read are valid; the next read continues after them.
            if not count:
                raise
        return count

    def _ending(self, client: Any) -> cancelling.Ending:
        return self._cancel.ending(functools.partial(_shut, client))

    def close(self) -> None:
        """Close idle connections, abort busy ones, and open none until ``connect``."""
        with self._changed:
            idle, self._idle = self._idle, []
            busy = list(self._busy)
            self._model = None
            self._url = ""
            self.generation += 1
        for client in busy:
            _shut(client)
        for client in idle:
            client.close()

    @contextlib.contextmanager
    def _lent(self) -> Iterator[Any]:
        """Lend an idle or new connection, after waiting for a free one at the server's limit."""
        with self._changed:
            self._changed.wait_for(lambda: self._lendings < self._allowed)
            if not self._url:
                raise self._ended()
            self._lendings += 1
            generation = self.generation
            client = self._idle.pop() if self._idle else None
        try:
            client = client or self._connected()
            with self._changed:
                self._busy.add(client)
            yield client
        except BaseException:
            # The response may be partly unread.
            generation = -1
            raise
        finally:
            self._take_back(client, generation)

    def _ended(self) -> errors.Transient:
        return errors.Transient(url=self._name, reason="the connections are closed")

    def _take_back(self, client: Any, generation: int) -> None:
        with self._changed:
            self._lendings -= 1
            self._busy.discard(client)
            if generation == self.generation:
                self._idle.append(client)
                client = None
            elif client is self._model:
                self._model = None
            self._changed.notify()
        if client is not None:
            client.close()

    def _connected(self, *, first: bool = False) -> Any:
        insecure = self._access.insecure
        model = self._model
        with self._translated(first=first):
            if model is not None:
                return _like(model)
            self._model = self._client.Client(
                self._url,
                disk=self._name,
                cafile=None if insecure else self._authorities,
                secure=not insecure,
                slowest=self._access.slowest,
            )
            return self._model

    @contextlib.contextmanager
    def _translated(self, *, first: bool = False) -> Iterator[None]:
        try:
            with wire.translated(self._name, first=first):
                yield
        except errors.Error:
            raise
        except Exception as err:
            # The library raises classes that are not public, and anything for a malformed response.
            failure = self._error(err)
            if failure is None:
                raise
            raise failure from err

    def _error(self, err: Exception) -> errors.Error | None:
        """Translate an exception of the library, whose classes are not public. None: unknown."""
        code, message = getattr(err, "code", None), wire.printable(str(err))
        answer = f"the imageio server answers {code} {message}".rstrip()
        if code in _REFUSED:
            return TicketRefused(url=self._name, reason=answer)
        if code == 200:
            return errors.NoRanges(url=self._name, reason="the server sent the whole disk instead of a range")
        if code in wire.TRANSIENT_STATUS:
            return errors.Transient(url=self._name, reason=answer)
        if code is not None:
            return errors.SourceError(reason=f"{self._name}: {answer}")
        if isinstance(err, responses.TooLong):
            advice = "if the disk is very fragmented, download it with ovirt-img and import the file"
            return errors.SourceError(reason=f"{self._name}: {err}; {advice}")
        if isinstance(err, http.client.HTTPException | RuntimeError):
            return errors.Transient(url=self._name, reason=message or type(err).__name__)
        if isinstance(err, ValueError | KeyError | TypeError | AttributeError):
            return errors.Transient(url=self._name, reason="invalid response")
        return None


def _like(client: Any) -> Any:
    """Return another connection to the same server.

    As the library's own downloads do it. A new client would load the system's CAs again (20 ms of CPU) and
    request the server's options again.
    """
    twin = copy.copy(client)
    twin._backend = client._backend.clone()  # noqa: SLF001  (the client has no public name for it)
    return twin


def _shut(client: Any) -> None:
    # The library has no call to abort a read of another thread. A connection that was closed meanwhile
    # raises ValueError.
    with contextlib.suppress(AttributeError, TypeError, ValueError):
        sockets.shut(client._backend._con.sock)  # noqa: SLF001  (the client has no public name for it)


def _host(url: str) -> str:
    """Return a URL without the ticket, which is a secret."""
    return wire.safe_url(url).rpartition("/")[0]
