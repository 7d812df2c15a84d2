"""The worker as the world starts it: a process of its own, in the command line's or a pod's way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support import processes

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-m", "cdi_worker")
#: Nothing of the environment that the tests run in.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "PYTHONPATH": str(ROOT), "LC_ALL": "C.UTF-8"}


@dataclasses.dataclass(frozen=True)
class Done:
    """How a worker ended."""

    status: int
    output: str
    errors: str

    @property
    def complaint(self) -> str:
        """The one line that the command line ends with on standard error."""
        lines = [line for line in self.errors.splitlines() if line.startswith("cdi-worker: ")]
        assert len(lines) == 1, self.errors
        return lines[0].removeprefix("cdi-worker: ")


def run(
    *arguments: str | Path,
    env: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
    timeout: float = 90,
) -> Done:
    """Run the command to its end; ``prefix`` is a command that runs a command, as of ``limits``."""
    done = subprocess.run(
        [*prefix, *COMMAND, *arguments],
        env={**ENVIRONMENT, **(env or {})},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )
    return Done(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def started(*arguments: str | Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run the command beside the block; killed at its end if it is still running."""
    process = subprocess.Popen(
        [*COMMAND, *arguments],
        env={**ENVIRONMENT, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
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

    ``block``: a device in place of the file-system volume. ``has_scratch``: whether scratch is mounted.
    """

    directory: Path
    block: Path | None = dataclasses.field(default=None, kw_only=True)
    has_scratch: bool = dataclasses.field(default=False, kw_only=True)

    @property
    def data(self) -> Path:
        return self.directory / "data"

    @property
    def scratch(self) -> Path:
        return self.directory / "scratch"

    @property
    def log(self) -> Path:
        return self.directory / "termination-log"

    @property
    def disk(self) -> Path:
        """Where the disk has to be in the end."""
        return self.block or self.data / "disk.img"

    @property
    def message(self) -> str:
        """The termination message of the last run, as it is."""
        return self.log.read_text()

    @property
    def told(self) -> dict[str, Any]:
        """The termination message of the last run, read as JSON."""
        return dict(json.loads(self.message))


@dataclasses.dataclass
class Pod(Volumes):
    """A worker pod's mounts, and the environment of its container. ``metrics_port``: 0 for nowhere."""

    metrics_port: int = 0
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data.mkdir(exist_ok=True, parents=True)
        self.headers.mkdir(exist_ok=True)

    @property
    def headers(self) -> Path:
        return self.directory / "extraheaders"

    @property
    def arguments(self) -> list[str]:
        """The container's arguments: a controller's, and the options that stand for its mounts."""
        if self.has_scratch:
            self.scratch.mkdir(exist_ok=True)
        return [
            "-v=1",
            f"--data-dir={self.data}",
            f"--block-device={self.block or self.directory / 'no-block'}",
            f"--scratch-dir={self.scratch}",
            f"--extra-headers-dir={self.headers}",
            f"--termination-log={self.log}",
            f"--metrics-port={self.metrics_port}",
        ]

    def run(self, *, prefix: tuple[str, ...] = (), **env: str) -> Done:
        """Run the container once; it finds the volumes as the last run left them."""
        self.log.unlink(missing_ok=True)
        return run(*self.arguments, env={**self.env, **env}, prefix=prefix)
