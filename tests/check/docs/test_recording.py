"""The picture of docs/_static/session.svg is what a person sees: the same commands in a real terminal."""

from __future__ import annotations

import os
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import disks, repository, servers, terminals

sys.path.insert(0, str(repository.ROOT / "docs"))

import recording

PICTURE = repository.ROOT / "docs/_static/session.svg"
MiB = 1 << 20
#: At 400 pixels, a character of 48 columns can be read.
COLUMNS, ROWS = 48, 30
#: Of 10 GiB, as of a fresh machine; 8 s at the speed of the server.
DISK, DATA = 10 << 30, 384 * MiB
#: Bytes per second of each connection: together 48 MiB/s.
RATE = 8 * MiB
LINES = ("cdi-worker import \\", "  http://example.org/vm.qcow2 vm.img")
BAR = r"transfer █+░* +(\d+)\.\d% [\d.]+ [KMG]iB/s(?:, \d+:\d\d left)?$"
#: What differs from run to run.
VARIABLE = (
    (BAR, "transfer …"),
    (r"\b\d+\.\d+ s\b", "… s"),
    (r"\b[\d.]+ (?:[KMGT]i)?B/s", "… B/s"),
    (r"((?:interrupted|resumed): )[\d.]+ [KMG]iB", r"\1…"),
    (r"(written  )\d+ bytes \(.*?\)", r"\1…"),
    (r"(read  )\d+ bytes \(.*?\), and \d+ bytes \(.*?\) (from an earlier attempt)", r"\1… and … \2"),
)


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[terminals.Terminal]:
    """A terminal where ``http://example.org/vm.qcow2`` is a disk on a server that is slow enough to watch."""
    root, raw = tmp_path / "www", tmp_path / "raw"
    root.mkdir()
    with raw.open("wb") as file:
        file.truncate(DISK)
        for number in range(DATA // MiB):
            file.seek(number * 26 * MiB)
            file.write(random.Random(number).randbytes(MiB))
    disks.convert(raw, root / "vm.qcow2", disks.FORMATS["qcow2"])
    raw.unlink()
    (tmp_path / "nginx").mkdir()
    settings = servers.Settings(limit_rate=RATE)
    with (
        servers.nginx(tmp_path / "nginx", root, settings) as served,
        terminals.Terminal(tmp_path, COLUMNS, ROWS) as made,
    ):
        # As a proxy, the server has every name.
        made.type(f"export http_proxy=http://127.0.0.1:{served.port}; clear")
        made.until(lambda: made.screen() == [terminals.PROMPT])
        yield made


def recorded(terminal: terminals.Terminal) -> list[recording.Frame]:
    """Import, interrupt and continue; return what was to be seen."""
    frames: list[recording.Frame] = []

    def see(pattern: str, seconds: float, least: int = 0) -> None:
        """Wait for a line that matches, with ``least`` percent; what is below it has come since."""
        shown: list[str] = []

        def matches() -> bool:
            lines = terminal.screen("-J")
            found = [(at, match) for at, line in enumerate(lines) if (match := re.match(pattern, line))]
            shown[:] = lines[: found[-1][0] + 1] if found else []
            return bool(found) and int((found[-1][1].groups() or "0")[0]) >= least

        terminal.until(matches)
        frames.append(recording.Frame(shown, seconds))

    def command() -> None:
        for line in LINES:
            terminal.type(line)

    command()
    see("> ", 1)
    for percent in (10, 20, 30, 40, 50):
        see(BAR, 0.7, percent)
    terminal.press("C-c")
    see(r"\$$", 1.5)
    command()
    see(r"resumed", 1)
    for percent in (60, 70, 80):
        see(BAR, 0.7, percent)
    see(r"\$$", 5)
    return frames


def normal(screens: list[list[str]]) -> list[str]:
    """Return the text of each frame without what differs from run to run."""
    texts = ["\n".join(lines) for lines in screens]
    for pattern, replacement in VARIABLE:
        texts = [re.sub(pattern, replacement, text, flags=re.MULTILINE) for text in texts]
    return texts


def test_picture_is_what_a_terminal_shows(terminal: terminals.Terminal) -> None:
    """REGOLD=1 draws it."""
    frames = recorded(terminal)
    if os.environ.get("REGOLD"):
        PICTURE.write_text(recording.picture(frames, COLUMNS))
    assert normal([[*frame.lines] for frame in frames]) == normal(recording.screens(PICTURE.read_text()))
