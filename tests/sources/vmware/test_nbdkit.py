"""nbdkit is started for a block, stopped at its end, and its errors are explained."""

from __future__ import annotations

import math
import os
import shutil
import socket as socket_module
import threading
import time
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources.vmware import nbdkit
from tests.support import processes

MiB = 1 << 20


@pytest.fixture(autouse=True)
def _needs() -> None:
    processes.need("nbdkit", "nbdinfo")


def size_of(socket: str) -> int:
    return int(processes.run("nbdinfo", "--size", f"nbd+unix:///?socket={socket}").stdout)


def test_nbdkit_serves_at_once_and_leaves_nothing() -> None:
    deadline = time.monotonic() + processes.PATIENCE
    took = math.inf
    while took >= 0.5:  # a busy machine may delay a start
        assert time.monotonic() < deadline
        start = time.monotonic()
        with nbdkit.serve(nbdkit.Plugin("memory", {"size": "3M"})) as socket:
            took = time.monotonic() - start
            assert size_of(socket) == 3 * MiB
        assert not Path(socket).parent.exists()


def test_export_is_read_only() -> None:
    with nbdkit.serve(nbdkit.Plugin("memory", {"size": "3M"})) as socket:
        processes.run("nbdinfo", "--is", "readonly", f"nbd+unix:///?socket={socket}")


@pytest.mark.parametrize("password", ["", "with space, a=b; 'quotes' and ümläut"])
def test_secret_is_passed_outside_the_command_line(password: str, tmp_path: Path) -> None:
    copy = tmp_path / "seen"
    script = f'if test "$2" = password; then f="${{3#+}}"; cat "$f" > {copy}; cat "$f" >> {copy}.again; fi'
    plugin = nbdkit.Plugin("eval", {"config": script, "get_size": "echo 1M"}, {"password": password})
    with nbdkit.serve(plugin) as socket:
        assert size_of(socket) == MiB
        assert copy.read_text() == password
        assert Path(f"{copy}.again").read_text() == password
        mine = [path for path in Path("/proc").glob("[0-9]*/cmdline") if socket in _text(path)]
        assert mine
        assert not password or all(password not in _text(path) for path in mine)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def test_output_is_passed_on_by_line() -> None:
    lines: list[str] = []
    heard = threading.Event()

    def on_line(line: str) -> None:
        lines.append(line)
        if "hello" in line:
            heard.set()

    plugin = nbdkit.Plugin(
        "eval", {"open": "echo EIO hello from the plugin >&2; exit 1", "get_size": "echo 1M"}
    )
    with nbdkit.serve(plugin, nbdkit.Follow(on_line=on_line)) as socket:
        with pytest.raises(AssertionError, match="nbdinfo"):
            size_of(socket)
        assert heard.wait(processes.PATIENCE)
    assert any("hello from the plugin" in line for line in lines)


def test_debug_output_is_passed_on_if_requested() -> None:
    for debug in ({}, {"nbdkit.backend.datapath": 0}):
        lines: list[str] = []
        plugin = nbdkit.Plugin("memory", {"size": "1M"}, debug=debug)
        with nbdkit.serve(plugin, nbdkit.Follow(on_line=lines.append)) as socket:
            assert size_of(socket) == MiB
        assert any("debug: memory: open" in line for line in lines) == bool(debug)


@pytest.mark.parametrize(
    ("plugin", "reason"),
    [
        (nbdkit.Plugin("nosuchplugin"), "nosuchplugin"),
        (nbdkit.Plugin("memory", {"size": "x"}), "size"),
        (nbdkit.Plugin("memory", {"size": "1M", "nonsense": "1"}), "unknown parameter"),
        (nbdkit.Plugin("file", {"file": "/no/such/file"}), "No such file"),
    ],
)
def test_failed_start_is_explained(plugin: nbdkit.Plugin, reason: str) -> None:
    with pytest.raises(errors.ToolFailed, match=reason), nbdkit.serve(plugin):
        pass


class Ends:
    """Takes the ends of nbdkit (``nbdkit.Follow.on_end``)."""

    def __init__(self) -> None:
        self.found: list[tuple[str, bool]] = []

    def take(self, failure: errors.Error, again: bool) -> None:
        self.found.append((str(failure), again))


def kill(told: Path) -> None:
    """Kill the nbdkit that wrote its process and its folder to a file; in /tmp the folder would stay."""
    pid, folder = told.read_text().split()
    os.kill(int(pid), 9)
    shutil.rmtree(folder)


def test_nbdkit_is_started_again_on_the_same_socket(tmp_path: Path) -> None:
    pids, ends = tmp_path / "pid", Ends()
    plugin = nbdkit.Plugin("eval", {"get_size": f"echo $PPID $tmpdir > {pids}; echo 1M"})
    with nbdkit.serve(plugin, nbdkit.Follow(on_end=ends.take)) as socket:
        for count in range(1, nbdkit.MOST_ENDS):
            assert size_of(socket) == MiB
            kill(pids)
            processes.wait_for(lambda count=count: len(ends.found) == count, "its end")
            processes.wait_for(lambda: accepts(socket), "its answer")
        assert all("SIGKILL" in reason and again for reason, again in ends.found)
        assert size_of(socket) == MiB
        kill(pids)
        processes.wait_for(lambda: len(ends.found) == nbdkit.MOST_ENDS, "the last end")
        assert not ends.found[-1][1]
    assert not Path(socket).parent.exists()


def accepts(path: str) -> bool:
    with socket_module.socket(socket_module.AF_UNIX) as made:
        return made.connect_ex(path) == 0


def test_nbdkit_that_cannot_be_started_again_is_given_up(tmp_path: Path) -> None:
    once, ends = tmp_path / "once", Ends()
    plugin = nbdkit.Plugin(
        "eval",
        {
            "get_ready": f"test ! -e {once} || {{ rm -r $tmpdir; echo EIO no second time >&2; exit 1; }}",
            "get_size": f"echo $PPID $tmpdir > {once}; echo 1M",
        },
    )
    with nbdkit.serve(plugin, nbdkit.Follow(on_end=ends.take)) as socket:
        assert size_of(socket) == MiB
        kill(once)
        processes.wait_for(lambda: len(ends.found) == 2, "the failed start")
    assert [again for _, again in ends.found] == [True, False]
    assert "no second time" in ends.found[1][0]


def test_error_of_the_block_is_raised_while_nbdkit_runs() -> None:
    with pytest.raises(errors.Cancelled), nbdkit.serve(nbdkit.Plugin("memory", {"size": "1M"})):
        raise errors.Cancelled


def test_start_can_be_cancelled(tmp_path: Path) -> None:
    cancel, told = cancelling.Cancel(), tmp_path / "told"
    # The folder of a killed plugin would stay in /tmp.
    starting = f"rm -r $tmpdir; touch {told}; sleep 60"

    def stop() -> None:
        processes.wait_for(told.exists, "the start")
        cancel.set()

    stopping = threading.Thread(target=stop)
    stopping.start()
    plugin = nbdkit.Plugin("eval", {"get_ready": starting, "get_size": "echo 1M"})
    with pytest.raises(errors.Cancelled), nbdkit.serve(plugin, nbdkit.Follow(cancel=cancel)):
        pass
    stopping.join()
