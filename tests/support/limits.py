"""Run a program with little memory, little CPU or few privileges, as in a pod."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes, repository

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000  # microseconds


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """A control group. Put ``prefix`` before a command to run it inside."""

    directories: tuple[Path, ...]

    @property
    def prefix(self) -> tuple[str, ...]:
        """Return the command prefix that enters the group and executes what follows."""
        enter = "; ".join(f"echo $$ > '{directory}/cgroup.procs'" for directory in self.directories)
        return ("sh", "-c", f'{enter}; exec "$@"', "sh")

    def peak(self) -> int:
        """Return the peak memory of the group in bytes, page cache included."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (file := self.directories[0] / name).exists():
                return int(file.read_text())
        pytest.skip("needs a kernel that keeps memory.peak")

    def killed(self) -> int:
        """Return how many processes of the group the kernel killed for memory."""
        for name in ("memory.events", "memory.oom_control"):
            if (file := self.directories[0] / name).exists():
                counts = dict(line.split() for line in file.read_text().splitlines())
                return int(counts["oom_kill"])
        return 0


@contextlib.contextmanager
def cgroup(*, memory: int, cpus: float) -> Iterator[Cgroup]:
    """Create a control group with a memory limit in bytes (page cache included) and a CPU limit."""
    processes.need_root()
    name = f"cdi-test-{os.urandom(4).hex()}"
    quota = int(cpus * _PERIOD)
    if (_ROOT / "memory" / "cgroup.procs").exists():
        files = {
            _ROOT / "memory" / name / "memory.limit_in_bytes": str(memory),
            _ROOT / "cpu" / name / "cpu.cfs_quota_us": str(quota),
        }
    else:
        controllers = _ROOT / "cgroup.subtree_control"
        if not controllers.exists() or not {"memory", "cpu"} <= {*controllers.read_text().split()}:
            pytest.skip("needs memory and cpu controllers in /sys/fs/cgroup")
        files = {
            _ROOT / name / "memory.max": str(memory),
            _ROOT / name / "cpu.max": f"{quota} {_PERIOD}",
        }
    group = Cgroup(tuple(dict.fromkeys(file.parent for file in files)))
    try:
        for directory in group.directories:
            directory.mkdir()
        for file, value in files.items():
            file.write_text(value)
        yield group
    finally:
        for directory in group.directories:
            # A process that has just exited may still be counted for a moment.
            processes.wait_for(functools.partial(_removed, directory), f"{directory} to be empty")


def _removed(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        directory.rmdir()
    return not directory.exists()


#: In a mount namespace: replaces a home directory closed to other users by one that holds only the checkout.
_LEAVE_HOME = """
home=$1 checkout=$2; shift 2
exec 3<"$checkout"
mount -t tmpfs -o mode=755 tmpfs "$home"
mkdir -p "$checkout"
mount --no-canonicalize --bind /proc/self/fd/3 "$checkout"
exec 3<&-
cd "$checkout"
exec "$@"
"""


def unprivileged(user: int = 107) -> tuple[str, ...]:
    """Return the command prefix that runs a command as ``user`` without any privilege."""
    processes.need_root()
    processes.need("setpriv")
    checkout = repository.ROOT
    closed = [path for path in checkout.parents if not path.stat().st_mode & 0o001]
    prefix: tuple[str, ...] = ()
    if closed:
        prefix = ("unshare", "--mount", "sh", "-euc", _LEAVE_HOME, "sh", str(closed[-1]), str(checkout))
    return (
        *prefix,
        "setpriv",
        f"--reuid={user}",
        f"--regid={user}",
        "--clear-groups",
        "--no-new-privs",
        "--bounding-set=-all",
    )
