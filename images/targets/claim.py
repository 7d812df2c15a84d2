"""The claim on a target: one run writes to it, and a run that has lost it stops.

On one machine, and on a file system with locks, a lock lets one run in: a lock file beside a disk image, or
an exclusively opened block device. Between machines without a common lock, every run stores a record with a
random token, and makes a disk usable only if it finds the record unchanged.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import json
import logging
import os
import pathlib
import stat
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple, Self

from cdi_worker import errors
from cdi_worker.formats import detect, smalljson
from cdi_worker.images import directio, kernel
from cdi_worker.images.engine import cancelling
from cdi_worker.images.targets import remote

log = logging.getLogger(__name__)

#: Seconds between two checks of the record while data is written: a run may write for so long after another
#: has taken the target over.
INTERVAL: Final = 5.0
#: Shortest wait for a busy target, in seconds. That of a killed run is busy until a program that it was
#: starting has called execve(2), which closes the descriptors: up to 50 ms on two busy cores.
_REMNANT: Final = 1.0
SAME_DISK: Final = "source and target are the same disk"
#: The name of standard output in messages.
STDOUT: Final = "standard output"
#: Bytes of a record: a sector, so that it cannot be torn.
RECORD: Final = 512
_KIND: Final = detect.CLAIM
_MAGIC: Final = _KIND + b"1\n"
# A byte that is never read: the locks of SMB are mandatory, and would hide the record.
_LOCKED: Final = 4096


class Terms(NamedTuple):
    """How to take a claim. ``wait``: seconds to wait for another run, at least one, until ``cancel`` is set.

    ``permissions`` of a lock file, as in ``base.Options``. ``key``: an id of the command, without blanks: it
    may replace the disks that a killed run of it has left (``Claim.note``). ``connect``: to NBD exports.
    """

    wait: float = 0.0
    cancel: cancelling.Cancel = cancelling.NEVER
    permissions: int | None = None
    key: str = ""
    connect: remote.Connect | None = None


NOW: Final = Terms()


class Holder(NamedTuple):
    """Who holds a claim, by its record. ``prepared``: see ``Claim.note``."""

    token: str
    host: str
    process: int
    since: str
    prepared: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"host {self.host}, process {self.process}, since {self.since}"

    def record(self) -> bytes:
        """Return the record: one sector of ASCII text, which is never a valid boot sector or superblock."""
        fields = self._asdict()
        if not self.prepared:
            del fields["prepared"]
        text = json.dumps(fields, separators=(",", ":")).encode("ascii")
        return (_MAGIC + text).ljust(RECORD, b"\n")


def holder(record: bytes) -> Holder | None:
    """Return the holder that a record names; None if it is not a record."""
    if not record.startswith(_MAGIC):
        return None
    try:
        return Holder(**smalljson.parse(record[len(_MAGIC) :]))
    except (ValueError, TypeError):
        return None


def _new_holder() -> Holder:
    since = dt.datetime.fromtimestamp(time.time(), dt.UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return Holder(os.urandom(16).hex(), os.uname().nodename[:64], os.getpid(), since)


class Claim:
    """The right to write to a target, until ``close``. Thread-safe.

    ``path``: the target. ``guard`` and ``check`` raise ``errors.TargetLost`` if another run has taken it
    over, and do so again on every later call: then nothing may be written or removed.
    """

    #: Whether the disk at ``path`` is one that a killed run of the same command has left, untouched.
    may_replace: bool = False

    def __init__(self, path: str) -> None:
        self.path = path
        self.lost: errors.TargetLost | None = None
        self._lock = threading.Lock()
        self._next = time.monotonic() + INTERVAL

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def guard(self) -> None:
        """Check the record if ``INTERVAL`` has passed. Cheap enough to call before every write."""
        if self.lost is None and time.monotonic() < self._next:
            return
        with self._lock:
            # Other threads wait here for the result of the first.
            if self.lost is not None or time.monotonic() >= self._next:
                self._check()

    def check(self) -> None:
        """Check the record now."""
        with self._lock:
            self._check()

    def lose(self, reason: str) -> errors.TargetLost:
        """Return the error of every later call: another run has taken the target over."""
        self.lost = self.lost or errors.TargetLost(path=self.path, reason=reason)
        return self.lost

    def _check(self) -> None:
        if self.lost is None:
            with errors.on_target(self.path, "check the claim"):
                reason = self._taken()
            if reason is None:
                self._next = time.monotonic() + INTERVAL
                return
            log.warning("target lost path=%r reason=%r", self.path, reason)
            self.lose(reason)
        assert self.lost is not None  # noqa: S101  (set by lose)
        raise self.lost

    def note(self, written: str) -> None:
        """Store which file becomes the disk, before the first disk of several becomes usable."""

    def settle(self) -> None:
        """Forget what ``note`` has stored: all disks are usable."""

    # -- implemented by the sub-classes

    def close(self) -> None:
        """Release the target. Idempotent."""
        raise NotImplementedError

    def _taken(self) -> str | None:
        """Return how the target was taken over, None if it was not."""
        raise NotImplementedError


class LockFileClaim(Claim):
    """A claim by a locked file, ``name``, whose content is the holder's record.

    The lock file is removed by its holder only, so that a locked file that still has its name is the lock.
    """

    def __init__(self, path: str, name: str, mode: int | None = None, key: str = "") -> None:
        super().__init__(path)
        self._name = name
        self._key = key
        self._holder = _new_holder()
        self._fd = _lock(path, name)
        self._record = b""
        try:
            if mode is not None:
                with contextlib.suppress(PermissionError):  # another user's left-over, or no modes
                    os.fchmod(self._fd, mode)
            # Entries of a killed run of several disks are kept until these disks are replaced or changed.
            self._prepared = self._still_there(_prepared(read(name)))
            self._write()
        except OSError:
            os.close(self._fd)
            raise

    @property
    def may_replace(self) -> bool:  # type: ignore[override]  # an attribute of the others
        return bool(self._key) and _entry(self._key, self.path) in self._prepared

    def note(self, written: str) -> None:
        with self._lock:
            self._prepared = (*self._still_there(self._prepared), _entry(self._key, written))
            self._write()
        folder = pathlib.Path(self._name).parent
        for path, flags, sync in ((self._name, 0, os.fsync), (folder, os.O_DIRECTORY, kernel.sync_directory)):
            with kernel.open_fd(path, flags) as fd:
                sync(fd)

    def settle(self) -> None:
        self._prepared = ()

    def _still_there(self, entries: tuple[str, ...]) -> tuple[str, ...]:
        """Return those ``entries`` that describe the present disk."""
        return tuple(each for each in entries if each == _entry(each.partition(" ")[0], self.path))

    def _write(self) -> None:
        record = self._holder._replace(prepared=self._prepared).record()
        # NFS sends what was written when the file is closed, and looks for changes when it is opened (nfs(5),
        # close-to-open cache consistency): every access opens it.
        with kernel.open_fd(self._name, os.O_WRONLY | os.O_NOFOLLOW) as fd:
            try:
                # In place: a kill must not lose what an earlier run has prepared.
                self._record = record[: os.pwrite(fd, record, 0)]
                os.ftruncate(fd, len(self._record))
            except OSError as err:
                # A left-over may fill the file system until it is removed, for which this claim is needed.
                if err.errno not in {errno.ENOSPC, errno.EDQUOT}:
                    raise
                self._record = b""
                os.ftruncate(fd, 0)

    def _taken(self) -> str | None:
        try:
            found = read(self._name)
        except (FileNotFoundError, NotADirectoryError):
            return f"another run has removed {self._name}"
        return None if found == self._record else _writes(found)

    def close(self) -> None:
        if self._fd < 0:
            return
        try:
            is_ours = self.lost is None and self._taken() is None
            if is_ours and not self._still_there(self._prepared):
                pathlib.Path(self._name).unlink()
        except OSError as err:
            # The next run removes it.
            log.debug("lock file kept path=%r error=%r", self._name, err.strerror)
        finally:
            os.close(self._fd)
            self._fd = -1


def _entry(key: str, path: str) -> str:
    """Return ``KEY INODE SIZE MTIME``, which changes with the file; empty if the file is missing."""
    try:
        found = os.lstat(path)
    except FileNotFoundError:
        return ""
    return f"{key} {found.st_ino} {found.st_size} {found.st_mtime_ns}"


def _prepared(record: bytes) -> tuple[str, ...]:
    """Return the entries of prepared disks in a record: the old disk, and the one that was to replace it."""
    found = holder(record)
    entries = found.prepared if found is not None else ()
    is_valid = (
        isinstance(entries, list) and len(entries) <= 2 and all(isinstance(each, str) for each in entries)
    )
    return tuple(entries) if is_valid else ()


def _lock(path: str, name: str) -> int:
    """Open and lock ``name``. Raises ``errors.TargetBusy``."""
    while True:
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        try:
            if not _is_lock_file(fd):
                reason = f"{name} is not a lock file of cdi-worker; move it away, or name another target"
                raise errors.TargetError(path=path, reason=reason)
            locked = kernel.lock(fd, _LOCKED)
            if locked is None:
                log.info("file system without locks path=%r", name)
            if locked is False:
                raise _busy(path, holder(read(name)))
            if _is_named(fd, name):
                return fd
        except FileNotFoundError:
            pass  # removed by its holder: try again
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)


def _writes(record: bytes) -> str:
    return f"another run writes to it ({holder(record) or 'unknown'})"


def _is_lock_file(fd: int) -> bool:
    """Return whether an open file is empty, as a new one, or holds a record of any version.

    A power cut may have stored a part of the record, or the length of the file only.
    """
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        return False
    found = os.pread(fd, RECORD, 0)
    return found.startswith(_KIND) or _KIND.startswith(found) or not any(found)


def _busy(path: str, found: Holder | None) -> errors.TargetBusy:
    who = f" ({found})" if found else ""
    remedy = errors.Remedy([("wait for it", "wait"), ("end it", "")])
    return errors.TargetBusy(path=path, reason=f"another run writes to it{who}", remedy=remedy)


def _is_named(fd: int, name: str) -> bool:
    return os.path.samestat(os.fstat(fd), os.lstat(name))


def read(name: str) -> bytes:
    """Return what may be a record at the start of a file or device."""
    with kernel.open_fd(name, os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        return os.pread(fd, RECORD, 0)


class MarkedClaim(Claim):
    """A claim whose record is in the first sector of a device of ``size`` bytes.

    It is there while the head is withheld, where any other use of the device overwrites it. Until an update
    begins, the first sector of the old disk stands for it. A delta writes the head in place: it has none.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.record = _new_holder().record()
        self._expected = b""

    def expect(self, first: bytes) -> None:
        """Expect these first bytes on the device from now on; empty: any bytes."""
        with self._lock:  # no check is between its read and its comparison
            self._expected = first

    def _taken(self) -> str | None:
        if not self._expected:
            return None
        found = self.first(len(self._expected))
        return None if found == self._expected else _writes(found)

    # -- implemented by the sub-classes

    @property
    def size(self) -> int:
        """Bytes of the device."""
        raise NotImplementedError

    def first(self, length: int, /) -> bytes:
        """Return the first bytes of the device, past all caches of this machine."""
        raise NotImplementedError


class DeviceClaim(MarkedClaim):
    """A claim on a block device by opening it exclusively as ``fd``, which fails if it is mounted.

    O_EXCL knows only this machine; the record is for the others.
    """

    def __init__(self, path: str) -> None:
        super().__init__(path)
        try:
            # Without O_CREAT, O_EXCL opens a block device exclusively (open(2)).
            self.fd = os.open(path, os.O_RDWR | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC)
        except PermissionError as err:
            # Unless configured, a container runtime gives a pod's device to root, whoever the pod runs as.
            ours: errors.Way = ("run as root, or as a member of its group", "root")
            remedy = errors.Remedy([ours, ("give it to the pod's user", "device")])
            raise errors.denied(path, remedy) from err
        except OSError as err:
            if err.errno != errno.EBUSY:
                raise
            if found := holder(read(path)):
                raise _busy(path, found) from err
            reason = "it is mounted, or another program uses it; unmount it"
            raise errors.TargetBusy(path=path, reason=reason) from err
        if not stat.S_ISBLK(os.fstat(self.fd).st_mode):
            self.close()
            raise OSError(errno.ENOTBLK, os.strerror(errno.ENOTBLK))
        if kernel.is_read_only(self.fd):
            # Linux opens it for writing, and refuses each write.
            self.close()
            way = "name another device, or make it writable: blockdev --setrw"
            remedy = errors.Remedy([(way, "command")])
            raise errors.TargetError(path=path, reason="is read-only", remedy=remedy)

    @property
    def size(self) -> int:
        return os.lseek(self.fd, 0, os.SEEK_END)

    def first(self, length: int, /) -> bytes:
        return directio.read_past_cache(self.fd, length)

    def close(self) -> None:
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class ReadingClaim(Claim):
    """No claim: a finished disk that is only read.

    ``device``: the open NBD export that it is on, or that shows it; closed with the claim.
    """

    def __init__(self, path: str, device: remote.Device | None = None) -> None:
        super().__init__(path)
        self.device = device

    @property
    def size(self) -> int:
        """Bytes of the export; 0 without one."""
        return self.device.size if self.device else 0

    def close(self) -> None:
        """Disconnect from an export."""
        if self.device is not None:
            self.device.close()

    def _taken(self) -> str | None:
        return None


class OutputClaim(ReadingClaim):
    """The claim on standard output, which no other run takes over. ``begun``: bytes were written to it."""

    def __init__(self) -> None:
        super().__init__(STDOUT)
        self.begun = False


def wait_for(make: Callable[[], Claim], terms: Terms) -> Claim:
    """Return a claim; wait while the target is busy. Raises ``errors.TargetBusy``."""
    end = time.monotonic() + max(terms.wait, _REMNANT)
    is_waiting = False
    while True:
        try:
            return make()
        except errors.TargetBusy as err:
            left = end - time.monotonic()
            if left <= 0:
                raise
            if terms.wait and not is_waiting:
                log.warning("waiting seconds=%.0f reason=%s", terms.wait, err)
            is_waiting = True
        # Nothing wakes a process when a device is closed, or a lock on another machine is released.
        terms.cancel.pause(min(left, cancelling.TURN))
