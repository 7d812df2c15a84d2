"""The tests read no file of the home of whoever runs them, and leave none in it or among temporary files."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import requests.utils

from tests.support import processes, repository


def test_home_is_a_temporary_folder() -> None:
    assert Path.home().is_relative_to(tempfile.gettempdir())
    assert Path.home() != Path(pwd.getpwuid(os.getuid()).pw_dir)


def test_directories_of_the_desktop_are_temporary() -> None:
    found = {name: value for name, value in os.environ.items() if name.startswith("XDG_")}
    assert "XDG_RUNTIME_DIR" in found
    assert not [path for path in found.values() if not Path(path).is_relative_to(tempfile.gettempdir())]


def test_no_login_is_found() -> None:
    assert requests.utils.get_netrc_auth("http://localhost") is None
    assert not {"NETRC", "CURL_HOME", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE"} & set(os.environ)


def test_logins_of_the_machine_are_not_read(tmp_path: Path) -> None:
    """Run the test above in a home with logins, and with variables that name them."""
    (tmp_path / ".netrc").write_text("machine localhost login someone password secret\n")
    env = {
        "NETRC": str(tmp_path / ".netrc"),
        "DOCKER_CONFIG": str(tmp_path),
        "XDG_CONFIG_HOME": str(tmp_path),
    }
    test = f"{__file__}::{test_no_login_is_found.__name__}"
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", test)
    processes.run(*command, env={**os.environ, **env, "HOME": str(tmp_path)})


def left(folder: Path, *tests: str, ended: bool = False) -> list[Path]:
    """Return what a run of tests leaves in the folder for temporary files, also one that SIGTERM ends."""
    folder.mkdir()
    command = (sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", "1", *tests)
    with subprocess.Popen(
        command, env={**os.environ, "TMPDIR": str(folder)}, stdout=subprocess.DEVNULL
    ) as run:
        if ended:
            processes.wait_for(lambda: list(folder.glob("*/t/*/test_*")), "a test", 60)
            run.terminate()
    assert run.returncode == (pytest.ExitCode.INTERRUPTED if ended else pytest.ExitCode.OK)
    return list(folder.iterdir())


def test_tests_leave_nothing(tmp_path: Path) -> None:
    assert left(tmp_path / "whole", f"{__file__}::{test_home_is_a_temporary_folder.__name__}") == []
    slow = str(repository.ROOT / "tests/scratch")
    assert left(tmp_path / "ended", slow, ended=True) == []
