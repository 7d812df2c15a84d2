"""The place of a disk: a file or a block device, written so that it is usable only when it is whole."""

from cdi_worker.images.target.open import Options, Target, TargetFacts, facts, journal_slots, open  # noqa: A004 - target.open() is what it is

__all__ = ["Options", "Target", "TargetFacts", "facts", "journal_slots", "open"]
