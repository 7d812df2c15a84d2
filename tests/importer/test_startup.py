"""The start-up budget: which modules, and how many, a start may load. Start-up is part of every import."""

from __future__ import annotations

import dataclasses
import gc
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cdi_worker import collector
from tests.support import disks as disks_module
from tests.support import servers, worker


@dataclasses.dataclass(frozen=True)
class Budget:
    """The modules that a start may load in addition to those of an empty program.

    ``ours``, ``all``: numbers of modules with Python 3.11, and a few more for other versions. ``packages``:
    the third-party packages it may load. ``without``: modules and packages it must not load.
    """

    ours: int
    all: int
    packages: frozenset[str]
    without: frozenset[str]


def _budget(ours: int, total: int, packages: str, without: str) -> Budget:
    return Budget(ours, total, frozenset(packages.split()), frozenset(without.split()))


DECOMPRESSORS = "isal backports"
# urllib3 loads backports.zstd.
HTTP = "click backports requests urllib3 certifi charset_normalizer idna"
#: For the digests of the journal.
DIGESTS = "cryptography _cffi_backend"
#: Modules that no start needs.
OTHERS = "cdi_worker.importer.metrics.server"
COMMANDS = (
    "cdi_worker.importer.commands.import_ cdi_worker.importer.commands.options cdi_worker.importer.kubernetes"
)
TABLES = "cdi_worker.images.disks.tables cdi_worker.images.disks.following"
ROUTES = "cdi_worker.importer.qemu cdi_worker.importer.unpack subprocess"
#: Raise a number only for a module that this start needs.
BUDGETS = {
    "help": _budget(23, 89, "click", "requests ssl cdi_worker.importer.disk"),
    "version": _budget(
        24, 83, "click", f"{COMMANDS} cdi_worker.importer.execute fractions importlib.metadata"
    ),
    "blank": _budget(
        102, 189, "click", f"{COMMANDS} {ROUTES} requests ssl {TABLES} fractions importlib.metadata"
    ),
    "raw": _budget(
        123,
        348,
        f"{HTTP} {DIGESTS}",
        f"{COMMANDS} {ROUTES} {TABLES} cdi_worker.formats.qcow2",
    ),
    "qcow2": _budget(
        135,
        365,
        f"{HTTP} {DIGESTS} isal backports",
        f"{COMMANDS} {ROUTES} cdi_worker.formats.vmdk",
    ),
    "clone": _budget(
        48,
        162,
        "click backports",
        f"{COMMANDS} cdi_worker.importer.execute cdi_worker.sources.base fractions requests",
    ),
    "server": _budget(
        114,
        236,
        f"click {DECOMPRESSORS} h11 multipart",
        f"{COMMANDS} {ROUTES} cdi_worker.importer.send.volume requests",
    ),
}
ENVIRONMENTS = {
    "blank": {"IMPORTER_SOURCE": "none", "IMPORTER_IMAGE_SIZE": "1Mi"},
    "raw": {"IMPORTER_SOURCE": "http"},
    "qcow2": {"IMPORTER_SOURCE": "http"},
    "clone": {"UPLOAD_URL": "https://127.0.0.1:1/"},
    "server": {"CLIENT_NAME": "client"},
}


def _loaded(messages: str) -> set[str]:
    """Return the modules that Python reports (``PYTHONVERBOSE``) until the program's end."""
    return set(re.findall(r"^import '?([\w.]+)'? #", messages, re.MULTILINE))


@pytest.fixture(scope="module")
def empty() -> set[str]:
    """Return what an empty program loads: the interpreter's own, and what the installation adds."""
    command = [sys.executable, "-v", "-c", "import runpy"]
    done = subprocess.run(command, env=worker.ENVIRONMENT, check=True, capture_output=True, text=True)
    return _loaded(done.stderr)


@pytest.mark.parametrize("start", BUDGETS)
def test_start_keeps_to_its_budget(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, empty: set[str], start: str
) -> None:
    env = dict(ENVIRONMENTS.get(start, {}))
    if env.get("IMPORTER_SOURCE") == "http":
        env["IMPORTER_ENDPOINT"] = web.url(disks.image(start))
    pod = worker.Pod(tmp_path)
    arguments = pod.arguments if env else [f"--{start}"]
    done = worker.run(*arguments, env={**env, "PYTHONVERBOSE": "1"})
    assert done.status == (1 if start in {"clone", "server"} else 0), done.errors
    found = _loaded(done.errors) - empty
    budget = BUDGETS[start]
    ours = {name for name in found if f"{name}.".startswith("cdi_worker.")}
    packages = {name.partition(".")[0] for name in found - ours} - sys.stdlib_module_names
    assert packages <= budget.packages
    excluded = budget.without | set(OTHERS.split())
    assert not {name for name in found for other in excluded if f"{name}.".startswith(f"{other}.")}
    assert len(ours) <= budget.ours, sorted(ours)
    # Python 3.13 has modules that 3.11 has not.
    assert len(found) <= budget.all + (3 if sys.version_info >= (3, 13) else 0), sorted(found)


@pytest.mark.parametrize(
    ("source", "place"), [("docker://127.0.0.1:1/x", "behind"), ("--source=registry", "in front")]
)
def test_command_line_is_parsed_once_with_the_options_of_its_kind(
    tmp_path: Path, empty: set[str], source: str, place: str
) -> None:
    own = ("--architecture", "arm64")
    others = (source, tmp_path / "disk.img", "--force", "--size", "0x")
    arguments = (*own, *others) if place == "in front" else (*others, *own)
    done = worker.run("import", *arguments, env={"PYTHONVERBOSE": "1"})
    assert done.status == 2
    assert "Invalid value for '--size'" in done.errors
    found = _loaded(done.errors) - empty
    assert {name for name in found if name.endswith(".locations")} <= {
        "cdi_worker.sources.registry.locations",
        "cdi_worker.sources.local.locations",
    }
    assert "difflib" not in found


def test_importing_the_library_loads_no_source_and_no_logging() -> None:
    code = "import sys, cdi_worker, cdi_worker.importer.execute\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    names = done.stdout.split()
    assert "cdi_worker.sources.base" in names
    assert not {"requests", "h11", "rich", "boto3", "google"} & set(names)


@pytest.mark.parametrize("start", ["version", "blank"])
def test_modules_of_a_start_are_not_searched_for_garbage(tmp_path: Path, start: str) -> None:
    arguments = ["--version"] if start == "version" else ["blank", str(tmp_path / "disk.img"), "1Mi"]
    code = f"""import gc, sys, cdi_worker.__main__
sys.argv[1:] = {arguments}
gc.set_debug(gc.DEBUG_STATS)
cdi_worker.__main__.main()"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stderr.count("gc: collecting generation") <= 5


@pytest.mark.parametrize("is_enabled", [True, False])
def test_start_pauses_the_collector_and_keeps_what_was_loaded(is_enabled: bool) -> None:
    was_enabled = gc.isenabled()
    (gc.enable if is_enabled else gc.disable)()
    try:
        with collector.pause():
            assert not gc.isenabled()
            loaded = [object()]
        assert gc.isenabled() is is_enabled
        assert any(each is loaded for each in gc.get_objects(generation=2))
        assert gc.get_freeze_count() == 0
    finally:
        (gc.enable if was_enabled else gc.disable)()


def test_start_that_fails_resumes_the_collector() -> None:
    was_enabled = gc.isenabled()
    with pytest.raises(ZeroDivisionError), collector.pause():
        _ = 1 // 0
    assert gc.isenabled() is was_enabled
