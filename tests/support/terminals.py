"""A real terminal (tmux) with a shell in it, and what is on its screen."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from tests.support import processes, repository

PROMPT = "$"


class Terminal:
    """A shell in a terminal of so many columns, below ``folder``, where ``cdi-worker`` is a command."""

    def __init__(self, folder: Path, columns: int, lines: int = 24) -> None:
        self.folder, self.columns = folder, columns
        self._tmux = ("tmux", "-f", "/dev/null", "-S", str(folder / f"tmux-{columns}"))
        programs = folder / "bin"
        programs.mkdir(exist_ok=True)
        program = programs / "cdi-worker"
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m cdi_worker "$@"\n')
        program.chmod(0o755)
        self._env = {
            "PATH": f"{programs}:/usr/sbin:/usr/bin:/sbin:/bin",
            "PYTHONPATH": str(repository.ROOT),
            "LC_ALL": "C.UTF-8",
            "HOME": str(folder),
            "PS1": f"{PROMPT} ",
            "TERM": "screen",
        }
        shell = ["env", "-i", *(f"{name}={value}" for name, value in self._env.items())]
        self._do(
            *("new-session", "-d", "-x", str(columns), "-y", str(lines), "-c", str(folder)),
            shlex.join([*shell, "bash", "--norc", "--noprofile", "-i"]),
        )

    def __enter__(self) -> Self:
        self.until(lambda: self.screen()[-1:] == [PROMPT])
        return self

    def __exit__(self, *_: object) -> None:
        self._do("kill-server")

    def _do(self, *arguments: str) -> str:
        environment = {"PATH": os.defpath, "LC_ALL": "C.UTF-8"}
        return processes.run(*self._tmux, *arguments, env=environment).stdout

    def type(self, line: str) -> None:
        """Type a line."""
        self._do("send-keys", "-l", line)
        self.press("Enter")

    def press(self, key: str) -> None:
        """Press a key, such as ``C-z``."""
        self._do("send-keys", key)

    def screen(self, *options: str) -> list[str]:
        """Return the lines of the screen, without those below the last one with text; ``-J``: not wrapped."""
        return [line.rstrip() for line in self._do("capture-pane", "-p", *options).rstrip().splitlines()]

    @property
    def has_cursor(self) -> bool:
        """Whether the cursor is visible."""
        return self._do("display-message", "-p", "#{cursor_flag}").strip() == "1"

    def until(self, condition: Callable[[], bool], seconds: float = processes.PATIENCE) -> None:
        """Wait until ``condition``."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "\n".join(self.screen())
            time.sleep(0.1)  # each look at the screen is a process

    def run(self, line: str) -> list[str]:
        """Type a line, and return the screen when the shell is back."""
        self._do("send-keys", "-l", "clear")
        self.press("Enter")
        self.until(lambda: self.screen() == [PROMPT])
        self.type(line)
        self.until(lambda: self.screen()[-1:] == [PROMPT] and len(self.screen()) > 1)
        return self.screen()[:-1]
