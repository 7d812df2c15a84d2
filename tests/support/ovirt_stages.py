"""A warm migration from oVirt: an engine, disks of running machines, and the requests of the stages."""

from __future__ import annotations

import dataclasses
import random
import shutil
from pathlib import Path

import cdi_worker
from cdi_worker.sources.ovirt import locations
from tests.support import engine as engine_module
from tests.support import engine_states, imageiod, tls

MIB = 1 << 20
SIZE = 16 * MIB
#: What the guest writes between two checkpoints: data and zeros, overlapping, unaligned, at both ends.
FIRST = ("write -P 1 0 64k", "write -P 2 1000k 300k", "write -z 4M 1M", "write -P 3 15M 1M")


@dataclasses.dataclass
class Setup:
    """An engine whose disks are migrated; ``directory`` also holds scratch."""

    engine: engine_module.Engine
    authority: tls.Authority
    directory: Path

    def reset(self) -> None:
        """Undo the changes of an earlier test, even of a failed one."""
        self.engine.reset()
        shutil.rmtree(self.directory / "scratch", ignore_errors=True)

    def chain(self, size: int = SIZE) -> imageiod.Chain:
        """Add a disk of a running machine, without checkpoints."""
        name = f"disk{len(self.engine.chains)}"
        raw = self.directory / f"{name}.raw"
        with raw.open("wb") as file:
            file.truncate(size)
            for offset, length in ((0, 100_000), (MIB, 3 * MIB), (size // 2, size // 8), (size - 700, 700)):
                file.seek(offset)
                file.write(random.Random(offset).randbytes(length))
        return self.engine.add_disk(name, raw)

    def request(
        self, chain: imageiod.Chain, target: Path, current: str, previous: str = ""
    ) -> cdi_worker.Request:
        """Return the request for a stage: the checkpoint ``current``, as a delta to ``previous`` if given."""
        scratch = self.directory / "scratch"
        scratch.mkdir(exist_ok=True)
        access = cdi_worker.Access(
            user=engine_module.USER,
            password=engine_module.PASSWORD,
            ca_files=(str(self.authority.certificate),),
        )
        location = locations.Imageio(
            self.engine.url, access, disk_id=chain.disk, current=current, previous=previous
        )
        return cdi_worker.Request(
            existing="replace",
            source="imageio",
            location=location,
            target=str(target),
            scratch=str(scratch),
            # A program that a killed run was about to start has its locks for a moment.
            wait=10.0,
            fetch=cdi_worker.FetchOptions(connections=2, chunk=MIB, no_progress=20),
        )

    def content(self, chain: imageiod.Chain, number: str) -> Path:
        """Return the raw disk at a volume."""
        return chain.content(number, self.directory / f"{number}.content")

    def check_settled(self) -> None:
        """Check that all transfers have ended, no disk is locked, and scratch is empty."""
        assert all(transfer.phase in engine_states.ENDED for transfer in self.engine.transfers)
        assert not self.engine.locked
        assert not list((self.directory / "scratch").iterdir())
