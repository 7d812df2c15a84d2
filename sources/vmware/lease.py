"""An export lease (HttpNfcLease of the vSphere API): what it serves, and its life."""

from __future__ import annotations

import hashlib
import logging
import re
import time
import urllib.parse
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.sources import renewal
from cdi_worker.sources.vmware import machine as machines
from cdi_worker.sources.vmware import session

log = logging.getLogger(__name__)

#: Seconds for vSphere to prepare a lease.
READY = 300.0
#: Seconds to wait for a renewal that is under way, and to repeat a call that ends a lease and fails.
ENDING = 5.0
#: Seconds of the shortest and the longest time-out that is believed: ESXi 5 stated 300,000,000.
SHORTEST, LONGEST = 3, 900
#: The key of a disk's URL: the machine, the type and number of its controller, and its unit.
_KEY: Final = re.compile(r"/[^/]+/([A-Za-z0-9]+:\d+)")
#: What faults mean when a lease begins. Messages of vSphere's own are less clear.
_REFUSED: Final = {
    "InvalidPowerState": "the machine runs; name a snapshot of it, or let one be taken",
    "RestrictedVersion": "the licence of this ESXi host does not allow it",
    "NotSupported": "vSphere does not export this machine; is one of its disks encrypted or shared?",
    "FileFault": "the host cannot read the files of the machine",
    "SnapshotFault": "vSphere cannot export this snapshot",
}


class Device(NamedTuple):
    """A disk of a lease. ``url``: where its stream is; ``thumbprint``: of the certificate there."""

    key: str
    url: str
    thumbprint: str


class Entry(NamedTuple):
    """What a manifest states of a stream: a digest and its length in bytes, and the bytes of the disk."""

    algorithm: str
    digest: str
    size: int
    capacity: int | None


class Lease:
    """The lease of a machine, or of a snapshot, from its beginning. A thread renews it.

    Raises ``errors.Unreachable`` if vSphere refuses it. ``pause`` waits, and raises when the import ends.
    ``progress``: returns how many percent have been read.
    """

    def __init__(
        self,
        opened: session.Session,
        machine: machines.Machine,
        snapshot: machines.Snapshot | None,
        pause: Callable[[float], object],
        progress: Callable[[], int],
    ) -> None:
        self._session = opened
        self._progress = progress
        self._name = machine.name
        self._is_held = True
        found = machine.managed(snapshot)
        begin = found.ExportVm if snapshot is None else found.ExportSnapshot
        self._lease = machines.when_free(lambda: opened.call("begin an export", begin, _REFUSED), pause)
        self._renewal = renewal.Renewal("lease", self._renew, SHORTEST)
        try:
            info = self._wait(pause)
            seconds = min(max(int(info.leaseTimeout or 0), SHORTEST), LONGEST)
            self._renewal = renewal.Renewal("lease", self._renew, seconds / 3)
            self._renewal.start()
            #: By the address of the disk; see ``machines.VirtualDisk``.
            self.devices = self._devices(info)
            log.info("lease machine=%r disks=%d timeout=%d", self._name, len(self.devices), seconds)
            self._hash = self._ask_for_sha256()
        except BaseException:
            self.abort()
            raise

    def check(self, offset: int = 0) -> None:
        """Raise ``errors.TransferFailed`` unless the lease is held."""

        def look() -> tuple[str, Any]:
            return str(self._lease.state), self._lease.error

        try:
            state, fault = self._session.call("look at the lease", look)
        except errors.Unreachable as err:
            state, fault = "", str(err.fields["reason"])
        if state not in {"initializing", "ready"}:
            raise errors.TransferFailed(url=self._session.name, offset=offset, reason=_ended(fault))

    def new_hash(self) -> Any:
        """Return a hash object of the algorithm that the manifest has."""
        return hashlib.new(self._hash, usedforsecurity=False)

    def manifest(self) -> dict[str, Entry]:
        """Return, before ``complete``, what the host has noted of each stream that it has sent, by key.

        Empty without a manifest. Raises ``errors.Transient`` if vSphere may have one, but does not answer.
        """
        doing = "read the manifest of the lease"
        try:
            entries = self._session.call(doing, lambda: list(self._lease.HttpNfcLeaseGetManifest()))
        except errors.Transient:
            raise
        except errors.SourceError as err:
            log.info("no manifest reason=%s", err)
            return {}
        found = {}
        for each in entries:
            algorithm = str(getattr(each, "checksumType", None) or "sha1").lower().replace("-", "")
            digest = (
                str(getattr(each, "checksum", None) or "") if algorithm != "sha1" else str(each.sha1 or "")
            )
            capacity = None if each.capacity is None else int(each.capacity)
            found[str(each.key)] = Entry(algorithm, digest.lower(), int(each.size or 0), capacity)
        return found

    def complete(self) -> None:
        """End the lease after success: vSphere unlocks the machine."""
        self._end("complete the lease", self._lease.HttpNfcLeaseComplete)

    def abort(self) -> None:
        """End the lease, unless it has ended. Safe to call twice."""
        self._end("abort the lease", self._lease.HttpNfcLeaseAbort)

    def _end(self, doing: str, end: Callable[[], object]) -> None:
        # One that is under way would log in again after the logout.
        self._renewal.end(ENDING)
        if not self._is_held:
            return
        self._is_held = False
        try:
            retry.patiently(lambda: self._session.call(doing, end), ENDING, cancelling.NEVER)
            log.info("%s machine=%r", doing, self._name)
        except errors.SourceError as err:
            # It ends by itself, and everything that was read is right.
            log.warning("vSphere unlocks the machine when the lease times out reason=%s", err)

    def _wait(self, pause: Callable[[float], object]) -> Any:
        """Wait until the lease is ready; return its information."""
        deadline = time.monotonic() + READY
        while True:
            state = self._session.call("wait for the export", lambda: str(self._lease.state))
            if state == "ready":
                return self._session.call("read the lease", lambda: self._lease.info)
            if state != "initializing" or time.monotonic() > deadline:
                self.check()
                reason = f"the lease is not ready after {READY:.0f} s"
                raise errors.Unreachable(url=self._session.name, reason=reason)
            pause(machines.LOOK)

    def _renew(self) -> None:
        percent = self._progress()
        self._session.call("renew the lease", lambda: self._lease.HttpNfcLeaseProgress(percent))

    def _devices(self, info: Any) -> dict[str, Device]:
        found = {}
        for each in info.deviceUrl or ():
            # Firmware settings and CD images are served, too.
            if each.disk is False or not (key := _KEY.fullmatch(str(each.key))):
                continue
            try:
                url = _url(str(each.url), self._session.server)
            except ValueError as err:
                reason = f"the lease has a malformed URL of disk {key[1]}; expected https://host[:port]/path"
                raise errors.Unreachable(url=self._session.name, reason=reason) from err
            found[key[1]] = Device(str(each.key), url, str(each.sslThumbprint or ""))
        return found

    def _ask_for_sha256(self) -> str:
        """Ask for SHA-256 in the manifest, before the first byte; return the algorithm that it will have."""
        pair = session.pyvmomi().vim.KeyValue
        wanted = [pair(key=each.key, value="sha256") for each in self.devices.values()]
        try:
            self._session.call(
                "ask for SHA-256", lambda: self._lease.HttpNfcLeaseSetManifestChecksumType(wanted)
            )
        except errors.Transient:
            # It may have been heard: then the manifest has no SHA-1.
            raise
        except errors.SourceError as err:
            log.debug("the manifest has SHA-1 reason=%s", err)
            return "sha1"
        return "sha256"


def _url(url: str, server: session.Server) -> str:
    """Return the URL of a device with the host of the server for ``*``, which ESXi writes for itself.

    Raises ``ValueError`` unless it is one of https: others would be read without TLS.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme != "https" or not parts.hostname:
        raise ValueError("not https")
    # Raises it, too.
    _ = parts.port
    if parts.netloc.partition(":")[0] == "*":
        host = f"[{server.host}]" if ":" in server.host else server.host
        parts = parts._replace(netloc=f"{host}:{server.port}")
    # Who knows the path may read the disk while the lease is held.
    masking.register(server, *(each for each in parts.path.split("/")[2:3] if len(each) > 20))
    return urllib.parse.urlunsplit(parts._replace(path=urllib.parse.quote(parts.path, safe="/%:@")))


def _ended(fault: Any) -> str:
    text = getattr(fault, "localizedMessage", None) or getattr(fault, "msg", None) or fault or ""
    reason = f" ({masking.quoted(str(text))})" if text else ""
    return (
        f"the lease ended{reason}: another client or an administrator ended it, or vSphere heard nothing of "
        "this one in time; run the import again"
    )
