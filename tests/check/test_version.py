"""The installed distribution: the commands and names that it gives its users work."""

from __future__ import annotations

import shlex
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support import processes, repository, worker

HINT = "from cdi_worker import version; print(version.install({!r}))"


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the distribution is made of: pip builds in the tree."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in ("cdi_worker", "importer", "sources", "images", "formats", "scratch", "share"):
        processes.run("cp", "-r", repository.ROOT / name, copy)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        processes.run("cp", repository.ROOT / name, copy)
    return copy


def install(target: Path, *what: str | Path) -> None:
    """Install into a directory of its own, from local files only."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"]
    processes.run(*pip, "--target", target, *what)


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    processes.run(*pip, "-w", folder, checkout)
    (made,) = folder.glob("*.whl")
    return made


def test_wheel_has_the_completions_and_the_manual_pages(wheel: Path) -> None:
    installed = {name.partition(".data/data/")[2] for name in zipfile.ZipFile(wheel).namelist()}
    files = [path for path in (repository.ROOT / "share").rglob("*") if path.is_file()]
    assert files
    assert {str(path.relative_to(repository.ROOT)) for path in files} <= installed


@pytest.fixture(scope="module")
def installed(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An installation from the checkout."""
    target = tmp_path_factory.mktemp("installed")
    install(target, checkout)
    return target


def hint(target: Path, extra: str) -> str:
    """Return the command that the installation in ``target`` gives for an extra."""
    code = f"import sys; sys.path.insert(0, {str(target)!r}); {HINT.format(extra)}"
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], cwd=target, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_hint_for_an_extra_works_from_a_checkout(checkout: Path, installed: Path, tmp_path: Path) -> None:
    command = hint(installed, "s3")
    assert shlex.split(command)[-1] == f"cdi-worker[s3] @ file://{checkout}"
    # As typed, except that nothing is downloaded.
    offline = ["--dry-run", "--no-deps", "--no-build-isolation", "--target", str(tmp_path / "new")]
    processes.run(*shlex.split(command), *offline)


def test_hint_for_an_extra_works_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    install(tmp_path / "installed", wheel)
    command = hint(tmp_path / "installed", "s3")
    assert shlex.split(command)[-1] == f"cdi-worker[s3] @ file://{wheel}"
    processes.run(*shlex.split(command), "--dry-run", "--no-deps", "--target", str(tmp_path / "new"))


def test_hint_names_the_compiler_first(installed: Path) -> None:
    assert hint(installed, "imageio").startswith("apt-get install gcc libxml2-dev python3-dev && ")


def test_hint_of_an_editable_installation() -> None:
    """The environment of the tests is one."""
    done = worker.run("--version")
    assert done.status == 0
    code = subprocess.run(
        [sys.executable, "-c", HINT.format("s3")], capture_output=True, text=True, check=True
    )
    assert shlex.split(code.stdout)[-2:] == ["--editable", f"{repository.ROOT}[s3]"]


def test_manifest_asks_for_an_image() -> None:
    done = worker.run("manifest", repository.DATAVOLUMES / "http.yaml")
    assert done.status == 2
    assert "--image" in done.error_message
    assert not done.output


def test_manifest_names_the_image_of_its_release(checkout: Path, tmp_path: Path) -> None:
    project = (checkout / "pyproject.toml").read_text()
    released = tmp_path / "released"
    processes.run("cp", "-r", checkout, released)
    urls = '\n[project.urls]\nImage = "docker://registry.example.org/cdi-worker:7.8.9"\n'
    (released / "pyproject.toml").write_text(project + urls)
    install(tmp_path / "installed", released)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "cdi_worker", "manifest", repository.DATAVOLUMES / "http.yaml"],
        env={**worker.ENVIRONMENT, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 'image: "registry.example.org/cdi-worker:7.8.9"\n' in done.stdout
