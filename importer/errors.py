"""Everything that can go wrong, as one family of exceptions.

Every layer raises these and only these across its border; exceptions of libraries and of the
operating system are translated where the call is made. This module imports nothing of the project.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from typing import ClassVar


class Error(Exception):
    """Base of all failures.

    Sub-classes set ``template``, filled with the keyword arguments, which stay readable in
    ``fields``. ``status`` is the exit status of the command line (docs/exit-status.md);
    ``retryable`` tells a controller whether the same call may succeed later without a change.
    Messages are one printable line and never hold secrets: callers pass URLs through
    ``sources.wire.safe_url`` first.
    """

    template: ClassVar[str] = "{reason}"
    status: ClassVar[int] = 1
    retryable: ClassVar[bool] = False

    def __init__(self, **fields: object) -> None:
        self.fields = fields
        super().__init__(one_line(self.template.format(**fields)))

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.fields)


def one_line(text: str) -> str:
    """Return ``text`` as one line that can be printed.

    Names in images and archives are part of messages: they may be no UTF-8, and may steer a terminal.
    """
    if text.isprintable():
        return text
    odd = "\N{REPLACEMENT CHARACTER}"
    return "".join(char if char.isprintable() else " " if char.isspace() else odd for char in text)


def _rebuild(kind: type[Error], fields: dict[str, object]) -> Error:
    return kind(**fields)


class RequestError(Error):
    """What was asked for makes no sense; ``faults`` lists every fault found, not the first."""

    status = 2

    def __init__(self, *faults: str) -> None:
        self.faults = faults
        super().__init__(reason="; ".join(faults))

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), self.faults


class MissingExtra(Error):
    """An optional dependency is not installed."""

    template = "{what} needs the Python package {package}: pip install 'cdi-worker[{extra}]'"
    status = 2


@contextlib.contextmanager
def optional(what: str, *, package: str, extra: str) -> Iterator[None]:
    """Import an optional dependency in the block; what cannot be imported is a ``MissingExtra``."""
    try:
        yield
    except ImportError as err:
        raise MissingExtra(what=what, package=package, extra=extra) from err


class MissingTool(Error):
    """A program that the worker runs is not installed."""

    template = "{tool} is not installed: apt-get install {package}"
    status = 2


# -- sources ---------------------------------------------------------------------------------


class SourceError(Error):
    """The source cannot give what was asked for."""

    status = 3


class Unreachable(SourceError):
    """No usable answer before the first byte: name, connection, TLS, permission, not found."""

    template = "{url}: {reason}"


class Transient(SourceError):
    """A failure that trying again can mend. ``retry_after``: seconds the server asked for."""

    template = "{url}: {reason}"
    retryable = True

    def __init__(self, *, url: str, reason: object, retry_after: float | None = None) -> None:
        self.retry_after = retry_after
        super().__init__(url=url, reason=reason)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_transient, (self.fields, self.retry_after)


def _rebuild_transient(fields: dict[str, object], retry_after: float | None) -> Transient:
    return Transient(url=str(fields["url"]), reason=fields["reason"], retry_after=retry_after)


class TransferFailed(SourceError):
    """The transfer broke and trying again did not help (or cannot)."""

    template = "{url}: transfer failed at byte {offset}: {reason}"
    retryable = True


class Withdrawn(SourceError):
    """The source was reached, and refuses what comes after its first bytes."""

    template = "{url}: refused after the first bytes: {reason}"


class SourceChanged(SourceError):
    """The source is not the one that the transfer began with."""

    template = "{url}: changed during the transfer ({what} was {before}, now {now}); run the import again"
    retryable = True


class DigestMismatch(SourceError):
    """A blob, manifest or configuration is not the one that its digest names."""

    template = "{url}: digest mismatch: expected {expected}, calculated {calculated}"


class WrongPlatform(SourceError):
    """An image has no variant for the architecture that is wanted."""

    template = "{url}: no image for architecture {wanted}; there is {found}"


class NoRanges(SourceError):
    """A server that promised byte ranges does not keep to it; one ordered stream may still work."""

    template = "{url}: does not honour byte ranges: {reason}"


class UploadFailed(Error):
    """An upload server has not taken what was sent to it; ``reason`` is its own words."""

    template = "{url}: upload failed: {reason}"
    status = 3


# -- what the bytes are ----------------------------------------------------------------------


class ImageError(Error):
    """The image cannot be used as it is."""

    status = 4


class Refused(ImageError):
    """A safety rule forbids the image or archive. ``rule`` is a stable short name."""

    template = "{format} image refused ({rule}): {reason}"


class Unsupported(ImageError):
    """Well formed as far as known, but nothing here can read it."""

    template = "unsupported image: {reason}"


class Corrupt(ImageError):
    """The bytes contradict their own format."""

    template = "corrupt {format}: {reason}"


class Truncated(Corrupt):
    """The bytes end before the format does."""

    template = "truncated {format}: {reason}"


class TrailingGarbage(Corrupt):
    """Bytes follow where the format has ended."""

    template = "trailing garbage after the end of the {format} at byte {offset}"


class ChecksumMismatch(ImageError):
    """The contract's final verdict: the phrase `checksum mismatch` stops the controller's retries."""

    template = "checksum mismatch: expected {algorithm}:{expected}, calculated {algorithm}:{calculated}"
    status = 5


# -- where the disk goes -----------------------------------------------------------------------


class TargetError(Error):
    """The target cannot be opened, written, synced or renamed."""

    template = "{path}: {reason}"
    status = 6


class TooLarge(TargetError):
    """The contract's phrase for an image that its volume cannot hold. Sizes in bytes."""

    template = (
        "virtual image size {virtual_size} is larger than the reported available storage {available}. "
        "A larger PVC is required"
    )


class NoSpace(TargetError):
    """The target's file system, or scratch, has no room left; or a quota of it."""


class ScratchRequired(Error):
    """The only possible route needs scratch space and there is none."""

    template = "scratch space required and none found: {reason}"
    status = 7


class ScratchTooSmall(Error):
    """Scratch space is there and cannot hold the image as served. Sizes in bytes."""

    template = "scratch space has {available} bytes, the image needs {size}: no space left on device"
    status = 7


class ToolFailed(Error):
    """A program that the worker ran has failed; ``reason`` is its own last words."""

    template = "{tool} failed (exit status {exit_status}): {reason}"


class NoProgress(Error):
    """Nothing moved for longer than the limit. ``seconds``: the limit."""

    template = "{what}: no progress for {seconds:.0f} s"
    retryable = True


class Cancelled(Error):
    """Asked to stop by signal or by the caller."""

    template = "cancelled"
    status = 130


def words(err: OSError) -> str:
    """Return what the operating system says, as a part of a message."""
    return os.strerror(err.errno or 0).lower()


def target_error(path: object, err: OSError, doing: str = "write") -> TargetError:
    """Translate an error of the operating system on the target or on scratch.

    The wording of ENOSPC and EDQUOT is the contract's: controllers look for these phrases.
    """
    reasons = {errno.ENOSPC: "no space left on device", errno.EDQUOT: "disk quota exceeded"}
    if full := reasons.get(err.errno or 0):
        return NoSpace(path=path, reason=f"{doing}: {full}")
    return TargetError(path=path, reason=f"{doing}: {words(err)}")
