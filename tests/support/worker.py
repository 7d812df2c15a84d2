"""The worker, started from the command line or as in a pod: in this process, or as one of its own."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from cdi_worker import masking
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import cli
from tests.support import forked, processes

COMMAND = (sys.executable, "-m", "cdi_worker")
ENVIRONMENT = forked.ENVIRONMENT


@dataclasses.dataclass(frozen=True)
class Completed:
    """The exit status and the output of a worker."""

    status: int
    output: str
    errors: str

    @property
    def error_message(self) -> str:
        """Return the error line printed at the end of standard error, without its prefix."""
        lines = [line for line in self.errors.splitlines() if line.startswith("cdi-worker: ")]
        assert len(lines) == 1, self.errors
        return lines[0].removeprefix("cdi-worker: ")


def call(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Completed:
    """Run the command in this process: for what it does and says.

    Not for what belongs to a process: signals and kills, closed streams, a disk on a standard stream, limits,
    start-up, and libraries that remember the environment (boto3's and Google's credentials).
    """
    output, errors = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with (
        mock.patch.dict(os.environ, {**ENVIRONMENT, **(env or {})}, clear=True),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
        mock.patch.object(masking, "_registry", masking._Registry()),
        mock.patch.object(threading, "excepthook"),
        mock.patch.object(sys, "unraisablehook"),
        _own_logging(),
    ):
        status = cli.status([str(each) for each in arguments], cancelling.Cancel())
    said = (each.buffer.getvalue().decode() for each in (output, errors))  # type: ignore[attr-defined]
    return Completed(status, *said)


@contextlib.contextmanager
def _own_logging() -> Iterator[None]:
    """Let the block set up logging as a new process; ``pytest`` gets its handlers and levels back.

    Loggers that are new have no level afterwards: a test may want to see all that a library logs.
    """

    def loggers() -> list[logging.Logger]:
        found = [*logging.root.manager.loggerDict.values()]
        return [root, *(each for each in found if isinstance(each, logging.Logger))]

    root = logging.root
    levels = {each: each.level for each in loggers()}
    handlers, root.handlers = root.handlers, []
    try:
        yield
    finally:
        root.handlers = handlers
        logging.captureWarnings(False)
        for each in loggers():
            each.setLevel(levels.get(each, logging.NOTSET))


def run(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    timeout: float = 90,
) -> Completed:
    """Run the command to its end; ``prefix`` is a command that runs a command, as in ``limits``."""
    argv = [*prefix, *COMMAND, *arguments]
    done = forked.run(argv, env={**ENVIRONMENT, **(env or {})}, timeout=timeout)
    return Completed(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def started(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    stdout: int = subprocess.PIPE,
    is_forked: bool = True,
) -> Iterator[subprocess.Popen[str]]:
    """Run the command in the background; kill it at the end of the block if it is still running.

    ``is_forked``: without it, ``/proc`` shows the command line and the environment.

    A command that writes a disk to standard output needs a descriptor as ``stdout``: what the pipe brings is
    decoded as text.
    """
    start = forked.Popen[str] if is_forked else subprocess.Popen[str]
    process = start(
        [*COMMAND, *arguments],
        env={**ENVIRONMENT, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=processes.PATIENCE)


@dataclasses.dataclass
class Volumes:
    """The mounts of a worker pod below one directory.

    ``block``: a device instead of the file-system volume. ``has_scratch``: whether scratch is mounted.
    """

    directory: Path
    block: Path | None = dataclasses.field(default=None, kw_only=True)
    has_scratch: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def data(self) -> Path:
        """Return the mount of the file-system volume."""
        return self.directory / "data"

    @property
    def scratch(self) -> Path:
        """Return the mount of scratch."""
        return self.directory / "scratch"

    @property
    def log(self) -> Path:
        """Return the file of the termination message."""
        return self.directory / "termination-log"

    @property
    def disk(self) -> Path:
        """Return the path of the imported disk."""
        return self.block or self.data / "disk.img"

    @property
    def message(self) -> str:
        """Return the termination message of the last run."""
        return self.log.read_text()

    @property
    def outcome(self) -> dict[str, Any]:
        """Return the termination message of the last run, parsed as JSON."""
        return dict(json.loads(self.message))


@dataclasses.dataclass
class Pod(Volumes):
    """The mounts of a worker pod and its container's environment.

    ``metrics_port``: 0 for none, None for what the environment says.
    """

    metrics_port: int | None = 0
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data.mkdir(exist_ok=True, parents=True)
        self.headers.mkdir(exist_ok=True)

    @property
    def headers(self) -> Path:
        """Return the mount of the Secrets with extra headers."""
        return self.directory / "extraheaders"

    @property
    def arguments(self) -> list[str]:
        """Return the container's arguments: a controller's, and the options that replace its mounts."""
        if self.has_scratch:
            self.scratch.mkdir(exist_ok=True)
        return [
            "-v=1",
            f"--data-dir={self.data}",
            f"--block-device={self.block or self.directory / 'no-block'}",
            f"--scratch-dir={self.scratch}",
            f"--extra-headers-dir={self.headers}",
            f"--termination-log={self.log}",
            *([] if self.metrics_port is None else [f"--metrics-port={self.metrics_port}"]),
        ]

    def call(self, **env: str) -> Completed:
        """Do as ``run`` in this process (the function ``call``)."""
        self.log.unlink(missing_ok=True)
        return call(*self.arguments, env={**self.env, **env})

    def run(self, *, prefix: tuple[str, ...] = (), **env: str) -> Completed:
        """Run the container once, on the volumes as the last run left them, as a process."""
        self.log.unlink(missing_ok=True)
        return run(*self.arguments, env={**self.env, **env}, prefix=prefix)
