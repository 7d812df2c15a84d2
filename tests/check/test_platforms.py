"""The container image for other platforms than this machine's."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.support import processes, repository

TOOLS = repository.ROOT / "tools"
PLATFORMS = ("linux/amd64", "linux/arm64")


def test_command_for_this_platform_needs_no_emulator() -> None:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    assert processes.run(TOOLS / "emulated", f"linux/{machine}", "echo", "a b").stdout == "a b\n"
    with pytest.raises(AssertionError, match="ended with 7"):
        processes.run(TOOLS / "emulated", f"linux/{machine}", "sh", "-c", "exit 7")


def test_unknown_emulator_is_named() -> None:
    with pytest.raises(AssertionError, match="no emulator for vax"):
        processes.run(TOOLS / "emulated", "linux/vax", "true")


@pytest.fixture
def emulator(tmp_path: Path) -> dict[str, str]:
    """Describe an emulator for the machine "toy": it prints its programs. Return the environment."""
    processes.need_root()
    if "binfmt_misc" not in Path("/proc/filesystems").read_text():
        pytest.skip("needs binfmt_misc")
    (tmp_path / "qemu-toy.conf").write_text(f":qemu-toy:M::{MAGIC}::/bin/cat:F\n")
    (tmp_path / "program").write_text(MAGIC)
    (tmp_path / "program").chmod(0o755)
    return {**os.environ, "BINFMT": str(tmp_path)}


#: The first bytes of a program for the machine "toy"; another one in each process that runs tests.
MAGIC = f"toy-{os.getpid()}"


def is_registered(program: Path) -> bool:
    """Return whether the kernel can start a program."""
    try:
        return subprocess.run([program], capture_output=True, text=True, check=True).stdout == MAGIC
    except OSError as err:
        if err.errno != errno.ENOEXEC:
            raise
        return False


def test_emulator_is_registered_while_the_command_runs(tmp_path: Path, emulator: dict[str, str]) -> None:
    program = tmp_path / "program"
    nested = [TOOLS / "emulated", "linux/toy"]
    # Two runs at the same time: the end of the inner one takes nothing from the outer one.
    done = processes.run(
        *nested, "sh", "-c", f"{TOOLS}/emulated linux/toy {program} && {program}", env=emulator
    )
    assert done.stdout == MAGIC * 2
    assert not is_registered(program)


def test_kill_leaves_no_emulator(tmp_path: Path, emulator: dict[str, str]) -> None:
    program, pid = tmp_path / "program", tmp_path / "pid"
    argv = [TOOLS / "emulated", "linux/toy", "sh", "-c", f"echo $$ >{pid}; exec sleep 60"]
    with processes.running(
        argv, log=tmp_path / "log", ready=lambda: is_registered(program), env=emulator
    ) as run:
        processes.wait_for(lambda: pid.exists() and pid.read_text(), "the command")
        run.kill()
        processes.wait_for(lambda: not is_registered(program), "the end of the registration")
    os.kill(int(pid.read_text()), signal.SIGKILL)


def test_images_for_several_platforms_are_one_index(tmp_path: Path) -> None:
    """The name may have been another kind of image before."""
    processes.need_root()
    processes.need("buildah")
    recipe, storage = tmp_path / "Containerfile", tmp_path / "storage.conf"
    recipe.write_text("FROM scratch\nCOPY LICENSE /\n")
    storage.write_text(f'[storage]\ndriver="vfs"\ngraphroot="{tmp_path}/root"\nrunroot="{tmp_path}/run"\n')
    env = {
        **os.environ,
        "CONTAINERS_STORAGE_CONF": str(storage),
        "RECIPE": str(recipe),
        "IMAGE": "localhost/x",
    }
    for platforms in (PLATFORMS, PLATFORMS, ("linux/arm64",), PLATFORMS):
        processes.run(TOOLS / "image", "--quiet", env=env | {"PLATFORMS": ",".join(platforms)})
        if len(platforms) > 1:
            index = json.loads(processes.run("buildah", "manifest", "inspect", "localhost/x", env=env).stdout)
            found = sorted("{os}/{architecture}".format(**item["platform"]) for item in index["manifests"])
        else:
            facts = json.loads(
                processes.run("buildah", "inspect", "--type=image", "localhost/x", env=env).stdout
            )
            found = ["{os}/{architecture}".format(**facts["OCIv1"])]
        assert found == [*platforms]
