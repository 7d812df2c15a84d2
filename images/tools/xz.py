"""The xz tool as a reader: the blocks of one stream are decompressed on several cores."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process

_CHUNK = 256 << 10
# What Linux grants a pipe without privilege; 16 times the default, so that neither side waits on the other.
_PIPE = 1 << 20


class Reader:
    """Decompress ``source`` with ``xz --threads``.

    ``memory`` in bytes bounds both what threads may take (else one thread is used) and the dictionary
    that a stream may ask for (else ``errors.Refused``). Ends like any other reader of a format:
    ``errors.Truncated``, ``errors.Corrupt``; an error of ``source`` comes out as it is. Closed
    before the end, it sets ``scope``, which has to end the read of ``source`` that is under way.
    """

    def __init__(
        self,
        source: readers.Reader,
        scope: cancelling.Cancel,
        *,
        threads: int = 2,
        memory: int = 128 << 20,
    ) -> None:
        self._source = source
        self._scope = scope
        limits = (f"--memlimit-decompress={memory}", f"--memlimit-mt-decompress={memory}")
        argv = ("xz", "--decompress", "--stdout", f"--threads={threads}", *limits)
        command = process.Command(argv, package="xz-utils", address_space=memory + (1 << 30))
        self._process = process.Process(command, stdin=process.PIPE, stdout=process.PIPE)
        for pipe in (self._process.stdin, self._process.stdout):
            # Refused when the user's pipes already hold a lot (pipe-user-pages-soft).
            with contextlib.suppress(OSError):
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE)
        self._failure: BaseException | None = None
        self._finished = False
        self._feeder = threading.Thread(target=self._feed, name="xz-feeder", daemon=True)
        self._feeder.start()

    def readinto(self, into: memoryview, /) -> int:
        """Read 1 to ``len(into)`` bytes; 0 only at the end of whole and correct data."""
        count = 0
        # The tool writes some KiB at a time: handing on each would cost more than the copy.
        while count < min(len(into), _CHUNK):
            more = os.readv(self._process.stdout, [into[count:]])
            if not more:
                break
            count += more
        if not count:
            self._finish()
        return count

    def close(self) -> None:
        """End the tool, then close the source, after the one read of it that may be under way."""
        self._process.end()
        if not self._finished:
            self._scope.set("closed before the end")
        self._feeder.join()
        self._process.stop()
        self._source.close()

    def _finish(self) -> None:
        self._feeder.join()
        self._finished = True
        if self._failure is not None:
            raise self._failure
        try:
            self._process.finish()
        except errors.ToolFailed as err:
            raise _translated(str(err.fields["reason"])) from err

    def _feed(self) -> None:
        buffer = memoryview(bytearray(_CHUNK))
        try:
            while count := self._source.readinto(buffer):
                sent = 0
                while sent < count:
                    sent += os.write(self._process.stdin, buffer[sent:count])
        except BrokenPipeError:
            # The tool has ended before its input did: its exit status tells why.
            pass
        except BaseException as err:  # noqa: BLE001  (raised again where the bytes are read)
            self._failure = err
        finally:
            self._process.close_stdin()


def _translated(said: str) -> errors.Error:
    if "Unexpected end of input" in said:
        return errors.Truncated(format="xz", reason="the data end before the stream does")
    if "Memory usage limit" in said:
        return errors.Refused(format="xz", rule="dictionary", reason="decompression needs too much memory")
    return errors.Corrupt(format="xz", reason=said)
