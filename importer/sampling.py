"""A sample of a disk: which parts a verification compares."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import secrets
from typing import TYPE_CHECKING, Final, Self

from cdi_worker import errors, units
from cdi_worker.formats import partitions, spans
from cdi_worker.scratch import ranges

if TYPE_CHECKING:
    from cdi_worker.images import targets

#: Bytes of a random piece, of the beginning and of the end.
PIECE: Final = units.MIB
#: Random pieces. Longer ones are chosen of a larger sample, so that the memory for them stays small.
MOST: Final = 64 << 10
#: Bytes at the start of each partition: superblocks.
SUPERBLOCK: Final = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """How much of a disk is compared: ``amount`` is a percentage (``5%``) or a size (``10Gi``).

    ``seed``: selects the random pieces; the same one selects the same pieces of a disk of this size.
    """

    amount: str
    seed: int

    @classmethod
    def parse(cls, amount: str, seed: int | None = None) -> Self:
        """Return a sample, with a random seed if none is given. Raises ``errors.RequestError``."""
        made = cls(amount, secrets.randbelow(1 << 32) if seed is None else seed)
        made.length(units.MIB)
        return made

    def length(self, size: int) -> int:
        """Return how many bytes of a disk of ``size`` bytes are compared at random places."""
        number = self.amount.removesuffix("%")
        if number == self.amount:
            return min(size, units.parse_quantity(number))
        hundredths = -1
        with contextlib.suppress(errors.RequestError):
            hundredths = units.parse_quantity(f"{number}e2") if number[-1:].isdigit() else -1
        if not 0 < hundredths <= 100_00:
            raise errors.RequestError(
                f"{self.amount!r} is not a percentage such as 5%, or a size such as 10Gi"
            )
        return -(-size * hundredths // 100_00)

    def within(self, size: int | None, disk: targets.Target) -> ranges.Ranges:
        """Return what is compared of an open ``disk``, and all that follows an image of ``size`` bytes there.

        None: the size is not known before the end of the image, and is taken for that of the disk.
        """
        whole = disk.size or 0
        # What the disk does not have differs, and a source may state any size.
        size = min(size or whole, whole)
        found = self.places(size, disk.storage.read(0, partitions.HEAD))
        found.add(size, whole)
        return found

    def places(self, size: int, head: bytes) -> ranges.Ranges:
        """Return what is compared of a disk: its ends, the start of each partition, and random pieces.

        ``head``: its first bytes, at least those of partition tables.
        """
        length, piece = self.length(size), PIECE
        while length > MOST * piece:
            piece *= 2
        count = -(-size // piece)
        chosen = min(count, -(-length // piece))
        pieces = random.Random(self.seed).sample(range(count), chosen)  # noqa: S311  (no secret)
        found = [(number * piece, (number + 1) * piece) for number in pieces]
        found += [(0, PIECE), (max(0, size - PIECE), size)]
        found += [(start, start + SUPERBLOCK) for start in partitions.starts(head)]
        within = ((start, min(end, size)) for start, end in sorted(found) if start < size)
        return ranges.Ranges(spans.joined(within))
