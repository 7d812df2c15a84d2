"""An oVirt engine with a disk of two volumes, read by the imageio source."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path

from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.ovirt import locations
from cdi_worker.sources.ovirt import source as imageio
from tests.support import engine as engine_module
from tests.support import reading, tls

MIB = 1 << 20
SIZE = 8 * MIB
#: Short timeouts for tests: every server is local.
QUICK = imageio.Patience(renew=0.3, locked=20, ready=20, first=2, end=10, last=5)


@dataclasses.dataclass
class Setup:
    """An engine with a disk of two volumes. ``before``, ``now``: the raw disk at the first and the last."""

    engine: engine_module.Engine
    authority: tls.Authority
    before: Path
    now: Path

    def location(self, current: str = "", previous: str = "", disk: str = "disk") -> locations.Imageio:
        """Return the location of a disk, or of the delta between two checkpoints."""
        access = base.Access(
            user=engine_module.USER,
            password=engine_module.PASSWORD,
            ca_files=(str(self.authority.certificate),),
        )
        return locations.Imageio(self.engine.url, access, disk_id=disk, current=current, previous=previous)

    def source(
        self,
        *checkpoints: str,
        patience: imageio.Patience = QUICK,
        cancel: cancelling.Cancel = cancelling.NEVER,
    ) -> imageio.ImageioSource:
        """Return the source of the disk, or of a delta."""
        return imageio.ImageioSource(self.location(*checkpoints), cancel, patience)

    def opened(
        self,
        *checkpoints: str,
        patience: imageio.Patience = QUICK,
        cancel: cancelling.Cancel = cancelling.NEVER,
    ) -> contextlib.AbstractContextManager[base.Image]:
        """Open the source of the disk, or of a delta; close it after the block."""
        return base.open_image(self.source(*checkpoints, patience=patience, cancel=cancel))

    def check_ended(self, *phases: str) -> None:
        """Check the final phases of the transfers, that the disk is unlocked and no session is open."""
        assert tuple(transfer.phase for transfer in self.engine.transfers) == phases
        assert not self.engine.locked
        assert not self.engine.logged_in


def raw_disk(path: Path) -> Path:
    """Write a disk with data, text, and zeros before and between them."""
    with path.open("wb") as file:
        file.truncate(SIZE)
        for offset, length in ((64 << 10, 100_000), (MIB, 3 * MIB), (6 * MIB, MIB), (SIZE - 512, 512)):
            file.seek(offset)
            file.write(random.Random(offset).randbytes(length))
    return path


def added(engine: engine_module.Engine, authority: tls.Authority, directory: Path) -> Setup:
    """Add the disk to an engine; ``directory`` is for its content."""
    chain = engine.add_disk("disk", raw_disk(directory / "raw"))
    chain.snapshot("write -P 7 2M 300k", "write -z 3M 64k")
    before = chain.content("disk-0", directory / "before")
    now = chain.content("disk-1", directory / "now")
    return Setup(engine, authority, before, now)


def read(image: base.Image) -> bytes:
    """Read the whole disk in order."""
    return reading.read_all(image.source.stream(), MIB)
