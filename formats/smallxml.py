"""XML from outside: of OVF descriptors, block maps and the engine of oVirt.

The standard library's expat is enough. These documents have no document type, and without one XML has no
entities: neither those that expand without end nor those that name files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Protocol
from xml.parsers import expat

from cdi_worker import errors

#: Levels of elements. Real documents have about six.
DEEPEST: Final = 64


class Handler(Protocol):
    """Takes the parts of a document in order. A namespace and a space precede a name in a namespace."""

    def start(self, name: str, attributes: Mapping[str, str], path: list[str]) -> None:
        """Take a start tag; ``path`` has the names of the elements around it, the outermost first."""

    def text(self, text: str, path: list[str]) -> None:
        """Take text, which may arrive in several pieces; ``path`` ends with its element."""

    def end(self, path: list[str]) -> None:
        """Take an end tag; ``path`` ends with its element."""


def parse(data: bytes, handler: Handler, form: str, refused: Callable[[str, str], errors.Refused]) -> None:
    """Parse a document. ``form``: its name in messages. ``refused``: the error of a rule and its reason.

    Raises ``errors.Corrupt`` for malformed XML, and ``refused`` for a document type and for too many levels.
    """
    path: list[str] = []

    def start(name: str, attributes: Mapping[str, str]) -> None:
        if len(path) >= DEEPEST:
            raise refused("size", f"the {form} has more than {DEEPEST} levels of elements")
        handler.start(name, attributes, path)
        path.append(name)

    def end(_name: str) -> None:
        handler.end(path)
        path.pop()

    def doctype(*_: object) -> None:
        raise refused("document type", f"the {form} has a document type, which may declare entities")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = doctype
    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.CharacterDataHandler = lambda text: handler.text(text, path)
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as err:
        # A declared encoding that Python does not know, or one of several bytes.
        raise errors.Corrupt(format=form, reason=str(err)) from err
