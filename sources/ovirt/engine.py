"""The REST API of an oVirt engine: a disk, its snapshots, and image transfers (ovirt-engine-sdk-python)."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

from cdi_worker import errors, masking
from cdi_worker.formats import smallxml
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, handshakes, wire
from cdi_worker.sources.ovirt import locations

with errors.optional("the imageio source", package="ovirt-engine-sdk-python", extra="imageio"):
    import ovirtsdk4
    import ovirtsdk4.types as sdk

log = logging.getLogger(__name__)

#: Limits in seconds: a response of the engine, a response after a cancel, the logout.
TIMEOUT, GRACE, LOGOUT = 30, 3.0, 3.0
#: Seconds after which the engine ends an unused transfer and unlocks the disk.
INACTIVITY = 60
#: Shortest and longest poll interval, in seconds.
FIRST_LOOK, LONGEST_LOOK = 0.05, 2.0
#: Seconds after which the request to end a transfer is repeated.
ASK_AGAIN = 5.0
#: The status of a disk that an operation locks.
LOCKED: Final = sdk.DiskStatus.LOCKED
#: HTTP statuses worth a retry.
TRANSIENT = wire.TRANSIENT_STATUS | {409}

# libcurl's error codes of TLS: permanent failures.
_TLS = re.compile(r"\((35|51|53|54|58|59|60|66|77|80|83|90|91), ")
#: CURLE_PEER_FAILED_VERIFICATION in it.
_UNVERIFIED = "(60, "
#: What curl says of an answer that is not taken (CURLE_WRITE_ERROR).
_REFUSED = "23, '"
#: Bytes of the longest answer. A snapshot has about 2 KB, and a list has those of a storage domain.
LONGEST: Final = 32 << 20


class NotFound(errors.Unreachable):
    """The object does not exist in the engine."""


class Locked(errors.Transient):
    """The disk is locked by another operation."""


class Engine:
    """A session of the engine. Thread-safe. ``authorities``: path of a PEM file with all trusted CAs."""

    def __init__(self, location: locations.Imageio, authorities: str, cancel: base.Cancel) -> None:
        self._cancel = cancel
        self.name = wire.safe_url(location.endpoint)
        self.is_https = location.endpoint.lower().startswith("https:")
        access = location.access
        self._connection = _Connection(
            url=location.endpoint.rstrip("/"),
            username=access.user,
            password=access.password,
            ca_file=None if access.insecure else authorities,
            insecure=access.insecure,
            timeout=TIMEOUT,
        )

    def log_in(self) -> None:
        """Log in. The SDK sets no time-out here, and the engine's web server allows an hour."""
        with self._translate_errors("login"):
            token = cancelling.run_apart(self._connection.authenticate, self._cancel, grace=0, limit=TIMEOUT)
        masking.register(self, str(token))

    def disk(self, number: str) -> Any:
        """Return a disk by its id."""
        service = self._connection.system_service().disks_service().disk_service(number)
        return self.ask(f"disk {number}", service.get, sdk.Disk)

    def snapshot(self, disk: Any, number: str) -> Any | None:
        """Return the snapshot of ``disk`` with this id, or None."""
        domains = self._connection.system_service().storage_domains_service()
        for domain in disk.storage_domains or ():
            what = f"snapshots in storage domain {domain.id}"
            listing = domains.storage_domain_service(domain.id).disk_snapshots_service().list
            for found in self.ask(what, listing, list):
                if not isinstance(found, sdk.DiskSnapshot):
                    raise self._invalid(what)
                if found.id == number and (found.disk is None or found.disk.id in (None, disk.id)):
                    return found
        return None

    def transfer(self, disk: Any, snapshot: Any | None, form: str) -> Transfer:
        """Start a download of a disk, or of a snapshot of it. ``form``: ``raw`` or ``cow``.

        Raises ``Locked`` while another operation locks the disk.
        """
        request = sdk.ImageTransfer(
            direction=sdk.ImageTransferDirection.DOWNLOAD,
            format=sdk.DiskFormat(form),
            inactivity_timeout=INACTIVITY,
        )
        if snapshot is None:
            request.disk = sdk.Disk(id=disk.id)
        else:
            request.snapshot = sdk.DiskSnapshot(id=snapshot.id)
        transfers = self._connection.system_service().image_transfers_service()
        begun = self.ask("image transfer", lambda: transfers.add(request), sdk.ImageTransfer)
        log.info("transfer id=%r disk=%r format=%r", begun.id, disk.id, form)
        return Transfer(self, begun.id, transfers.image_transfer_service(begun.id))

    def close(self) -> None:
        """Log out. Failures are ignored: the session expires by itself."""
        with contextlib.suppress(errors.Error), self._translate_errors("logout"):
            cancelling.run_apart(self._connection.close, cancelling.NEVER, limit=LOGOUT)

    def ask(self, what: str, call: Callable[[], Any], kind: type = object) -> Any:
        """Return the result of an SDK call, of class ``kind``. ``what``: its subject, for messages."""
        with self._translate_errors(what):
            found = cancelling.run_apart(call, self._cancel, grace=GRACE)
        # The SDK makes an object of any element.
        if not isinstance(found, kind):
            raise self._invalid(what)
        return found

    def _invalid(self, what: str) -> errors.Transient:
        return errors.Transient(url=self.name, reason=f"{what}: invalid response")

    @contextlib.contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except errors.Error:
            raise
        except TimeoutError as err:
            reason = f"{what}: no response within {TIMEOUT} s"
            raise errors.Transient(url=self.name, reason=reason) from err
        except ovirtsdk4.Error as err:
            raise self._error(what, err) from err
        except Exception as err:
            # The SDK trusts the shape of answers. For others, such as a proxy's page or a truncated body, it
            # raises anything, even a plain Exception.
            raise self._invalid(what) from err

    def _error(self, what: str, err: Any) -> errors.Error:
        # The engine's own message, without the SDK's wrapping.
        fault = getattr(err, "fault", None)
        detail = (fault.detail or fault.reason or "") if fault is not None else ""
        message = masking.quoted(detail.strip("[]") or str(err), 300)
        reason = f"{what}: {message}"
        if isinstance(err, ovirtsdk4.NotFoundError):
            return NotFound(url=self.name, reason=f"{what}: not found in the engine; check the id")
        if isinstance(err, ovirtsdk4.AuthError):
            return errors.Unreachable(url=self.name, reason=f"{reason}; check user, password and permissions")
        if _REFUSED in message:
            return errors.Unreachable(url=self.name, reason=f"{what}: the answer is too long; check the URL")
        if err.code == 409 and re.search(r"\blocked\b", message, re.IGNORECASE):
            return Locked(url=self.name, reason=reason)
        if (err.code is None and not _TLS.search(message)) or err.code in TRANSIENT:
            return errors.Transient(url=self.name, reason=reason)
        remedy = handshakes.UNSPECIFIED if _UNVERIFIED in message else None
        return errors.Unreachable(url=self.name, reason=reason, remedy=remedy)


class Transfer:
    """An image transfer."""

    #: Final phases, and those that lead to them.
    ENDED = frozenset({"cancelled", "finished_success", "finished_failure", "finished_cleanup"})
    ENDING = frozenset(
        {
            "finalizing_success",
            "finalizing_failure",
            "finalizing_cleanup",
            "cancelled_system",
            "cancelled_user",
        }
    )
    #: Phases that only a user can cause, unless we ended the transfer.
    BY_USER = frozenset({"cancelled_user", "finalizing_cleanup", "finished_cleanup"})

    def __init__(self, engine: Engine, number: str, service: Any) -> None:
        self.id = number
        self._engine = engine
        self._service = service

    def look(self) -> Any:
        """Return the current state of the transfer. Raises ``NotFound`` once the engine has removed it."""
        return self._engine.ask(f"image transfer {self.id}", self._service.get, sdk.ImageTransfer)

    def phase(self) -> str:
        """Return the name of the phase; ``unknown`` if the SDK does not know it."""
        return _phase(self.look())

    def urls(self, limit: float, pause: Callable[[float], None]) -> list[str]:
        """Wait until the transfer is ready; return the URLs of its data, the best first.

        ``pause``: waits for some seconds, or raises ``errors.Cancelled``.

        Raises ``errors.Unreachable`` if the transfer ends, is not ready after ``limit`` seconds, or has only
        http URLs, though the engine has https: whoever reads the ticket in one reads the disk.
        """
        deadline = time.monotonic() + limit
        phase = "unknown"
        for delay in _looks():
            with contextlib.suppress(errors.Transient):
                found = self.look()
                phase = _phase(found)
                urls = [url for url in (found.transfer_url, found.proxy_url) if url and base.is_web(url)]
                if phase == "transferring" and urls:
                    # The last part of the path is the ticket.
                    masking.register(self, *(url.rpartition("/")[2] for url in urls))
                    if self._engine.is_https:
                        urls = [url for url in urls if url.lower().startswith("https:")]
                    if urls:
                        return urls
                    reason = f"image transfer {self.id} has only http URLs, and the engine has https"
                    raise errors.Unreachable(url=self._engine.name, reason=reason)
                if phase == "paused_system":
                    self.resume()
            if phase in self.ENDED | self.ENDING or time.monotonic() > deadline:
                break
            pause(delay)
        raise errors.Unreachable(
            url=self._engine.name, reason=f"image transfer {self.id} is not ready (phase {phase})"
        )

    def extend(self) -> None:
        """Renew the ticket."""
        self._engine.ask("extend", self._service.extend)

    def resume(self) -> None:
        """Resume a transfer that the engine has paused."""
        log.info("transfer id=%r was paused by the engine, resuming", self.id)
        self._engine.ask("resume", self._service.resume)

    def end(self, limit: Callable[[], float], *, succeeded: bool) -> str:
        """Finalize or cancel the transfer and wait; return the last phase, '' once the engine has removed it.

        Never raises. After ``limit`` seconds (evaluated at each poll) it logs that the engine will end the
        transfer by itself.
        """
        started = ask_at = time.monotonic()
        phase = ""
        for delay in _looks():
            now = time.monotonic()
            try:
                phase = self.phase()
                if phase in self.ENDED:
                    log.info("transfer id=%r ended phase=%r", self.id, phase)
                    return phase
                if phase not in self.ENDING and now >= ask_at:
                    action = "finalize" if succeeded and phase == "transferring" else "cancel"
                    self._engine.ask(action, getattr(self._service, action))
                    ask_at = now + ASK_AGAIN
            except NotFound:
                return ""
            except errors.Error as err:
                log.debug("transfer id=%r end reason=%s", self.id, err)
            if now - started > limit():
                break
            # Not aborted by a cancel: the transfer must be ended then, too.
            time.sleep(delay)
        log.warning(
            "transfer id=%r not ended phase=%r; the engine ends it after %d s", self.id, phase, INACTIVITY
        )
        return phase


def _phase(found: Any) -> str:
    return found.phase.value if found.phase is not None else "unknown"


def _looks() -> Iterator[float]:
    delay = FIRST_LOOK
    while True:
        yield delay
        delay = min(1.5 * delay, LONGEST_LOOK)


class _Buffer(io.BytesIO):
    """Takes an answer, also one that curl decompresses. The SDK has no limit."""

    def write(self, data: Any, /) -> int:
        return super().write(data) if self.tell() + len(data) <= LONGEST else 0


# The SDK makes its buffers in functions that are too long to replace.
ovirtsdk4.io = types.SimpleNamespace(BytesIO=_Buffer)


class _Connection(ovirtsdk4.Connection):  # type: ignore[misc]  # without types
    """The SDK's connection, with answers that end and are plain XML."""

    def _read_reponse(self, context: Any) -> Any:
        """Return a response. Raises ``ValueError`` for XML that the SDK should not see.

        Its parser, libxml2, expands entities, and prints lines that it cannot parse, tickets included.
        """
        response = super()._read_reponse(context)
        if response.body and "xml" in (self._get_header_value(response.headers, "content-type") or ""):
            try:
                smallxml.parse(
                    response.body,
                    "answer",
                    lambda rule, reason: errors.Refused(format="answer", rule=rule, reason=reason),
                )
            except errors.Error as err:
                raise ValueError(str(err)) from err
        return response
