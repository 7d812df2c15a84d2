"""The worker as a process of its own, started from the command line or as in a pod."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

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

    def run(self, *, prefix: tuple[str, ...] = (), **env: str) -> Completed:
        """Run the container once, on the volumes as the last run left them."""
        self.log.unlink(missing_ok=True)
        return run(*self.arguments, env={**self.env, **env}, prefix=prefix)
