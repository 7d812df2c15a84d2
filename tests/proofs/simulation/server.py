"""A simulated web server: objects with versions, and responses with faults.

The product's HTTP source runs on it; what is simulated is the session of ``requests`` below.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import functools
import hashlib
import random
import re
import struct
from typing import Any

import requests
import requests.structures
import urllib3.exceptions
from isal import isal_zlib

from tests.proofs.simulation import disk as disks
from tests.proofs.simulation import kernel
from tests.proofs.simulation import scheduler as schedulers
from tests.support import qcow2_parts

#: The checkpoint of the first stage, which a delta names as its backing file.
BASE = "base.raw"
#: Seconds after which a read without data fails (``wire.TIMEOUT``).
READ_TIMEOUT = 60.0
BLOCK = 64 << 10
#: Bytes at the beginning that versions may have in common: more than the first response has.
_HEAD = 6 * BLOCK
#: Bytes on each side of a border between blocks that versions may have in common: requests overlap by less.
_EDGE = 4096
#: Bytes by which shifted ranges are wrong.
SHIFT = 512
#: What a response remembers of its request: its secrets are hidden in messages.
_REQUEST = requests.Request("GET", "http://server.example/").prepare()
STATUSES = (
    301,
    400,
    401,
    403,
    404,
    405,
    408,
    409,
    410,
    412,
    416,
    418,
    425,
    429,
    451,
    500,
    501,
    502,
    503,
    504,
    507,
)


@dataclasses.dataclass
class Serving:
    """The faults of the server towards one client: probabilities of one request, except as noted.

    ``encodes``: a whole object is sent compressed. ``busy``: seconds of Retry-After on every request after
    the first ones. ``changes``: the object is replaced. ``whole``: a range is answered with the whole object.
    ``lies``: wrong Content-Range or length. ``latency``: longest response time in seconds.
    """

    resets: float = 0.0
    cuts: float = 0.0
    stalls: float = 0.0
    errors: float = 0.0
    whole: float = 0.0
    lies: float = 0.0
    changes: float = 0.0
    encodes: float = 0.0
    busy: float = 0.0
    latency: float = 0.05


@dataclasses.dataclass
class Version:
    """One version of an object: ``disk`` is what the import must write, ``body`` what is served.

    ``gap``: zeros in the middle of the disk. ``grown``: the requested size, or 0.
    """

    disk: bytes
    body: bytes
    gap: int = 0
    grown: int = 0

    @functools.cached_property
    def stored(self) -> disks.Sparse:
        """What is on storage after the import: whole sectors."""
        before = _before_gap(self.disk)
        made = disks.Sparse(self.disk[:before])
        made.write(before + self.gap, self.disk[before:])
        size = max(len(made), self.grown)
        made.resize(size + -size % disks.SECTOR)
        return made


class Object:
    """An image on the server.

    ``identity``: strong, weak (the same for all versions), date or none. ``ranges``: right, none, cut (only
    the first one has data), shifted (all but those from 0 are of other bytes than they say) or elsewhere
    (they are of other bytes, and say so). ``has_replicas``: they send different dates for the same version.
    ``lead``: zeros at the beginning. ``shared``: all objects have one address, but for its query,
    and one ETag. ``gap``, ``grown``: see ``Version``. ``base``: the object whose disk the delta changes.
    ``like``: the object whose disk this one's resembles, as another version of it does.
    """

    def __init__(
        self,
        name: str,
        *,
        form: str,
        identity: str,
        ranges: str,
        size: int,
        has_replicas: bool,
        lead: int,
        gap: int = 0,
        grown: int = 0,
        shared: bool = False,
        base: Object | None = None,
        like: Object | None = None,
        dice: random.Random,
    ) -> None:
        self.name = name
        self.url = f"http://server.example/{f'image?disk={name}' if shared else name}"
        self._tag = "image" if shared else name
        self.gap, self.grown = gap, grown
        self._base = base
        self._like = like
        self.form = form
        self.identity = identity
        self.size = size
        self._dice = dice
        self._lead = lead
        self._versions: list[Version] = []
        self.has_replicas = has_replicas and identity == "strong"
        self.ranges = ranges

    @property
    def made(self) -> list[Version]:
        """The versions that were made."""
        return self._versions

    @property
    def versions(self) -> list[Version]:
        """All versions, the newest last; the first is made when it is needed."""
        if not self._versions:
            self._versions.append(self._made() if self._like is None else self._another(self._like.now))
        return self._versions

    @property
    def now(self) -> Version:
        return self.versions[-1]

    def replace(self) -> None:
        """Make a new version."""
        self.versions.append(self._another(self.now))

    def headers(self, dice: random.Random) -> dict[str, str]:
        """Return the headers that identify the version."""
        number = len(self.versions)
        day = 1 + (dice.randrange(2) if self.has_replicas else 0)
        found = {"Last-Modified": f"Mon, {day:02} Jan 2024 00:00:00 GMT"}
        if self.identity == "strong":
            found["ETag"] = f'"{self._tag}-{number}"'
        if self.identity == "weak":
            found["ETag"] = f'W/"{self._tag}"'
        return {} if self.identity == "none" else found

    @property
    def is_delta(self) -> bool:
        return self._base is not None

    def _another(self, before: Version) -> Version:
        """Make another version: often with the same beginning, or with the same bytes where requests meet."""
        if self._dice.random() < 0.7:
            return self._serving(_alike(self._dice, before.disk))
        return self._made(before.disk[:_HEAD] if self._dice.random() < 0.5 else b"")

    def _made(self, head: bytes = b"") -> Version:
        if self._base is not None:
            return _delta(self._dice, self._base.now.stored)
        made = _disk(self._dice, self.size, self._lead, has_edges=self.ranges == "elsewhere")
        return self._serving(head + made[len(head) :])

    def _serving(self, disk: bytes) -> Version:
        """Return the version with this disk, in the form of the object."""
        body = disk
        if self.form == "gz":
            body = _gzip(disk)
        if self.form == "qcow2":
            disk += bytes(-len(disk) % disks.SECTOR)
            body = _qcow2(disk, self.gap)
        return Version(disk, body, self.gap, self.grown)

    def checksum(self, kind: str) -> str | None:
        """Return the checksum of what is served: ``right``, ``wrong`` or ``none``."""
        if kind == "none":
            return None
        digest = hashlib.sha256(self.now.body).hexdigest()
        return "sha256:" + (digest if kind == "right" else digest[::-1])


def _disk(dice: random.Random, size: int, lead: int, *, has_edges: bool) -> bytes:
    """Return a disk: blocks of noise and of zeros. The first one has no signature of a format.

    ``has_edges``: all blocks have the same bytes at their beginning and at their end, so that requests which
    overlap there agree, whatever block they are of.
    """
    noise = _noise()
    blocks = []
    if has_edges:
        for _ in range(0, size, BLOCK):
            at = dice.randrange(len(noise) - BLOCK)
            blocks.append(noise[:_EDGE] + noise[at : at + BLOCK - 2 * _EDGE] + noise[:_EDGE])
        return b"RAW" + b"".join(blocks)[3:size]
    for start in range(0, size, BLOCK):
        length = min(BLOCK, size - start)
        at = dice.randrange(len(noise) - length)
        blocks.append(noise[at : at + length] if start == 0 or dice.random() < 0.7 else bytes(length))
    return bytes(lead) + b"RAW" + b"".join(blocks)[lead + 3 :]


def _alike(dice: random.Random, disk: bytes) -> bytes:
    """Return another disk with the same beginning and the same bytes around the borders of its blocks.

    Requests for ranges of whole blocks that overlap there agree with each other: only the version in each
    response shows that they are of two disks.
    """
    found, noise = bytearray(disk), _noise()
    for start in range(_HEAD, len(disk) - BLOCK + 1, BLOCK):
        if any(disk[start : start + BLOCK]):
            length = BLOCK - 2 * _EDGE
            at = dice.randrange(len(noise) - length)
            found[start + _EDGE : start + _EDGE + length] = noise[at : at + length]
    return bytes(found)


@functools.cache
def _noise() -> bytes:
    return random.Random("noise").randbytes(4 << 20)


def _gzip(data: bytes) -> bytes:
    return isal_zlib.compress(data, 0, wbits=31)


def _delta(dice: random.Random, before: disks.Sparse) -> Version:
    """Return a qcow2 file with changes of a disk, which may become smaller: what is behind it is zeros."""
    cluster = qcow2_parts.CLUSTER
    noise = _noise()
    size = len(before) - dice.choice((0, 0, 512, 5 * cluster))
    made, entries, data = before.copy(), [], []
    for at in range(0, size, cluster):
        fate = dice.random()
        length = min(cluster, size - at)
        if fate < 0.3:
            start = dice.randrange(len(noise) - cluster)
            data.append(noise[start : start + length])
            entries.append((4 + len(data)) * cluster | qcow2_parts.COPIED)
            made.write(at, data[-1])
        elif fate < 0.4:
            entries.append(1)
            made.zero(at, at + length)
        else:
            entries.append(0)
    made.zero(size, len(before))
    used = 5 + len(data)
    head = bytearray(qcow2_parts.header(size=size, l1=(1, 3 * cluster), refcounts=(cluster, 1), backing=512))
    head[512:520] = BASE.encode()
    parts = [
        head,
        struct.pack(">Q", 2 * cluster),
        struct.pack(f">{used}H", *[1] * used),
        struct.pack(">Q", 4 * cluster | qcow2_parts.COPIED),
        struct.pack(f">{len(entries)}Q", *entries),
        *data,
    ]
    body = b"".join(part.ljust(cluster, b"\0") for part in parts)
    return Version(made.read(0, len(made)), body)


def _before_gap(disk: bytes) -> int:
    """Return where zeros may be inserted: between two clusters."""
    return len(disk) // 2 // qcow2_parts.CLUSTER * qcow2_parts.CLUSTER


def _qcow2(disk: bytes, gap: int) -> bytes:
    """Return an image with clusters of 64 KiB in random order of creation: data clusters without holes."""
    cluster = qcow2_parts.CLUSTER
    clusters = [disk[at : at + cluster].ljust(cluster, b"\0") for at in range(0, len(disk), cluster)]
    each_table = cluster // 8
    tables = -(-(len(clusters) + gap // cluster) // each_table)
    first = 4 + tables
    entries, data = [], []
    for each in clusters:
        entries.append(0 if not any(each) else (first + len(data)) * cluster | qcow2_parts.COPIED)
        if any(each):
            data.append(each)
    before = _before_gap(disk) // cluster
    entries[before:before] = [0] * (gap // cluster)
    used = first + len(data)
    parts = [
        qcow2_parts.header(size=len(disk) + gap, l1=(tables, 3 * cluster), refcounts=(cluster, 1)),
        struct.pack(">Q", 2 * cluster),
        struct.pack(f">{used}H", *[1] * used),
        struct.pack(
            f">{tables}Q", *((4 + number) * cluster | qcow2_parts.COPIED for number in range(tables))
        ),
        *(
            struct.pack(f">{len(part)}Q", *part)
            for part in (entries[at : at + each_table] for at in range(0, len(entries), each_table))
        ),
        *data,
    ]
    return b"".join(part.ljust(cluster, b"\0") for part in parts)


class _Adapter:
    """Opens no connections: a request needs none here."""

    def connect_early(self, *_: object, **_options: object) -> None:
        pass


class Session:
    """What the HTTP source uses of ``requests.Session``."""

    verify = True

    def __init__(self, served: Object, faults: Serving) -> None:
        self._served = served
        self._faults = faults
        self._count = 0

    def close(self) -> None:
        pass

    def get_adapter(self, _url: str) -> _Adapter:
        return _Adapter()

    def request(self, method: str, url: str, *, headers: dict[str, str], **_: object) -> requests.Response:
        world = schedulers.active()
        asked = headers.get("Range", "")
        world.step("request", self._served.name, asked)
        waited = self._faults.latency * world.dice.random()
        world.sleep(waited)
        self._count += 1
        made = self._answer(world, asked)
        made.elapsed = dt.timedelta(seconds=waited)
        return made

    def _answer(self, world: schedulers.Scheduler, asked: str) -> requests.Response:
        faults, dice, served = self._faults, world.dice, self._served
        if dice.random() < faults.changes:
            served.replace()
            world.note("replaced", served.name, len(served.versions))
        if dice.random() < faults.resets:
            world.note("refused")
            raise requests.exceptions.ConnectionError(ConnectionResetError(104, "Connection reset by peer"))
        if faults.busy and self._count > 3:
            return self._respond(503, b"", {"Retry-After": str(int(faults.busy))})
        if dice.random() < faults.errors:
            return self._respond(dice.choice(STATUSES), b"oh", {})
        body = served.now.body
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", asked)
        same = served.headers(dice)
        if not found or served.ranges == "none" or dice.random() < faults.whole:
            if dice.random() < faults.encodes:
                coding = dice.choice(("gzip", "deflate"))
                world.note("encoded", coding)
                packed = _gzip(body) if coding == "gzip" else isal_zlib.compress(body, 0)
                return self._respond(200, packed, {**same, "Content-Encoding": coding})
            return self._respond(200, body, {**same, "Content-Length": str(len(body))})
        start, end = int(found[1]), min(len(body), int(found[2] or len(body)) + 1)
        if start >= len(body):
            return self._respond(416, b"", same)
        return self._part(world, start, end, same)

    def _part(
        self, world: schedulers.Scheduler, start: int, end: int, same: dict[str, str]
    ) -> requests.Response:
        faults, dice, body = self._faults, world.dice, self._served.now.body
        said, total = start, len(body)
        if start and self._served.ranges == "elsewhere" and end + BLOCK <= total:
            start = said = start + BLOCK
            end += BLOCK
        if dice.random() < faults.lies:
            said, end, total = dice.choice(
                [
                    (start + 512, end, total),
                    (start, max(start + 1, end - 700), total),
                    (start, end, total + 512),
                ]
            )
            world.note("lie", said, end, total)
        shift = SHIFT if start and self._served.ranges == "shifted" else 0
        data = body[start + shift : end + shift].ljust(end - start, b"\0")
        if start and self._served.ranges == "cut":
            data = b""
        stated = {"Content-Range": f"bytes {said}-{end - 1}/{total}", "Content-Length": str(end - start)}
        return self._respond(206, data, {**same, **stated})

    def _respond(self, status: int, data: bytes, headers: dict[str, str]) -> requests.Response:
        world = schedulers.active()
        world.note("response", status, len(data))
        made = requests.Response()
        made.status_code = status
        made.reason = "Simulated"
        made.headers = requests.structures.CaseInsensitiveDict(headers)
        made.request = _REQUEST
        made.raw = _Body(data, self._faults, headers.get("Content-Length"))
        return made


class _Body:
    """The body of a response: what the source uses of urllib3's."""

    decode_content = False

    def __init__(self, data: bytes, faults: Serving, length: str | None) -> None:
        world = schedulers.active()
        self._rest = memoryview(data)
        self._has_length = length is not None
        self._length = int(length or 0)
        dice = world.dice
        self._faults = faults
        self._cut: int | None = dice.randrange(len(data)) if data and dice.random() < faults.cuts else None
        self._stall: int | None = (
            dice.randrange(len(data)) if data and dice.random() < faults.stalls else None
        )
        self._task: schedulers.Task | None = None
        self._is_shut = False
        # The parts that ``pinned`` uses to shut down the socket.
        self.connection = self
        self.answering = kernel.Socket(self._shut)
        self.answer = None
        self._given = 0

    @property
    def length_remaining(self) -> int | None:
        return self._length - self._given if self._has_length else None

    def read1(self, count: int, decode_content: bool = False) -> bytes:
        world = schedulers.active()
        world.step("receive", self._given)
        self._wait(world, self._faults.latency * world.dice.random() / 4)
        if self._stall is not None and self._given >= self._stall:
            world.note("stall")
            self._stall = None
            self._wait(world, READ_TIMEOUT)
            raise urllib3.exceptions.ReadTimeoutError(None, "/", "Read timed out.")
        if self._cut is not None and self._given >= self._cut:
            world.note("cut", self._given)
            if not self._has_length or world.dice.random() < 0.5:
                raise urllib3.exceptions.ProtocolError(
                    "Connection broken", ConnectionResetError(104, "reset")
                )
            raise urllib3.exceptions.IncompleteRead(self._given, len(self._rest))
        if not self._rest and self._given < self._length:
            raise urllib3.exceptions.IncompleteRead(self._given, self._length - self._given)
        count = min(count, 1 + world.dice.randrange(128 << 10))
        for bound in (self._cut, self._stall):
            if bound is not None:
                count = min(count, max(1, bound - self._given))
        data, self._rest = bytes(self._rest[:count]), self._rest[count:]
        self._given += len(data)
        return data

    def read(self, count: int = -1, decode_content: bool = False) -> bytes:
        return self.read1(len(self._rest) if count < 0 else count)

    def close(self) -> None:
        self._rest = memoryview(b"")

    def release_conn(self) -> None:
        pass

    def _shut(self) -> None:
        self._is_shut = True
        if self._task is not None and schedulers.running:
            schedulers.running.wake(self._task)

    def _wait(self, world: schedulers.Scheduler, seconds: float) -> None:
        if not self._is_shut:
            self._task = world.current
            world.park(seconds)
            self._task = None
        if self._is_shut:
            raise urllib3.exceptions.ProtocolError(
                "Connection broken", ConnectionResetError(104, "shut down")
            )


def session(served: Object, faults: Serving) -> Any:
    """Return a session for the HTTP source."""
    return Session(served, faults)
