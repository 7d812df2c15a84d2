"""Shell completions and manual pages, made from the commands."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from cdi_worker.importer.commands import command, group
from tests.support import repository, worker

SHARE = repository.ROOT / "share"
COMPLETION = SHARE / "bash-completion/completions/cdi-worker"


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return a folder for PATH with the command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "cdi-worker").write_text(f'#!/bin/sh\nexec {sys.executable} -m cdi_worker "$@"\n')
    (folder / "cdi-worker").chmod(0o755)
    return folder


def complete(program: Path, line: str, **env: str) -> list[str]:
    """Return what bash offers after ``line``, by the installed completion."""
    words = line.split(" ")
    script = (
        f". {COMPLETION}; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; "
        "_cdi_worker_completion cdi-worker; printf '%s\\n' \"${COMPREPLY[@]}\""
    )
    path = {"PATH": f"{program}:{worker.ENVIRONMENT['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", script],
        env={**worker.ENVIRONMENT, **path, **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert not done.stderr.replace("bash: compopt: not currently executing completion function\n", ""), (
        done.stderr
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("cdi-worker im", ["import"]),
        ("cdi-worker import --stall", ["--stall-timeout"]),
        ("cdi-worker import --thumb", ["--thumbprint"]),
        ("cdi-worker import --content-type a", ["archive"]),
        ("cdi-worker import --source im", ["imageio"]),
        ("cdi-worker digest --thumb", []),
        ("cdi-worker --strict", ["--strict-exit-status"]),
    ],
)
def test_bash_completes(program: Path, line: str, found: list[str]) -> None:
    assert complete(program, line) == found


def test_fish_completes_at_commas(program: Path, tmp_path: Path) -> None:
    script = SHARE / "fish/vendor_completions.d/cdi-worker.fish"
    env = {**worker.ENVIRONMENT, "HOME": str(tmp_path), "PATH": f"{program}:{worker.ENVIRONMENT['PATH']}"}
    code = f"source {script}; complete --do-complete 'cdi-worker import --sou'"
    done = subprocess.run(["fish", "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "--source\tKind of source, such as vddk [default: from the URL].\n"
    source = worker.run(env={"_CDI_WORKER_COMPLETE": "fish_source"})
    assert source.output.strip() == script.read_text().strip()


@pytest.mark.parametrize("env", [{"CDI_WORKER_WAIT": "x"}, {"CDI_WORKER_WIAT": "1"}])
def test_completion_is_quiet_about_a_faulty_variable(program: Path, env: dict[str, str]) -> None:
    assert complete(program, "cdi-worker import --stall", **env) == ["--stall-timeout"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_shell_has_its_completion(shell: str) -> None:
    folder = COMPLETION.parent if shell == "bash" else SHARE / shell
    (file,) = folder.rglob("*cdi-worker*")
    assert f"_CDI_WORKER_COMPLETE={shell}_complete" in file.read_text()
    done = worker.run(
        env={
            "_CDI_WORKER_COMPLETE": f"{shell}_complete",
            "COMP_WORDS": "cdi-worker ins" if shell != "fish" else "cdi-worker",
            "COMP_CWORD": "1" if shell != "fish" else "ins",
        }
    )
    assert (done.status, "inspect" in done.output, done.errors) == (0, True, "")


def pages() -> dict[str, click.Command]:
    found = {name: group.command_of(name) for name in group.COMMANDS}
    return {f"cdi-worker-{name}": each for name, each in found.items() if not each.hidden} | {
        "cdi-worker": group.cli
    }


def test_every_command_has_a_page_with_its_options() -> None:
    assert {path.stem for path in (SHARE / "man/man1").iterdir()} == set(pages())
    for name, made in pages().items():
        text = (SHARE / f"man/man1/{name}.1").read_text()
        assert isinstance(made, command.Command)
        listed = re.findall(r"^\\fB\\-\\-((?:[a-z0-9]|\\-)+)\\fP", text, re.MULTILINE)
        known = {each.lstrip("-") for option in made.options for each in option.opts}
        assert {each.replace("\\", "") for each in listed} <= known, f"{name}: run make share"
        for option in made.options:
            shown = max(option.opts, key=len).replace("-", r"\-")
            assert option.hidden or shown in text, f"{name}: {shown}; run make share"
            assert option.hidden or (option.help or "") in text, f"{name}: {option.help}; run make share"


def test_every_page_lists_the_exit_statuses() -> None:
    for name in pages():
        section = (SHARE / f"man/man1/{name}.1").read_text().partition(".SH EXIT STATUS\n")[2]
        found = [int(each) for each in re.findall(r"^\.TP\n(\d+)\n.", section, re.MULTILINE)]
        assert sorted(found) == [*range(10), 130, 141], f"{name}: run make share"
