"""Programs are started in a clean environment, watched, and stopped; failures are explained."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process
from tests.support import processes, repository


def shell(script: str, **fields: object) -> process.Command:
    return process.Command(("sh", "-c", script), package="dash", **fields)


def output(command: process.Command, **keywords: object) -> bytes:
    output_lines: list[bytes] = []
    process.run(command, output_lines.append, **keywords)
    return b"".join(output_lines)


def test_environment_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OF_THE_WORKER", "secret")
    names = {line.split(b"=")[0] for line in output(process.Command(("env",), "coreutils")).splitlines()}
    assert names == {b"PATH", b"LANG", b"LC_ALL", b"HOME", b"TMPDIR", b"MALLOC_ARENA_MAX"}


def test_working_directory_is_empty_and_removed() -> None:
    here, mode, *content = output(shell("pwd; stat -c %a .; ls -A")).decode().splitlines()
    assert mode == "700"
    assert content == []
    assert not pathlib.Path(here).exists()


def test_standard_input_is_empty() -> None:
    assert output(shell("cat")) == b""


def test_only_the_descriptors_passed_are_open() -> None:
    read_end, write_end = os.pipe()
    os.write(write_end, b"through a descriptor")
    os.close(write_end)
    try:
        output_lines = output(shell(f"cat /dev/fd/{read_end}; ls /proc/self/fd", pass_fds=(read_end,)))
    finally:
        os.close(read_end)
    assert output_lines.startswith(b"through a descriptor")
    # The highest one is the directory that ls reads.
    descriptors = {int(word) for word in output_lines.removeprefix(b"through a descriptor").split()}
    assert descriptors - {0, 1, 2, read_end} <= {3}


def test_address_space_is_limited() -> None:
    script = "import sys\ntry: bytearray(512 << 20)\nexcept MemoryError: sys.exit(7)"
    command = process.Command(("python3", "-c", script), "python3", address_space=256 << 20)
    with pytest.raises(errors.ToolFailed) as caught:
        process.run(command)
    assert caught.value.fields["exit_status"] == 7


def test_missing_program_names_its_package() -> None:
    with pytest.raises(errors.MissingTool, match="nbdcarrot is not installed: apt-get install carrots"):
        process.run(process.Command(("nbdcarrot",), package="carrots"))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        (
            "echo chatter; echo one >&2; printf 'two\\033[31m\\n\\nthree' >&2; exit 3",
            "sh failed (exit status 3): one; two\ufffd[31m; three",
        ),
        ("exit 1", "sh failed (exit status 1): no message on standard error"),
        ("kill -9 $$", "sh failed (exit status -9): killed by SIGKILL; no message on standard error"),
    ],
)
def test_failure_has_last_lines_of_standard_error(script: str, message: str) -> None:
    with pytest.raises(errors.ToolFailed) as caught:
        process.run(shell(script))
    assert str(caught.value) == message


def test_long_standard_error_does_not_block() -> None:
    lines: list[str] = []
    script = "i=0; while [ $i -lt 30000 ]; do echo line $i >&2; i=$((i+1)); done; exit 1"
    with (
        process.Process(shell(script), on_line=lines.append) as running,
        pytest.raises(errors.ToolFailed) as caught,
    ):
        running.finish()
    assert lines[0] == "line 0"
    assert lines[-1] == "line 29999"
    assert len(lines) == 30000
    assert str(caught.value).endswith("line 29997; line 29998; line 29999")


def test_long_line_is_truncated() -> None:
    lines: list[str] = []
    with process.Process(shell("head -c 300000 /dev/zero | tr '\\0' x >&2"), on_line=lines.append) as running:
        running.finish()
    assert [len(line) for line in lines] == [4096]


def test_output_of_any_size_is_read() -> None:
    assert len(output(shell("head -c 5000000 /dev/zero"))) == 5_000_000


def test_cancel_stops_the_program() -> None:
    cancel = cancelling.Cancel()
    threading.Timer(0.3, cancel.set).start()
    start = time.monotonic()
    with pytest.raises(errors.Cancelled):
        process.run(shell("exec sleep 60"), cancel=cancel)
    assert time.monotonic() - start < 20


def test_cancel_of_an_ended_attempt_stops_the_program() -> None:
    """Also if the scope of the attempt has ended before the waiting thread looks at it."""
    reads = cancelling.Reads(cancelling.Cancel())
    # What setting a scope does to its callbacks; the scope has ended when they return.
    threading.Timer(0.3, reads._wake).start()
    with pytest.raises(errors.Cancelled):
        process.run(shell("exec sleep 3"), cancel=reads)


def test_program_ignoring_sigterm_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_GRACE", 0.3)
    with process.Process(
        shell("trap '' TERM; echo ready; while :; do sleep 0.1; done"), stdout=process.PIPE
    ) as it:
        assert os.read(it.stdout, 100) == b"ready\n"
        pid = it.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_children_are_stopped_with_the_program() -> None:
    with process.Process(shell("sleep 60 & echo $!; wait"), stdout=process.PIPE) as it:
        child = int(os.read(it.stdout, 100))
    until_ended(child)


def test_program_without_progress_is_stopped() -> None:
    with pytest.raises(errors.NoProgress, match="the sleeper: no progress for 1 s"):
        process.run(shell("exec sleep 60"), watch=process.Watch("the sleeper", 1))


def test_fed_watch_keeps_the_program_running() -> None:
    watch = process.Watch("the fed one", 2)
    stop = threading.Event()

    def feed() -> None:
        while not stop.wait(0.1):
            watch.feed()

    feeder = threading.Thread(target=feed)
    feeder.start()
    try:
        process.run(shell("exec sleep 3"), watch=watch)
    finally:
        stop.set()
        feeder.join()


def test_written_bytes_count_as_progress(tmp_path: pathlib.Path) -> None:
    script = (
        f"import time\nfor i in range(15):\n  open({str(tmp_path / 'f')!r}, 'a').write('x'); time.sleep(0.2)"
    )
    process.run(process.Command(("python3", "-c", script), "python3"), watch=process.Watch("the writer", 2))


def test_program_dies_with_its_killed_parent(tmp_path: pathlib.Path) -> None:
    script = """
        import pathlib, sys, time
        from cdi_worker.images.tools import process
        with process.Process(process.Command(("sleep", "60"), "coreutils")) as running:
            print(running.pid, flush=True)
            time.sleep(60)
    """
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdout=subprocess.PIPE,
        cwd=repository.ROOT,
        # A killed worker cannot remove its files.
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        name = pathlib.Path(f"/proc/{child}/comm")
        processes.wait_for(lambda: name.read_text().strip() == "sleep", "the program itself")
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    until_ended(child)


def until_ended(pid: int) -> None:
    processes.wait_for(lambda: state(pid) in {"", "Z"}, "its end")


def state(pid: int) -> str:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        # The file of a process that is waited for after open() cannot be read any more.
        return ""


def test_program_can_be_stopped_twice() -> None:
    running = process.Process(process.Command(("sleep", "60"), "coreutils"))
    running.stop()
    running.stop()


def test_error_in_callback_stops_the_program() -> None:
    pids: list[int] = []

    def refuse(chunk: bytes) -> None:
        pids.append(int(chunk))
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011  (ours, from refuse)
        process.run(shell("echo $$; exec sleep 60"), refuse)
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_long_directory_for_temporary_files_is_not_used(tmp_path: pathlib.Path) -> None:
    """The path of a unix socket is limited to 107 bytes."""
    long = tmp_path / ("x" * 100)
    long.mkdir()
    code = (
        "from cdi_worker.images.tools import workspace\n"
        "with workspace.Workspace() as name: print(len(name), name.startswith('/dev/shm/'))"
    )
    done = processes.script(code, TMPDIR=str(long))
    assert done.stdout.split()[1:] == ["True"], done.stderr
    assert int(done.stdout.split()[0]) < 75


def test_other_files_are_not_read_after_the_end(tmp_path: pathlib.Path) -> None:
    """A file that is opened later gets the number of a closed pipe."""
    (tmp_path / "other").write_bytes(b"of another")
    running = process.Process(process.Command(("true",), package="coreutils"), stdout=process.PIPE)
    number = running.stdout
    running.stop()
    with contextlib.ExitStack() as stack:
        opened = {stack.enter_context((tmp_path / "other").open("rb")).fileno() for _ in range(number + 1)}
        assert number in opened
        with pytest.raises(ValueError, match="negative"):
            running.readinto(memoryview(bytearray(10)))
