"""A login to vCenter or ESXi: trust, sessions that expire, faults as sentences (pyvmomi)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import logging
import re
import socket
import ssl
import urllib.parse
import xml.parsers.expat
from collections.abc import Callable, Iterator
from typing import Any, Self, TypeVar

from cdi_worker import errors
from cdi_worker.sources import wire
from cdi_worker.sources.vmware import locations

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds for an answer. vCenter takes its time to look for changed areas.
TIMEOUT = 120.0
#: ESXi and vCenter from 5.5 on speak it; newer fields are not needed.
VERSION = "vim.version.version9"


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """Where vCenter or ESXi is; ``thumbprint``: what its certificate has, SHA-1 with colons."""

    host: str
    port: int
    thumbprint: str


class Session:
    """A login, ended with its block. Raises ``errors.Unreachable``, ``Transient`` and ``SourceError``.

    A session that expired is begun anew and the call made again.
    """

    def __init__(self, location: locations.Vddk) -> None:
        self.name = wire.safe_url(location.endpoint)
        self._access = location.access
        parts = urllib.parse.urlsplit(location.endpoint)
        host, port = parts.hostname or "", parts.port or 443
        pin = location.thumbprint
        context = _pinned(pin) if pin else wire.tls_context(location.access)
        with self._translated("connect"):
            self.server = Server(host, port, _thumbprint(host, port, context))
        self._stub = pyvmomi().SoapStubAdapter(
            host, port, version=VERSION, sslContext=context, httpConnectionTimeout=TIMEOUT
        )
        self._instance = pyvmomi().vim.ServiceInstance("ServiceInstance", self._stub)

    def __enter__(self) -> Self:
        try:
            with self._translated("log in"):
                self._log_in()
        except errors.Error:
            self._stub.DropConnections()
            raise
        log.info("vsphere url=%r product=%r", self.name, self._content.about.fullName)
        return self

    def __exit__(self, *_: object) -> None:
        # A session that expired is logged out, and what broke is reported by whoever it broke for.
        with contextlib.suppress(errors.Error), self._translated("log out"):
            self._content.sessionManager.Logout()
        self._stub.DropConnections()

    @property
    def is_vcenter(self) -> bool:
        return bool(self._content.about.apiType == "VirtualCenter")

    def find(self, uuid: str) -> Any:
        """Return the virtual machine with this instance uuid, else BIOS uuid, as pyvmomi has it."""

        def find() -> Any:
            index = self._content.searchIndex
            return index.FindByUuid(None, uuid, True, True) or index.FindByUuid(None, uuid, True, False)

        found = self.call("find the virtual machine", find)
        if found is None:
            raise errors.Unreachable(
                url=self.name, reason=f"no virtual machine with instance or BIOS uuid {uuid!r}"
            )
        return found

    def call(self, doing: str, function: Callable[[], T]) -> T:
        """Return what ``function`` returns, after a new login if it needs one."""
        with self._translated(doing):
            try:
                return function()
            except pyvmomi().vim.fault.NotAuthenticated:
                log.info("vsphere url=%r session expired, logging in again", self.name)
                self._log_in()
                return function()

    def _log_in(self) -> None:
        self._content = self._instance.RetrieveContent()
        self._content.sessionManager.Login(self._access.user, self._access.password, None)

    @contextlib.contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        vmodl = pyvmomi().vmodl
        try:
            yield
        except ssl.SSLCertVerificationError as err:
            why = getattr(err, "verify_message", "")
            reason = f"certificate not trusted: {why}; give its authority or thumbprint" if why else err
            raise errors.Unreachable(url=self.name, reason=reason) from err
        except (OSError, http.client.HTTPException) as err:
            raise errors.Transient(url=self.name, reason=f"{doing}: {err or type(err).__name__}") from err
        except xml.parsers.expat.ExpatError as err:
            raise errors.Unreachable(url=self.name, reason="not an address of vSphere") from err
        except vmodl.MethodFault as err:
            raise self._fault(doing, err) from err

    def _fault(self, doing: str, fault: Any) -> errors.Error:
        """Return a sentence for a fault, by its name or that of a kind it is of."""
        for kind in type(fault).__mro__:
            name = kind.__name__.rpartition(".")[2]
            if name in _FAULTS:
                return errors.Unreachable(url=self.name, reason=f"{doing}: {_FAULTS[name]}")
            if name in _PASSING:
                return errors.Transient(url=self.name, reason=f"{doing}: {_message(fault)}")
        return errors.SourceError(reason=f"{self.name}: {doing}: {_message(fault)}")


#: What a fault means to the one who asked, by the name of its type.
_FAULTS = {
    "InvalidLogin": "wrong user name or password",
    "NoPermission": "the user has no permission for that; see the privileges that VDDK needs",
    "ManagedObjectNotFound": "it is no longer there",
    "FileFault": (
        "vSphere has no list of changes since then: changed block tracking is off or was reset, or the "
        "change id is of another disk; begin again with a full copy"
    ),
    "InvalidArgument": "vSphere does not accept that; is the change id one of this disk?",
}
#: Faults that trying again can mend.
_PASSING = {"HostCommunication", "HostConnectFault", "RequestCanceled", "Timedout", "TaskInProgress"}


def _message(fault: Any) -> str:
    return f"{fault.msg or 'no reason given'} ({type(fault).__name__.rpartition('.')[2]})"


class _PinnedContext(ssl.SSLContext):
    """Trusts one certificate by its thumbprint, whoever signed it, before anything is sent."""

    thumbprint = ""

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        wrapped = super().wrap_socket(*args, **kwargs)
        presented = _digest(wrapped)
        if presented != self.thumbprint:
            wrapped.close()
            raise ssl.SSLCertVerificationError(
                f"the certificate has thumbprint {presented}, not {self.thumbprint}: "
                "another server, or a new certificate"
            )
        return wrapped


def _pinned(thumbprint: str) -> ssl.SSLContext:
    digits = re.sub(r"[:\s]", "", thumbprint).upper()
    if not re.fullmatch(r"[0-9A-F]{40}", digits):
        raise errors.RequestError(f"thumbprint {thumbprint!r} is not a SHA-1 thumbprint: 20 bytes in hex")
    context = _PinnedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.thumbprint = ":".join(re.findall("..", digits))
    return context


def _digest(connected: ssl.SSLSocket) -> str:
    certificate = connected.getpeercert(binary_form=True) or b""
    return hashlib.sha1(certificate, usedforsecurity=False).digest().hex(":").upper()


def _thumbprint(host: str, port: int, context: ssl.SSLContext) -> str:
    """Return the thumbprint of the certificate that ``context`` trusts: VDDK wants it in any case."""
    with (
        socket.create_connection((host, port), wire.TIMEOUT[0]) as plain,
        context.wrap_socket(plain, server_hostname=host) as wrapped,
    ):
        return _digest(wrapped)


def pyvmomi() -> Any:
    with errors.optional("vSphere", package="pyvmomi", extra="vddk"):
        import pyVmomi
    return pyVmomi
