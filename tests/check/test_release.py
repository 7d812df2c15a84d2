"""`make release`: from a clean tree, cut once, the same files at every run, with their components."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.support import containers, processes, repository

VERSION = "97.1.0"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the tracked files of this one, committed."""
    tree = tmp_path_factory.mktemp("original")
    names = processes.run(
        "git", "-C", repository.ROOT, "ls-files", "--cached", "--others", "--exclude-standard"
    )
    for name in names.stdout.splitlines():
        if name.partition("/")[0] != "tests" and (repository.ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(repository.ROOT / name, tree / name, follow_symlinks=False)
    git(tree, "init", "--quiet")
    git(tree, "config", "user.name", "a maintainer")
    git(tree, "config", "user.email", "maintainer@example.org")
    git(tree, "add", "--all")
    git(tree, "commit", "--quiet", "--message", "all")
    return tree


@pytest.fixture
def tree(original: Path, tmp_path: Path) -> Path:
    """A clone of it."""
    processes.run("cp", "--archive", original, tmp_path / "tree")
    return tmp_path / "tree"


def git(tree: Path, *command: str) -> str:
    return processes.run("git", "-C", tree, *command).stdout.strip()


def release(tree: Path, version: str = VERSION, **env: str) -> subprocess.CompletedProcess[str]:
    """Make a release without an image, whose test needs root and a network."""
    return subprocess.run(
        [sys.executable, tree / "tools/release", version],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "NO_IMAGE": "1", "HOME": str(tree), **env},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def released(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which a release was made."""
    tree = tmp_path_factory.mktemp("released") / "tree"
    processes.run("cp", "--archive", original, tree)
    done = release(tree, IMAGE="registry.example.org/cdi-worker")
    assert done.returncode == 0, done.stderr
    return tree


def test_release_is_cut_once_and_reproducible(released: Path) -> None:
    tree = released
    assert git(tree, "log", "-1", "--format=%s") == f"release: {VERSION}"
    assert not git(tree, "status", "--porcelain")
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    assert project["urls"] == {"Image": f"docker://registry.example.org/cdi-worker:{VERSION}"}
    log = (tree / "CHANGELOG.md").read_text()
    assert re.search(
        rf"^## \[Unreleased\]\n\n## \[{VERSION}\] - \d{{4}}-\d\d-\d\d\n\n### Added\n", log, re.MULTILINE
    )

    place = tree / "build/release" / VERSION
    wheel = f"cdi_worker-{VERSION}-py3-none-any.whl"
    names = {wheel, f"cdi_worker-{VERSION}.tar.gz", f"{wheel}.cdx.json", "SHA256SUMS"}
    assert {path.name for path in place.iterdir()} == names
    processes.run("env", f"--chdir={place}", "sha256sum", "--check", "--strict", "SHA256SUMS")
    with zipfile.ZipFile(place / wheel) as archive:
        metadata = archive.read(f"cdi_worker-{VERSION}.dist-info/METADATA").decode()
    assert f"\nVersion: {VERSION}\n" in metadata

    sums, commit = (place / "SHA256SUMS").read_bytes(), git(tree, "rev-parse", "HEAD")
    again = release(tree, IMAGE="registry.example.org/cdi-worker")
    assert again.returncode == 0, again.stderr
    assert git(tree, "rev-parse", "HEAD") == commit
    assert (place / "SHA256SUMS").read_bytes() == sums


def test_list_of_components_of_the_wheel(released: Path) -> None:
    tree = released
    place = tree / "build/release" / VERSION
    (path,) = place.glob("*.cdx.json")
    found = valid(path.read_text())
    root = found["metadata"]["component"]
    wheel = place / path.name.removesuffix(".cdx.json")
    assert (root["name"], root["version"]) == ("cdi-worker", VERSION)
    assert root["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    locked = re.findall(r"^([\w.-]+)==([^\s;\\]+)", (tree / "requirements.lock").read_text(), re.MULTILINE)
    assert {(each["name"], each["version"]) for each in found["components"]} == set(locked)


@pytest.mark.parametrize(
    ("version", "message"),
    [("1.2", "not a version"), ("v1.2.0", "not a version"), ("0.1.0", "nothing under [Unreleased]")],
)
def test_release_is_refused(tree: Path, version: str, message: str) -> None:
    log = tree / "CHANGELOG.md"
    log.write_text(re.sub(r"(## \[Unreleased\]\n).*", r"\1", log.read_text(), flags=re.DOTALL))
    git(tree, "commit", "--quiet", "--all", "--message", "no entries")
    before = git(tree, "rev-parse", "HEAD")
    done = release(tree, version)
    assert done.returncode != 0
    assert message in done.stderr
    assert git(tree, "rev-parse", "HEAD") == before


def test_release_needs_a_clean_tree(tree: Path) -> None:
    (tree / "README.md").write_text("changed")
    done = release(tree)
    assert done.returncode != 0
    assert "the tree is not clean" in done.stderr


def test_list_of_components_of_an_image(tmp_path: Path) -> None:
    """Packages of Debian and Python, as the uppermost layer has them."""
    status = "Package: tar\nStatus: {}\nArchitecture: amd64\nVersion: {}\n\n"
    site = "usr/lib/cdi-worker/lib/python3.13/site-packages"
    below = containers.layer(
        containers.Entry("var/lib/dpkg/status", status.format("install ok installed", "1.0").encode()),
    )
    gone = status.format("deinstall ok config-files", "9").replace("tar", "gone")
    above = containers.layer(
        containers.Entry(
            "var/lib/dpkg/status", (status.format("install ok installed", "2.0") + gone).encode()
        ),
        containers.Entry(
            f"{site}/urllib3-2.6.3.dist-info/METADATA", b"Name: urllib3\nVersion: 2.6.3\n\ntext"
        ),
    )
    archive = containers.archive(tmp_path / "image.tar", {"v1": containers.Image([below, above])})
    command = [sys.executable, repository.ROOT / "tools/sbom", "image", archive]
    first, second = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2)
    )
    assert first == second
    found = {each["purl"] for each in valid(first)["components"]}
    assert found == {"pkg:deb/debian/tar@2.0?arch=amd64&distro=debian", "pkg:pypi/urllib3@2.6.3"}


def valid(text: str) -> dict[str, dict[str, dict[str, list[dict[str, str]]]]]:
    """Return a list of components that has the form of CycloneDX."""
    # It takes seconds to load, in each process that collects.
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    fault = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    assert fault is None, fault
    found: dict[str, dict[str, dict[str, list[dict[str, str]]]]] = json.loads(text)
    return found
