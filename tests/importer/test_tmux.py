"""What a person sees: a shell in a terminal of 80 and of 40 columns."""

from __future__ import annotations

import dataclasses
import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker.importer.commands import bar
from tests.support import misbehave, terminals

MiB = 1 << 20
DATA = random.Random(7).randbytes(12 * MiB)
#: Each of six connections has 0.8 MiB/s.
SLOW = misbehave.Page(DATA, drip=(256 << 10, 0.3))
FAST = misbehave.Page(DATA)


@pytest.fixture(params=[80, 40])
def terminal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[terminals.Terminal]:
    with terminals.Terminal(tmp_path, request.param) as made:
        yield made


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[terminals.Terminal]:
    with terminals.Terminal(tmp_path, 80) as made:
        yield made


def bars(screen: list[str]) -> list[str]:
    """Return the lines with the bar."""
    return [line for line in screen if re.match(r" *(connect|transfer|readback|sync)\b", line)]


def see(terminal: terminals.Terminal, pattern: str) -> str:
    """Wait for the bar to match; return it."""
    shown: list[str] = []

    def matches() -> bool:
        shown[:] = [line for line in bars(terminal.screen()) if re.search(pattern, line)]
        return bool(shown)

    terminal.until(matches)
    return shown[-1]


def test_bar_is_one_line_and_leaves_nothing(terminal: terminals.Terminal, server: misbehave.Server) -> None:
    terminal.type(f"cdi-worker import -q {server.serve('/a', FAST)} a.img; clear")
    terminal.until(lambda: terminal.screen() == [terminals.PROMPT])
    terminal.type(f"cdi-worker import {server.serve('/disk', SLOW)} disk.img")
    for _ in range(4):
        line = see(terminal, r"transfer .*\d\.\d% .*B/s, 0:\d\d left")
        screen = terminal.screen()
        assert len(bars(screen)) <= 1, screen
        assert screen[-1] == line or bars(screen) != [line], screen
    assert ("█" in line) == (len(line) > 45)
    terminal.until(lambda: terminal.screen()[-1] == terminals.PROMPT)
    assert not bars(terminal.screen())
    assert terminal.has_cursor


def test_interrupt_leaves_no_bar(terminal: terminals.Terminal, server: misbehave.Server) -> None:
    """The terminal writes ``^C`` behind it."""
    terminal.type(f"cdi-worker import {server.serve('/disk', SLOW)} disk.img")
    see(terminal, "transfer .*%")
    terminal.press("C-c")
    terminal.until(lambda: terminal.screen()[-1] == terminals.PROMPT)
    assert not bars(terminal.screen())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_cursor_survives_a_death(
    wide: terminals.Terminal, server: misbehave.Server, number: signal.Signals
) -> None:
    wide.type(f"cdi-worker import {server.serve('/disk', SLOW)} disk.img & echo $! >pid; fg")
    see(wide, "transfer .*%")
    os.kill(int((wide.folder / "pid").read_text()), number)
    wide.until(lambda: wide.screen()[-1].endswith(terminals.PROMPT))
    assert wide.has_cursor


def test_stopped_import_gives_the_terminal_back(wide: terminals.Terminal, server: misbehave.Server) -> None:
    wide.type(f"cdi-worker import {server.serve('/disk', SLOW)} disk.img")
    see(wide, "transfer .*%")
    wide.press("C-z")
    wide.until(lambda: wide.screen()[-1] == terminals.PROMPT)
    assert wide.has_cursor
    wide.type("bg; clear")
    wide.until(lambda: bool(wide.screen()) and wide.screen()[-1].startswith(terminals.PROMPT))
    # In the background nothing is drawn over what is typed.
    wide.type("echo typed")
    wide.until(lambda: "typed" in wide.screen())
    end = time.monotonic() + 4 * bar.INTERVAL
    while time.monotonic() < end:
        assert not bars(wide.screen())
    wide.type("fg")
    wide.until(lambda: any("imported" in line for line in wide.screen()))


def test_unknown_size_has_no_percentage(wide: terminals.Terminal, server: misbehave.Server) -> None:
    page = dataclasses.replace(SLOW, ranges=False, framing="chunked")
    wide.type(f"cdi-worker import {server.serve('/disk', page)} disk.img")
    first = see(wide, "transfer .*MiB")
    assert "%" not in first
    assert "░███" in first or "███░" in first
    place = first.index("███")
    wide.until(lambda: any("███" in line and line.index("███") != place for line in bars(wide.screen())))


def test_time_left_after_a_resume_is_that_of_this_run(
    wide: terminals.Terminal, server: misbehave.Server
) -> None:
    page = dataclasses.replace(SLOW, body=DATA * 4)
    command = f"cdi-worker import {server.serve('/disk', page)} disk.img"
    wide.type(command)
    see(wide, r"transfer .* [2-9]\d\.\d%")
    wide.press("C-c")
    wide.until(lambda: wide.screen()[-1] == terminals.PROMPT)
    wide.type(f"clear; {command}")
    found = re.search(r"(\d+):(\d\d) left", see(wide, "left"))
    assert found
    assert int(found[1]) * 60 + int(found[2]) < 10
    wide.press("C-c")


def test_retry_says_why_and_until_when(wide: terminals.Terminal, server: misbehave.Server) -> None:
    page = dataclasses.replace(SLOW, status=503)
    wide.type(f"cdi-worker import {server.serve('/disk', page)} disk.img")
    see(wide, r"connect 503 Service Unavailable, next try in \d+ s \(\d+ of \d+ s without data\)")
    assert len(bars(wide.screen())) == 1


def test_warning_at_a_terminal_is_for_people(wide: terminals.Terminal) -> None:
    (wide.folder / "image").write_bytes(DATA[:MiB])
    screen = wide.run("cat image | cdi-worker import - disk.img")
    assert screen[1].startswith("warning: standard input can be read only once"), screen
    assert not [line for line in screen if re.search(r"\d\d:\d\d:\d\d", line)]


def test_import_is_complete_although_nothing_can_be_printed(wide: terminals.Terminal) -> None:
    (wide.folder / "image").write_bytes(DATA[:MiB])
    for to in (">&-", "2>&-", ">/dev/full", "2>/dev/full", ">&- 2>&-"):
        screen = wide.run(f"cdi-worker import image disk.img {to}; echo status $?")
        assert screen[-1] == "status 0"
        assert (wide.folder / "disk.img").read_bytes() == DATA[:MiB]
        (wide.folder / "disk.img").unlink()
        assert not [line for line in screen if "Traceback" in line or "Exception" in line]
        if to in {">&-", ">/dev/full"}:
            expected = "cdi-worker: standard output: .*; disk.img is complete"
            assert [line for line in screen if re.match(expected, line)]


def test_obstacle_is_shown_once(wide: terminals.Terminal) -> None:
    """In the table; on standard error too where standard output is not the terminal."""
    for name in ("image", "disk.img"):
        (wide.folder / name).write_bytes(bytes(MiB))
    obstacle = "disk.img: exists; to replace it, use --force"
    shown = [line for line in wide.run("cdi-worker import --dry-run image disk.img") if obstacle in line]
    assert [line.split()[0] for line in shown] == ["obstacle"]
    screen = wide.run("cdi-worker import --dry-run image disk.img >report")
    assert f"cdi-worker: {obstacle}" in screen


def test_lost_output_is_an_error(wide: terminals.Terminal) -> None:
    (wide.folder / "image").write_bytes(bytes(MiB))
    for command, to, reason in (
        ("inspect image", ">&-", "bad file descriptor"),
        ("inspect image", ">/dev/full", "no space left on device"),
        ("--help", ">/dev/full", "no space left on device"),
        ("inspect --json image", ">/dev/full", "no space left on device"),
        ("--version", ">&-", "bad file descriptor"),
    ):
        screen = wide.run(f"cdi-worker {command} {to}; echo status $?")
        assert screen[1:] == [f"cdi-worker: standard output: {reason}", "status 1"]


def test_disk_is_not_written_to_a_closed_standard_output(wide: terminals.Terminal) -> None:
    (wide.folder / "image").write_bytes(DATA[:MiB])
    screen = wide.run("cdi-worker import image - >&-; echo status $?")
    assert screen[-1] == "status 6", screen


def test_first_help_fits_the_screen(wide: terminals.Terminal) -> None:
    screen = wide.run("cdi-worker")
    assert screen[1].startswith("Usage: cdi-worker")
    assert len(screen) <= 21
    assert any(line.startswith("  import ") for line in screen)
