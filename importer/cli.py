"""The entry point: command line, signals, logging, exit status. Only this module exits the process."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from pathlib import Path
from typing import NoReturn

import click

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import commands, contract
from cdi_worker.importer.commands import group, parameters

log = logging.getLogger(__name__)

#: Errors of a standard output that is closed or full.
LOST = frozenset({errno.EBADF, errno.ENOSPC, errno.EIO})

#: Signals within this many seconds count as one: timeout(1) sends two, to its child and its process group.
TOGETHER = 0.5

#: What our image says as that of ``initImageURL``: its end must not keep the pod from starting.
NO_LIBRARY = (
    f"copies nothing to {contract.LIBRARY_VOLUME}: this image has no VDDK library, and the import reads the "
    "disk through an export lease of vSphere"
)

#: Flags of Go's klog, which controllers pass to every role (contract, Roles).
_GO_FLAG = re.compile(r"--?(alsologtostderr|logtostderr|stderrthreshold|v)(=.*)?")


def main(argv: list[str] | None = None) -> NoReturn:
    """Run ``cdi-worker`` with ``argv`` and exit with its status (docs/reference/exit-status.md)."""
    _open_streams()
    number = status(_arguments() if argv is None else list(argv), cancelled_by_signals())
    # Python's finalization takes another 25 ms, and reports what cannot be printed.
    logging.shutdown()
    for stream in (sys.stderr, sys.stdout):
        # Failures of the output were reported where they happened.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(number)


def _open_streams() -> None:
    """Open the standard streams that are closed, so that no other file gets their descriptors.

    Using them fails as before: they are open for the other direction.
    """
    for number, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_RDONLY)):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, mode)
    sys.stdin = sys.stdin or open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115


def cancelled_by_signals() -> cancelling.Cancel:
    """Return a cancel that the first SIGTERM, SIGINT or SIGHUP sets; nohup's SIGHUP stays ignored.

    A later SIGTERM or SIGINT ends the process at once; the kernel then kills its children.
    A thread reads the numbers that the interpreter writes to a pipe. Python's own handlers would run
    in the main thread: only when its wait ends, if the signal came just before it, and with any lock held.
    """
    cancel = cancelling.Cancel()
    arrived, wakeup = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(wakeup, False)

    def follow() -> None:
        cancel.set(signal.Signals(os.read(arrived, 1)[0]).name)
        began = time.monotonic()
        while True:
            number = signal.Signals(os.read(arrived, 1)[0])
            if number != signal.SIGHUP and time.monotonic() - began > TOGETHER:
                # No message: the program may be blocked in writing to standard error.
                os._exit(128 + number)

    threading.Thread(target=follow, name="signals", daemon=True).start()
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda *_: None)
    return cancel


def _arguments() -> list[str]:
    """Return the arguments; if the process has the name of one of CDI's programs, it is the sub-command.

    Forklift's controller starts a populator without a command: its arguments say which it is.
    """
    name, *arguments = Path(sys.argv[0]).name, *sys.argv[1:]
    if name in group.PROGRAMS:
        return [name, *arguments]
    is_first = arguments[:1] and not arguments[0].startswith("-")
    has_command = is_first or not group.PROGRAMS.keys().isdisjoint(arguments)
    options = {each.lstrip("-").partition("=")[0] for each in arguments if each.startswith("-")}
    if not has_command and "volume-path" in options:
        program = (
            "openstack-populator" if options.isdisjoint({"disk-id", "engine-url"}) else "ovirt-populator"
        )
        return [program, *arguments]
    return arguments


class _Formatter(logging.Formatter):
    """Write ``warning: …``, or with ``is_log`` a line with the header of klog, as CDI's own pods.

    klog's header is ``Lmmdd hh:mm:ss.uuuuuu pid file:line]``; it has no level for debugging. Masks the
    secrets, also in tracebacks and in what libraries log; erases the bar before it.
    """

    def __init__(self, *, is_log: bool) -> None:
        header = "{level}{asctime} {process:7d} {filename}:{lineno}] " if is_log else "{level}: "
        super().__init__(header + "{message}", "%m%d %H:%M:%S", style="{")
        self._is_log = is_log

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:  # noqa: N802  (logging's)
        return f"{super().formatTime(record, datefmt)}.{int(record.created % 1 * 1e6):06}"

    def format(self, record: logging.LogRecord) -> str:
        name = record.levelname
        record.level = {"DEBUG": "I"}.get(name, name[0]) if self._is_log else name.lower()
        return f"{commands.erase}{masking.mask(super().format(record))}"


def set_up_logging(verbosity: int) -> None:
    """Log to standard error: warnings, from level 1 on info, from level 4 on debug (klog's levels).

    Below 0 only errors.
    """
    levels = {-1: logging.ERROR, 0: logging.WARNING, 1: logging.INFO, 2: logging.INFO, 3: logging.INFO}
    level = levels.get(max(-1, verbosity), logging.DEBUG)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(is_log=level < logging.WARNING))
    logging.basicConfig(handlers=[handler], level=level, force=True)
    # What Python would print itself is logged, and so masked.
    logging.captureWarnings(True)
    threading.excepthook = lambda found: log.error(
        "thread %s has failed", found.thread.name if found.thread else "", exc_info=found.exc_value
    )
    sys.unraisablehook = lambda found: log.error("ignored in %r", found.object, exc_info=found.exc_value)
    for noisy in ("urllib3", "botocore", "boto3", "google", "requests", "backends", "client", "keystoneauth"):
        # urllib3 warns about malformed headers with the URL and its signature.
        logging.getLogger(noisy).setLevel(
            logging.ERROR if noisy == "urllib3" else max(level, logging.WARNING)
        )


def status(argv: list[str], cancel: cancelling.Cancel) -> int:
    """Run a command and return its exit status. Messages go to standard output and standard error."""
    obj = parameters.Context(cancel, set_up_logging, contract.environment())
    if not argv and contract.role(obj.env) is None and contract.is_library_image(obj.env):
        _say(NO_LIBRARY)
        return 0
    # A wrong command line may be refused, with its arguments in the message, before there is a location.
    for text in (re.sub("^-[^=]*=", "", each) for each in argv):
        masking.register(obj, *masking.address(text))
    masking.register(obj, *masking.variables(obj.env))
    if f"_{contract.PREFIX}_COMPLETE" in obj.env:
        from cdi_worker.importer.commands import completion  # noqa: F401  (registers itself)
    error: errors.Error
    try:
        outcome = group.cli.main(
            _arguments_of_click(argv), prog_name="cdi-worker", standalone_mode=False, obj=obj
        )
        return outcome if isinstance(outcome, int) else 0
    except errors.OutputClosed as err:
        # As quiet as a program that SIGPIPE ends.
        return err.status
    except click.ClickException as err:
        with contextlib.suppress(OSError):
            err.message = masking.mask(err.message)  # type: ignore[misc]  # final in click
            err.show()
        error, number = errors.RequestError(err.format_message()), err.exit_code
    except (click.Abort, KeyboardInterrupt):
        error, number = errors.Cancelled(), errors.Cancelled.status
    except errors.Error as err:
        error, number = err, err.status
        _say(error.at_terminal())
        log.debug("trace", exc_info=True)
    except Exception as err:
        log.debug("trace", exc_info=True)
        if isinstance(err, OSError) and err.filename is None and err.errno in LOST:
            # Help, printed by click.
            reason = f"standard output: {errors.words(err)}"
        else:
            # A defect. The traceback is for the person who reports it.
            reason = f"internal error: {type(err).__name__}: {err}; please report it with the output of -v=4"
        error, number = errors.Error(reason=reason), errors.Error.status
        _say(reason)
    # A wrong command line may be refused before ``obj`` knows of --json or of a disk on standard output.
    if obj.as_json or "--json" in argv:
        is_disk = obj.to_stdout or ("import" in argv and "-" in argv[argv.index("import") + 2 :])
        stream = sys.stderr if is_disk else sys.stdout
        with contextlib.suppress(OSError):
            print(json.dumps({"error": error.as_fields(error.at_terminal())}), file=stream, flush=True)
    return number


def _say(message: str) -> None:
    """Print a line for people. A closed standard error (``2>&1 | head``, ssh) does not change the outcome."""
    with contextlib.suppress(OSError):
        print(f"cdi-worker: {errors.one_line(message)}", file=sys.stderr, flush=True)


def _arguments_of_click(argv: list[str]) -> list[str]:
    """Return the arguments with long options for Go's flags, and a level for ``-v`` and ``-vv``.

    ``-v=3`` becomes ``--v=3``, and ``-logtostderr=true`` a flag.
    """
    found: list[str] = []
    ended = False
    for argument in argv:
        ended = ended or argument == "--"
        if ended:
            found.append(argument)
        elif found and found[-1] == "--v=1" and re.fullmatch("[0-9]", argument):
            found[-1] = f"--v={argument}"
        elif re.fullmatch("-v+", argument):
            found.append(f"--v={len(argument) - 1}")
        elif flag := _GO_FLAG.fullmatch(argument):
            name, value = flag.groups(default="")
            found.append(f"--{name}" if name.endswith("logtostderr") else f"--{name}{value}")
        else:
            found.append(argument)
    return found
