"""Imports in a row leave nothing behind: no thread, descriptor, loop device, temporary file or memory."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import cdi_worker
from tests.proofs.soak import steps
from tests.support import (
    containers,
    devices,
    misbehave,
    objectservers,
    ovirt_disks,
    registries,
    repository,
    servers,
    vmware_stages,
)
from tests.support import disks as disks_module

#: Bytes by which the resident memory may grow in the second half, at any number of runs.
GROWTH = 16 << 20
OPTIONS = cdi_worker.FetchOptions(connections=2, chunk=256 << 10, no_progress=5)

Record = Callable[[str, object], None]


def soak(
    kind: str, directory: Path, made: Sequence[steps.Step], config: pytest.Config, record: Record
) -> None:
    """Run the steps in a process of their own, and check what it holds at the end."""
    count = max(config.getoption("--soak") or 0, 2 * len(made))
    (directory / "steps").write_bytes(pickle.dumps(made))
    temporary = directory / "work" / "tmp"
    temporary.mkdir(parents=True)
    argv = [sys.executable, "-W", "error", "-m", "tests.proofs.soak.runs", kind, str(directory), str(count)]
    # With a threshold that glibc adapts, blocks of MiB come from the heaps of its arenas, which grow.
    env = {**os.environ, "TMPDIR": str(temporary), "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    done = subprocess.run(argv, cwd=repository.ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    outcome = json.loads(done.stdout.splitlines()[-1])
    print(outcome)
    record(f"soak: {kind} in a row", count)
    record(f"soak: KiB grown in the second half of {kind}", outcome["grown"] >> 10)
    assert not outcome["rises"], outcome
    assert outcome["grown"] < GROWTH, outcome


@pytest.mark.timeout(3600)
def test_imports_leave_nothing_behind(
    disks: disks_module.Disks,
    web: servers.Web,
    guarded: registries.Registry,
    seaweed: objectservers.Store,
    emulator: objectservers.Emulator,
    ovirt_disk: ovirt_disks.Setup,
    server: misbehave.Server,
    tmp_path: Path,
    pytestconfig: pytest.Config,
    record_property: Record,
) -> None:
    raw = disks.raw()
    guarded.push("soak", containers.image_of(raw, "+gzip"))
    seaweed.put("soak", disks.image("qcow2").read_bytes())
    emulator.put("soak", raw.read_bytes())
    keys = cdi_worker.Access(user=objectservers.ACCESS_KEY, password=objectservers.SECRET_KEY)

    def step(name: str, expected: Path | None, location: cdi_worker.Location, **more: object) -> steps.Step:
        request = cdi_worker.Request(
            source=name.partition(" ")[0], location=location, target="", fetch=OPTIONS, connect_patience=5
        )
        return steps.Step(name, expected, request=request, **more)

    def http(variant: str, compression: str | None = None) -> steps.Step:
        url = web.url(disks.wrapped(variant, compression))
        return step(f"http {variant} {compression}", disks.expected(variant), cdi_worker.Location(url))

    page = misbehave.Page(raw.read_bytes())
    cut = cdi_worker.Location(server.serve("/cut", misbehave.Page(page.body, cut_at=5 << 20)))
    html = cdi_worker.Location(server.serve("/html", misbehave.Page(b"<html>" * 1000)))
    url = cdi_worker.Location(web.url(raw))
    vcsim = vmware_stages.migration(tmp_path / "vcsim")
    with devices.loop(tmp_path, 24 << 20, sector=4096) as device, vcsim.running():
        made = [
            *(http(variant) for variant in ("raw", "qcow2", "qcow2-zlib", "vmdk-stream", "vhdx-log", "vdi")),
            *(http("raw", compression) for compression in ("gz", "xz", "zst")),
            http("qcow2", "bz2"),
            http("vhdx-log", "gz"),
            step("http to a device", raw, url, device=device),
            step("http missing", None, cdi_worker.Location(web.url("none"))),
            step("http cancelled", None, url, cancel_after=1 << 20),
            step("http cut", None, cut),
            step("http html", None, html),
            step("local", raw, cdi_worker.Location(str(raw))),
            step("registry", raw, cdi_worker.Location(guarded.reference("soak"), guarded.access())),
            step("registry missing", None, cdi_worker.Location(guarded.reference("no"), guarded.access())),
            step("s3", disks.expected("qcow2"), cdi_worker.Location(seaweed.url("soak"), keys)),
            step("gcs", raw, cdi_worker.Location(emulator.url("soak"))),
            step("imageio", ovirt_disk.now, ovirt_disk.location()),
            step("vddk", vcsim.content(0), vcsim.location(**vcsim.stage(0))),
            step("imageio cancelled", None, ovirt_disk.location(), cancel_after=1 << 20),
        ]
        # Not in tmp_path: the path of a unix socket is limited to 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="soak-"))
        soak("imports", directory, made, pytestconfig, record_property)


@pytest.mark.timeout(3600)
def test_upload_servers_leave_nothing_behind(
    disks: disks_module.Disks, tmp_path: Path, pytestconfig: pytest.Config, record_property: Record
) -> None:
    raw = disks.raw()
    wrong = {"x-cdi-checksum": "sha256:" + "0" * 64}
    with devices.loop(tmp_path, 24 << 20) as device:
        made = [
            steps.Step("raw", raw, body=raw),
            steps.Step("qcow2", disks.expected("qcow2"), body=disks.image("qcow2")),
            steps.Step("vhdx-log", disks.expected("vhdx-log"), body=disks.image("vhdx-log")),
            steps.Step("gz", raw, body=disks.wrapped("raw", "gz")),
            steps.Step("to a device", raw, body=raw, device=device),
            steps.Step("clone", raw),
            steps.Step("wrong checksum", body=raw, headers=wrong),
            steps.Step("cut", body=raw, cut=3 << 20),
        ]
        # Not in tmp_path: the path of a unix socket is limited to 107 bytes.
        directory = Path(tempfile.mkdtemp(prefix="soak-"))
        soak("uploads", directory, made, pytestconfig, record_property)
