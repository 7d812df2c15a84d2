"""Parse XML from outside: OVF descriptors, and responses of the oVirt engine.

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
#: Elements. The descriptor of a machine with 100 disks has about 2,000.
MOST_ELEMENTS: Final = 1 << 16
#: Different names of elements, attributes and prefixes: expat keeps each. Real documents have 200.
MOST_NAMES: Final = 4096
#: Bytes of a tag, a comment or another part that expat reads as a whole, before the names in it are known.
LONGEST: Final = 1 << 20
_CHUNK: Final = 64 << 10

#: Names of the elements around a part of a document, the outermost first. A namespace and a space precede a
#: name in a namespace.
Path: TypeAlias = list[str]


def parse(
    data: bytes,
    form: str,
    refused: Callable[[str, str], errors.Refused],
    *,
    start: Callable[[str, Mapping[str, str], Path], object] = lambda *_: None,
) -> None:
    """Parse a document. ``form``: its name in messages. ``refused``: makes the error of a rule and reason.

    ``start`` gets the name and the attributes of each start tag. Raises ``errors.Corrupt`` for malformed XML,
    and ``refused`` for a document type, and for too many levels, elements or names, or too long a tag: each
    takes many times its bytes in memory.
    """
    path: Path = []
    count, names = 0, set[str]()

    def count_names(*more: str) -> None:
        names.update(more)
        if len(names) > MOST_NAMES:
            raise refused("size", f"the {form} has more than {MOST_NAMES} names of elements and attributes")

    def start_element(name: str, attributes: Mapping[str, str]) -> None:
        nonlocal count
        count += 1
        if count > MOST_ELEMENTS:
            raise refused("size", f"the {form} has more than {MOST_ELEMENTS} elements")
        count_names(name, *attributes)
        if len(path) >= DEEPEST:
            raise refused("size", f"the {form} has more than {DEEPEST} levels of elements")
        start(name, attributes, path)
        path.append(name)

    def doctype(*_: object) -> None:
        raise refused("document type", f"the {form} has a document type, which may declare entities")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartDoctypeDeclHandler = doctype
    parser.StartNamespaceDeclHandler = lambda prefix, _uri: count_names(f"xmlns:{prefix}")
    parser.StartElementHandler = start_element
    parser.EndElementHandler = lambda _name: path.pop()
    longest, reached = LONGEST, 0
    if (defer := getattr(parser, "SetReparseDeferralEnabled", None)) is not None:
        defer(False)
    else:
        # Expat 2.6, and 2.5 of Debian 12 with the fix of CVE-2023-52425, parse an incomplete part again
        # only when it has doubled; Python before 3.11.8 cannot switch that off.
        longest = 2 * LONGEST + _CHUNK
    try:
        for at in range(0, len(data), _CHUNK):
            chunk = data[at : at + _CHUNK]
            parser.Parse(chunk, False)
            # -1 after a call that parsed nothing.
            reached = max(reached, parser.CurrentByteIndex)
            if at + len(chunk) - reached > longest:
                raise refused("size", f"the {form} has a tag of more than {LONGEST} bytes")
        parser.Parse(b"", True)
    except (expat.ExpatError, ValueError, LookupError) as err:
        # A declared encoding that Python does not know, or one of several bytes.
        raise errors.Corrupt(format=form, reason=str(err)) from err
