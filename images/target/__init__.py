"""The target of a disk: a file or a block device that becomes usable only when the disk is complete."""

from cdi_worker.images.target.open import Options, Target, TargetFacts, facts, journal_slots, open  # noqa: A004 - target.open() is what it is

__all__ = ["Options", "Target", "TargetFacts", "facts", "journal_slots", "open"]
