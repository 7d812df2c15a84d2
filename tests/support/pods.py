"""The worker's image in containers, with the privileges and limits of a pod."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import stat
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support import devices, oracle, processes, worker

#: The limits of a controller's pod (contract, Roles).
LIMITS = ("--memory=600m", "--memory-swap=600m", "--cpus=0.75", "--pids-limit=256")
#: A user as OpenShift chooses it, without a name and in the group 0, and the group of volumes (fsGroup).
USER = 1000660000
GROUP = 1000660000
#: A restricted namespace. The seccomp profile is podman's own, as that of containerd for RuntimeDefault.
RIGHTS = (
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--read-only",
    "--read-only-tmpfs=false",
    "--passwd=false",
    f"--group-add={GROUP}",
)
#: Options that give back what these take.
MORE = ("--privileged", "--cap-add", "--security-opt=seccomp", "--security-opt=unmask", "--user=0", "--tmpfs")
#: Seconds until a container listens, also in an emulated image on a busy machine.
START = 60.0
#: For podman inside a container: the host's network reaches servers on its loopback.
HERE = (
    "--runtime=runc",
    "--network=host",
    "--ulimit=nofile=1024:20000",
    "--ulimit=nproc=1024:20000",
    "--pull=never",
)


@dataclasses.dataclass
class Pod(worker.Volumes):
    """Volumes below a directory and the container that mounts them.

    ``user``: ``uid:gid``. ``files``: further files and their mount points.
    ``mount_point`` and ``device_path``: where the target is, by its mode.
    """

    image: str
    user: str = f"{USER}:0"
    mount_point: str = "/data"
    device_path: str = "/dev/cdi-block-volume"
    #: The volume shared by the containers of one pod, mounted at ``/shared``.
    shared: Path = Path()
    files: dict[Path, str] = dataclasses.field(default_factory=dict)
    env: dict[str, str] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.shared == Path():
            self.shared = self.directory / "shared"
        for path in (self.data, self.scratch, self.shared):
            path.mkdir(parents=True, exist_ok=True)
            self._own(path)
        self.log.touch()
        self._own(self.log)

    def _own(self, path: Path) -> None:
        # As with an fsGroup: the volume and what is written there belong to the group, whatever the user.
        os.chown(path, 0, GROUP)
        path.chmod(path.stat().st_mode | stat.S_IRWXG | (stat.S_ISGID if path.is_dir() else 0))

    def command(self, *arguments: str, entrypoint: str | None = None, **env: str) -> list[str]:
        """Return the command that runs the container once."""
        mounts = {self.log: "/dev/termination-log:rw", self.shared: "/shared:rw"}
        mounts |= {path: f"{place}:ro" for path, place in self.files.items()}
        if self.block is None:
            mounts[self.data] = f"{self.mount_point}:rw"
        if self.has_scratch:
            mounts[self.scratch] = "/scratch:rw"
        words = ["podman", "run", "--rm", *HERE, *LIMITS, *RIGHTS, f"--user={self.user}"]
        words += [f"--volume={path}:{place}" for path, place in mounts.items()]
        if self.block is not None:
            words.append(f"--device={self.block}:{self.device_path}")
        words += [f"--env={key}={value}" for key, value in {**self.env, **env}.items()]
        if entrypoint is not None:
            words.append(f"--entrypoint={entrypoint}")
        return [*words, self.image, *arguments]

    def run(
        self, *arguments: str, entrypoint: str | None = None, timeout: float = 100, **env: str
    ) -> subprocess.CompletedProcess[str]:
        """Run the container to its end, by default with a controller's arguments."""
        command = self.command(*(arguments or ("-v=1",)), entrypoint=entrypoint, **env)
        # conmon writes a file into the current directory when a container is killed for memory.
        return subprocess.run(
            command, capture_output=True, text=True, timeout=timeout, check=False, cwd=self.directory
        )

    @contextlib.contextmanager
    def running(
        self, *arguments: str, port: int, entrypoint: str | None = None, env: Mapping[str, str] | None = None
    ) -> Iterator[subprocess.Popen[bytes]]:
        """Run the container beside the block; it is ready when it listens on the port."""
        command = self.command(*arguments, entrypoint=entrypoint, **(env or {}))
        output = self.directory / "output"
        with processes.running(
            command, log=output, ready=lambda: processes.is_listening(port), patience=START
        ) as started:
            yield started


def check(pod: Pod, done: subprocess.CompletedProcess[str], message: str, expected: Path) -> None:
    """Check that a container succeeded with this message, and that the volume holds the disk."""
    assert (done.returncode, pod.message) == (0, message), done.stderr
    assert "Traceback" not in done.stderr
    oracle.same(pod.disk, expected, beyond=devices.DIRT if pod.block else b"\0")


@contextlib.contextmanager
def device(directory: Path, owner: int = USER) -> Iterator[Path]:
    """Make a block device of 16 MiB for a container, filled with 0xFF."""
    with devices.loop(directory, 16 << 20) as made:
        before = made.stat()
        # As the kubelet's runtime does (device_ownership_from_security_context).
        os.chown(made, owner, owner)
        yield made
        os.chown(made, before.st_uid, before.st_gid)


def refuse_others(event: str, arguments: tuple[Any, ...]) -> None:
    """Refuse to start a container with more rights or no limits: an audit hook (``sys.addaudithook``)."""
    if event != "subprocess.Popen":
        return
    words = [os.fsdecode(each) for each in arguments[1]]
    if words[:1] != ["podman"] or words[1] in ("image", "import", "rmi"):
        return
    lacking = {"run", *LIMITS, *RIGHTS}.difference(words)
    more = [each for each in words if each.startswith(MORE)]
    assert not lacking, f"a container without {lacking}: {words}"
    assert not more, f"a container with {more}: {words}"


@contextlib.contextmanager
def image_of(tree: Path, name: str) -> Iterator[str]:
    """Make a container image with the content of a folder, and remove it after the block."""
    archive = tree.parent / f"{tree.name}.tar"
    processes.run("tar", "--create", f"--file={archive}", f"--directory={tree}", ".")
    processes.run("podman", "import", "--quiet", archive, name)
    try:
        yield name
    finally:
        processes.run("podman", "rmi", "--force", name)
