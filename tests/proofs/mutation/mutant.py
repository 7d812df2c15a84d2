"""What a mutant is."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Mutant:
    """The product without one of its checks.

    ``what``: what it does without the check. ``file``: relative to the checkout. ``old`` occurs once in it,
    and is replaced by ``new``. ``tests``: node ids of pytest; at least one of them must fail. ``equivalent``:
    why the change makes no difference that a test could see; then none may fail.
    """

    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""

    def apply(self, tree: Path) -> str:
        """Change ``tree``; return the text of the file before.

        Raises ``ValueError`` unless ``old`` is unique.
        """
        path = tree / self.file
        text = path.read_text()
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file}: {self.old!r} occurs {text.count(self.old)} times")
        path.write_text(text.replace(self.old, self.new))
        return text


def mutant(file: str, what: str, old: str, new: str, *tests: str, equivalent: str = "") -> Mutant:
    """Return a mutant; see the class."""
    return Mutant(what, file, old, new, tests, equivalent)
