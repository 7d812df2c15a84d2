"""XML from outside: of OVF descriptors, block maps and the engine of oVirt.

The standard library's expat is enough. These documents have no document type, and without one XML has no
entities: neither those that expand without end nor those that name files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, TypeAlias
from xml.parsers import expat

from cdi_worker import errors

#: Levels of elements. Real documents have about six.
DEEPEST: Final = 64

#: Names of the elements around a part of a document, the outermost first. A namespace and a space precede a
#: name in a namespace.
Path: TypeAlias = list[str]


def _nothing(*_: object) -> None:
    """Ignore a part of a document."""


def parse(
    data: bytes,
    form: str,
    refused: Callable[[str, str], errors.Refused],
    *,
    start: Callable[[str, Mapping[str, str], Path], object] = _nothing,
    text: Callable[[str, Path], object] = _nothing,
    end: Callable[[Path], object] = _nothing,
) -> None:
    """Parse a document. ``form``: its name in messages. ``refused``: the error of a rule and its reason.

    ``start`` gets the name and the attributes of each start tag. ``text`` gets the text, which may arrive in
    several pieces; its path ends with its element. ``end``: each end tag; the path ends with its element.
    Raises ``errors.Corrupt`` for malformed XML, and ``refused`` for a document type and for too many levels.
    """
    path: Path = []

    def start_element(name: str, attributes: Mapping[str, str]) -> None:
        if len(path) >= DEEPEST:
            raise refused("size", f"the {form} has more than {DEEPEST} levels of elements")
        start(name, attributes, path)
        path.append(name)

    def end_element(_name: str) -> None:
        end(path)
        path.pop()

    def doctype(*_: object) -> None:
        raise refused("document type", f"the {form} has a document type, which may declare entities")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = doctype
    parser.StartElementHandler = start_element
    parser.EndElementHandler = end_element
    parser.CharacterDataHandler = lambda found: text(found, path)
    try:
        parser.Parse(data, True)
    except (expat.ExpatError, ValueError, LookupError) as err:
        # A declared encoding that Python does not know, or one of several bytes.
        raise errors.Corrupt(format=form, reason=str(err)) from err
