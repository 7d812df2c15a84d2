"""Kubernetes quantities, sizes in messages, and the overhead of file systems."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fractions import Fraction

MIB = 1 << 20
SECTOR = 512
#: Characters of a quantity: Python refuses to parse numbers of thousands of digits.
LONGEST = 100
_QUANTITY = r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)"
#: The power of ten, or of two, that a suffix multiplies by.
_TENS = {"n": -9, "u": -6, "m": -3, "": 0, **{letter: 3 * power for power, letter in enumerate("kMGTPE", 1)}}
_TWOS = {f"{letter}i": 10 * power for power, letter in enumerate("KMGTPE", 1)}


def parse_quantity(text: str) -> int:
    """Return a Kubernetes quantity in bytes, rounded up.

    Raises ``ValueError`` if malformed. Grammar: k8s.io/apimachinery, resource.Quantity.
    """
    found = re.fullmatch(_QUANTITY, text, re.ASCII)
    if not found or len(text) > LONGEST:
        what = f"{text[:LONGEST]!r} is not a quantity such as 10Gi, 500M or 1e9"
        # Sizes as other tools write them: 10GB, 10GiB, 10g.
        other = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?) ?([kmgtpe])(i?)b?", text, re.IGNORECASE)
        if not other:
            raise ValueError(what)
        number, letter, binary = other.groups()
        letter = letter.upper()
        more = "" if binary else f", {number}{letter.replace('K', 'k')} for powers of 1000"
        raise ValueError(f"{what}; write {number}{letter}i for powers of 1024{more}")
    number, exponent, suffix = found.groups()
    if exponent and abs(int(exponent[1:])) > 30:
        raise ValueError(f"{text!r} is out of range")
    whole, _, decimals = number.partition(".")
    tens = (int(exponent[1:]) if exponent else _TENS.get(suffix or "", 0)) - len(decimals)
    above = int(whole + decimals) * 10 ** max(0, tens) << _TWOS.get(suffix, 0)
    value: int = -(-above // 10 ** max(0, -tens))
    if not 0 <= value < 1 << 63:
        raise ValueError(f"{text!r} is out of range")
    return value


def format_size(size: float) -> str:
    """Return ``size`` in bytes as text for people, with one decimal: ``1.5 GiB``.

    Units are powers of 1024. A size that would be rounded to 1024 of a unit is 1 of the next.
    """
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if round(size, 1) < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"


def format_exactly(size: int) -> str:
    """Return ``size`` in bytes for people and for scripts: ``1536 bytes (1.5 KiB)``."""
    return f"{size} bytes ({format_size(size)})" if size >= 1024 else f"{size} bytes"


def whole_sectors(size: int) -> int:
    """Return ``size`` rounded up to whole sectors, as qemu-img rounds a raw file."""
    return -(-size // SECTOR) * SECTOR


def usable_space(available: int, overhead: Fraction | int) -> int:
    """Return the largest disk on a file system with ``available`` bytes, a multiple of 1 MiB.

    ``overhead``: the fraction reserved for the file system itself (contract, Sizes).
    """
    whole, part = overhead.denominator, overhead.numerator
    return -(-available * whole // (whole + part)) // MIB * MIB


def volume_size(virtual_size: int, overhead: Fraction | int) -> int:
    """Return the smallest volume for a disk of ``virtual_size``, both in bytes, a multiple of 1 MiB."""
    size = math.ceil(math.ceil(virtual_size / MIB) * MIB * (1 + overhead))
    return math.ceil(size / MIB) * MIB
