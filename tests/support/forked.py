"""Python programs as forks of a prepared process, which has imported what they need.

``Popen`` and ``run`` replace those of ``subprocess``. The prepared process has imported the worker and run
nothing. A program begins there with its own arguments, environment, working directory, standard streams and
session, and is a child of the process that started it. What a fork could not do faithfully is executed as
usual: another program than Python, options of the interpreter, and variables that the interpreter or the C
library reads when it starts. Tests that measure the start, memory or imports use ``subprocess``.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import inspect
import io
import json
import os
import pkgutil
import runpy
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, AnyStr

import cdi_worker
from tests.support import repository

# jsonschema takes it where it is installed, and its grammar takes 1.3 s to load. The image does not have it.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

#: Only ``TMPDIR`` is inherited from the environment of the tests.
ENVIRONMENT = {
    "PATH": "/usr/sbin:/usr/bin:/sbin:/bin",
    "PYTHONPATH": str(repository.ROOT),
    "LC_ALL": "C.UTF-8",
    # Each TLS context takes 20 ms to load the machine's authorities. This one has issued nothing.
    "SSL_CERT_FILE": str(repository.ROOT / "tests/support/authority.pem"),
    "SSL_CERT_DIR": "/nonexistent",
}
#: Modules that read other variables than the language's while they are imported, or run a program.
UNPREPARED = (
    "cdi_worker.__main__",
    "cdi_worker.importer.metrics.server",
    "cdi_worker.sources.glance.keystone",
    "cdi_worker.sources.glance.source",
    "cdi_worker.sources.objects.aws",
    "cdi_worker.sources.objects.gcp",
    "cdi_worker.sources.objects.gcs",
    "cdi_worker.sources.ovirt.backend",
)
#: Libraries that the worker imports when it needs them. boto3 reads where the home is, for models of its own.
LIBRARIES = (
    "boto3",
    "jsonschema",  # takes a second, with the libraries that the tests need beside it
    "keystoneauth1.session",
    "nbd",
    "ovirtsdk4.types",
    "pyVmomi",
    "yaml",
)
#: Variables that are read when a program starts, by their first letters.
READ_AT_START = ("LANG", "LC_", "LD_", "GLIBC_", "MALLOC_", "OPENSSL_", "PYTHON", "TZ")

#: Memory in huge pages: a fork has fewer entries to copy, and takes 3 ms instead of 7.
HUGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}

_PR_SET_CHILD_SUBREAPER = 36
_lock = threading.Lock()


class Popen(subprocess.Popen[AnyStr]):
    """A program in the background, as ``subprocess.Popen``, but forked if it is Python code."""

    # Methods that are private in the standard library are missing in its types.

    def _execute_child(self, *positional: Any) -> None:
        """Start the program; called by the constructor when the pipes are made."""
        start = inspect.signature(super()._execute_child).bind(*positional).arguments  # type: ignore[misc]
        program = _forkable(start)
        if program is None:
            super()._execute_child(*positional)  # type: ignore[misc]
            return
        streams = [start[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = _fork(program, [number if each == -1 else each for number, each in enumerate(streams)])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*[start[name] for name in pipes])  # type: ignore[attr-defined]


def run(
    argv: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    stdin: str | bytes | None = None,
    text: bool = True,
    timeout: float = 90,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """Run a program to its end and return its output.

    ``stdin``: its standard input, else that of the tests. ``options``: of ``Popen``.
    """
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    if stdin is not None:
        options["stdin"] = subprocess.PIPE
    with Popen[Any](argv, env=env, text=text, **options) as process:
        try:
            output, errors = process.communicate(stdin, timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(argv, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _forkable(start: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the Python program that is to be started, None if it must be executed."""
    if start["shell"] or start["executable"] or not isinstance(start["args"], list | tuple):
        return None
    argv = [os.fsdecode(each) for each in start["args"]]
    env = os.environ if start["env"] is None else start["env"]
    is_plain = (
        argv[:1] == [sys.executable]
        and len(argv) > 1
        and (argv[1] in ("-m", "-c") or not argv[1].startswith("-"))
        and _read_at_start(env) == _read_at_start(ENVIRONMENT)
        and start["preexec_fn"] is None
        and not start["pass_fds"]
        and start["umask"] < 0
        and start["process_group"] in (None, -1)
        and all(start[name] is None for name in ("uid", "gid", "gids"))
    )
    if not is_plain:
        return None
    return {
        "argv": argv,
        "env": {str(name): str(value) for name, value in env.items()},
        "cwd": str(start["cwd"] or Path.cwd()),
        "session": start["start_new_session"],
        "parent": os.getpid(),
    }


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


def _fork(program: Mapping[str, Any], streams: list[int]) -> int:
    """Let the prepared process start a program; return its process number.

    It forks twice, and the process between ends at once: the program then belongs to the next ancestor that
    adopts orphans (PR_SET_CHILD_SUBREAPER), which is this process for as long as the start takes.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_lock)
        answer, replying = socket.socketpair()
        stack.enter_context(answer)
        message = stack.enter_context(os.fdopen(os.memfd_create("program"), "w+b"))
        message.write(json.dumps(program).encode())
        message.flush()
        _adopt_orphans(True)
        stack.callback(_adopt_orphans, False)
        with replying:
            socket.send_fds(_prepared(), [b"."], [*streams, message.fileno(), replying.fileno()])
        number = answer.recv(64)
    assert number, "the prepared process has ended"
    return int(number)


def _adopt_orphans(is_on: bool) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, int(is_on), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


@functools.cache
def _prepared() -> socket.socket:
    """Start the process that programs are forks of; return the socket that takes orders."""
    orders, taking = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked", str(taking.fileno())],
        cwd=repository.ROOT,
        env={**ENVIRONMENT, **HUGE_PAGES},
        stdin=subprocess.DEVNULL,
        pass_fds=[taking.fileno()],
    )
    taking.close()
    atexit.register(process.wait)
    atexit.register(orders.close)  # runs first: lets it end
    return orders


# -- in the prepared process ------------------------------------------------------------------------


def _next_program(orders: socket.socket) -> dict[str, Any]:
    """Wait for programs to start; return in the process of each one."""
    while True:
        _, descriptors, _, _ = socket.recv_fds(orders, 1, 5)
        if not descriptors:  # the tests have ended
            os._exit(0)
        between = os.fork()
        if not between:
            if os.fork():
                os._exit(0)
            orders.close()
            return _begin(descriptors)
        os.waitpid(between, 0)
        for each in descriptors:
            os.close(each)


def _begin(descriptors: list[int]) -> dict[str, Any]:
    """Take over the streams and the environment of a program; return it."""
    *streams, message, replying = descriptors
    program: dict[str, Any] = json.loads(os.pread(message, os.fstat(message).st_size, 0))
    if program["session"]:
        os.setsid()
    # Until the tests have adopted this process, because the one between has ended: no event shows it.
    while os.getppid() != program["parent"]:
        time.sleep(0.0002)
    os.chdir(program["cwd"])
    for number, each in enumerate(streams):
        os.dup2(each, number)
    os.environ.clear()
    os.environ.update(program["env"])
    # Constants in the types of the standard library.
    sys.stdin = sys.__stdin__ = _stream(0, sys.stdin, "rb")  # type: ignore[misc]
    sys.stdout = sys.__stdout__ = _stream(1, sys.stdout, "wb")  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _stream(2, sys.stderr, "wb")  # type: ignore[misc]
    os.write(replying, str(os.getpid()).encode())
    # Until the tests adopt no orphans any more: this program may leave some.
    os.read(replying, 1)
    os.closerange(3, max(descriptors) + 1)
    return program


def _stream(descriptor: int, like: IO[str], mode: str) -> io.TextIOWrapper:
    """Open a standard stream as the interpreter does when it starts."""
    is_lines = descriptor == 2 or os.isatty(descriptor)
    opened = open(descriptor, mode, closefd=False)  # noqa: SIM115 - a descriptor, for the life of the process
    return io.TextIOWrapper(
        opened, encoding=like.encoding, errors=like.errors, newline="\n", line_buffering=is_lines
    )


def _run(program: Mapping[str, Any]) -> None:
    """Run the program in this process, which is its own."""
    sys.orig_argv = program["argv"]
    _, how, *arguments = program["argv"]
    sys.argv = [how, *arguments[how in ("-m", "-c") :]]
    if how == "-m":
        sys.path[0] = program["cwd"]
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif how == "-c":
        sys.path[0] = ""
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(arguments[0], "<string>", "exec"), main.__dict__)
    else:
        sys.path[0] = str(Path(how).resolve().parent)
        runpy.run_path(how, run_name="__main__")


def prepare() -> None:
    """Import the whole worker and most of its libraries."""
    modules = {each.name for each in pkgutil.walk_packages(cdi_worker.__path__, "cdi_worker.")}
    for name in (*sorted(modules.difference(UNPREPARED)), *LIBRARIES):
        importlib.import_module(name)


def _main() -> None:
    orders = socket.socket(fileno=int(sys.argv[1]))
    prepare()
    assert len(os.listdir("/proc/self/task")) == 1, "a thread would be missing in the forks"
    gc.freeze()  # else the first collection copies all pages
    _run(_next_program(orders))
    # As the interpreter does. It would then take all modules apart, for 50 ms.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
