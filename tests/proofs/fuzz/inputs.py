"""The corpus in git: valid small inputs, each in a file named by its parser (``ovf-1``)."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path

from cdi_worker import errors

FOLDER = Path(__file__).parent / "corpus"
_WORDS = (b"", b"\0", b"\xff" * 4, b"-1", b"[]", b"{}", b"null", b"1e999", b'"', b"\n", b":", b"\xed\xa0\x80")


def read(target: str) -> Iterator[tuple[str, bytes]]:
    """Yield the inputs of a target, with the names of their parsers."""
    for path in sorted((FOLDER / target).iterdir()):
        yield path.name.rpartition("-")[0], path.read_bytes()


def run(parser: Callable[[bytes], None], data: bytes) -> None:
    """Parse one input."""
    with contextlib.suppress(errors.Error):
        parser(data)


def mutated(data: bytes, dice: random.Random) -> bytes:
    """Return ``data`` with one to four changes: bytes, bits, words and parts of its own."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 4)):
        at, length = dice.randint(0, len(changed)), dice.choice((0, 1, 1, 4, dice.randint(0, 64)))
        how = dice.randrange(5)
        if how == 0 and at < len(changed):
            changed[at] ^= 1 << dice.randrange(8)
        elif how == 1:
            changed[at : at + length] = dice.randbytes(length)
        elif how == 2:
            changed[at : at + length] = dice.choice(_WORDS)
        elif how == 3:
            start = dice.randint(0, len(changed))
            changed[at : at + length] = changed[start : start + dice.randint(0, 64)]
        else:
            del changed[at : at + dice.choice((length, length, len(changed)))]
    return bytes(changed)
