"""Kubernetes quantities and sizes for people."""

from __future__ import annotations

import math
import re
from fractions import Fraction

from importer import errors

MIB = 1 << 20
#: Of a quantity in characters: Python reads no numbers of thousands of digits.
LONGEST = 100
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)", re.ASCII)
_SUFFIX = {
    "n": Fraction(1, 10**9),
    "u": Fraction(1, 10**6),
    "m": Fraction(1, 10**3),
    "": Fraction(1),
    **{letter: Fraction(1000 ** (power + 1)) for power, letter in enumerate("kMGTPE")},
    **{f"{letter}i": Fraction(1024 ** (power + 1)) for power, letter in enumerate("KMGTPE")},
}


def parse_quantity(text: str) -> int:
    """Return the bytes a Kubernetes quantity stands for, rounded up.

    Raises ``RequestError`` for anything else. Grammar: k8s.io/apimachinery, resource.Quantity.
    """
    found = _QUANTITY.fullmatch(text)
    if not found or len(text) > LONGEST:
        raise errors.RequestError(f"{text[:LONGEST]!r} is not a quantity such as 10Gi, 500M or 1e9")
    number, exponent, suffix = found.groups()
    if exponent and abs(int(exponent[1:])) > 30:
        raise errors.RequestError(f"{text!r} is out of range")
    scale = Fraction(10) ** int(exponent[1:]) if exponent else _SUFFIX[suffix or ""]
    value = math.ceil(Fraction(number) * scale)
    if not 0 <= value < 1 << 63:
        raise errors.RequestError(f"{text!r} is out of range")
    return value


def format_size(size: float) -> str:
    """Return ``size`` bytes as people read it: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def usable_space(available: int, overhead: Fraction) -> int:
    """Return how large a disk a file system of ``available`` bytes holds, a multiple of 1 MiB.

    ``overhead``: the fraction kept for the file system itself (contract, Sizes).
    """
    return math.ceil(available / (1 + overhead)) // MIB * MIB


def volume_size(virtual_size: int, overhead: Fraction) -> int:
    """Return the smallest volume, a multiple of 1 MiB, on which ``virtual_size`` is usable."""
    size = math.ceil(math.ceil(virtual_size / MIB) * MIB * (1 + overhead))
    return math.ceil(size / MIB) * MIB
