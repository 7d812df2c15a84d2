"""A session of vCenter or ESXi: TLS trust, renewed logins, translated faults (pyvmomi)."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import http.client
import logging
import re
import ssl
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, Self, TypeVar

from cdi_worker import errors, masking
from cdi_worker.sources import certificates, handshakes, responses, wire
from cdi_worker.sources.vmware import locations

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds for a response. vCenter is slow to list changed areas.
TIMEOUT = 120.0
#: API version of ESXi and vCenter 5.5, and of 6.7, of which the checksums of an export are.
VERSION, CHECKSUMS = "vim.version.version9", "vim.version.version12"
#: Bytes of the longest response, of which pyvmomi makes objects. 2000 changed areas have 200 KB.
LONGEST: Final = 8 << 20


@dataclasses.dataclass(frozen=True)
class Server:
    """A vCenter or ESXi host. ``thumbprint``: SHA-1 of its certificate, with colons."""

    host: str
    port: int
    thumbprint: str


class Busy(errors.Transient):
    """Another operation locks the object."""


_NONE: Final[Mapping[str, str]] = {}


class Session:
    """A login session. Raises ``errors.Unreachable``, ``Transient`` and ``SourceError``.

    If the session has expired, it logs in again and repeats the call.
    """

    def __init__(self, location: locations.Vsphere) -> None:
        self.name = wire.safe_url(location.url)
        self._access = location.access
        parts = urllib.parse.urlsplit(location.url)
        host, port = parts.hostname or "", parts.port or 443
        pin = location.thumbprint
        context = pinned(pin) if pin else wire.tls_context(location.access)
        self._stub = pyvmomi().SoapStubAdapter(
            host,
            port,
            version=VERSION,
            sslContext=context,
            httpConnectionTimeout=wire.TIMEOUT[0],
            # What a compressed response expands to could not be limited.
            acceptCompressedResponses=False,
        )
        # pyvmomi's name for the class of its connections.
        self._stub.scheme = _Connection
        with self._translate_errors("connect"):
            # VDDK always requires the thumbprint, of SHA-1; here the certificate is verified already.
            connected = self._stub.GetConnection()
            if connected.sock is None:
                # pyvmomi 8 connects with the first request.
                connected.connect()
            self.server = Server(host, port, _digest(connected.sock))
            self._stub.ReturnConnection(connected)
        self._instance = pyvmomi().vim.ServiceInstance("ServiceInstance", self._stub)
        self._logins = 0
        self._logging_in = threading.Lock()

    def __enter__(self) -> Self:
        try:
            with self._translate_errors("log in"):
                self._log_in()
                about = self._content.about
                log.info("vsphere url=%r product=%r", self.name, about.fullName)
                if [int(each) for each in about.apiVersion.split(".")[:2]] >= [6, 7]:
                    self._stub.ComputeVersionInfo(CHECKSUMS)
        except errors.Error:
            self._stub.DropConnections()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # An expired session needs no logout; other failures must not hide the error of the block.
        with contextlib.suppress(errors.Error), self._translate_errors("log out"):
            self._content.sessionManager.Logout()
        self._stub.DropConnections()

    @property
    def product(self) -> str:
        """The name and the version of the server."""
        return str(self._content.about.fullName)

    @property
    def instance(self) -> str:
        """The id of this installation; its address, if it has none."""
        return str(self._content.about.instanceUuid or self.name)

    @property
    def is_vcenter(self) -> bool:
        return bool(self._content.about.apiType == "VirtualCenter")

    def find(self, uuid: str) -> Any:
        """Return pyvmomi's virtual machine with this instance UUID, else with this BIOS UUID."""

        def find() -> Any:
            index = self._content.searchIndex
            return index.FindByUuid(None, uuid, True, True) or index.FindByUuid(None, uuid, True, False)

        found = self.call("find the virtual machine", find)
        if found is None:
            raise errors.Unreachable(
                url=self.name, reason=f"no virtual machine with instance or BIOS UUID {uuid!r}"
            )
        return found

    def call(self, doing: str, function: Callable[[], T], meanings: Mapping[str, str] = _NONE) -> T:
        """Return the result of ``function``, after a new login if the session has expired.

        ``meanings``: of faults of this call, by the name of their type; they are final.
        """
        with self._translate_errors(doing, meanings):
            logins = self._logins
            try:
                return function()
            except pyvmomi().vim.fault.NotAuthenticated:
                with self._logging_in:
                    # vSphere refuses the login of a session that another thread has logged in.
                    if self._logins == logins:
                        log.info("vsphere url=%r session expired, logging in again", self.name)
                        self._log_in()
                return function()

    def _log_in(self) -> None:
        self._content = self._instance.RetrieveContent()
        self._content.sessionManager.Login(self._access.user, self._access.password, None)
        self._logins += 1
        # As pyvmomi sends it: NAME="VALUE"; Path=/; ...
        masking.register(self, *masking.headers([("cookie", str(self._stub.cookie or "").partition(";")[0])]))

    @contextlib.contextmanager
    def _translate_errors(self, doing: str, meanings: Mapping[str, str] = _NONE) -> Iterator[None]:
        vmodl = pyvmomi().vmodl
        try:
            yield
        except errors.Error:
            raise
        except ssl.SSLCertVerificationError as err:
            cause = handshakes.certificate(err)
            remedy = errors.Remedy([*(cause.remedy or ()), ("pin the certificate", "thumbprint")])
            raise errors.Unreachable(url=self.name, reason=cause.reason, remedy=remedy) from err
        except responses.TooLong as err:
            raise errors.Unreachable(url=self.name, reason=f"{doing}: {err}; check the server") from err
        except (OSError, http.client.HTTPException) as err:
            kind = errors.Malformed if wire.violation(err) else errors.Transient
            raise kind(url=self.name, reason=f"{doing}: {err or type(err).__name__}") from err
        except vmodl.MethodFault as err:
            message = f"{err.msg or 'no reason given'} ({type(err).__name__.rpartition('.')[2]})"
            # The first of its type and its base types that is known.
            for each in type(err).__mro__:
                name = each.__name__.rpartition(".")[2]
                if name in (known := {**_FAULTS, **meanings}):
                    lacking = (getattr(err, "privilegeId", ""), getattr(err, "object", ""))
                    privilege, on = (masking.quoted(str(each).strip("'")) for each in lacking)
                    reason = known[name].format(privilege=privilege, on=on)
                    raise errors.Unreachable(url=self.name, reason=f"{doing}: {reason}") from err
                if name in _PASSING:
                    kind = Busy if name == "TaskInProgress" else errors.Transient
                    raise kind(url=self.name, reason=f"{doing}: {message}") from err
            raise errors.SourceError(reason=f"{self.name}: {doing}: {message}") from err
        except Exception as err:
            # pyvmomi trusts the shape of answers, and raises anything for others: of expat, AttributeError,
            # even a plain Exception.
            reason = (
                f"{doing}: unexpected response ({type(err).__name__}); not a vSphere server? check the URL"
            )
            raise errors.Unreachable(url=self.name, reason=reason) from err


#: Messages of faults, by the name of their type.
_FAULTS = {
    "InvalidLogin": "wrong user name or password",
    "NoPermission": "no privilege {privilege} on {on}; give the user a role that has it",
    "ManagedObjectNotFound": "the object no longer exists",
}
#: Faults worth a retry.
_PASSING = {"HostCommunication", "HostConnectFault", "RequestCanceled", "Timedout", "TaskInProgress"}


class _Response(responses.Bounded):
    most = LONGEST

    def begin(self) -> None:
        super().begin()
        if self.getheader("Content-Encoding", "identity").lower() != "identity":
            raise responses.TooLong("the response is compressed, which was not requested")


class _Connection(http.client.HTTPSConnection):
    response_class = _Response

    def connect(self) -> None:
        super().connect()
        self.sock.settimeout(TIMEOUT)


class _PinnedContext(ssl.SSLContext):
    """Trusts one certificate by its thumbprint, regardless of its CA. Checked before any data is sent."""

    thumbprint = ""

    def wrap_socket(self, *args: Any, **kwargs: Any) -> ssl.SSLSocket:
        wrapped = super().wrap_socket(*args, **kwargs)
        presented = _digest(wrapped, _ALGORITHMS[len(self.thumbprint)])
        if presented != self.thumbprint:
            wrapped.close()
            raise ssl.SSLCertVerificationError(
                f"the certificate has thumbprint {presented}, not {self.thumbprint}; "
                "check the server, and the thumbprint if its certificate was renewed"
            )
        return wrapped


#: By the characters of a thumbprint, with colons.
_ALGORITHMS: Final = {59: "sha1", 95: "sha256"}


def pinned(thumbprint: str) -> ssl.SSLContext:
    """Return a TLS context that trusts only the certificate with this thumbprint, of SHA-1 or SHA-256."""
    digits = _digits(thumbprint)
    if not re.fullmatch(r"[0-9A-F]{40}|[0-9A-F]{64}", digits):
        what = "is not a thumbprint, of SHA-1 or SHA-256: 20 or 32 bytes in hex"
        raise errors.RequestError(f"thumbprint {thumbprint!r} {what}")
    if is_forbidden(thumbprint):
        what = "is of SHA-1, which the OpenSSL policy of this machine forbids"
        remedy = "give that of SHA-256: openssl x509 -noout -fingerprint -sha256 -in CERTIFICATE"
        raise errors.RequestError(f"thumbprint {thumbprint!r} {what}; {remedy}")
    context = certificates.prepare(_PinnedContext(ssl.PROTOCOL_TLS_CLIENT))
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.thumbprint = ":".join(re.findall("..", digits))
    return context


def is_forbidden(thumbprint: str) -> bool:
    """Return whether a thumbprint is of SHA-1, and the policy of the machine forbids that for security."""
    if len(_digits(thumbprint)) != 40:
        return False
    try:
        # Not hashlib.new, which falls back to Python's own code.
        hashlib.sha1()  # noqa: S324 - only whether there is one
    except ValueError:
        return True
    return False


def _digits(thumbprint: str) -> str:
    return re.sub(r"[:\s]", "", thumbprint).upper()


def _digest(connected: ssl.SSLSocket, algorithm: str = "sha1") -> str:
    certificate = connected.getpeercert(binary_form=True) or b""
    return hashlib.new(algorithm, certificate, usedforsecurity=False).digest().hex(":").upper()


def pyvmomi() -> Any:
    with errors.optional("vSphere", package="pyvmomi", extra="vddk"):
        import pyVmomi
    return pyVmomi
