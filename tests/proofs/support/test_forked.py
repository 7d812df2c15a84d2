"""A forked program is like one that is executed: what it sees, and what is seen of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import forked, processes

#: Prints what a program sees of its environment.
LOOK = """
import os, signal, sys, threading
print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), sorted(os.environ.items()), __name__)
print(sorted(os.listdir("/proc/self/fd")), os.getppid(), threading.active_count())
print([(name.encoding, name.errors, name.line_buffering) for name in (sys.stdin, sys.stdout, sys.stderr)])
print(*(signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGPIPE, signal.SIGHUP)))
print(os.getsid(0), os.getpgid(0), os.umask(0o22), sys.stdin.read())
sys.stderr.write("words")
"""


def executed(argv: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    done: subprocess.CompletedProcess[str]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, **options)
    return done


def both(argv: list[str], cwd: Path) -> list[tuple[int, str, str]]:
    """Run a program in both ways with some standard input."""
    env = {**forked.ENVIRONMENT, "OTHER": "value"}
    done = [
        executed(argv, env=env, cwd=cwd, input="typed"),
        forked.run(argv, env=env, cwd=cwd, stdin="typed"),
    ]
    return [(each.returncode, each.stdout, each.stderr) for each in done]


@pytest.mark.parametrize("how", ["code", "module", "script"])
def test_program_sees_the_same(tmp_path: Path, how: str) -> None:
    (tmp_path / "looking.py").write_text(LOOK)
    start = {"code": ["-c", LOOK], "module": ["-m", "looking"], "script": [str(tmp_path / "looking.py")]}[how]
    real, fork = both([sys.executable, *start, "an argument"], tmp_path)
    assert real[2] == "words"
    assert "typed" in real[1]
    assert fork == real


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(7)",
        "raise SystemExit('a message')",
        "import os; os._exit(3)",
        "import os; os.kill(os.getpid(), 9)",
        "import atexit; atexit.register(print, 'the end')",
        "import threading; threading.Timer(0.1, print, ['a thread']).start()",
    ],
)
def test_program_ends_the_same(tmp_path: Path, code: str) -> None:
    real, fork = both([sys.executable, "-c", code], tmp_path)
    assert fork == real


def test_error_that_is_not_caught_is_printed(tmp_path: Path) -> None:
    real, fork = both([sys.executable, "-c", "1/0"], tmp_path)
    assert fork[:2] == real[:2] == (1, "")
    assert [fork[2].splitlines()[at] for at in (0, -1)] == [real[2].splitlines()[at] for at in (0, -1)]


def test_program_has_a_session_of_its_own_if_asked() -> None:
    argv = [sys.executable, "-c", "import os; print(os.getpid() == os.getsid(0))"]
    assert forked.run(argv, env=forked.ENVIRONMENT, start_new_session=True).stdout == "True\n"


def test_program_is_a_child_that_signals_reach() -> None:
    argv = [sys.executable, "-c", "import time; print('runs', flush=True); time.sleep(60)"]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "runs\n"
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
    assert process.returncode == -signal.SIGTERM


def test_orphans_are_not_adopted_for_longer_than_a_start_takes() -> None:
    code = "import os, time\nif pid := os.fork(): print(pid)\nelse: os.closerange(0, 3); time.sleep(60)"
    number = int(forked.run([sys.executable, "-c", code], env=forked.ENVIRONMENT).stdout)
    try:
        assert f"PPid:\t{os.getpid()}\n" not in Path(f"/proc/{number}/status").read_text()
    finally:
        os.kill(number, signal.SIGKILL)


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (
            [sys.executable, "-c", "import sys; print('pyVmomi' in sys.modules)"],
            {"PYTHONDONTWRITEBYTECODE": "1"},
        ),
        ([sys.executable, "-c", "import sys; print('pyVmomi' in sys.modules)"], {"LC_ALL": "C"}),
        ([sys.executable, "-S", "-c", "import sys; print('pyVmomi' in sys.modules)"], {}),
        (["env", sys.executable, "-c", "import sys; print('pyVmomi' in sys.modules)"], {}),
    ],
)
def test_what_a_fork_cannot_do_is_executed(argv: list[str], env: dict[str, str]) -> None:
    plain = [sys.executable, "-c", "import sys; print('pyVmomi' in sys.modules)"]
    assert forked.run(plain, env=forked.ENVIRONMENT).stdout == "True\n"
    assert forked.run(argv, env={**forked.ENVIRONMENT, **env}).stdout == "False\n"


def test_missing_program_is_reported() -> None:
    with pytest.raises(FileNotFoundError):
        forked.run(["/nonexistent/program"], env=forked.ENVIRONMENT)


def test_prepared_modules_read_only_language_and_home() -> None:
    """What a module reads while it is imported would be of the prepared process, not of the program."""
    code = """
import os, sysconfig, zoneinfo
from tests.support import forked
sysconfig.get_config_vars()  # reads the directories of the interpreter, once
names = []
class Watched(type(os.environ)):
    def __getitem__(self, name):
        names.append(name)
        return super().__getitem__(name)
os.environ.__class__ = Watched
forked.prepare()
print(*sorted(set(names)))
"""
    done = processes.run("env", sys.executable, "-c", code, env=forked.ENVIRONMENT)
    assert set(done.stdout.split()) <= {"LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG", "HOME"}
