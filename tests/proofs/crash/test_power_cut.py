"""No power cut during an import leaves an accepted disk that is not whole, and the next run writes it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.proofs.crash import checking, imports, media
from tests.support import disks as disks_module
from tests.support import ovirt_stages, registries, servers, uploads

#: Of each epoch between two flushes, with ``--whole`` and without.
WHOLE = checking.Plan(epochs=12, cuts=8, sets=5, reruns=2)
SAMPLE = checking.Plan(epochs=3, cuts=2, sets=1, reruns=1)
#: The cases without ``--whole``.
SAMPLED = {
    "raw-block512",
    "raw-over-a-disk-block512",
    "qcow2-block4096",
    "update-block4096",
    "raw-ext4-busy",
    "to-qcow2-ext4",
    "vhdx-xfs",
    "clone-of-a-device-ext4",
    "vmware-delta-block4096",
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Select the cases."""
    if "case" not in metafunc.fixturenames:
        return
    whole = metafunc.config.getoption("--whole")
    cases = [(name, kind) for name, (_, kinds) in imports.CASES.items() for kind in kinds]
    chosen = [case for case in cases if whole or "-".join(case) in SAMPLED]
    metafunc.parametrize("case", chosen, ids=["-".join(case) for case in chosen])


@pytest.fixture
def sources(
    disks: disks_module.Disks,
    web: servers.Web,
    guarded: registries.Registry,
    certificates: uploads.Certificates,
    ovirt: ovirt_stages.Setup,
    tmp_path: Path,
) -> imports.Sources:
    directory = tmp_path / "sources"
    directory.mkdir()
    return imports.Sources(disks, web, guarded, certificates, ovirt, directory)


@pytest.mark.timeout(600)
def test_power_cut_leaves_no_incomplete_disk(
    case: tuple[str, str],
    sources: imports.Sources,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Callable[[str, object], None],
) -> None:
    name, kind = case
    make, _ = imports.CASES[name]
    plan = WHOLE if pytestconfig.getoption("--whole") else SAMPLE
    place = tmp_path / "check"
    place.mkdir()
    with make(sources) as made:
        check = checking.Check(media.KINDS[kind], made, place, plan, seed=f"{name} {kind}")
        figures = check.run()
    for what, count in figures.counted().items():
        record_property(f"power cuts: {what}", count)
    assert not figures.violations, figures.violations[0]
