"""The data of an image transfer: connections to its ticket (ovirt-imageio's client library)."""

from __future__ import annotations

import contextlib
import http.client
import logging
import operator
import threading
from collections.abc import Iterator, Sequence
from typing import Any

from cdi_worker import errors, masking
from cdi_worker.sources import base, extents, responses, wire

with errors.optional("the imageio source", package="ovirt-imageio", extra="imageio"):
    from cdi_worker.sources.ovirt import backend

log = logging.getLogger(__name__)

#: The largest offset of a file, in bytes.
_MOST_BYTES = (1 << 63) - 1
#: Tries for a list of extents that the server fails to make. It may be down, so each is left to the caller.
TRIES = 3
#: Statuses for an unknown or expired ticket.
_REFUSED = frozenset({401, 403, 404, 410})


class TicketRefused(errors.Transient):
    """The ticket is invalid or has expired. The engine knows the cause."""


class Failed(errors.Transient):
    """The server answers with a status that may pass."""


class Refused(errors.SourceError):
    """The server answers with any other status."""


class Pool:
    """Connections to the data server of a transfer, one per reading thread, up to the server's limit.

    Thread-safe. The library uses the server's unix socket if it is on this machine.
    """

    def __init__(self, name: str, access: base.Access, cancel: base.Cancel) -> None:
        self._name = name
        self._access = access
        self._cancel = cancel
        self._url = ""
        self._answered = False
        self._idle: list[Any] = []
        self._busy: set[Any] = set()
        #: An open connection that new ones are copied from.
        self._model: Any = None
        self._allowed = 1
        self._lendings = 0
        #: Failed lists of extents.
        self._unlisted = 0
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
                client = self._connect(first=not self._answered)
            except errors.SourceError as err:
                log.info("no data at %r reason=%s", wire.safe_url(url), err.message())
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
            log.info("data at %r connections=%d", wire.safe_url(url), self._allowed)
            return
        raise failures[0]

    def extents(self) -> extents.Kept:
        """Return the extents of the whole disk: one of data, if the server has or lists none.

        Raises ``errors.Transient`` for the first failures of the server.
        """
        found = extents.Kept()
        try:
            with self._lend() as client:
                for run in client.extents("zero"):
                    # ``index``: JSON may hold anything.
                    start, length = operator.index(run.start), operator.index(run.length)
                    if start != found.end or not 0 < length <= _MOST_BYTES - start:
                        reason = f"{self._name}: the extents have a gap at byte {found.end}"
                        raise errors.SourceError(reason=reason)
                    found.add(base.Extent(start, length, bool(operator.index(run.zero))))
            return found
        except (Failed, Refused) as err:
            self._unlisted += 1
            if isinstance(err, Failed) and self._unlisted < TRIES:
                raise
            log.warning("no extents of %r: all of it is read reason=%s", self._name, err)
        found = extents.Kept()
        with self._lend() as client:
            size = client.whole_size()
            if not 0 <= size <= _MOST_BYTES:
                raise errors.Malformed(url=self._name, reason=f"the server reports a size of {size} bytes")
            if size:
                found.add(base.Extent(0, size, zero=False))
        return found

    def read(self, offset: int, into: memoryview) -> int:
        """Read ``into`` at ``offset``; return the number of bytes read before the connection broke."""
        count = 0
        try:
            with self._lend() as client:
                for received in client.read_into(offset, into):
                    count += received
        except errors.Transient:
            # The bytes read are valid; the next read continues after them.
            if not count:
                raise
        return count

    def close(self) -> None:
        """Close idle connections, abort busy ones, and open none until ``connect``."""
        with self._changed:
            idle, self._idle = self._idle, []
            busy = list(self._busy)
            self._model = None
            self._url = ""
            self.generation += 1
        for client in busy:
            client.abort()
        for client in idle:
            client.close()

    @contextlib.contextmanager
    def _lend(self) -> Iterator[Any]:
        """Lend an idle or new connection, after waiting for a free one at the server's limit.

        The block raises ``errors.Error`` instead of the library's exceptions.
        """
        with self._cancel.notifying(self._changed) as ending, self._changed:
            self._changed.wait_for(lambda: ending.was_called or self._lendings < self._allowed)
            ending.check()
            if not self._url:
                raise self._ended()
            self._lendings += 1
            generation = self.generation
            client = self._idle.pop() if self._idle else None
        try:
            client = client or self._connect()
            with self._changed:
                self._busy.add(client)
            with self._cancel.ending(client.abort), self._translate_errors():
                yield client
        except BaseException:
            # The response may be partly unread.
            generation = -1
            raise
        finally:
            with self._changed:
                self._lendings -= 1
                self._busy.discard(client)
                if is_kept := generation == self.generation:
                    self._idle.append(client)
                elif client is self._model:
                    self._model = None
                self._changed.notify()
            if client is not None and not is_kept:
                client.close()

    def _ended(self) -> errors.Transient:
        return errors.Transient(url=self._name, reason="the connections are closed")

    def _connect(self, *, first: bool = False) -> Any:
        model = self._model
        with self._translate_errors(first=first):
            if model is not None:
                # A new one would load the system's CAs (20 ms of CPU) and request the server's options again.
                return model.clone()
            self._model = backend.connect(self._url, self._access, self._name)
            return self._model

    @contextlib.contextmanager
    def _translate_errors(self, *, first: bool = False) -> Iterator[None]:
        try:
            yield
        except errors.Error:
            raise
        except OSError as err:
            raise wire.failure(self._name, err, first=first) from err
        except Exception as err:
            # The library raises classes that are not public, and anything for a malformed response.
            code, message = getattr(err, "code", None), masking.quoted(str(err))
            answer = f"the imageio server answers {code} {message}".rstrip()
            if code in _REFUSED:
                raise TicketRefused(url=self._name, reason=answer) from err
            if code == 200:
                reason = "the server sent the whole disk instead of a range"
                raise errors.NoRanges(url=self._name, reason=reason) from err
            if code in wire.TRANSIENT_STATUS:
                raise Failed(url=self._name, reason=answer) from err
            if code is not None or type(err).__name__ == "UnsupportedOperation":
                # The second is the library's own error for 404 instead of a list of extents.
                raise Refused(reason=f"{self._name}: {message if code is None else answer}") from err
            if isinstance(err, responses.TooLong):
                advice = "if the disk is very fragmented, download it with ovirt-img and import the file"
                raise errors.SourceError(reason=f"{self._name}: {err}; {advice}") from err
            if isinstance(err, http.client.HTTPException):
                raise wire.failure(self._name, err, first=False) from err
            if isinstance(err, RuntimeError):
                # The length of the response is not that of the range.
                raise errors.Malformed(url=self._name, reason=message) from err
            if isinstance(err, ValueError | KeyError | TypeError | AttributeError):
                raise errors.Transient(url=self._name, reason="invalid response") from err
            raise
