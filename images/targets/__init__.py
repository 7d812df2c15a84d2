"""The target of a disk: inspect it, claim it, and open it for a disk that is usable only when complete."""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
from typing import Final, Literal, NamedTuple

from cdi_worker import errors
from cdi_worker.images import directio, kernel
from cdi_worker.images.targets import base, block, claim, export, file, file_format, finished, remote, stream
from cdi_worker.scratch import journal

Claim = claim.Claim
ReadingClaim = claim.ReadingClaim
Mode = base.Mode
TargetOptions = base.TargetOptions
Terms = claim.Terms
Target = base.Target
SAME_DISK: Final = claim.SAME_DISK
is_export = remote.is_export
refuse_unfinished = file.refuse_unfinished
#: The target that is standard output; a file with this name is ``./-``.
STDOUT: Final = "-"


class TargetFacts(NamedTuple):
    """The facts of a target. Sizes in bytes.

    ``missing``: not a block device, and its directory does not exist. ``stream``: standard output. ``size``:
    of the device, or of the existing disk, also after an interrupted update (0: no disk). ``available``: size
    of the device, or free bytes for unprivileged users including what is removed before a new disk is
    written. ``direct``: O_DIRECT is supported.
    """

    kind: Literal["file", "block", "stream", "missing"]
    size: int = 0
    available: int = 0
    direct: bool = False


def facts(
    path: str | os.PathLike[str], held: claim.Claim | None = None, *, removed: bool = False
) -> TargetFacts:
    """Inspect a target without changing it. ``removed``: the existing disk is removed first.

    ``held``: its claim, without which an NBD export cannot be inspected. Raises ``errors.TargetError``.
    """
    path = os.fspath(path)
    if isinstance(held, claim.ReadingClaim | export.ExportClaim) and held.device is not None:
        return TargetFacts("block", held.size, held.size)
    directory = pathlib.Path(path).parent
    with errors.on_target(path, "inspect"):
        if path == STDOUT:
            return TargetFacts("stream")
        if _is_block(path):
            with kernel.open_fd(path, os.O_NONBLOCK) as fd:
                size = os.lseek(fd, 0, os.SEEK_END)
            return TargetFacts("block", size, size, direct=True)
        if not directory.is_dir() or _holds_devices(directory):
            return TargetFacts("missing")
        room = os.statvfs(directory)
        changing = file.changing(path)
        left_overs = [file.part(path), file.lock_file(path)] + ([path, changing] if removed else [])
        return TargetFacts(
            "file",
            size=_size(path) or _size(changing),
            available=room.f_bavail * room.f_frsize + sum(map(_occupied, left_overs)),
            # Tried with a file without a name, so that nothing is left behind.
            direct=kernel.supports_direct(directory, os.O_TMPFILE),
        )


def follow_link(path: str | os.PathLike[str]) -> str:
    """Return the file that a symbolic link points to, which need not exist; any other path unchanged.

    The incomplete disk, the lock and the rename then are in the directory of the file. Raises
    ``errors.TargetError``.
    """
    path = os.fspath(path)
    if path == STDOUT:
        return path
    with errors.on_target(path, "open"):
        return os.path.realpath(path) if pathlib.Path(path).is_symlink() and not _is_block(path) else path


def names_used(path: str | os.PathLike[str]) -> tuple[str, ...]:
    """Return a target and the paths beside it that a run with this target uses or removes.

    They are beside the file that a symbolic link leads to, as in ``follow_link``.
    """
    path = os.fspath(path)
    # A target that cannot be inspected is reported when it is claimed.
    with contextlib.suppress(errors.TargetError):
        path = follow_link(path)
    return path, file.part(path), file.journal(path), file.changing(path), file.lock_file(path)


def take(
    path: str | os.PathLike[str], terms: claim.Terms = claim.NOW, *, folder: bool = False
) -> claim.Claim:
    """Claim a target, so that no other run writes to it; nothing on it is changed yet.

    ``folder``: it is the folder of an archive, whose claim excludes a disk on the same volume. Raises
    ``errors.TargetBusy`` and ``errors.TargetError``.
    """
    path = os.fspath(path)

    def make() -> claim.Claim:
        if folder:
            return claim.LockFileClaim(path, _lock_file(f"{path}/{file.DISK}"), terms.permissions)
        if path == STDOUT:
            return claim.OutputClaim()
        if is_export(path) and terms.connect is not None:
            return export.ExportClaim(path, terms.connect)
        if _is_block(path):
            return claim.DeviceClaim(path)
        return claim.LockFileClaim(path, _lock_file(path), terms.permissions, terms.key)

    with errors.on_target(path, "open"):
        return claim.wait_for(make, terms)


def _lock_file(path: str) -> str:
    directory = pathlib.Path(path).parent
    if not directory.is_dir() or _holds_devices(directory):
        if pathlib.Path(path).exists():
            reason = "is neither a block device nor in a directory of files; name another target"
            raise errors.TargetError(path=path, reason=reason)
        raise errors.TargetError(path=path, reason="no such directory or device; check the path")
    if file.is_reserved(path):
        reason = (
            "names that end with .part, .changing or .lock are those of incomplete disks; choose another name"
        )
        raise errors.TargetError(path=path, reason=reason)
    return file.lock_file(path)


def check_folder(path: str | os.PathLike[str]) -> None:
    """Raise ``errors.TargetError`` if ``take`` and ``open`` cannot create files beside ``path``."""
    path = follow_link(path)
    folder = pathlib.Path(_lock_file(path)).parent
    with errors.on_target(path, "inspect"):
        is_read_only = os.statvfs(folder).f_flag & os.ST_RDONLY
    if is_read_only or not os.access(folder, os.W_OK | os.X_OK, effective_ids=True):
        number = errno.EROFS if is_read_only else errno.EACCES
        raise errors.target_error(path, OSError(number, os.strerror(number)), "open")


def check_replaceable(held: claim.Claim, *, force: bool) -> None:
    """Raise ``errors.TargetExists`` if the claimed target holds a disk; with ``force`` it may be replaced."""
    with errors.on_target(held.path, "inspect"):
        if isinstance(held, claim.MarkedClaim | claim.OutputClaim):
            return
        for path in (held.path, file.changing(held.path)):
            if not os.path.lexists(path):
                continue
            if not stat.S_ISREG(os.lstat(path).st_mode):
                raise errors.TargetError(path=path, reason="is not a regular file; name another target")
            if not (force or (path == held.path and held.may_replace)):
                raise errors.TargetExists(path=path, reason="exists")


def in_use(path: str) -> bool:
    """Return whether a device is mounted, or opened exclusively by another program."""
    if not is_block(path):
        return False
    try:
        # Without O_CREAT, O_EXCL opens a block device exclusively (open(2)).
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL | os.O_NONBLOCK | os.O_CLOEXEC))
    except OSError as err:
        return err.errno == errno.EBUSY
    return False


def is_left_over(held: claim.Claim) -> bool:
    """Return whether a claimed device holds the left-over of an interrupted run."""
    with errors.on_target(held.path, "read"):
        return isinstance(held, claim.MarkedClaim) and claim.holder(held.first(claim.RECORD)) is not None


def unfinished(held: claim.Claim) -> str:
    """Return the path of the unfinished disk that an interrupted run has left beside a file; empty: none."""
    part = file.part(held.path)
    return part if isinstance(held, claim.LockFileClaim) and os.path.lexists(part) else ""


def partial(held: claim.Claim) -> int | None:
    """Return the stored bytes of a partial import with a journal, of any source; 0: not known, None: none."""
    with contextlib.suppress(OSError):
        if isinstance(held, claim.DeviceClaim):
            slots = os.pread(held.fd, journal.AREA, block.JOURNAL_OFFSET)
            return 0 if journal.is_at(slots, 0) or journal.is_at(slots, journal.SLOT) else None
        part = unfinished(held)
        if part and (journal.is_at_end_of(part) or os.path.lexists(file.journal(held.path))):
            return pathlib.Path(part).lstat().st_blocks * 512
    return None


def open(  # noqa: A001 - read as targets.open
    path: str | os.PathLike[str], size: int | None, options: TargetOptions = base.NEW
) -> Target:
    """Open a target for a disk of ``size`` bytes (None: not known before the end).

    In mode ``new``, the left-over of an earlier attempt is removed. Raises ``errors.TargetError``,
    ``errors.TargetLost`` if the claim is lost, and ``errors.TooLarge`` if a device is too small.
    """
    if options.claim is not None:
        # A run opens its target again when it falls back to another route: its claim may be lost since then.
        options.claim.check()
        return _open(options.claim, size, options)
    with contextlib.ExitStack() as undo:
        held = undo.enter_context(take(path, claim.Terms(permissions=options.permissions)))
        target = _open(held, size, options)
        undo.push(target.owned)  # closed before the claim
        target.owned = undo.pop_all()
        return target


def _open(held: claim.Claim, size: int | None, options: TargetOptions) -> Target:
    with errors.on_target(held.path, "open"):
        if isinstance(held, claim.DeviceClaim):
            return block.BlockTarget(held, size, options)
        if isinstance(held, claim.OutputClaim):
            return stream.StreamTarget(held, size, options)
        if isinstance(held, claim.MarkedClaim):
            return export.ExportTarget(held, size, options)
        if isinstance(held, claim.ReadingClaim):
            return finished.Finished(held, options)
        if options.form is not None:
            # 16 ms, with what starts qemu-img: few imports write qcow2.
            from cdi_worker.images.targets import qcow2

            return qcow2.Qcow2Target(held, size, options)
        kind = file.FileTarget if options.mode == "new" else file.ChangedFile
        return kind(held, size, options)


def journal_slots(
    path: str | os.PathLike[str], size: int, form: file_format.Qcow2Format | None = None
) -> journal.Slots | None:
    """Return where the journal of a disk of this size is stored (704 KiB); None: it has none.

    It is stored on the target: after the last byte of an incomplete file, or in the withheld head of a block
    device. So it is removed together with the data. That of a qcow2 file (``form``) is beside it. A small
    disk, and one on an NBD export, has none.
    """
    path = os.fspath(path)
    if size < block.HEAD or is_export(path):
        return None
    if form is not None:
        return journal.Slots(file.journal(path), 0, 0, is_apart=True)
    if _is_block(path):
        return journal.Slots(os.path.realpath(path), block.JOURNAL_OFFSET, block.HEAD)
    return journal.Slots(file.part(path), -(-size // directio.UNIT) * directio.UNIT, 0)


def is_block(path: str) -> bool:
    """Return whether it is a block device, False for what cannot be inspected: opening it reports why."""
    try:
        return _is_block(path)
    except OSError:
        return False


def is_folder(path: str) -> bool:
    """Return whether it is a directory, False for what cannot be inspected."""
    return os.path.isdir(path)  # noqa: PTH112  (pathlib raises PermissionError)


def is_file(path: str) -> bool:
    """Return whether it is a regular file, False for what cannot be inspected."""
    return os.path.isfile(path)  # noqa: PTH113  (pathlib raises PermissionError)


def _is_block(path: str) -> bool:
    try:
        return stat.S_ISBLK(pathlib.Path(path).stat().st_mode)
    except FileNotFoundError:
        return False


def _holds_devices(directory: pathlib.Path) -> bool:
    # If a device node has disappeared, a file in /dev would be written to memory (devtmpfs).
    return os.path.realpath(directory) == "/dev"


def _size(path: str) -> int:
    try:
        return os.lstat(path).st_size
    except FileNotFoundError:
        return 0


def _occupied(path: str) -> int:
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return 0
    # Removing a file with another hard link frees no blocks.
    return status.st_blocks * 512 if stat.S_ISREG(status.st_mode) and status.st_nlink == 1 else 0
