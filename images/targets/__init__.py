"""The target of a disk: a file or block device that becomes usable only when the disk is complete."""

from cdi_worker.images.targets.open import (
    STDOUT,
    Claim,
    Options,
    Target,
    TargetFacts,
    Terms,
    check_replaceable,
    facts,
    followed,
    is_block,
    is_folder,
    is_foreign,
    is_left_over,
    journal_slots,
    open,  # noqa: A004 - targets.open() is what it is
    take,
    take_folder,
    used,
)

__all__ = [
    "STDOUT",
    "Claim",
    "Options",
    "Target",
    "TargetFacts",
    "Terms",
    "check_replaceable",
    "facts",
    "followed",
    "is_block",
    "is_folder",
    "is_foreign",
    "is_left_over",
    "journal_slots",
    "open",
    "take",
    "take_folder",
    "used",
]
