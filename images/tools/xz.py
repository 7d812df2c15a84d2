"""Decompress xz with the xz tool, several blocks of a stream in parallel."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import decompress
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process

#: The program, and the Debian package with it.
PROGRAM = "xz", "xz-utils"

_CHUNK = 256 << 10
# The maximum pipe size without privileges; 16 times the default, so that both sides wait less.
_PIPE = 1 << 20
#: Bytes that xz may be given beyond what it keeps in memory, while it returns none: padding, empty streams.
_FRUITLESS = 64 << 20


class XzReader:
    """Decompress ``source`` with ``xz --threads``.

    ``memory`` in bytes limits the memory of the threads (if it is too small, one thread is used) and the
    dictionary of the stream (if it is larger, ``errors.Unsupported``). Raises ``errors.Truncated`` and
    ``errors.Corrupt``, and ``errors.Refused`` for input without end and without content; errors of ``source``
    are raised unchanged. Closing it before the end sets ``scope``,
    which must end the read of ``source`` in progress.
    """

    def __init__(
        self,
        source: readers.Reader,
        scope: cancelling.Cancel,
        *,
        threads: int = 2,
        memory: int = decompress.MEMORY,
    ) -> None:
        self._source = source
        self._scope = scope
        limits = (f"--memlimit-decompress={memory}", f"--memlimit-mt-decompress={memory}")
        argv = ("xz", "--decompress", "--stdout", f"--threads={threads}", *limits)
        command = process.Command(argv, package=PROGRAM[1], address_space=memory + (1 << 30))
        self._process = process.Process(command, stdin=process.PIPE, stdout=process.PIPE)
        for pipe in (self._process.stdin, self._process.stdout):
            # Fails if the user's pipes have too many pages already (pipe-user-pages-soft, pipe(7)).
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
        self._failure: BaseException | None = None
        self._most = memory + _FRUITLESS
        #: Bytes given to xz, and how many of them at its last output.
        self._fed = self._fruitful = 0
        self._finished = False
        self._feeder = threading.Thread(target=self._feed, name="xz-feeder", daemon=True)
        self._feeder.start()

    def readinto(self, into: memoryview, /) -> int:
        """Read 1 to ``len(into)`` bytes; return 0 only at the end of complete and valid data."""
        if count := self._process.readinto(into[:_CHUNK]):
            self._fruitful = self._fed
            return count
        self._feeder.join()
        self._finished = True
        if self._failure is not None:
            raise self._failure
        try:
            self._process.finish()
        except errors.ToolFailed as err:
            message = str(err.fields["reason"])
            if "Unexpected end of input" in message:
                reason = "the data ends before the end of the stream"
                raise errors.Truncated(format="xz", reason=reason) from err
            if "Memory usage limit" in message:
                raise decompress.too_large_window("xz") from err
            raise errors.Corrupt(format="xz", reason=message) from err
        return 0

    def close(self) -> None:
        """End the tool, wait for a read of the source in progress, then close the source."""
        self._process.end()
        if not self._finished:
            self._scope.set("closed before the end")
        self._feeder.join()
        self._process.stop()
        self._source.close()

    def _feed(self) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        try:
            while count := self._source.readinto(buffer):
                sent = 0
                while sent < count:
                    sent += os.write(self._process.stdin, buffer[sent:count])
                self._fed += count
                if self._fed - self._fruitful > self._most:
                    reason = f"more than {self._most >> 20} MiB in a row are empty"
                    raise errors.Refused(format="xz", rule="no content", reason=reason)
        except BrokenPipeError:
            # xz has exited: ``readinto`` reports its exit status.
            pass
        except BaseException as err:  # noqa: BLE001  (raised again where the bytes are read)
            self._failure = err
        finally:
            self._process.close_stdin()
