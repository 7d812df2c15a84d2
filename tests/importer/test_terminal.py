"""The command at a terminal: as a user who is not root, with closed pipes, with broken plug-ins."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import limits, worker

SIZE = 3 << 20
SOURCE, TARGET = 3, 6


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a directory that any user may search, with ``open``, writable, and ``closed``."""
    made = Path("/var/tmp", f"cdi-test-{os.urandom(4).hex()}")
    (made / "open").mkdir(parents=True)
    (made / "open").chmod(0o777)
    (made / "closed" / "inner").mkdir(parents=True)
    (made / "closed").chmod(0o700)
    (made / "image").write_bytes(os.urandom(SIZE))
    yield made
    shutil.rmtree(made)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (("import", "image", "closed/inner/disk.img"), TARGET, "closed/inner/disk.img: open: permission"),
        (("import", "image", "closed/inner", "--content-type=archive"), TARGET, "permission denied"),
        (("import", "closed/inner/image", "open/disk.img"), SOURCE, "closed/inner/image: permission denied"),
        (("import", "image", "open", "--header-dir=closed"), 2, "closed: permission denied"),
        (("inspect", "closed/inner/image"), SOURCE, "closed/inner/image: permission denied"),
        (("blank", "closed/inner/disk.img", "1Mi"), TARGET, "closed/inner/disk.img: open: permission"),
        (("upload", "closed/inner/image", "https://127.0.0.1:1"), SOURCE, "inner/image: permission denied"),
    ],
)
def test_closed_directory_is_an_error_without_traceback(
    folder: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    names = ("image", "open", "closed")
    found = [
        str(folder / each) if each.startswith(names) else each.replace("=closed", f"={folder}/closed")
        for each in arguments
    ]
    done = worker.run(*found, prefix=limits.unprivileged())
    assert done.status == status, done.errors
    assert message in done.error_message
    assert "Traceback" not in done.errors


@pytest.mark.parametrize("existing", ["", "disk.img"])
def test_permission_denied_names_user_owner_and_mode(folder: Path, existing: str) -> None:
    """In a pod, the volume's owner is the storage's matter, and its group that of the pod."""
    if existing:
        (folder / "closed" / existing).write_bytes(b"")
    (folder / "closed").chmod(0o755)
    pod = worker.Pod(folder / "open")
    pod.directory.chmod(0o777)
    data = folder / "closed"
    arguments = [each for each in pod.arguments if "--data-dir" not in each] + [f"--data-dir={data}"]
    env = {"IMPORTER_SOURCE": "none", "IMPORTER_IMAGE_SIZE": "1Mi"}
    who = f"user 107 of group 107 must not write to {data} (owner 0:0, mode 0755)"
    denied = f"{data}/disk.img: open: permission denied: {who}"
    done = worker.run(*arguments, env=env, prefix=limits.unprivileged())
    advice = "give the volume to the pod's user (fsGroup in its security context; NFS: chown on the server)"
    assert done.status == 1, done.errors
    assert pod.message == f"Unable to process data: {denied}; {advice}"
    done = worker.run("blank", data / "disk.img", "1Mi", prefix=limits.unprivileged())
    advice = "check the permissions, or name another target"
    assert done.error_message == f"{denied}; {advice}"


@pytest.mark.parametrize(
    # The progress is a line of the log, or printed beside it.
    ("stream", "verbosity"),
    [("stdout", "-v=1"), ("stderr", "-v=1"), ("stderr", "-v=0")],
)
def test_closed_pipe_does_not_end_an_import(tmp_path: Path, stream: str, verbosity: str) -> None:
    (tmp_path / "image").write_bytes(os.urandom(SIZE))
    reading, writing = os.pipe()
    os.close(reading)
    other = "stderr" if stream == "stdout" else "stdout"
    argv = [*worker.COMMAND, verbosity, "import", tmp_path / "image", tmp_path / "disk.img"]
    done = subprocess.run(
        argv,
        env=worker.ENVIRONMENT,
        check=False,
        timeout=60,
        **{stream: writing, other: subprocess.PIPE},  # type: ignore[call-overload]  # streams by name
    )
    os.close(writing)
    assert done.returncode == 0, getattr(done, other)
    assert b"BrokenPipe" not in getattr(done, other)
    assert (tmp_path / "disk.img").read_bytes() == (tmp_path / "image").read_bytes()
