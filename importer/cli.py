"""The one exit door: command line, signals, logging, exit status."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from cdi_worker import errors
from cdi_worker.commands import group

#: Flags of Go's klog, which controllers pass to every role (contract, Roles).
_GO_FLAG = re.compile(r"--?(alsologtostderr|logtostderr|stderrthreshold|v)(=.*)?")


def main(argv: list[str] | None = None) -> NoReturn:
    """Run ``cdi-worker`` with ``argv`` and exit with the documented status (docs/exit-status.md)."""
    cancel = threading.Event()

    def stop(_number: int, _frame: FrameType | None) -> None:
        cancel.set()

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    _leave(_status(_arguments() if argv is None else list(argv), cancel))


def _leave(status: int) -> NoReturn:
    """End the process at once: to take its modules apart one by one would take Python another 25 ms."""
    logging.shutdown()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        # Python says so in its own way, and with its own status.
        sys.exit(status)
    os._exit(status)


def _arguments() -> list[str]:
    """Return the process's arguments; a name of one of CDI's programs is the sub-command."""
    program = Path(sys.argv[0]).name
    return [program, *sys.argv[1:]] if program in group.PROGRAMS else sys.argv[1:]


def set_up_logging(verbosity: int) -> None:
    """Log to standard error: warnings, from 1 on what happens, from 4 on everything (klog's levels)."""
    level = logging.WARNING if verbosity < 1 else logging.INFO if verbosity < 4 else logging.DEBUG
    logging.basicConfig(
        stream=sys.stderr, level=level, format="%(asctime)s %(levelname).1s %(name)s %(message)s", force=True
    )
    for noisy in ("urllib3", "botocore", "boto3", "google", "requests", "backends", "client"):
        logging.getLogger(noisy).setLevel(max(level, logging.WARNING))


def _status(argv: list[str], cancel: threading.Event) -> int:
    try:
        outcome = group.cli.main(
            [_long(argument) for argument in argv],
            prog_name="cdi-worker",
            standalone_mode=False,
            obj=group.Context(cancel, set_up_logging),
        )
    except click.ClickException as err:
        err.show()
        return err.exit_code
    except (click.Abort, KeyboardInterrupt):
        return errors.Cancelled.status
    except errors.Error as err:
        print(f"cdi-worker: {err}", file=sys.stderr)
        return err.status
    return outcome if isinstance(outcome, int) else 0


def _long(argument: str) -> str:
    """Turn a Go flag into the long option that click reads: ``-v=3`` into ``--v=3``; switches lose theirs."""
    found = _GO_FLAG.fullmatch(argument)
    if not found:
        return argument
    name, value = found.groups(default="")
    return f"--{name}" if name.endswith("logtostderr") else f"--{name}{value}"
