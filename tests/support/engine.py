"""An oVirt engine for image transfers: XML over HTTPS, with the phases of the real one.

The real ovirt-imageio daemon serves the data. A disk is locked from the start of a transfer to its end,
and the engine cancels a transfer that is not used.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self
from xml.sax.saxutils import escape

from tests.support import engine_http, imageiod, processes, threaded, tls
from tests.support.engine_states import ENDED, NEXT, Transfer

USER, PASSWORD = "admin@internal", "secret-of-the-engine"
DOMAINS = ("domain-without", "domain-with")


class Engine:
    """Run an engine for the duration of a ``with`` block.

    Faults: ``slow`` seconds in the phase initializing, ``broken``: the number of 503 responses to come,
    ``inactivity`` timeout in seconds, ``host``: whether transfer URLs have the host's real address (proxy
    URLs always do), ``delay`` of each read, ``flat``: serve raw disks from a file, without extents,
    ``mute``: answer no request until it is reset, ``extends``: whether an extend renews a lost ticket,
    ``front``: the port of a relay to the daemon, for all transfer URLs, ``short``: bytes that files lack at
    the end, of ``flat`` disks and of deltas, ``ending``: an operation that ends just before the next transfer
    locks the disk.
    """

    def __init__(self, directory: Path, daemon: imageiod.Daemon, pair: tls.KeyPair) -> None:
        self.directory = directory
        self.daemon = daemon
        self.chains: dict[str, imageiod.Chain] = {}
        self.locked: set[str] = set()
        self.transfers: list[Transfer] = []
        self.calls: list[str] = []
        self._tokens: set[str] = set()
        self.reset()
        self._pair = pair
        self._numbers = itertools.count(1)
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._stopping = threading.Event()
        self._listening = contextlib.ExitStack()
        self.port = 0

    def reset(self) -> None:
        """Forget the transfers and faults of an earlier test, and the sessions of workers that it killed."""
        self._tokens.clear()
        self.transfers.clear()
        self.calls.clear()
        self.slow = 0.05
        self.broken = 0
        self.inactivity = 60.0
        self.host = True
        self.delay = ""
        self.flat = False
        self.mute = False
        self.extends = True
        self.front: int | None = None
        self.short = 0
        self.ending: Callable[[], object] | None = None

    def __enter__(self) -> Self:
        self.start()
        threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._stopping.set()
            self._changed.notify_all()
        self.stop()
        for transfer in self.transfers:
            self._drop(transfer)

    @property
    def url(self) -> str:
        """Return the URL of the API."""
        return f"https://127.0.0.1:{self.port}/ovirt-engine/api"

    def start(self) -> None:
        """Listen, on the same port after ``stop``; all sessions are forgotten."""
        self._tokens.clear()
        server = threaded.Threaded(engine_http.Server(self, self.port, self._pair))
        self.port = self._listening.enter_context(server).port

    def stop(self) -> None:
        """Refuse connections."""
        self._listening.close()

    def add_disk(self, disk: str, content: Path) -> imageiod.Chain:
        """Add a disk with the content of a raw file."""
        self.chains[disk] = imageiod.Chain(self.directory / disk, disk, content)
        return self.chains[disk]

    @property
    def last(self) -> Transfer:
        """Return the most recent transfer."""
        return self.transfers[-1]

    # -- phases of transfers

    def enter(self, transfer: Transfer, phase: str) -> None:
        """Put a transfer into a phase, and add or remove its ticket."""
        with self._lock:
            transfer.log.append(phase)
            transfer.since = time.monotonic()
            if phase == "transferring":
                transfer.ticket = str(uuid.uuid4())
                self._admit(transfer)
            elif phase not in {"initializing", "resuming"}:
                self._drop(transfer)
            if phase in ENDED:
                self.locked.discard(transfer.disk)
            self._changed.notify_all()

    def expire(self, transfer: Transfer) -> None:
        """Remove the ticket on the host, as a restart of the daemon does."""
        with self._lock:
            self._revoke(transfer)

    def _admit(self, transfer: Transfer) -> None:
        if transfer.admitted:
            return
        volume = transfer.volume
        if transfer.form == "cow":
            url, size = self._file(transfer, volume.path)
        elif self.flat:
            raw = self.chains[transfer.disk].content(volume.id, self.directory / f"{transfer.id}.raw")
            url, size = self._file(transfer, raw)
        else:
            directory = self.directory / transfer.id
            directory.mkdir(exist_ok=True)
            transfer.export.close()
            for leftover in directory.iterdir():
                leftover.unlink()
            socket = transfer.export.enter_context(
                imageiod.exported(directory, volume.path, delay=self.delay)
            )
            url, size = f"nbd:unix:{socket}", volume.size
        self.daemon.add(transfer.ticket, url, size)
        transfer.admitted = True

    def _file(self, transfer: Transfer, path: Path) -> tuple[str, int]:
        """Return URL and size of a file to serve, of a copy if it is to be short."""
        size = path.stat().st_size - self.short
        if self.short:
            path = Path(shutil.copy(path, self.directory / f"{transfer.id}.short"))
            os.truncate(path, size)
        return f"file://{path}", size

    def _revoke(self, transfer: Transfer) -> None:
        if transfer.admitted:
            transfer.admitted = False
            self.daemon.remove(transfer.ticket)

    def _drop(self, transfer: Transfer) -> None:
        self._revoke(transfer)
        transfer.export.close()

    def _watch(self) -> None:
        """Advance transfers to their next phase in time, and cancel unused ones."""
        with self._lock:
            while not self._stopping.is_set():
                for transfer in self.transfers:
                    due = self.slow if transfer.phase in {"initializing", "resuming"} else 0.05
                    if transfer.phase in NEXT and time.monotonic() - transfer.since >= due:
                        self.enter(transfer, NEXT[transfer.phase])
                    elif transfer.admitted and self.daemon.idle(transfer.ticket) >= self.inactivity:
                        self.enter(transfer, "cancelled_system")
                is_open = any(each.phase in NEXT or each.admitted for each in self.transfers)
                self._changed.wait(0.02 if is_open else None)

    # -- the REST API

    def answer(self, method: str, path: str, body: str, authorization: str) -> tuple[int, str]:
        """Return the status and the XML for one request."""
        self._silence()
        with self._lock:
            if self.broken:
                self.broken -= 1
                return 503, ""
            if authorization.removeprefix("Bearer ") not in self._tokens:
                return 401, _fault("Unauthorized", "the token is not valid")
            found = re.fullmatch(r"/ovirt-engine/api/(disks|storagedomains|imagetransfers)(/.*)?", path)
            if not found:
                return 404, _fault("Not found", path)
            self.calls.append(f"{method} {path.removeprefix('/ovirt-engine/api')}")
            kind, rest = found[1], [part for part in (found[2] or "").split("/") if part]
            answers = {
                "disks": self._disk,
                "storagedomains": self._snapshots,
                "imagetransfers": self._transfer,
            }
            return answers[kind](method, rest, body)

    def log_in(self, form: dict[str, str]) -> dict[str, str]:
        """Return a token, or an error for wrong credentials."""
        if self._silence() or self.broken:
            self.broken = max(0, self.broken - 1)
            raise ConnectionError
        if (form.get("username"), form.get("password")) != (USER, PASSWORD):
            return {"error_code": "access_denied", "error": "Cannot authenticate user Invalid credentials."}
        self._tokens.add(token := str(uuid.uuid4()))
        return {
            "access_token": token,
            "scope": "ovirt-app-api",
            "token_type": "bearer",
            "exp": "9999999999999",
        }

    def _silence(self) -> bool:
        """Wait while ``mute``; return whether it was set."""
        if was_mute := self.mute:
            processes.wait_for(lambda: not self.mute or self._stopping.is_set(), "a word", 300)
        return was_mute

    def log_out(self, form: dict[str, str]) -> dict[str, str]:
        """Revoke a token."""
        self._tokens.discard(form.get("token", ""))
        return {}

    @property
    def logged_in(self) -> int:
        """Return the number of open sessions."""
        return len(self._tokens)

    def _disk(self, _method: str, rest: list[str], _body: str) -> tuple[int, str]:
        chain = self.chains.get(rest[0])
        if chain is None:
            return 404, ""
        status = "locked" if chain.disk in self.locked else "ok"
        domains = "".join(f'<storage_domain id="{name}"/>' for name in DOMAINS)
        return 200, (
            f'<disk id="{chain.disk}"><image_id>{chain.active.id}</image_id><status>{status}</status>'
            f"<provisioned_size>{chain.active.size}</provisioned_size>"
            f"<total_size>{chain.active.size}</total_size><storage_domains>{domains}</storage_domains></disk>"
        )

    def _snapshots(self, _method: str, rest: list[str], _body: str) -> tuple[int, str]:
        found = [
            f'<disk_snapshot id="{volume.id}"><actual_size>{volume.path.stat().st_size}</actual_size>'
            f"<provisioned_size>{volume.size}</provisioned_size>"
            f'<disk id="{chain.disk}"/><snapshot id="{volume.snapshot}"/></disk_snapshot>'
            for chain in self.chains.values()
            for volume in chain.volumes[:-1]
            if rest[0] == DOMAINS[1]
        ]
        return 200, f"<disk_snapshots>{''.join(found)}</disk_snapshots>"

    def _transfer(self, method: str, rest: list[str], body: str) -> tuple[int, str]:
        if not rest:
            return self._add(body)
        transfer = next((item for item in self.transfers if item.id == rest[0]), None)
        if transfer is None:
            return 404, ""
        if method == "GET":
            return 200, self._describe(transfer)
        return self._act(transfer, rest[1])

    def _add(self, body: str) -> tuple[int, str]:
        disk = re.search(r'<disk id="([^"]+)"', body)
        snapshot = re.search(r'<snapshot id="([^"]+)"', body)
        form = re.search(r"<format>(\w+)</format>", body)
        requested = (disk or snapshot)[1] if disk or snapshot else ""
        for chain in self.chains.values():
            volume = chain.active if requested == chain.disk else chain.volume(requested)
            if volume is None or form is None:
                continue
            if chain.disk in self.locked:
                detail = "[Cannot transfer Virtual Disk: Disk is locked. Please try again later.]"
                return 409, _fault("Operation Failed", detail)
            if self.ending is not None:
                ending, self.ending = self.ending, None
                ending()
                return self._add(body)
            self.locked.add(chain.disk)
            transfer = Transfer(f"transfer-{next(self._numbers)}", chain.disk, volume, form[1])
            self.transfers.append(transfer)
            self.enter(transfer, "initializing")
            return 201, self._describe(transfer)
        return 404, ""

    def _act(self, transfer: Transfer, action: str) -> tuple[int, str]:
        allowed = {
            "extend": {"transferring"},
            "finalize": {"transferring", "paused_user", "paused_system"},
            "cancel": {"initializing", "transferring", "paused_user", "paused_system", "resuming"},
            "resume": {"paused_user", "paused_system"},
        }[action]
        if transfer.phase not in allowed:
            detail = f"[Cannot {action} image transfer in phase {transfer.phase}.]"
            return 409, _fault("Operation Failed", detail)
        if action == "extend" and self.extends:
            self._admit(transfer)
        phases = {"finalize": "finalizing_success", "cancel": "cancelled_user", "resume": "resuming"}
        if action in phases:
            self.enter(transfer, phases[action])
        return 200, "<action><status>complete</status></action>"

    def _describe(self, transfer: Transfer) -> str:
        url = self.daemon.url(transfer.ticket) if transfer.phase == "transferring" else ""
        url = url.replace(f":{self.daemon.port}/", f":{self.front or self.daemon.port}/")
        host = url if self.host else url.replace(f":{self.daemon.port}/", ":1/")
        urls = f"<transfer_url>{host}</transfer_url><proxy_url>{url}</proxy_url>" if url else ""
        return (
            f'<image_transfer id="{transfer.id}"><direction>download</direction>'
            f"<format>{transfer.form}</format><phase>{transfer.phase}</phase>{urls}</image_transfer>"
        )


def _fault(reason: str, detail: str) -> str:
    return f"<fault><reason>{escape(reason)}</reason><detail>{escape(detail)}</detail></fault>"


@contextlib.contextmanager
def running(
    directory: Path, *, local: bool = True, level: str = "INFO"
) -> Iterator[tuple[Engine, tls.Authority]]:
    """Run an engine and a daemon (see ``imageiod.daemon``), with certificates of one authority."""
    authority = tls.Authority(directory / "ca")
    pair = authority.issue()
    with (
        imageiod.daemon(directory / "daemon", pair, local=local, level=level) as daemon,
        Engine(directory, daemon, pair) as engine,
    ):
        yield engine, authority
