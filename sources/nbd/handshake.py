"""Connect to an NBD server and select an export (libnbd)."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import os
import select
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import workspace
from cdi_worker.sources import base, handshakes, wire
from cdi_worker.sources.nbd import locations

ALLOCATION = "base:allocation"
BITMAP = "qemu:dirty-bitmap:"
#: The most names of exports or bitmaps in a message; a server may list them without end.
MOST_NAMES = 20

# LIBNBD_AIO_DIRECTION_READ and _WRITE.
_READ, _WRITE = 1, 2
# LIBNBD_TLS_REQUIRE.
_TLS_REQUIRED = 2


class Failed(errors.Transient):
    """A connection failed in a way that a retry at the first contact does not mend."""


@dataclasses.dataclass(frozen=True)
class Server:
    """A server, and what is requested of it.

    ``name``: for messages. ``contexts``: metadata contexts, of those that the server has. ``folder``: with
    TLS, certificates as libnbd wants them; empty: no TLS. ``verify``: whether to verify the server's.
    """

    name: str
    address: locations.Address
    contexts: tuple[str, ...] = (ALLOCATION,)
    folder: str = ""
    verify: bool = True


@contextlib.contextmanager
def credentials(location: locations.Nbd) -> Iterator[str]:
    """Yield a folder of links to the CAs, the client certificate and its key, under libnbd's names."""
    with workspace.Workspace() as folder, wire.authorities(location.access) as authorities:
        files = {"ca-cert.pem": authorities}
        if location.certificate:
            files["client-cert.pem"] = location.certificate
            files["client-key.pem"] = location.key or location.certificate
        for name, path in files.items():
            # libnbd ignores a file that it cannot read, and then connects without a certificate.
            if not os.access(path, os.R_OK):
                raise errors.RequestError(f"{path}: cannot be read")
            (Path(folder) / name).symlink_to(Path(path).absolute())
        yield folder


def connect(server: Server, cancel: base.Cancel, limit: float) -> tuple[Any, list[str]]:
    """Return a libnbd handle that is ready for requests, and the names of QEMU's dirty bitmaps.

    Raises ``Failed`` or ``errors.Transient``. ``limit`` in seconds.
    """
    handle = library().NBD()
    with contextlib.ExitStack() as undo:
        undo.callback(_hang_up, handle)
        bitmaps = _connect(handle, server, cancel, limit)
        undo.pop_all()
    return handle, bitmaps


def _hang_up(handle: Any) -> None:
    """Close the connection. An exception refers to the handle, and nbdkit would wait for its client."""
    with (
        contextlib.suppress(library().Error, OSError),
        socket.socket(fileno=os.dup(handle.aio_get_fd())) as connected,
    ):
        connected.shutdown(socket.SHUT_RDWR)


def _connect(handle: Any, server: Server, cancel: base.Cancel, limit: float) -> list[str]:
    nbd = library()
    deadline, late = time.monotonic() + limit, "connecting timed out"
    handle.set_opt_mode(True)
    handle.set_export_name(server.address.export)
    # The buffer of a failed read is not used: clearing buffers first took 0.2 s of CPU for 2 GiB.
    handle.set_pread_initialize(False)
    # A disk may end within a block. Whether its server reads that, it must say itself.
    handle.set_strict_mode(handle.get_strict_mode() & ~nbd.STRICT_ALIGN)
    if server.folder:
        handle.set_tls(_TLS_REQUIRED)
        handle.set_tls_certificates(server.folder)
        handle.set_tls_verify_peer(server.verify)
    try:
        with cancelling.wake_on(cancel) as wake:

            def wait() -> None:
                """Run the state machine until libnbd waits for the next step."""
                while handle.aio_is_connecting():
                    wake.check()
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError
                    step(handle, handle.aio_get_fd(), wake.fd, left * 1000)

            address = server.address
            if address.socket:
                handle.aio_connect_unix(address.socket)
            else:
                # libnbd verifies the name in a certificate only if it resolves the name itself, which nothing
                # can wake.
                dial = functools.partial(handle.aio_connect_tcp, address.host, str(address.port))
                cancelling.run_apart(dial, cancel, limit=limit)
            # qemu-nbd without --shared accepts others and does not answer them.
            late += "; the server may be serving another client"
            wait()
            # A server of the old protocol has one export and no options.
            bitmaps = [] if handle.aio_is_ready() else _negotiate(handle, server, wait)
        if not handle.aio_is_ready():
            raise errors.Transient(url=server.name, reason="the server closed the connection")
        try:
            handle.get_size()
        except nbd.Error as err:
            # It has more than 63 bits.
            raise Failed(url=server.name, reason="the server reports an impossible size") from err
    except nbd.Error as err:
        raise _failure(server, err) from err
    except TimeoutError as err:
        raise errors.Transient(url=server.name, reason=late) from err
    return bitmaps


def library() -> Any:
    """Import and return libnbd's bindings."""
    try:
        import nbd
    except ImportError as err:
        from cdi_worker import version

        command = version.install_libnbd()
        raise errors.MissingExtra(what="NBD", package="nbd (libnbd)", extra="", install=command) from err
    return nbd


def step(handle: Any, fd: int, wake: int, milliseconds: float | None) -> set[int]:
    """Wait for what libnbd waits for on ``fd``, or for ``wake``, and let it read or write.

    Returns which of the two were ready.
    """
    direction: int = handle.aio_get_direction()
    polled = select.poll()
    polled.register(wake, select.POLLIN)
    expected = select.POLLIN if direction & _READ else 0
    polled.register(fd, expected | (select.POLLOUT if direction & _WRITE else 0))
    ready = dict(polled.poll(milliseconds))
    events = ready.get(fd, 0)
    if events & ~select.POLLOUT and direction & _READ:
        handle.aio_notify_read()
    elif events and direction & _WRITE:
        handle.aio_notify_write()
    return set(ready)


def _negotiate(handle: Any, server: Server, wait: Callable[[], None]) -> list[str]:
    if not handle.aio_is_negotiating() and server.folder:
        # nbdkit without TLS closes the connection when it is asked for it.
        raise Failed(url=server.name, reason="closed by the server, which perhaps has no TLS; use nbd://")
    if not handle.aio_is_negotiating():
        raise errors.Transient(url=server.name, reason="the server closed the connection")
    listed: list[str] = []
    if handle.get_structured_replies_negotiated():
        handle.add_meta_context(BITMAP)
        handle.aio_opt_list_meta_context(functools.partial(_collect, listed))
        wait()
        handle.clear_meta_contexts()
        for context in server.contexts:
            handle.add_meta_context(context)
    outcome: list[int] = []

    def end(error: Any) -> int:
        outcome.append(error.value)
        return 1

    handle.aio_opt_go(end)
    wait()
    if not any(outcome):
        return [name.removeprefix(BITMAP) for name in listed if name.startswith(BITMAP)]
    error, export = outcome[0], server.address.export
    if error in {errno.ENOTSUP, errno.ENOTCONN}:
        raise Failed(url=server.name, reason="the server requires TLS; use nbds://")
    if error in {errno.EPERM, errno.EACCES}:
        raise Failed(url=server.name, reason=f"the server denies access to the export {export!r}")
    if error != errno.ENOENT or not handle.aio_is_negotiating():
        reason = f"the server refuses the export {export!r}: {os.strerror(error).lower()}"
        raise errors.Transient(url=server.name, reason=reason)
    exports: list[str] = []
    handle.aio_opt_list(functools.partial(_collect, exports))
    wait()
    names = f"; the server has {', '.join(map(repr, exports))}" if exports else ""
    raise Failed(url=server.name, reason=f"no export {export!r}{names}")


def _collect(found: list[str], name: str, *_: object) -> int:
    if len(found) < MOST_NAMES:
        found.append(name)
    return 0


#: Part of libnbd's message, and ours.
_CAUSES = (
    ("getaddrinfo", "unknown host"),
    ("certificate", "TLS: {text}"),
    ("refused TLS", "the server has no TLS; use nbd://"),
    ("server policy", "the server has no TLS; use nbd://"),
    ("gnutls", "TLS handshake failed ({text}); does the server require a client certificate?"),
    ("handshake: ", "not an NBD server? ({text})"),
)
_UNREACHABLE = {errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH}
_FINAL = _UNREACHABLE | {errno.ENOENT, errno.EACCES, errno.ENOTSOCK}


def _failure(server: Server, err: Any) -> errors.Error:
    """Return the error for an exception of libnbd while connecting."""
    text = words(err)
    for part, message in _CAUSES:
        if part in err.string:
            remedy = handshakes.UNSPECIFIED if part == "certificate" else None
            return Failed(url=server.name, reason=message.format(text=text), remedy=remedy)
    if err.errnum:
        reason = f"connect: {os.strerror(err.errnum).lower()}"
        return (Failed if err.errnum in _FINAL else errors.Transient)(url=server.name, reason=reason)
    return errors.Transient(url=server.name, reason=text or "the server closed the connection")


def words(err: Any) -> str:
    """Return libnbd's message without the name of the function."""
    return masking.quoted(str(err.string).partition(": ")[2] or str(err.string))
