"""The exceptions of the project: their messages, what to do about them, and their exit statuses.

Every layer raises only these to its callers; exceptions of libraries and of the operating system are
translated where the call is made. Command line, pods and library word the same error differently: their names
of the settings that help, and a class may have another message at a terminal.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import stat
import string
from collections.abc import Iterable, Iterator, Mapping
from typing import ClassVar, Final, Literal, NamedTuple, get_args

from cdi_worker import masking, units

#: What a remedy changes: a field of ``base.Access`` or of a location; ``root``: the user of the process;
#: ``device``: the container runtime; ``volume``: the pod or the storage; ``flatten``, ``repair``: a program
#: that changes the image; ``command``: only a person who typed the command can do it.
Setting = Literal[
    "ca_files", "certificate", "checksum_file", "command", "device", "disk", "existing", "flatten",
    "insecure", "min_speed", "patience", "repair", "root", "scratch", "thumbprint", "token",
    "user and password", "volume", "wait",
]  # fmt: skip
#: An action, and the setting that does it; empty if no setting of ours does.
Way = tuple[str, Setting | Literal[""]]

_PROGRAMS: Final = {
    "flatten": "qemu-img convert -O qcow2 FILE flat.qcow2",
    "repair": "qemu-img check -r all FILE",
}
#: The names of the settings in the library.
LIBRARY: Final = {name: _PROGRAMS.get(name, name) for name in get_args(Setting) if name != "command"}
#: Their options. An action without a name is shown alone.
TERMINAL: Final[Mapping[str, str]] = {
    **_PROGRAMS,
    "ca_files": "--ca-file",
    "certificate": "--cert and --key",
    "checksum_file": "--checksum-file",
    "command": "",
    "disk": "--disk",
    "insecure": "--insecure",
    "patience": "--stall-timeout",
    "root": "sudo",
    "min_speed": "--min-speed",
    "scratch": "--scratch",
    "thumbprint": "--thumbprint",
    "token": "--token-file",
    "user and password": "--user and --password-file",
    "wait": "--wait SECONDS",
}


class Remedy(tuple[Way, ...]):
    """Ways to mend a failure."""

    __slots__ = ()

    def text(self, names: Mapping[str, str]) -> str:
        """Return the ways as one sentence. One whose setting has no name in ``names`` is left out."""
        named = [(action, names.get(setting, "")) for action, setting in self if setting in {"", *names}]
        return ", or ".join(f"{action} ({name})" if name else action for action, name in named)

    def __str__(self) -> str:
        return self.text(LIBRARY)


#: By the reason why a source is unreachable.
_REACH: Final[Mapping[str, Way]] = {
    "connection refused": ("check host and port, and that the server runs", ""),
    "connect: connection refused": ("check host and port, and that the server runs", ""),
    "unknown host": ("check the name of the host", ""),
    "no such file or directory": (
        "check the path; a URL begins with https://, an image in a registry with docker://",
        "command",
    ),
    "connect: no such file or directory": ("check the path of the socket", ""),
    "is a directory": ("name the file of the disk", "command"),
    "permission denied": ("check the permissions of the file", ""),
}

#: Fields of an error whose values are our own names. Code compares them, so they are not masked.
NAMES = frozenset({"algorithm", "fault", "format", "rule", "tool"})


class Pause(NamedTuple):
    """A wait before something is tried again: ``until`` when, and ``since`` when there was no progress.

    Both on the clock of ``time.monotonic``. After ``limit`` seconds without progress it is given up.
    """

    until: float
    since: float
    limit: float


class _Formatter(string.Formatter):
    """Formats a message; the format ``size`` is that of bytes for people."""

    def format_field(self, value: object, format_spec: str) -> str:
        if format_spec != "size":
            return format(value, format_spec)
        return units.format_exactly(value) if isinstance(value, int) else f"{value} bytes"


class Error(Exception):
    """Base class of all errors.

    Fields are the keyword arguments. A message is one printable line, and it and the fields are masked
    (``masking``). Callers pass URLs through ``sources.wire.safe_url`` first. The field ``remedy``
    (``Remedy``), or that of the class, is added to the message; None is left out.
    """

    #: The message, formatted with the fields.
    template: ClassVar[str] = "{reason}"
    #: The message at a terminal, where it is another one.
    terminal: str = ""
    remedy: ClassVar[Remedy] = Remedy()
    #: What the termination message of a pod begins with; controllers search for it (contract, Outcome).
    phrase: ClassVar[str] = "Unable to process data: "
    #: The exit status of the command line (docs/reference/exit-status.md).
    status: ClassVar[int] = 1
    #: Whether the failure often passes by itself, so that the same call may succeed later.
    retryable: ClassVar[bool] = False
    #: Of a failure that is retried.
    pause: Pause | None = None

    def __init__(self, **fields: object) -> None:
        self.fields = {
            name: each if name in NAMES or not isinstance(each, str) else masking.mask(each)
            for name, each in fields.items()
            if name != "remedy" or each is not None
        }
        super().__init__(self.message(LIBRARY))

    def message(self, names: Mapping[str, str] | None = None, template: str = "") -> str:
        """Return the message, with what to do if the settings have ``names``."""
        text = _Formatter().vformat(template or self.template, (), self.fields)
        remedy = self.fields.get("remedy") or self.remedy
        advice = remedy.text(names) if isinstance(remedy, Remedy) and names is not None else ""
        return one_line(f"{text}; {advice}" if advice else text)

    def at_terminal(self) -> str:
        """Return the message for a person who can change the command line."""
        return self.message(TERMINAL, self.terminal)

    def __reduce__(self) -> tuple[object, ...]:
        return Exception.__new__, (type(self), *self.args), self.__dict__

    def as_fields(self, message: str = "") -> dict[str, object]:
        """Return the error for JSON: its class as ``kind``, its message or ``message``, and its fields."""
        plain = (str, int, float, bool, type(None))
        fields = {
            name: each if isinstance(each, plain) else masking.mask(str(each))
            for name, each in self.fields.items()
            if name != "remedy" or str(each)
        }
        fixed = {"message": message or str(self), "status": self.status, "retryable": self.retryable}
        return {**fields, "kind": type(self).__name__, **fixed}


#: Characters of a message. A hostile index can list platforms of megabytes.
LONGEST = 8000


def one_line(text: str) -> str:
    """Return ``text`` as one printable line, masked and then cut to ``LONGEST`` characters."""
    return masking.quoted(text, LONGEST)


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``did you mean 'NAME'?`` for the name in ``known`` that is like ``given``; empty for none."""
    import difflib

    names = {name.lower(): name for name in known}
    near = difflib.get_close_matches(given[:100].lower(), names, n=1)
    return f"did you mean {names[near[0]]!r}?" if near else ""


def supported(given: str, known: Iterable[str]) -> str:
    """Return what to write instead of ``given``: the name that is like it, else all of ``known``."""
    names = list(known)
    return did_you_mean(given, names) or f"supported: {', '.join(names)}"


#: Exit statuses after which another attempt cannot help without a change (docs/reference/exit-status.md).
FINAL = frozenset({2, 4, 5, 7, 8, 9, 130})


class Hidden(Exception):
    """Replaces an exception of a library whose text contains a secret: ``TYPE: TEXT``, masked."""


@contextlib.contextmanager
def masked_causes() -> Iterator[None]:
    """Mask the causes of an error raised in the block: a traceback shows them, with their secrets."""
    try:
        yield
    except Exception as err:
        links: list[BaseException] = [err]
        # Causes and contexts may form a circle.
        seen = {id(err)}
        for link in links:
            # Setting a cause suppresses the context.
            is_suppressed = link.__suppress_context__
            for name in ("__cause__", "__context__"):
                if (inner := getattr(link, name)) is not None:
                    shown = _shown(inner)
                    # Not setattr(): the exceptions of pyVmomi refuse what vSphere does not name.
                    BaseException.__setattr__(link, name, shown)
                    if id(shown) not in seen:
                        seen.add(id(shown))
                        links.append(shown)
            BaseException.__setattr__(link, "__suppress_context__", is_suppressed)
        raise


def _shown(err: BaseException) -> BaseException:
    text = f"{type(err).__module__}.{type(err).__qualname__}: {err}"
    if masking.mask(text) == text:
        return err
    found = Hidden(masking.mask(text)).with_traceback(err.__traceback__)
    found.__cause__, found.__context__ = err.__cause__, err.__context__
    found.__suppress_context__ = err.__suppress_context__
    return found


class RequestError(Error):
    """The request is invalid; ``faults`` lists every fault found, not only the first."""

    status = 2

    def __init__(self, *faults: str, remedy: Remedy | None = None) -> None:
        self.faults = tuple(map(masking.mask, faults))
        super().__init__(reason="; ".join(faults), remedy=remedy)

    def at_terminal(self) -> str:
        text = super().at_terminal()
        for fault in self.faults:
            # ``sources.fields.Fault`` names a setting.
            text = text.replace(fault, getattr(fault, "at_terminal", fault))
        return text

    def as_fields(self, message: str = "") -> dict[str, object]:
        return {"faults": list(self.faults), **super().as_fields(message)}


class MissingExtra(Error):
    """An optional dependency is not installed. ``install``: the command that installs it."""

    template = "{what} needs the Python package {package}: {install}"
    status = 2

    def __init__(self, **fields: object) -> None:
        if not fields.get("install"):
            from cdi_worker import version

            fields["install"] = version.install(str(fields["extra"]))
        super().__init__(**fields)


@contextlib.contextmanager
def optional(what: str, *, package: str, extra: str) -> Iterator[None]:
    """Raise ``MissingExtra`` if an import in the block fails."""
    try:
        yield
    except ImportError as err:
        raise MissingExtra(what=what, package=package, extra=extra) from err


class MissingTool(Error):
    """A program that the worker needs is not installed."""

    template = "{tool} is not installed: apt-get install {package}"
    status = 2


class PluginFailed(Error):
    """The code of a third-party source raised an exception that is not ours."""

    template = "source {source!r} ({package}): {exception}: {reason}; report this to the author of {package}"


# -- sources ---------------------------------------------------------------------------------


class SourceError(Error):
    """The source cannot be read."""

    status = 3
    phrase = "Unable to process data: failed to pull image: "

    def __init__(self, *, remedy: object = None, **fields: object) -> None:
        if not remedy and (way := _REACH.get(str(fields.get("reason")))):
            remedy = Remedy([way])
        super().__init__(**fields, remedy=remedy)


class Unreachable(SourceError):
    """The source failed before its first byte: name resolution, connection, TLS, permission, not found."""

    template = "{url}: {reason}"
    phrase = "Unable to connect to {source} data source: "


class Transient(SourceError):
    """A failure that may be retried. ``retry_after``: seconds that the server asked to wait."""

    template = "{url}: {reason}"
    retryable = True

    def __init__(
        self, *, url: object, reason: object, retry_after: float | None = None, **more: object
    ) -> None:
        self.retry_after = retry_after
        super().__init__(url=url, reason=reason, **more)


class Malformed(Transient):
    """A response violates its protocol. A second one at the same byte ends the retries."""


class CutShort(Transient):
    """A range response ended before its first byte, although its header had arrived."""


class TransferFailed(SourceError):
    """The transfer was interrupted, and retries did not help or are not possible."""

    template = "{url}: transfer failed at byte {offset}: {reason}"
    retryable = True


class Withdrawn(SourceError):
    """The source was reached but refused a later request."""

    template = "{url}: refused after the first bytes: {reason}"


class SourceChanged(SourceError):
    """The source changed during the transfer."""

    template = "{url}: changed during the transfer ({what} was {before}, now {now}); run the import again"
    retryable = True


class Reencoded(SourceChanged):
    """A stream has other bytes when it is read again, but of the same disk; raised a few times at most."""


class DigestMismatch(SourceError):
    """A blob, manifest or configuration does not match its digest."""

    template = "{url}: digest mismatch: expected {expected}, calculated {calculated}"


class WrongPlatform(SourceError):
    """The image has no variant for the requested architecture."""

    template = "{url}: no image for architecture {wanted}; available: {found}"
    # The registry has answered.
    phrase = Error.phrase


class NoRanges(SourceError):
    """A server that announced byte ranges does not serve them; an ordered stream may still work."""

    template = "{url}: byte ranges not available: {reason}"


class WrongRanges(NoRanges):
    """A server serves other ranges than requested: nothing that was read by ranges may be used."""


class UploadFailed(Error):
    """An upload server refused an upload; ``reason`` is the server's message."""

    template = "{url}: upload failed: {reason}"
    status = 3


# -- images ----------------------------------------------------------------------------------


class ImageError(Error):
    """The image cannot be used as it is."""

    status = 4


class Refused(ImageError):
    """A safety rule refuses the image or archive. ``rule`` is a stable short name."""

    template = "{format} image refused ({rule}): {reason}"


class Unsupported(ImageError):
    """The image is not known to be malformed, but its format or a feature of it is not supported."""

    template = "unsupported image: {reason}"


class Corrupt(ImageError):
    """The data is invalid in its format."""

    template = "corrupt {format}: {reason}"


class Truncated(Corrupt):
    """The data ends before the end that its format declares."""

    template = "truncated {format}: {reason}"


class TrailingGarbage(Corrupt):
    """There is data after the end that the format declares."""

    template = "trailing garbage after the end of the {format} at byte {offset}"


class ChecksumMismatch(ImageError):
    """The checksum does not match; the phrase ``checksum mismatch`` stops the controller's retries."""

    template = "checksum mismatch: expected {algorithm}:{expected}, calculated {algorithm}:{calculated}"
    remedy = Remedy(
        [("check the checksum, or fetch the source again: what was written is not a usable disk", "command")]
    )
    status = 5


class Untrusted(Error):
    """A demanded signature is missing or not valid. ``fault``: a stable name (``formats.signature``)."""

    template = "{url}: signature {fault}: {reason}"
    status = 7


class Differs(Error):
    """A disk is not that of the source, as a verification in a pod has found."""

    template = "{path} differs from {url}: {reason}"
    status = 9


# -- target and scratch ----------------------------------------------------------------------


class TargetError(Error):
    """The target cannot be opened, written, synced or renamed."""

    template = "{path}: {reason}"
    status = 6


class TooLarge(TargetError):
    """The image does not fit on its volume; the message is the contract's phrase. Sizes in bytes."""

    # Unlike other failures of a target, no retry helps: a Job stops (docs/reference/exit-status.md).
    status = 8
    template = (
        "virtual image size {virtual_size} is larger than the reported available storage {available}. "
        "A larger PVC is required"
    )
    terminal = (
        "the disk needs {virtual_size:size}, the target has room for {available:size}; "
        "free space or name a larger target"
    )

    def __init__(self, **fields: object) -> None:
        super().__init__(**fields)
        if fields.get("is_limit"):
            self.terminal = (
                "the disk needs {virtual_size:size}, --size allows {available:size}; "
                "give a larger --size, or leave it out"
            )


class NoSpace(TargetError):
    """The file system of the target or of scratch is full, or its quota is used up."""

    remedy = Remedy([("free space, or use a larger file system", "command")])
    status = TooLarge.status


class TargetBusy(TargetError):
    """Another run writes to the target, or a device is in use; it may be free later."""

    template = "{path}: busy: {reason}"
    retryable = True


class TargetLost(TargetError):
    """Another run has taken the target over. This run has stopped writing, and must not clean up either."""

    template = "{path}: taken over: {reason}; this run has stopped and changed nothing since"


class TargetExists(TargetError):
    """The target holds data that is replaced only on request."""

    terminal = "{path}: {reason}; to replace it, use --force"
    # Not at a terminal, which has its own text.
    remedy = Remedy([("replace it", "existing")])


class OutputClosed(TargetError):
    """The reader of standard output has closed its end before the whole disk was written.

    The status is that of a program which SIGPIPE has ended, as shells report it.
    """

    template = "{path}: closed by its reader"
    status = 141


class ScratchRequired(Error):
    """The only possible route needs scratch space, and none is mounted."""

    template = "scratch space required and none found: {reason}"
    terminal = "scratch space required: {reason}; name a folder with --scratch DIRECTORY"
    status = 7


class ScratchTooSmall(Error):
    """Scratch space is too small for the image as served. Sizes in bytes."""

    template = "scratch space has {available} bytes, the image needs {size} bytes: no space left on device"
    terminal = (
        "scratch space has {available:size}, the image needs {size:size}; "
        "name a larger folder with --scratch DIRECTORY"
    )
    status = 7


class ToolFailed(Error):
    """A program that the worker ran has failed; ``reason`` is the end of its error output."""

    template = "{tool} failed (exit status {exit_status}): {reason}"


class NoProgress(Error):
    """No data was transferred for ``seconds``, the limit."""

    template = "{what}: no progress for {seconds:.0f} s"
    retryable = True


class Cancelled(Error):
    """Cancelled by a signal or by the caller."""

    template = "cancelled"
    status = 130


class Interrupted(Cancelled):
    """Cancelled, and the same call continues: ``kept`` says what with. A pod has no command to repeat."""

    terminal = "interrupted: {kept}; the same command continues"


def words(err: OSError) -> str:
    """Return the operating system's message for ``err``, in lower case."""
    return os.strerror(err.errno or 0).lower()


@contextlib.contextmanager
def on_target(path: object, doing: str = "write") -> Iterator[None]:
    """Translate errors of the operating system in the block, see ``target_error``.

    It takes about a microsecond: calls for each piece of data translate them themselves.
    """
    try:
        yield
    except OSError as err:
        raise target_error(path, err, doing) from err


def target_error(path: object, err: OSError, doing: str = "write") -> TargetError:
    """Translate an operating system error on the target or on scratch.

    The texts for ENOSPC and EDQUOT are the contract's: controllers search for these phrases.
    """
    reasons = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "disk quota exceeded"}
    if full := reasons.get(err.errno or 0):
        return NoSpace(path=path, reason=f"{doing}: {full}")
    if err.errno == errno.EACCES:
        ours: Way = ("check the permissions, or name another target", "command")
        remedy = Remedy([ours, ("give the volume to the pod's user", "volume")])
        return denied(str(path), remedy, doing)
    return TargetError(path=path, reason=f"{doing}: {words(err)}")


def denied(path: str, remedy: Remedy, doing: str = "open") -> TargetError:
    """Return the error of a target that this user must not write to: it names user, owner and mode."""
    reason = f"{doing}: {os.strerror(errno.EACCES).lower()}"
    there = pathlib.Path(path)
    places = [there.parent, there]
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(there.stat().st_mode):
            places = [there]
    for each in places:
        with contextlib.suppress(OSError):
            found = each.stat()
            if not os.access(each, os.W_OK, effective_ids=True):
                groups = ", ".join(map(str, sorted({os.getegid(), *os.getgroups()})))
                owner = f"owner {found.st_uid}:{found.st_gid}, mode {stat.S_IMODE(found.st_mode):04o}"
                reason += f": user {os.geteuid()} of group {groups} must not write to {each} ({owner})"
                break
    return TargetError(path=path, reason=reason, remedy=remedy)
