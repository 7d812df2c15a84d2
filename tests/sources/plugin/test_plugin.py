"""A third-party source, installed beside ours and registered by its entry point only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support import worker

SIZE = 3 << 20
REQUEST = 2


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """Install the distribution of ``cdi_worker_pattern`` into a folder, as pip does."""
    folder = tmp_path / "site"
    shutil.copytree(Path(__file__).parent / "cdi_worker_pattern", folder / "cdi_worker_pattern")
    info = folder / "cdi_worker_pattern-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cdi-worker-pattern\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        """[cdi_worker.sources]
pattern = cdi_worker_pattern:KIND
zeros = cdi_worker_pattern.source:zeros
broken = cdi_worker_pattern.nothing:KIND
failing = cdi_worker_pattern.source:broken
"""
    )
    return folder


def run(site: Path, *arguments: str | Path, **env: str) -> worker.Completed:
    """Run the command with the plug-in installed."""
    path = f"{worker.ENVIRONMENT['PYTHONPATH']}:{site}"
    return worker.run(*arguments, env={"PYTHONPATH": path, **env})


def test_option_of_the_plugin_is_used(site: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    done = run(site, "import", f"pattern:{SIZE}", target, "--pattern-byte", "0xA5", "--json")
    assert done.status == 0, done.errors
    assert target.read_bytes() == b"\xa5" * SIZE
    done = run(site, "inspect", f"pattern:{SIZE}")
    assert done.status == 0, done.errors
    assert f"{SIZE} bytes" in done.output


def test_variable_of_the_plugin_is_used(site: Path, tmp_path: Path) -> None:
    pod = worker.Pod(tmp_path)
    env = {"IMPORTER_SOURCE": "pattern", "IMPORTER_ENDPOINT": f"pattern:{SIZE}"}
    done = run(site, *pod.arguments, **env, IMPORTER_PATTERN_BYTE="7")
    assert done.status == 0, done.errors
    assert pod.outcome["message"] == "Import Complete"
    assert pod.disk.read_bytes() == b"\x07" * SIZE
    done = run(site, *pod.arguments, **env, IMPORTER_PATTERN_BYTE="700")
    assert done.status == 1
    assert "IMPORTER_PATTERN_BYTE: '700' is not a byte" in pod.message


@pytest.mark.slow
def test_help_shows_the_options_of_each_source(site: Path) -> None:
    for command, kind, option in (
        ("import", "pattern", "--pattern-byte"),
        ("inspect", "pattern", "--pattern-byte"),
        ("import", "s3", "--region"),
        ("inspect", "registry", "--architecture"),
        ("import", "vddk", "--thumbprint"),
        ("inspect", "imageio", "--disk-id"),
    ):
        text = run(site, command, "--help", kind).output
        assert option in text.partition(f"Options of {kind}:")[2].partition("\n\n")[0], text
    assert "no help on 'pattern'" in worker.run("import", "--help", "pattern").errors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((f"pattern:{SIZE}", "x", "--pattern-byte=700"), "'--pattern-byte': '700' is not a byte"),
        (("pattern:large", "x"), "'pattern:large' is not pattern:SIZE"),
        ((f"pattern:{SIZE}", "x", "--pattern-bit=1"), "No such option"),
        (("irc://x", "x"), "pattern, s3"),
    ],
)
def test_invalid_use_is_reported(site: Path, arguments: tuple[str, ...], message: str) -> None:
    done = run(site, "import", *arguments)
    assert done.status == REQUEST
    assert message in done.errors


def test_entry_point_may_be_a_plain_callable(site: Path, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    done = run(site, "import", f"pattern:{SIZE}", target, "--source=zeros")
    assert done.status == 0, done.errors
    assert target.read_bytes() == bytes(SIZE)


def test_a_plugin_that_cannot_be_loaded_is_named_and_stops_no_other(site: Path, tmp_path: Path) -> None:
    words = "source 'broken': cdi_worker_pattern.nothing:KIND cannot be loaded: No module named"
    done = run(site, "import", "--help", "pattern")
    assert (done.status, "--pattern-byte" in done.output, words in done.errors) == (0, True, True)
    done = run(site, "import", "x", tmp_path / "disk.img", "--source=broken")
    assert done.status == REQUEST
    assert done.error_message.startswith(words)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (SIZE, "KeyError: 'page 0'; report this to the author of cdi_worker_pattern"),
        (0, "ZeroDivisionError: pattern of no bytes; report this to the author of cdi_worker_pattern"),
    ],
)
def test_exception_in_a_plugin_is_reported_with_its_name(
    site: Path, tmp_path: Path, size: int, message: str
) -> None:
    done = run(site, "import", f"pattern:{size}", tmp_path / "disk.img", "--source=failing")
    assert (done.status, "Traceback" in done.errors) == (1, False), done.errors
    assert done.error_message == f"source 'failing' (cdi_worker_pattern): {message}"
    assert not [*tmp_path.glob("disk.img*")]
    if not size:
        done = run(site, "inspect", f"pattern:{size}", "--source=failing")
        assert done.error_message == f"source 'failing' (cdi_worker_pattern): {message}"
    pod = worker.Pod(tmp_path)
    env = {"IMPORTER_SOURCE": "failing", "IMPORTER_ENDPOINT": f"pattern:{size}"}
    assert run(site, *pod.arguments, **env).status == 1
    assert pod.message == f"Unable to process data: source 'failing' (cdi_worker_pattern): {message}"
