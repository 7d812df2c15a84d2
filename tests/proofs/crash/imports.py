"""The imports whose writes are recorded: every route, and every way in which a disk arrives."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker.importer import contract
from tests.proofs.crash import checking, media
from tests.support import (
    chains,
    clones,
    containers,
    ovirt_stages,
    processes,
    registries,
    servers,
    uploads,
    vmware_stages,
)
from tests.support import disks as disks_module

#: Many small requests and a journal that is saved after each: many flushes in a short import. A state may
#: already hold the disk when the import is run again.
QUICK: dict[str, Any] = {
    "fetch": cdi_worker.FetchOptions(connections=2, chunk=256 << 10, no_progress=20),
    "journal_interval": 0.0,
    "existing": "replace",
}


class Sources:
    """The servers of the test run, those that a case needs, and a directory of this test."""

    def __init__(self, request: pytest.FixtureRequest, directory: Path) -> None:
        self._fixture = request.getfixturevalue
        self.directory = directory
        directory.mkdir()

    @property
    def disks(self) -> disks_module.Disks:
        """Return the cache of disks."""
        return self._fixture("disks")  # type: ignore[no-any-return]

    @property
    def web(self) -> servers.Web:
        """Return the nginx that serves them."""
        return self._fixture("web")  # type: ignore[no-any-return]

    @property
    def guarded(self) -> registries.Registry:
        """Return a registry."""
        return self._fixture("guarded")  # type: ignore[no-any-return]

    @property
    def certificates(self) -> uploads.Certificates:
        """Return the certificates of an upload server and its client."""
        return self._fixture("certificates")  # type: ignore[no-any-return]

    @property
    def ovirt(self) -> ovirt_stages.Setup:
        """Return an engine of oVirt."""
        return self._fixture("ovirt")  # type: ignore[no-any-return]


#: Yields an import; its servers run during the block.
Making = Callable[[Sources], contextlib.AbstractContextManager[checking.Import]]


def guest(target: Path, directory: Path) -> Path:
    """Check a qcow2 file, and return the guest's bytes."""
    processes.run("qemu-img", "check", "-q", "-f", "qcow2", target)
    processes.run("qemu-img", "convert", "-f", "qcow2", "-O", "raw", target, directory / "guest")
    return directory / "guest"


def http(variant: str, compression: str | None = None, *, over: str = "", **options: Any) -> Making:
    """Import over HTTP; ``over``: the variant of a disk that the target holds before."""

    @contextlib.contextmanager
    def make(sources: Sources) -> Iterator[checking.Import]:
        disks = sources.disks

        def run(variant: str, compression: str | None, target: Path, scratch: Path) -> None:
            url = sources.web.url(disks.wrapped(variant, compression))
            request = cdi_worker.Request(
                source="http",
                location=cdi_worker.Location(url),
                target=str(target),
                scratch=str(scratch),
                **QUICK | options,
            )
            cdi_worker.run(request)

        def earlier(target: Path, scratch: Path) -> None:
            run(over, None, target, scratch)

        yield checking.Import(
            run=lambda target, scratch: run(variant, compression, target, scratch),
            expected=disks.expected(variant),
            read=guest if options.get("format") else checking.Import.read,
            before=earlier if over else None,
            earlier=disks.expected(over) if over else None,
        )

    return make


def registry(variant: str, compression: str) -> Making:
    """Import a container disk."""

    @contextlib.contextmanager
    def make(sources: Sources) -> Iterator[checking.Import]:
        name = f"crash-{variant}"
        sources.guarded.push(name, containers.image_of(sources.disks.image(variant), compression))
        location = cdi_worker.Location(sources.guarded.reference(name), sources.guarded.access())

        def run(target: Path, scratch: Path) -> None:
            request = cdi_worker.Request(
                source="registry", location=location, target=str(target), scratch=str(scratch), **QUICK
            )
            cdi_worker.run(request)

        yield checking.Import(run, sources.disks.expected(variant))

    return make


def chain(*, over: bool = False) -> Making:
    """Import a chain of three files; ``over``: as an update of the disk without the last one."""

    @contextlib.contextmanager
    def make(sources: Sources) -> Iterator[checking.Import]:
        files = chains.Chain(sources.directory)
        files.base("16M", "write -P 1 0 9M", "write -P 2 15M 1M")
        files.overlay("write -P 3 1M 2M", "write -z 4M 1M")
        earlier = files.disk() if over else None
        files.overlay("write -P 4 100k 64k", "write -P 5 11M 1M", "write -z 15M 512k")

        def run(paths: list[Path], target: Path, scratch: Path) -> None:
            first, *layers = (cdi_worker.Location(str(path)) for path in paths)
            request = cdi_worker.Request(
                source="local",
                location=first,
                layers=tuple(layers),
                target=str(target),
                scratch=str(scratch),
                **QUICK | ({"existing": "update"} if over and target.exists() else {}),
            )
            cdi_worker.run(request)

        yield checking.Import(
            run=lambda target, scratch: run(files.files, target, scratch),
            expected=files.disk(),
            before=(lambda target, scratch: run(files.files[:-1], target, scratch)) if over else None,
            earlier=earlier,
        )

    return make


@contextlib.contextmanager
def _server(sources: Sources, target: Path, scratch: Path, **env: str) -> Iterator[uploads.Server]:
    is_block = target.is_block_device()
    paths = contract.Paths(
        data=str(sources.directory if is_block else target.parent),
        block="/no",
        scratch=str(scratch),
        termination_log=str(sources.directory / "termination-log"),
        metrics_port=0,
    )
    destination = {"DESTINATION": str(target)} if is_block else {}
    with uploads.Server(sources.certificates, {**destination, **env}, paths) as server:
        yield server
        assert server.result().status == 0


def upload(variant: str, *, parts: int = 0) -> Making:
    """Upload in one request, or resumable in ``parts``."""

    @contextlib.contextmanager
    def make(sources: Sources) -> Iterator[checking.Import]:
        body = sources.disks.image(variant).read_bytes()

        def run(target: Path, scratch: Path) -> None:
            with _server(sources, target, scratch) as server:
                if not parts:
                    assert server.ask("POST", uploads.SYNC, body).status == 200
                    return
                made = {**uploads.TUS, "Upload-Length": str(len(body))}
                assert server.ask("POST", uploads.RESUMABLE, b"", made).status == 201
                step = -(-len(body) // parts)
                for at in range(0, len(body), step):
                    headers = {**uploads.PATCH_HEADERS, "Upload-Offset": str(at)}
                    answer = server.ask("PATCH", uploads.RESUMABLE, body[at : at + step], headers)
                    assert answer.status == 204

        yield checking.Import(run, sources.disks.expected(variant))

    return make


def clone(mode: str) -> Making:
    """Clone a volume of a mode: a disk, or a file system that contains one."""

    @contextlib.contextmanager
    def make(sources: Sources) -> Iterator[checking.Import]:
        folder = sources.directory / "original"
        folder.mkdir()
        disk = clones.write_disk(folder / "disk.img", 16 << 20)
        (folder / "note").write_text("another file")

        def run(target: Path, scratch: Path) -> None:
            with _server(sources, target, scratch) as server:
                clones.run(clones.environment(server, mode, disk if mode == "block" else folder))

        yield checking.Import(run, disk)

    return make


def migration_from_ovirt(stage: int) -> Making:
    """Run a stage of a warm migration: the first copies the disk, the second commits a qcow2 delta."""

    @contextlib.contextmanager
    def make(sources: Sources) -> Iterator[checking.Import]:
        chain = sources.ovirt.chain()
        chain.snapshot(*ovirt_stages.FIRST)
        chain.snapshot("write -P 5 5M 1M")
        first, second = (volume.id for volume in chain.volumes[:2])
        sources.ovirt.engine.inactivity = 2.0

        def run(current: str, previous: str, target: Path, scratch: Path) -> None:
            request = sources.ovirt.request(chain, target, current, previous)
            cdi_worker.run(dataclasses.replace(request, scratch=str(scratch), **QUICK))

        def copy(target: Path, scratch: Path) -> None:
            run(first, "", target, scratch)

        if stage == 0:
            yield checking.Import(copy, sources.ovirt.content(chain, first), rest=b"\0")
            return
        yield checking.Import(
            run=lambda target, scratch: run(second, first, target, scratch),
            expected=sources.ovirt.content(chain, second),
            before=copy,
            earlier=sources.ovirt.content(chain, first),
            in_place=True,
            rest=b"\0",
        )

    return make


def migration_from_vmware(stage: int) -> Making:
    """Run a stage of a warm migration: the first copies the extents, the others write changed areas."""

    @contextlib.contextmanager
    def make(sources: Sources) -> Iterator[checking.Import]:
        vcsim = vmware_stages.migration(sources.directory / "vcsim", 16 << 20)
        with vcsim.running():

            def run(target: Path, stage: int) -> None:
                request = vmware_stages.request(vcsim, target, stage)
                cdi_worker.run(dataclasses.replace(request, **QUICK))

            def before(target: Path, _scratch: Path) -> None:
                for earlier in range(stage):
                    run(target, earlier)

            yield checking.Import(
                run=lambda target, _scratch: run(target, stage),
                expected=vcsim.content(stage),
                before=before if stage else None,
                earlier=vcsim.content(stage - 1) if stage else None,
                in_place=stage > 0,
                rest=b"\0",
            )

    return make


#: What is recorded, and where.
CASES: dict[str, tuple[Making, tuple[str, ...]]] = {
    "raw": (http("raw"), ("block512", "block4096", "ext4-busy", "xfs-4096")),
    "chain": (chain(), ("block512", "ext4-busy", "xfs-4096")),
    "update": (chain(over=True), ("block512", "block4096", "ext4-busy", "xfs")),
    "raw-direct": (http("raw", direct=True), ("block512", "ext4-4096", "xfs")),
    "raw-gz": (http("raw", "gz"), ("block4096", "xfs-busy")),
    "raw-over-a-disk": (http("raw", over="vdi"), ("block512", "ext4-busy", "xfs")),
    "qcow2": (http("qcow2"), ("block512", "block4096", "ext4-4096", "xfs")),
    "qcow2-gz": (http("qcow2-zlib", "gz"), ("block512", "xfs")),
    "to-qcow2": (http("raw", format="qcow2"), ("ext4", "ext4-busy", "xfs")),
    "vmdk": (http("vmdk-stream"), ("block512", "ext4")),
    "vhdx": (http("vhdx"), ("block512", "block4096", "ext4-busy", "xfs")),
    "vhdx-spooled": (http("vhdx", "gz"), ("block512", "ext4", "xfs-4096")),
    "preallocated": (http("qcow2", preallocation=True), ("block4096", "ext4", "xfs-busy")),
    "registry": (registry("raw", "+gzip"), ("block512", "ext4")),
    "registry-qcow2": (registry("qcow2", ""), ("block4096", "xfs")),
    "upload": (upload("raw"), ("block512", "ext4-busy")),
    "upload-qcow2": (upload("qcow2"), ("block4096", "xfs")),
    "upload-resumable": (upload("raw", parts=3), ("block512", "ext4")),
    "clone-of-a-device": (clone("block"), ("block512", "block4096", "ext4", "xfs")),
    "clone-of-a-file-system": (clone("filesystem"), ("block512", "ext4-busy", "xfs-busy")),
    "ovirt-copy": (migration_from_ovirt(0), ("block512", "ext4")),
    "ovirt-delta": (migration_from_ovirt(1), ("block512", "ext4", "xfs-4096")),
    "vmware-copy": (migration_from_vmware(0), ("block4096", "xfs")),
    "vmware-delta": (migration_from_vmware(1), ("block4096", "ext4")),
}


def check(
    case: tuple[str, str], request: pytest.FixtureRequest, directory: Path, plan: checking.Plan
) -> None:
    """Check the power cuts during an import onto a kind of storage, drawn by ``--first-seed``."""
    name, kind = case
    place = directory / "check"
    place.mkdir()
    seed = f"{request.config.getoption('--first-seed')} {name} {kind}"
    with CASES[name][0](Sources(request, directory / "sources")) as made:
        figures = checking.Check(media.KINDS[kind], made, place, plan, seed).run()
    for what, count in figures.counted().items():
        request.node.user_properties.append((f"power cuts: {what}", count))
    assert not figures.violations, figures.violations[0]
