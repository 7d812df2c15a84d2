"""Fixtures shared by all tests, and the count of skipped tests."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import os
import random
import shutil
import signal
import ssl
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from cdi_worker import masking
from cdi_worker.importer import contract
from tests.support import (
    clones,
    devices,
    engine,
    forked,
    misbehave,
    node_servers,
    objectservers,
    openstack,
    ovirt_disks,
    ovirt_stages,
    pods,
    policy,
    quick,
    registries,
    servers,
    shared,
    uploads,
    worker,
)
from tests.support import disks as disks_module

# The machine may be busy: how long an example takes says nothing.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

#: What the processes of this run share, if this process has used it.
TOGETHER = pytest.StashKey[shared.Shared]()
#: Variables that name a file or folder with logins.
LOGINS = ("NETRC", "CURL_HOME", "DOCKER_CONFIG", "REGISTRY_AUTH_FILE")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of our own."""
    parser.addoption("--no-skips", action="store_true", help="fail when a need of a test is not met")
    parser.addoption("--quick", action="store_true", help="only tests that start nothing (make quick)")
    parser.addoption("--first-seed", type=int, help="the seed of what proofs draw: power cuts and kills")
    parser.addoption("--cases", type=int, help="the number of imports whose power cuts are checked: all")
    parser.addoption("--kills-for", type=float, help="seconds for each test of kills at random moments")
    parser.addoption("--soak", type=int, help="the number of imports in a row (make soak)")
    parser.addoption("--policy", type=Path, help="the folder of the policy that this process is under")
    parser.addoption("--image", help="the image that tests/image run (make test-image)")


def pytest_configure(config: pytest.Config) -> None:
    """Draw the first seed, if none is given; keep all temporary files in a folder on disk; leave home.

    The folder is removed with what killed programs left. On Debian 13 /tmp is in memory: writes to it are not
    counted as I/O, and large disks do not fit.
    """
    if config.option.first_seed is None:
        config.option.first_seed = random.randrange(1 << 30)
    if not hasattr(config, "workerinput"):  # a process of pytest-xdist has the environment of the first one
        _move(config)
    # What a killed worker leaves is removed too.
    forked.ENVIRONMENT["TMPDIR"] = os.environ["TMPDIR"]
    is_testing = hasattr(config, "workerinput") or not config.getoption("numprocesses", None)
    if config.option.policy and is_testing:
        policy.adopt(config.option.policy)


def _move(config: pytest.Config) -> None:
    """Set folders for temporary files and for the home, which are removed after the tests."""
    if config.getoption("numprocesses", None):
        # Ended by CI as by Ctrl-C, with all clean-ups. This process runs no test, and starts nothing.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder = tempfile.mkdtemp(prefix="cdi-tests-", dir=os.environ.get("TMPDIR", "/var/tmp"))
    Path(folder).chmod(0o755)
    config.add_cleanup(functools.partial(shutil.rmtree, folder, ignore_errors=True))
    # For this process, which has already read its environment, and for the programs it starts.
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    # Shorter than pytest's choice: the path of a unix socket is limited to 108 bytes.
    config.option.basetemp = config.option.basetemp or f"{folder}/t"
    _leave_home(f"{folder}/home")


def _leave_home(home: str) -> None:
    """Set an empty home: no ``.netrc``, ``.docker`` or configuration of this machine is read."""
    for name in [name for name in os.environ if name.startswith("XDG_") or name in LOGINS]:
        del os.environ[name]
    # The defaults of the others are below the home.
    os.environ |= {"HOME": home, "XDG_RUNTIME_DIR": f"{home}/run"}
    Path(home).mkdir()
    Path(home, "run").mkdir(mode=0o700)
    # Nor its certificates, all of which each TLS context would load: the servers of the tests have their own.
    ssl.SSLContext.load_default_certs = lambda *_: None  # type: ignore[method-assign, assignment]


def pytest_report_header(config: pytest.Config) -> str:
    """Print the option that draws the same again."""
    return f"seed: --first-seed {config.option.first_seed}"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Collect only files with quick tests, with ``--quick``."""
    is_slow = config.getoption("--quick") and collection_path.suffix == ".py" and _is_slow(collection_path)
    return True if is_slow else None


def _is_slow(path: Path) -> bool:
    return path.name.startswith("test_") and not quick.has_quick_tests(path)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage among the tests: they stay, and each full collection would look at all of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # of what -k has left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the quick tests, with ``--quick``, and kills at random moments only with ``--kills-for``."""
    others = [item for item in items if config.getoption("--quick") and not quick.is_quick(item)]
    if config.getoption("--kills-for") is None:
        others += [item for item in items if item.name.startswith("test_kills_at_random")]
    config.hook.pytest_deselected(items=others)
    gone = set(others)
    items[:] = [item for item in items if item not in gone]


def pytest_make_parametrize_id(config: pytest.Config, val: object, argname: str) -> str | None:
    """Name long bytes by their argument.

    gzip writes the time into them, and the IDs must be the same in every process that collects.
    """
    return argname if isinstance(val, bytes) and len(val) > 16 else None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the number of skipped tests, the figures of proofs, and the seed of a failure."""
    count = len(terminalreporter.stats.get("skipped", []))
    terminalreporter.write_line(f"needs not met: {count} tests skipped")
    reports = [report for found in terminalreporter.stats.values() for report in found]
    totals = collections.Counter[str]()
    for report in reports:
        for name, figure in getattr(report, "user_properties", ()):
            if getattr(report, "when", "") == "call":
                totals[name] += figure
    for name, total in totals.items():
        terminalreporter.write_line(f"{name}: {total}")
    if terminalreporter.stats.get("failed"):
        terminalreporter.write_line(pytest_report_header(config))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop what all processes share; fail the run if tests were skipped and ``--no-skips`` is given."""
    if (together := session.config.stash.get(TOGETHER, None)) is not None:
        together.close()
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    skipped = reporter.stats.get("skipped", []) if reporter else []
    if skipped and session.config.getoption("--no-skips") and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope="session")
def together(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> shared.Shared:
    """Return what all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    common = own.parent if hasattr(pytestconfig, "workerinput") else own
    pytestconfig.stash[TOGETHER] = made = shared.Shared(common / "shared")
    return made


@pytest.fixture(scope="session")
def disks(together: shared.Shared) -> disks_module.Disks:
    """Return the cache of disks of this run."""
    return disks_module.Disks(together.directory("disks"))


@pytest.fixture(scope="session")
def web(disks: disks_module.Disks, together: shared.Shared) -> servers.Web:
    """Serve the cache of disks by an nginx with default settings."""
    return together.get("nginx", lambda path: servers.nginx(path, disks.directory))


@pytest.fixture(scope="session")
def own_folder(pytestconfig: pytest.Config) -> str:
    """Return the folder of this process in the stores that all processes share.

    What a test has stored is only changed by tests of the same process, one after the other.
    """
    return f"{getattr(pytestconfig, 'workerinput', {'workerid': 'main'})['workerid']}/"


@pytest.fixture(scope="session")
def seaweed(
    certificates: uploads.Certificates, together: shared.Shared, own_folder: str
) -> objectservers.Store:
    """Run SeaweedFS as an S3 server, with a certificate from the authority of ``certificates``."""
    issue = certificates.authority.issue
    store = together.get("seaweed", lambda path: objectservers.seaweed(path, issue()))
    return dataclasses.replace(store, folder=own_folder)


@pytest.fixture(scope="session")
def guarded(
    certificates: uploads.Certificates, together: shared.Shared, own_folder: str
) -> Iterator[registries.Registry]:
    """Run a registry that requires a password, with TLS by the authority of ``certificates``."""
    authority = certificates.authority
    registry = together.get(
        "registry", lambda path: registries.registry(path, authority=authority, password=True)
    )
    with registry.session:
        yield dataclasses.replace(registry, folder=own_folder)


@pytest.fixture(scope="session")
def rclone(together: shared.Shared, own_folder: str) -> objectservers.Store:
    """Run rclone as an S3 server with unusual responses."""
    return dataclasses.replace(together.get("rclone", objectservers.rclone), folder=own_folder)


@pytest.fixture(scope="session")
def emulator(together: shared.Shared, own_folder: str) -> objectservers.Emulator:
    """Run an emulator of Google Cloud Storage."""
    return dataclasses.replace(together.get("emulator", objectservers.emulator), folder=own_folder)


@pytest.fixture(scope="session")
def cloud(together: shared.Shared) -> openstack.Cloud:
    """Run OpenStack's Keystone and Glance."""
    return together.get("openstack", openstack.cloud)


@pytest.fixture(scope="session")
def ovirt_running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ovirt_stages.Setup]:
    """Run an oVirt engine during the whole test run."""
    directory = tmp_path_factory.mktemp("ovirt")
    with engine.running(directory, local=False, level="DEBUG") as (running, authority):
        yield ovirt_stages.Setup(running, authority, directory)


@pytest.fixture
def ovirt(ovirt_running: ovirt_stages.Setup) -> ovirt_stages.Setup:
    """Return an oVirt engine for migrations, reset to its normal behaviour."""
    ovirt_running.reset()
    return ovirt_running


@pytest.fixture(scope="session")
def ovirt_disk_running(
    ovirt_running: ovirt_stages.Setup, tmp_path_factory: pytest.TempPathFactory
) -> ovirt_disks.Setup:
    """Add a disk to the oVirt engine of the whole test run."""
    return ovirt_disks.added(
        ovirt_running.engine, ovirt_running.authority, tmp_path_factory.mktemp("ovirt-disk")
    )


@pytest.fixture
def ovirt_disk(ovirt_disk_running: ovirt_disks.Setup) -> Iterator[ovirt_disks.Setup]:
    """Return an oVirt engine with a disk, reset to its normal behaviour; no disk may stay locked."""
    ovirt_disk_running.engine.reset()
    yield ovirt_disk_running
    assert not ovirt_disk_running.engine.locked


@pytest.fixture(params=[512, 4096], ids=["block512", "block4096"])
def block(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """Make a block device of 32 MiB filled with 0xFF, once with each sector size."""
    with devices.loop(tmp_path, 32 << 20, sector=request.param) as device:
        yield device


@pytest.fixture
def server() -> Iterator[misbehave.Server]:
    """Run the misbehaving HTTP server."""
    with misbehave.Server() as running:
        yield running


@pytest.fixture
def pod(tmp_path: Path) -> worker.Pod:
    """Return an importer pod with a file-system volume and the http source."""
    return worker.Pod(tmp_path / "pod", env={"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0"})


@pytest.fixture
def device(tmp_path: Path) -> Iterator[Path]:
    """Make a block device of 16 MiB, filled with 0xFF."""
    with devices.loop(tmp_path, 16 << 20) as made:
        yield made


@pytest.fixture(scope="session")
def node_program(together: shared.Shared) -> Path:
    """Build the node pull server as in the image."""
    return together.get("static", lambda path: contextlib.nullcontext(node_servers.compiled(path)))


@pytest.fixture
def empty_node(tmp_path: Path, node_program: Path) -> Iterator[node_servers.Container]:
    """Return a root directory for the node pull server, without a disk."""
    with contextlib.closing(node_servers.container(tmp_path / "root", node_program)) as made:
        yield made


@pytest.fixture
def node(empty_node: node_servers.Container) -> node_servers.Container:
    """Run the node pull server with a disk."""
    empty_node.put("disk.img")
    empty_node.serve()
    return empty_node


@pytest.fixture(scope="session")
def certificates(together: shared.Shared) -> uploads.Certificates:
    """Issue the certificates of an upload server and its client."""
    return together.get("certificates", lambda path: contextlib.nullcontext(uploads.certificates(path)))


@pytest.fixture
def original(tmp_path: Path) -> Path:
    """Write a disk to clone."""
    return clones.write_disk(tmp_path / "original")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a file-system volume to clone."""
    return clones.fill_volume(tmp_path / "volume")


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """Create an empty scratch directory."""
    path = tmp_path / "scratch"
    path.mkdir()
    return path


@pytest.fixture
def image(request: pytest.FixtureRequest) -> str:
    """Return the name of the container image built by ``make test-image``."""
    name = request.config.getoption("--image")
    if name is None:
        pytest.skip("needs --image")
    return str(name)


@pytest.fixture
def container(image: str, tmp_path: Path) -> pods.Pod:
    """Return an importer pod in a container, with a file-system volume and the http source."""
    env = {"IMPORTER_SOURCE": "http", "FILESYSTEM_OVERHEAD": "0", "OWNER_UID": "1-2"}
    return pods.Pod(tmp_path / "pod", image, env=env)


@pytest.fixture
def paths(tmp_path: Path) -> contract.Paths:
    """Return the paths of a pod with an empty file-system volume and nothing else."""
    (tmp_path / "data").mkdir()
    log = str(tmp_path / "termination-log")
    return contract.Paths(
        data=str(tmp_path / "data"), block="/no", scratch="/no", termination_log=log, metrics_port=0
    )


@pytest.fixture
def disk(paths: contract.Paths) -> Path:
    """Return the path of the disk to be written."""
    return Path(paths.data, "disk.img")


@pytest.fixture(autouse=True)
def _no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the secrets of earlier tests: a password of theirs may be a word of this one's messages."""
    monkeypatch.setattr(masking, "_registry", masking._Registry())
