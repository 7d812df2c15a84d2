"""How a caller says that it wants no more."""

from __future__ import annotations

from typing import Final, Protocol


class Cancel(Protocol):
    """The part of ``threading.Event`` that says whether to stop."""

    def is_set(self) -> bool: ...


class Never:
    """A cancel that nobody sets."""

    def is_set(self) -> bool:
        return False


NEVER: Final = Never()
