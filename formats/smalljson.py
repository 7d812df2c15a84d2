"""Parse JSON from outside: from servers, images, signatures, and files named by the user."""

from __future__ import annotations

import json
from typing import Any, Final

#: Levels of objects and arrays. Real documents have about ten. Python's own limit is that of its stack: a
#: document just below it is parsed, and fails where its values are printed.
DEEPEST: Final = 64
_NO_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def parse(data: bytes | bytearray | str, *, unique: bool = False) -> Any:
    """Return a JSON document. Raises ``ValueError``, also for more than ``DEEPEST`` levels.

    ``unique``: refuse an object with a repeated name. Parsers differ in which value they use: the signer may
    have seen the other one.
    """
    text = data if isinstance(data, str) else data.decode(json.detect_encoding(data), "surrogatepass")
    # Before parsing, which may use up the stack: a finalizer that Python calls meanwhile would fail. Brackets
    # outside of strings are counted: in a malformed text only those before its first fault matter.
    plain = text.encode("utf-8", "surrogatepass").replace(b"\\\\", b"").replace(b'\\"', b"")
    level = 0
    for bracket in b"".join(plain.split(b'"')[::2]).translate(None, _NO_BRACKETS):
        level += 1 if bracket in b"[{" else -1
        if level > DEEPEST:
            raise ValueError(f"more than {DEEPEST} levels of objects and arrays")
    return json.loads(text, object_pairs_hook=_unique if unique else None)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is repeated")
    return found
