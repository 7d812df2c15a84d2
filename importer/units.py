"""Kubernetes quantities, sizes in messages, and the overhead of file systems."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from cdi_worker import errors

if TYPE_CHECKING:
    from fractions import Fraction

MIB = 1 << 20
SECTOR = 512
#: Characters of a quantity: Python refuses to parse numbers of thousands of digits.
LONGEST = 100
_QUANTITY = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+))(?:([eE][+-]?\d+)|([numkMGTPE]|[KMGTPE]i)?)", re.ASCII)
#: The power of ten, or of two, that a suffix multiplies by.
_TENS = {"n": -9, "u": -6, "m": -3, "": 0, **{letter: 3 * power for power, letter in enumerate("kMGTPE", 1)}}
_TWOS = {f"{letter}i": 10 * power for power, letter in enumerate("KMGTPE", 1)}


def parse_quantity(text: str) -> int:
    """Return a Kubernetes quantity in bytes, rounded up.

    Raises ``RequestError`` if malformed. Grammar: k8s.io/apimachinery, resource.Quantity.
    """
    found = _QUANTITY.fullmatch(text)
    if not found or len(text) > LONGEST:
        raise errors.RequestError(f"{text[:LONGEST]!r} is not a quantity such as 10Gi, 500M or 1e9")
    number, exponent, suffix = found.groups()
    if exponent and abs(int(exponent[1:])) > 30:
        raise errors.RequestError(f"{text!r} is out of range")
    whole, _, decimals = number.partition(".")
    tens = (int(exponent[1:]) if exponent else _TENS.get(suffix or "", 0)) - len(decimals)
    above = int(whole + decimals) * 10 ** max(0, tens) << _TWOS.get(suffix, 0)
    value: int = -(-above // 10 ** max(0, -tens))
    if not 0 <= value < 1 << 63:
        raise errors.RequestError(f"{text!r} is out of range")
    return value


def format_size(size: float) -> str:
    """Return ``size`` in bytes as text for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError


def whole_sectors(size: int) -> int:
    """Return ``size`` rounded up to whole sectors, as qemu-img rounds a raw file."""
    return -(-size // SECTOR) * SECTOR


def usable_space(available: int, overhead: Fraction) -> int:
    """Return the largest disk on a file system with ``available`` bytes, a multiple of 1 MiB.

    ``overhead``: the fraction reserved for the file system itself (contract, Sizes).
    """
    return math.ceil(available / (1 + overhead)) // MIB * MIB


def volume_size(virtual_size: int, overhead: Fraction) -> int:
    """Return the smallest volume for a disk of ``virtual_size``, both in bytes, a multiple of 1 MiB."""
    size = math.ceil(math.ceil(virtual_size / MIB) * MIB * (1 + overhead))
    return math.ceil(size / MIB) * MIB
