"""``os``, ``fcntl``, ``ctypes`` and ``socket`` of a simulated process, on a simulated disk."""

from __future__ import annotations

import ctypes as real_ctypes
import dataclasses
import errno
import fcntl as real_fcntl
import os as real_os
import stat
import struct
import types
from collections.abc import Callable
from typing import Any, Protocol

from tests.proofs.simulation import disk as disks
from tests.proofs.simulation import scheduler as schedulers

_TYPES = stat.S_IFDIR, stat.S_IFBLK
#: From linux/fs.h and linux/falloc.h, as in images/kernel.
_BLKROGET = 0x125E
_BLKSSZGET = 0x1268
_BLKZEROOUT = 0x127F
_PUNCH_HOLE = 0x02
_ZERO_RANGE = 0x10
_KEEP_SIZE = 0x01
#: How the product's records begin: a slot of the journal, and a claim in the first sector of a device.
_JOURNAL = b"cdi-worker journal"
_RECORD = b"cdi-worker claim"
#: Bytes at the start of a device that a run writes at its end.
_HEAD = 256 << 10


@dataclasses.dataclass
class Storing:
    """What the storage supports, and how often a call fails: probabilities of one call.

    ``locks``: open-file-description locks and exclusive opens are seen by other nodes, too.
    """

    direct: bool = True
    punch: bool = True
    zero: bool = True
    allocate: bool = True
    locks: bool = True
    attributes: bool = True
    holes: bool = True
    sector: int = 512
    fails: float = 0.0
    fails_read: float = 0.0
    full: float = 0.0
    short: float = 0.0
    slow: float = 0.0


class Open:
    """An open file description."""

    def __init__(self, inode: disks.Inode, flags: int, path: str) -> None:
        self.inode = inode
        self.flags = flags
        self.path = path
        self.position = 0


class Watching(Protocol):
    """Who watches the storage (``law.Law``)."""

    def wrote(self, process: schedulers.Process, inode: disks.Inode, call: str, *details: object) -> None: ...

    def changed(self, inode: disks.Inode) -> None: ...


class Machine:
    """The system calls of one process. ``faults``: those of this process, which the world changes.

    ``law`` is called before and after each change.
    """

    def __init__(
        self,
        process: schedulers.Process,
        disk: disks.Disk,
        storing: Storing,
        law: Watching,
    ) -> None:
        self.process = process
        self.disk = disk
        self.storing = storing
        self._law = law
        self._files: dict[int, Open] = {}
        process.at_end.append(self._release)

    # -- helpers

    def _begin(self, call: str, *details: object, changes: disks.Inode | None = None) -> None:
        """Enter a system call: it may fail, or take long."""
        world = schedulers.active()
        world.step(call, *details)
        storing, dice = self.storing, world.dice
        if changes is None:
            if call in {"open", "lock"} and dice.random() < storing.slow:
                world.sleep(dice.choice((0.05, 0.2)))
            return
        if dice.random() < storing.slow:
            world.sleep(dice.choice((0.1, 3.0, 40.0)))
        self._law.wrote(self.process, changes, call, *details)
        if dice.random() < storing.fails:
            raise self._error(errno.EIO)
        if call in {"pwrite", "fallocate", "open"} and dice.random() < storing.full:
            storing.full = 1.0
            raise self._error(errno.ENOSPC)

    def _error(self, number: int, path: object = None) -> OSError:
        world = schedulers.active()
        world.note("error", errno.errorcode[number])
        return OSError(number, real_os.strerror(number), path)

    def _file(self, fd: int) -> Open:
        try:
            return self._files[fd]
        except KeyError:
            raise self._error(errno.EBADF) from None

    def _find(self, path: Any) -> disks.Inode:
        path = real_os.fspath(path)
        if path in {"/data", "/data/."}:
            return self.disk.directory
        if path in self.disk.devices:
            return self.disk.devices[path]
        if path in {"/", "/dev"}:
            return disks.Inode(stat.S_IFDIR)
        if path.startswith("/data/") and path[6:] in self.disk.directory.entries:
            return self.disk.directory.entries[path[6:]]
        raise self._error(errno.ENOENT, path)

    def _name(self, path: Any) -> str:
        path = real_os.fspath(path)
        assert path.startswith("/data/"), path
        return path[6:]

    def _release(self) -> None:
        for fd in list(self._files):
            self._close(fd)

    def _close(self, fd: int) -> None:
        opened = self._files.pop(fd)
        if opened not in self._files.values():
            holders = opened.inode.held
            holders[:] = [each for each in holders if each[0] is not opened]

    # -- opening

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        path = real_os.fspath(path)
        self._begin("open", path)
        if path.startswith("/proc/self/fd/"):
            inode = self._file(int(path.rpartition("/")[2])).inode
        elif flags & real_os.O_TMPFILE == real_os.O_TMPFILE:
            inode = disks.Inode(stat.S_IFREG)
        else:
            inode = self._open_named(path, flags)
        if flags & real_os.O_DIRECT and not self.storing.direct:
            raise self._error(errno.EINVAL, path)
        opened = Open(inode, flags, path)
        if inode.is_device and flags & real_os.O_EXCL and not self._take(opened, "exclusive"):
            raise self._error(errno.EBUSY, path)
        if flags & real_os.O_TRUNC and stat.S_ISREG(inode.kind):
            inode.data.resize(0)
        return self._add(opened)

    def _open_named(self, path: str, flags: int) -> disks.Inode:
        try:
            inode = self._find(path)
        except FileNotFoundError:
            if not flags & real_os.O_CREAT:
                raise
            inode = disks.Inode(stat.S_IFREG)
            self._begin("create", path, changes=self.disk.directory)
            found = self.disk.directory.entries.get(self._name(path))
            if found is None:  # nor has another process created it meanwhile
                self.disk.directory.change((self._name(path), inode))
                self._law.changed(self.disk.directory)
                return inode
            inode = found
        if flags & real_os.O_CREAT and flags & real_os.O_EXCL:
            raise self._error(errno.EEXIST, path)
        if flags & real_os.O_DIRECTORY and not stat.S_ISDIR(inode.kind):
            raise self._error(errno.ENOTDIR, path)
        return inode

    def _take(self, opened: Open, kind: str) -> bool:
        holders = opened.inode.held
        for other, what, node in holders:
            same_node = node == self.process.node
            if (
                other is not opened
                and what == kind
                and (same_node or (self.storing.locks and kind == "lock"))
            ):
                return False
        holders.append((opened, kind, self.process.node))
        return True

    def dup(self, fd: int) -> int:
        self._begin("dup", fd)
        return self._add(self._file(fd))

    def _add(self, opened: Open) -> int:
        fd = next(number for number in range(3, 1 << 16) if number not in self._files)
        self._files[fd] = opened
        return fd

    def fcntl(self, fd: int, request: int, argument: bytes) -> bytes:
        """Take a lock of an open file description; all locks are on the same byte."""
        assert request == real_fcntl.F_OFD_SETLK, request
        opened = self._file(fd)
        self._begin("lock", opened.path)
        if not self._take(opened, "lock"):
            raise self._error(errno.EAGAIN)
        return argument

    def close(self, fd: int) -> None:
        self._begin("close", fd)
        self._file(fd)
        self._close(fd)

    # -- reading and writing

    def pread(self, fd: int, length: int, offset: int) -> bytes:
        self._begin("pread", offset, length)
        opened = self._file(fd)
        self._check_direct(opened, offset, length)
        if opened.inode.is_device and schedulers.active().dice.random() < self.storing.fails_read:
            raise self._error(errno.EIO)
        return opened.inode.data.view.read(offset, offset + length)

    def preadv(self, fd: int, buffers: list[Any], offset: int, flags: int = 0) -> int:
        done = 0
        for buffer in buffers:
            view = memoryview(buffer)
            data = self.pread(fd, len(view), offset + done)
            view[: len(data)] = data
            done += len(data)
        return done

    def pwrite(self, fd: int, data: Any, offset: int) -> int:
        opened = self._file(fd)
        self._begin("pwrite", offset, len(data), changes=opened.inode)
        self._check_direct(opened, offset, len(data))
        world = schedulers.active()
        if len(data) > 4096 and world.dice.random() < self.storing.short:
            data = data[: world.dice.randrange(1, len(data) // 512) * 512]
        if opened.inode.is_device:
            data = data[: max(0, len(opened.inode.data.view) - offset)]
            if not data:
                raise self._error(errno.ENOSPC)
        opened.inode.data.write(offset, bytes(data))
        self._law.changed(opened.inode)
        self._meet(opened, offset, bytes(data[:32]))
        return len(data)

    def _meet(self, opened: Open, offset: int, first: bytes) -> None:
        """Tell the process what it has written, at which its fate may wait."""
        if first.startswith(_JOURNAL):
            self.process.meets("save")
        elif opened.inode.is_device and offset < _HEAD and not first.startswith(_RECORD):
            self.process.meets("head")

    def _check_direct(self, opened: Open, offset: int, length: int) -> None:
        if opened.flags & real_os.O_DIRECT:
            if offset % self.storing.sector or length % self.storing.sector:
                raise self._error(errno.EINVAL)
            opened.inode.data.evict()

    def lseek(self, fd: int, offset: int, whence: int) -> int:
        opened = self._file(fd)
        if whence in {real_os.SEEK_DATA, real_os.SEEK_HOLE}:
            return self._seek(opened.inode.data.view, offset, whence)
        base = {
            real_os.SEEK_SET: 0,
            real_os.SEEK_CUR: opened.position,
            real_os.SEEK_END: len(opened.inode.data.view),
        }
        opened.position = base[whence] + offset
        return opened.position

    def _seek(self, view: disks.Sparse, offset: int, whence: int) -> int:
        """Return where data or a hole begins."""
        if not self.storing.holes:
            raise self._error(errno.EINVAL)
        if offset >= len(view):
            raise self._error(errno.ENXIO)
        data = next(view.data(offset, len(view)), None)
        if whence == real_os.SEEK_DATA:
            if data is None:
                raise self._error(errno.ENXIO)
            return data[0]
        for start, end in view.data(offset, len(view)):
            if start > offset:
                break
            offset = end
        return offset

    def ftruncate(self, fd: int, length: int) -> None:
        opened = self._file(fd)
        self._begin("ftruncate", length, changes=opened.inode)
        if length != len(opened.inode.data.view):
            opened.inode.data.resize(length)
            self._law.changed(opened.inode)

    def fsync(self, fd: int) -> None:
        opened = self._file(fd)
        try:
            self._begin("fsync", fd, changes=opened.inode)
        except OSError:
            world = schedulers.active()
            opened.inode.data.fail_sync(world.dice)
            raise
        opened.inode.sync()
        self._law.changed(opened.inode)

    fdatasync = fsync

    def posix_fadvise(self, fd: int, offset: int, length: int, advice: int) -> None:
        self._begin("posix_fadvise", offset, length)
        self._file(fd).inode.data.evict()

    # -- names

    def stat(
        self, path: Any, *, dir_fd: int | None = None, follow_symlinks: bool = True
    ) -> real_os.stat_result:
        self._begin("stat", path)
        return _stat(self._file(path).inode if isinstance(path, int) else self._find(path))

    def lstat(self, path: Any, *, dir_fd: int | None = None) -> real_os.stat_result:
        return self.stat(path)

    def fstat(self, fd: int) -> real_os.stat_result:
        return _stat(self._file(fd).inode)

    def readlink(self, path: Any) -> str:
        raise self._error(errno.EINVAL, path)

    def unlink(self, path: Any, *, dir_fd: int | None = None) -> None:
        inode = self._find(path)
        self._begin("unlink", path, changes=self.disk.directory)
        inode.links -= 1
        self.disk.directory.change((self._name(path), None))
        self._law.changed(self.disk.directory)

    remove = unlink

    def rename(self, old: Any, new: Any) -> None:
        self._begin("rename", old, new, changes=self.disk.directory)
        inode = self._find(old)
        directory = self.disk.directory
        replaced = directory.entries.get(self._name(new))
        if replaced is inode:
            return
        if replaced is not None:
            replaced.links -= 1
        directory.change((self._name(old), None), (self._name(new), inode))
        self._law.changed(directory)

    replace = rename

    def statvfs(self, path: Any) -> Any:
        self._begin("statvfs", path)
        return types.SimpleNamespace(f_bavail=4 << 20, f_frsize=4096, f_bsize=4096, f_blocks=4 << 20)

    def fchmod(self, fd: int, mode: int) -> None:
        self._begin("fchmod", fd)
        self._file(fd).inode.mode = mode

    def getxattr(self, path: Any, name: str, *, follow_symlinks: bool = True) -> bytes:
        inode = self._find(path)
        if not self.storing.attributes or inode.is_device:
            raise self._error(errno.EOPNOTSUPP)
        if name not in inode.attributes:
            raise self._error(errno.ENODATA)
        return inode.attributes[name]

    def setxattr(
        self, path: Any, name: str, value: bytes, flags: int = 0, *, follow_symlinks: bool = True
    ) -> None:
        inode = self._find(path)
        self._begin("setxattr", path, name)
        if not self.storing.attributes or inode.is_device:
            raise self._error(errno.EOPNOTSUPP)
        inode.attributes[name] = value

    def removexattr(self, path: Any, name: str, *, follow_symlinks: bool = True) -> None:
        inode = self._find(path)
        self._begin("removexattr", path, name)
        if not self.storing.attributes or inode.is_device:
            raise self._error(errno.EOPNOTSUPP)
        if inode.attributes.pop(name, None) is None:
            raise self._error(errno.ENODATA)

    def uname(self) -> Any:
        return types.SimpleNamespace(nodename=f"node{self.process.node}")

    def sched_getaffinity(self, _pid: int) -> set[int]:
        return {0, 1}

    def getcwd(self) -> str:
        return "/"

    def getpid(self) -> int:
        return 1

    def geteuid(self) -> int:
        return 1000

    def umask(self, mask: int) -> int:
        return 0o022

    # -- system calls that Python's os module lacks

    def fallocate(self, fd: int, mode: int, offset: int, length: int) -> None:
        opened = self._file(fd)
        self._begin("fallocate", mode, offset, length, changes=opened.inode)
        supported = self.storing.allocate
        if mode & _PUNCH_HOLE:
            supported = self.storing.punch
        elif mode & _ZERO_RANGE:
            supported = self.storing.zero
        if not supported or (opened.inode.is_device and not mode):
            raise self._error(errno.EOPNOTSUPP)
        data = opened.inode.data
        end = offset + length
        if mode & _KEEP_SIZE:
            end = min(end, len(data.view))
        if mode & (_PUNCH_HOLE | _ZERO_RANGE):
            data.zero(offset, max(0, end - offset))
        elif end > len(data.view):
            data.resize(end)
        self._law.changed(opened.inode)

    def ioctl(self, fd: int, request: int, argument: bytes) -> bytes:
        opened = self._file(fd)
        if request == _BLKROGET:
            return struct.pack("i", 0)
        if request == _BLKSSZGET:
            return struct.pack("i", self.storing.sector)
        assert request == _BLKZEROOUT, hex(request)
        offset, length = struct.unpack("QQ", argument)
        self._begin("zero_out", offset, length, changes=opened.inode)
        if not opened.inode.is_device:
            raise self._error(errno.ENOTTY)
        opened.inode.data.zero(offset, length)
        self._law.changed(opened.inode)
        return b""

    def sync_file_range(self, fd: int, offset: int, length: int, flags: int) -> None:
        opened = self._file(fd)
        self._begin("sync_file_range", offset, length, flags, changes=opened.inode)

    def syncfs(self, fd: int) -> None:
        raise self._error(errno.ENOSYS)


def _stat(inode: disks.Inode) -> real_os.stat_result:
    size = 0 if inode.is_device else len(inode.data.view)
    mode = inode.kind | inode.mode
    times = (0, 0, 0)
    # Not the clock: two changes at one time differ, as nanoseconds do nearly always.
    changed = {"st_mtime_ns": inode.data.changes}
    return real_os.stat_result(
        (mode, inode.number, 1, inode.links, 1000, 1000, size, *times),
        {"st_blocks": len(inode.data.view.chunks) * 128, "st_rdev": inode.number if inode.is_device else 0}
        | changed,
    )


#: Names of ``os`` without system calls.
_PURE = (
    *("PathLike", "fsdecode", "fsencode", "fspath", "strerror", "error", "stat_result", "name"),
    *("altsep", "curdir", "devnull", "extsep", "linesep", "pardir", "pathsep", "sep"),
    *("SEEK_SET", "SEEK_CUR", "SEEK_END", "SEEK_DATA", "SEEK_HOLE", "POSIX_FADV_DONTNEED"),
)

_CALLS = [name for name in vars(Machine) if not name.startswith("_")]


class _Calls(types.ModuleType):
    """A module whose functions are system calls of the process that runs."""

    def __init__(self, name: str, machines: dict[schedulers.Process, Machine], calls: list[str]) -> None:
        super().__init__(name)
        self._machines = machines
        for call in calls:
            setattr(self, call, self._calling(call))

    def _calling(self, call: str) -> Callable[..., Any]:
        def made(*args: Any, **options: Any) -> Any:
            world = schedulers.running
            assert world is not None, f"{call} outside of the simulation"
            assert world.current is not None, f"{call} outside of the simulation"
            return getattr(self._machines[world.current.process], call)(*args, **options)

        made.__name__ = call
        return made

    def __getattr__(self, name: str) -> Any:
        what = f"{self.__name__}.{name} is not simulated; add it to tests/proofs/simulation/kernel.py"
        if schedulers.running is not None:
            schedulers.running.unsupported(what)
        raise AttributeError(what)


class _Libc:
    """The functions of the C library that the product calls; those of memory are real."""

    def __init__(self, calls: Any, failed: Callable[[int], None]) -> None:
        self.fallocate = _Function(calls.fallocate, failed)
        self.sync_file_range = _Function(calls.sync_file_range, failed)
        self.syncfs = _Function(calls.syncfs, failed)
        self.memcmp = real_ctypes.CDLL(None).memcmp


class _Function:
    argtypes: tuple[Any, ...] = ()

    def __init__(self, call: Callable[..., Any], failed: Callable[[int], None]) -> None:
        self._call = call
        self._failed = failed

    def __call__(self, *args: Any) -> int:
        try:
            self._call(*args)
        except OSError as err:
            self._failed(err.errno or 0)
            return -1
        return 0


class Socket:
    """What a cancelled read shuts down; ``shut`` is called for it."""

    def __init__(self, shut: Callable[[], object] = lambda: None) -> None:
        self._shut = shut

    def setsockopt(self, *_: object) -> None:
        pass

    def shutdown(self, _how: int) -> None:
        self._shut()


def modules(machines: dict[schedulers.Process, Machine]) -> dict[str, types.ModuleType]:
    """Return the simulated modules."""
    calls = _Calls("os", machines, _CALLS)
    for name in _PURE:
        setattr(calls, name, getattr(real_os, name))
    for name in dir(real_os):
        if name.startswith(("O_", "EX_", "W_", "R_", "F_")):
            setattr(calls, name, getattr(real_os, name))
    calls.supports_follow_symlinks = calls.supports_fd = calls.supports_dir_fd = set()
    calls.urandom = lambda count: schedulers.active().dice.randbytes(count)  # noqa: PLW0108 (not active yet)
    control = _Calls("fcntl", machines, ["ioctl", "fcntl"])
    for name in dir(real_fcntl):
        if name.isupper():
            setattr(control, name, getattr(real_fcntl, name))
    return {
        "os": calls,
        "fcntl": control,
        "ctypes": _ctypes(calls),
        "socket": _socket(),
        "shutil": _Calls("shutil", machines, []),
    }


def _ctypes(calls: Any) -> types.ModuleType:
    made = types.ModuleType("ctypes")
    numbers = [0]
    libc = _Libc(calls, lambda number: numbers.__setitem__(0, number))
    made.__dict__.update(
        {name: getattr(real_ctypes, name) for name in dir(real_ctypes) if name.startswith("c_")}
    )
    made.__dict__.update(CDLL=lambda *_, **__: libc, get_errno=lambda: numbers[0], byref=real_ctypes.byref)
    return made


def _socket() -> types.ModuleType:
    import socket

    made = types.ModuleType("socket")
    made.__dict__.update({name: getattr(socket, name) for name in dir(socket) if name.isupper()})
    made.__dict__.update(socket=Socket, SocketType=Socket)
    return made
