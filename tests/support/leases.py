"""The host behind vcsim's export leases: an HTTPS server that sends each disk as a stream-optimized VMDK.

    with vcsim.running():
        vcsim.host.page = dataclasses.replace(vcsim.host.page, cut=100_000)
        vcsim.save()  # after a change of what the lease says: names, thumbprints

A URL of it is valid while its lease is: then it answers 404, and a response ends with a reset.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import mmap
import re
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support import misbehave, processes, tls, vmdk_stream
from tests.support.pages import Page, Request

if TYPE_CHECKING:
    from tests.support import vmware

#: What ESXi sends with a disk: no length, no ranges, nothing to recognize it by.
PAGE = Page(framing="chunked", ranges=False, etag=None, modified=None, content_type="application/x-vmdk")
NOTHING = Page(b"File not found", status=404, content_type="text/plain")
#: The URL of the machine's variables has a raw space.
NVRAM = "the machine.nvram"

#: Makes a stream of a raw disk.
Maker = Callable[[Path, Path], None]


def place(disk: int) -> tuple[int, int, str]:
    """Return the controller of a disk, its unit, and what a lease calls both. The second disk is SATA."""
    if disk == 1:
        return 15000, 1, "VirtualAHCIController0:1"
    # Unit 7 of a SCSI bus is the controller itself.
    unit = disk if disk in (0, *range(8, 15)) else disk - 1
    return 1000, unit, f"ParaVirtualSCSIController0:{unit}"


def by_qemu(raw: Path, stream: Path) -> None:
    """Convert a disk: the tables come first, and the CID is another one each time."""
    options = ("-O", "vmdk", "-o", "subformat=streamOptimized")
    processes.run("qemu-img", "convert", "-f", "raw", *options, raw, stream)


def by_esxi(raw: Path, stream: Path) -> None:
    """Write a disk as ESXi does: the tables follow their grains, with markers, and a footer ends it."""
    stream.write_bytes(vmdk_stream.streamed(raw.read_bytes()))


def by_waiting_esxi(raw: Path, stream: Path) -> None:
    """Write a disk as ESXi does when it finds nothing to send for a long time: with markers of progress."""
    stream.write_bytes(vmdk_stream.streamed(raw.read_bytes(), progress=2))


class Host(misbehave.Server):
    """Serve the disks of a machine; settings are read anew for each request. Its certificate is its own."""

    def __init__(self, vcsim: vmware.Vcsim) -> None:
        self.authority = tls.Authority(vcsim.directory / "host", "CA of the host")
        self.pair = self.authority.issue()
        super().__init__(self.pair)
        self._vcsim = vcsim
        self._streams = vcsim.directory / "streams"
        self._streams.mkdir(exist_ok=True)
        self.reset()

    def reset(self) -> None:
        """Forget the requests, and serve without faults."""
        with self.lock:
            self.requests.clear()
            self._gets.clear()
        #: How long vcsim's log was, and the leases that were held then.
        self._events: tuple[int, set[str]] = 0, set()
        #: How streams are made: that of the first lease, of the second …; then again.
        self.makers: tuple[Maker, ...] = (by_qemu,)
        #: How disks are served, and the first responses (each for a number of requests) of a disk.
        self.page = PAGE
        self.turns: dict[int, list[tuple[Page, int]]] = {}
        #: What is served when the lease has ended.
        self.gone = NOTHING
        #: Changes a stream that is sent: the disk, the number of the request, its bytes. The host knows.
        self.change: Callable[[int, int, bytes], bytes] | None = None
        #: Changes the manifest's entry of a disk.
        self.state: Callable[[int, dict[str, Any]], dict[str, Any]] | None = None
        #: URLs have * as their host: vcsim is it.
        self.star = False
        #: The thumbprint that the lease states; None: the true one.
        self.stated: str | None = None

    def devices(self) -> list[dict[str, Any]]:
        """Return what a lease lists: disks, the last one first, and what is no disk between them."""
        found = []
        for position, disk in enumerate(self._order()):
            content = self._vcsim.current(disk)
            entry = self._device(disk, f"disk-{position}.vmdk")
            found.append({**entry, "Disk": True, "Size": content.stat().st_blocks * 512})
        nvram = self._device(None, NVRAM) | {"Key": "nvram", "Disk": False, "Size": 8684}
        return [*found[:1], nvram, *found[1:]]

    def requested(self, disk: int) -> list[Request]:
        """Return the GETs of a disk, in their order."""
        name = f"/disk-{list(self._order()).index(disk)}.vmdk"
        return [each for each in self.requests if each.path.endswith(name) and each.method == "GET"]

    def sent_of(self, disk: int) -> int:
        """Return how many bytes of a disk were sent."""
        return sum(each.sent for each in self.requested(disk))

    def stream(self, state: str, disk: int, lease: int = 1) -> Path:
        """Return the stream of a disk at a snapshot or now (``current``), as this lease has it."""
        maker = self.makers[(lease - 1) % len(self.makers)]
        # A snapshot does not change.
        name = f"{state}{f'.{lease}' if state == 'current' else ''}-{disk}-{maker.__name__}.vmdk"
        path = self._streams / name
        if not path.exists():
            made = path.with_suffix(".new")
            maker(self._vcsim.content(self._vcsim.number(state), disk), made)
            made.replace(path)
        return path

    def turn(self, path: str, method: str) -> tuple[Page, int]:
        """Return the page of a disk, and note what is sent for the manifest."""
        id_, disk, name = self._named(path)
        if not self._is_held(id_):
            return self.gone, 0
        with self.lock:
            number = self._gets[path] = self._gets.get(path, -1) + (method == "GET")
        if name == NVRAM:
            return dataclasses.replace(PAGE, body=b"variables" * 64), number
        if disk is None:
            return NOTHING, 0
        page = self._turn(disk, number)
        if page.status != 200 or page.to or page.silent:
            return page, number
        state, _, lease = id_.rpartition(".")
        # Requests of several disks come at once.
        with self._vcsim.saving:
            body = _mapped(self.stream(state, disk, int(lease)))
            body = self.change(disk, number, bytes(body)) if self.change else body
            if method == "GET":
                self._note(id_, disk, body)
        return dataclasses.replace(page, body=body), number

    def is_gone(self, request: Request) -> bool:
        """Report whether the lease of a request has ended."""
        return request.status in (200, 206) and not self._is_held(self._named(request.path)[0])

    def _turn(self, disk: int, number: int) -> Page:
        for page, times in self.turns.get(disk, []):
            if number < times:
                return page
            number -= times
        return self.page

    def _note(self, id_: str, disk: int, body: bytes) -> None:
        content = self._vcsim.content(self._vcsim.number(id_.rpartition(".")[0]), disk)
        entry = {
            "Key": self._key(disk),
            "SHA1": hashlib.sha1(body, usedforsecurity=False).hexdigest(),
            "SHA256": hashlib.sha256(body).hexdigest(),
            "Size": len(body),
            "Disk": True,
            "Capacity": content.stat().st_size,
            "Populated": content.stat().st_blocks * 512,
        }
        entry = self.state(disk, entry) if self.state else entry
        self._vcsim.manifests.setdefault(id_, {})[self._key(disk)] = entry
        self._vcsim.save()

    def _order(self) -> range:
        return range(self._vcsim.count - 1, -1, -1)

    def _key(self, disk: int) -> str:
        return place(disk)[2]

    def _device(self, disk: int | None, name: str) -> dict[str, Any]:
        thumbprint = self._vcsim.thumbprint if self.star else self.pair.thumbprint
        key = self._key(disk) if disk is not None else name
        return {
            "Key": key,
            "ImportKey": f"/machine/{key}",
            "URL": f"https://*/ha-nfc/{{id}}/{name}" if self.star else self.url(f"/nfc/{{id}}/{name}"),
            "Thumbprint": thumbprint if self.stated is None else self.stated,
            "TargetID": name,
            "Independent": disk in self._vcsim.independent,
        }

    def _named(self, path: str) -> tuple[str, int | None, str]:
        """Return the lease, the disk and the name of a URL's path."""
        found = re.fullmatch(r"/(?:ha-)?nfc/([^/]+)/(.+)", urllib.parse.unquote(path))
        if not found:
            return "", None, ""
        position = re.fullmatch(r"disk-(\d+)\.vmdk", found[2])
        order = self._order()
        is_known = position and int(position[1]) < len(order)
        return found[1], order[int(position[1])] if position and is_known else None, found[2]

    def _is_held(self, id_: str) -> bool:
        """Report whether a lease has begun and not ended; vcsim's log grows at its end only."""
        log = self._vcsim.directory / "calls.log"
        size = log.stat().st_size if log.exists() else 0
        if size != self._events[0]:
            held: set[str] = set()
            for line in log.read_text().splitlines() if size else ():
                call = json.loads(line)
                if call["call"] == "lease":
                    held.add(call["lease"])
                elif call["call"] == "ended":
                    held.discard(call["lease"])
            self._events = size, held
        return id_ in self._events[1]


def _mapped(path: Path) -> Any:
    """Return the bytes of a file, which may be larger than memory."""
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
