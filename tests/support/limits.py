"""Running a program with little memory, little CPU or few rights, as in a pod."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import processes

_ROOT = Path("/sys/fs/cgroup")
_PERIOD = 100_000  # microseconds


@dataclasses.dataclass(frozen=True)
class Cgroup:
    """A control group. Put ``prefix`` before a command to run it inside."""

    directories: tuple[Path, ...]

    @property
    def prefix(self) -> tuple[str, ...]:
        """The command that enters the group and becomes the command that follows."""
        enter = "; ".join(f"echo $$ > '{directory}/cgroup.procs'" for directory in self.directories)
        return ("sh", "-c", f'{enter}; exec "$@"', "sh")

    def peak(self) -> int:
        """Return the most bytes of memory, page cache included, that the group ever held."""
        for name in ("memory.peak", "memory.max_usage_in_bytes"):
            if (file := self.directories[0] / name).exists():
                return int(file.read_text())
        pytest.skip("needs a kernel that keeps memory.peak")

    def killed(self) -> int:
        """Return how many processes of the group were killed for memory."""
        for name in ("memory.events", "memory.oom_control"):
            if (file := self.directories[0] / name).exists():
                counts = dict(line.split() for line in file.read_text().splitlines())
                return int(counts["oom_kill"])
        return 0


@contextlib.contextmanager
def cgroup(*, memory: int, cpus: float) -> Iterator[Cgroup]:
    """Make a control group with a limit in bytes of memory, page cache included, and of CPUs."""
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
            # A process that has just ended may still count for a moment.
            processes.wait_for(functools.partial(_removed, directory), f"{directory} to be empty")


def _removed(directory: Path) -> bool:
    with contextlib.suppress(OSError):
        directory.rmdir()
    return not directory.exists()


#: In mounts of its own: instead of a home that only its owner may enter, one that holds just the checkout.
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
    """Return the command to put before another to run it as a user id without any privilege."""
    processes.need_root()
    processes.need("setpriv")
    checkout = Path(__file__).parents[2]
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
