"""JSON from outside: of servers, images, signatures, and files that a user names."""

from __future__ import annotations

import json
from typing import Any, Final

#: Levels of objects and arrays. Real documents have about ten. Python's own limit is that of its stack: a
#: document just below it is parsed, and fails where its values are printed.
DEEPEST: Final = 64
_NESTED: Final = (dict, list)


def parse(data: bytes | bytearray | str, *, unique: bool = False) -> Any:
    """Return a JSON document. Raises ``ValueError``, also for more than ``DEEPEST`` levels.

    ``unique``: refuse an object with a repeated name. Parsers differ in which of the values they use, and
    whoever signed the document may have seen the other one.
    """
    try:
        document = json.loads(data, object_pairs_hook=_unique if unique else None)
    except RecursionError as err:
        raise _too_deep() from err
    level: list[Any] = [[document]]
    for _ in range(DEEPEST + 1):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer)
            if isinstance(inner, _NESTED)
        ]
        if not level:
            return document
    raise _too_deep()


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is repeated")
    return found


def _too_deep() -> ValueError:
    return ValueError(f"more than {DEEPEST} levels of objects and arrays")
