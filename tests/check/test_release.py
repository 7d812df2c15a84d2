"""`make release`: from a clean tree, cut once, the same files at every run; and what its page finds wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import containers, processes, registries, repository, signers

VERSION = "97.1.0"
#: A list of names that a release writes (tests/check/test_surfaces.py).
NAMES = "docs/about/surfaces/json.txt"
IMAGE = "registry.example.org/cdi-worker"
WHEEL = f"cdi_worker-{VERSION}-py3-none-any.whl"
ARCHIVE = f"cdi-worker-{VERSION}-image.tar"
DIGEST = f"cdi-worker-{VERSION}-image.digest"
#: In place of the tools that need root and a network. An archive is as old as its files.
BUILD = "#!/bin/sh\n"
SAVE = """#!/bin/sh
cd "$(mktemp --directory)"
tar --extract --touch --file "$OLDPWD/image.tar"
exec tar --create --file "$2" *
"""


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
    # Right after a release, the changelog has no entry for another one.
    log = tree / "CHANGELOG.md"
    log.write_text(
        log.read_text().replace("## [Unreleased]\n", "## [Unreleased]\n\n### Added\n\n- An entry.\n", 1)
    )
    (tree / "tools/image").write_text(BUILD)
    (tree / "tools/save-image").write_text(SAVE)
    layer = containers.layer(containers.Entry("etc/hostname", b"worker"))
    containers.archive(tree / "image.tar", {"v1": containers.Image([layer])})
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
    """Make a release. The parts of the image need root and a network, and are replaced."""
    return subprocess.run(
        [sys.executable, tree / "tools/release", version],
        cwd=tree,
        env={"PATH": "/usr/bin:/bin", "HOME": str(tree), "TMPDIR": str(tree.parent), "IMAGE": IMAGE, **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def maintainers() -> Iterator[signers.OpenPGP]:
    with signers.people() as people:
        yield people


@pytest.fixture(scope="module")
def released(original: Path, maintainers: signers.OpenPGP, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone in which a release was made and signed."""
    tree = tmp_path_factory.mktemp("released") / "tree"
    processes.run("cp", "--archive", original, tree)
    (tree / NAMES).write_text("")
    git(tree, "commit", "--quiet", "--all", "--message", "the names of an earlier release")
    done = release(tree, SIGN="Good Signer", GNUPGHOME=str(maintainers.home))
    assert done.returncode == 0, done.stderr
    assert "not signed" not in done.stderr
    return tree


def test_release_is_cut_once_and_reproducible(released: Path) -> None:
    """All files of two runs are the same, but the signature."""
    tree = released
    assert git(tree, "log", "-1", "--format=%s") == f"release: {VERSION}"
    assert not git(tree, "status", "--porcelain")
    project = tomllib.loads((tree / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    assert project["urls"] == {"Image": f"docker://{IMAGE}:{VERSION}"}
    log = (tree / "CHANGELOG.md").read_text()
    assert re.search(
        rf"^## \[Unreleased\]\n\n## \[{VERSION}\] - \d{{4}}-\d\d-\d\d\n\n### Added\n", log, re.MULTILINE
    )

    assert "import target: text\n" in (tree / NAMES).read_text()

    place = tree / "build/release" / VERSION
    listed = {
        WHEEL,
        f"{WHEEL}.cdx.json",
        f"cdi_worker-{VERSION}.tar.gz",
        ARCHIVE,
        f"{ARCHIVE}.cdx.json",
        DIGEST,
    }
    assert {path.name for path in place.iterdir()} == {*listed, "SHA256SUMS", "SHA256SUMS.asc"}
    assert set(re.findall(r"  (.+)", (place / "SHA256SUMS").read_text())) == listed
    with zipfile.ZipFile(place / WHEEL) as archive:
        metadata = archive.read(f"cdi_worker-{VERSION}.dist-info/METADATA").decode()
    assert f"\nVersion: {VERSION}\n" in metadata

    sums, commit = (place / "SHA256SUMS").read_bytes(), git(tree, "rev-parse", "HEAD")
    kept = place.rename(place.with_name("signed"))
    again = release(tree)
    assert again.returncode == 0, again.stderr
    assert "not signed; name a key: make release SIGN=KEY" in again.stderr
    assert git(tree, "rev-parse", "HEAD") == commit
    assert (place / "SHA256SUMS").read_bytes() == sums
    assert not (place / "SHA256SUMS.asc").exists()
    shutil.rmtree(place)
    kept.rename(place)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.Registry]:
    processes.need("skopeo")
    with registries.registry(tmp_path_factory.mktemp("registry")) as served:
        yield served


@pytest.fixture
def checked(
    released: Path, maintainers: signers.OpenPGP, registry: registries.Registry, tmp_path: Path
) -> Checked:
    """The release as a stranger has it: the folder and a public key. Its image is pushed."""
    place = tmp_path / "folder"
    shutil.copytree(released / "build/release" / VERSION, place)
    (place / "maintainers.asc").write_bytes(maintainers.export("good", armor=True))
    settings = tmp_path / ".config/containers/registries.conf"
    settings.parent.mkdir(parents=True)
    settings.write_text(f'[[registry]]\nlocation = "{registry.host}"\ninsecure = true\n')
    return Checked(place, registry)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A folder in which the commands of the page are run."""

    place: Path
    registry: registries.Registry

    def run(self, heading: str, only: str = "") -> subprocess.CompletedProcess[str]:
        """Run the commands below a heading of the page that begin with ``only``, up to one that fails."""
        page = (repository.ROOT / "docs/about/releases.md").read_text()
        section = page.partition(f"{heading}\n")[2].partition("\n## ")[0]
        lines = re.findall(rf"^    ({only}.*)", section, re.MULTILINE)
        assert lines
        script = (
            "\n".join(lines).replace("1.2.0", VERSION).replace("registry.example.org", self.registry.host)
        )
        env = {"PATH": "/usr/bin:/bin", "HOME": str(self.place.parent)}
        return subprocess.run(
            ["sh", "-ec", script], cwd=self.place, env=env, capture_output=True, text=True, check=False
        )


CHECK = "## Verify a release"


def test_page_checks_a_release(checked: Checked, maintainers: signers.OpenPGP) -> None:
    assert checked.run("# Releases", "skopeo copy").returncode == 0
    done = checked.run(CHECK)
    assert done.returncode == 0, done.stderr
    assert 'Good signature from "Good Signer <good@example.org>"' in done.stderr
    shown = re.findall("[0-9A-F]{4}(?: +[0-9A-F]{4}){9}", done.stdout)
    known = re.findall(
        "^fpr:+([0-9A-F]+):", maintainers.gpg("--with-colons", "-k", "good").decode(), re.MULTILINE
    )
    assert [each.replace(" ", "") for each in shown] == known
    digest = (checked.place / DIGEST).read_text().strip()
    assert json.loads(done.stdout[done.stdout.index("{\n") :])["Digest"] == digest


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        (WHEEL, f"{WHEEL}: FAILED"),
        (f"cdi_worker-{VERSION}.tar.gz", "tar.gz: FAILED"),
        (f"{WHEEL}.cdx.json", "whl.cdx.json: FAILED"),
        (ARCHIVE, f"{ARCHIVE}: FAILED"),
        (f"{ARCHIVE}.cdx.json", "tar.cdx.json: FAILED"),
        (DIGEST, f"{DIGEST}: FAILED"),
        ("SHA256SUMS", "BAD signature"),
    ],
)
def test_page_finds_a_changed_byte(checked: Checked, name: str, complaint: str) -> None:
    path = checked.place / name
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    done = checked.run(CHECK)
    assert done.returncode != 0
    assert complaint in done.stdout + done.stderr


def test_page_finds_a_signature_of_somebody_else(checked: Checked, maintainers: signers.OpenPGP) -> None:
    """Also if gpg has the key: only that of the maintainers counts."""
    sums = (checked.place / "SHA256SUMS").read_bytes()
    (checked.place / "SHA256SUMS.asc").write_bytes(
        maintainers.sign("other", sums, "--detach-sign", "--armor")
    )
    (checked.place.parent / ".gnupg").mkdir(mode=0o700)
    (checked.place / "other").write_bytes(maintainers.export("other"))
    processes.run(
        "gpg", f"--homedir={checked.place.parent}/.gnupg", "--quiet", "--import", checked.place / "other"
    )
    done = checked.run(CHECK)
    assert done.returncode != 0
    assert "No public key" in done.stderr


def test_page_finds_a_list_of_other_components(checked: Checked) -> None:
    """Also if the file itself is missing."""
    components = checked.place / f"{WHEEL}.cdx.json"
    assert checked.run(CHECK, "sha256sum .*grep").returncode == 0
    text = components.read_bytes()
    components.write_bytes((checked.place / f"{ARCHIVE}.cdx.json").read_bytes())
    assert checked.run(CHECK, "sha256sum .*grep").returncode != 0
    components.write_bytes(text)
    (checked.place / WHEEL).unlink()
    assert checked.run(CHECK, "sha256sum .*grep").returncode != 0


def test_page_finds_another_image_in_the_registry(checked: Checked) -> None:
    """It has the tag."""
    other = containers.Image([containers.layer(containers.Entry("etc/hostname", b"other"))])
    checked.registry.push("cdi-worker", other, VERSION)
    (checked.place / DIGEST).write_text(f"sha256:{'0' * 64}\n")
    done = checked.run(CHECK, "skopeo")
    assert done.returncode != 0
    assert "manifest unknown" in done.stderr


@pytest.mark.parametrize(
    ("key", "reason"),
    [("nobody@example.org", "No secret key"), ("expired@example.org", "Unusable secret key")],
)
def test_key_that_cannot_sign_is_refused(
    tree: Path, maintainers: signers.OpenPGP, key: str, reason: str
) -> None:
    before = git(tree, "rev-parse", "HEAD")
    done = release(tree, SIGN=key, GNUPGHOME=str(maintainers.home))
    assert done.returncode == 1
    assert f"gpg cannot sign with SIGN={key}: signing failed: {reason}; gpg --list-secret-keys" in done.stderr
    assert git(tree, "rev-parse", "HEAD") == before
    assert not (tree / "build").exists()


def test_list_of_components_of_the_wheel(released: Path) -> None:
    tree = released
    place = tree / "build/release" / VERSION
    path = place / f"{WHEEL}.cdx.json"
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
