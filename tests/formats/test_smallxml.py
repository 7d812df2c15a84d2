"""What a document may cost: bytes of XML can stand for many times as many bytes of memory."""

from __future__ import annotations

import tracemalloc

import pytest

from cdi_worker import errors
from cdi_worker.formats import smallxml

MiB = 1 << 20
SIZE = 8 * MiB
#: What expat has and what we count; without limits, most of these have 80 MiB and more.
MOST_MEMORY = 10 * MiB


def refused(rule: str, reason: str) -> errors.Refused:
    return errors.Refused(format="document", rule=rule, reason=reason)


def parse(data: bytes) -> int:
    """Parse a document; return the number of its elements."""
    count = 0

    def start(*_: object) -> None:
        nonlocal count
        count += 1

    smallxml.parse(data, "document", refused, start=start)
    return count


def filled(part: str) -> str:
    """Return ``SIZE`` bytes of a part with a different number in place of each ``#``."""
    count = SIZE // len(part.replace("#", "0000000"))
    return "".join(part.replace("#", f"{number:07}") for number in range(count))


#: Documents that take many times their size in memory: what surrounds a part, and the part.
DOCUMENTS = {
    "elements": ("<a>|</a>", "<b/>"),
    "names of elements": ("<a>|</a>", "<b#/>"),
    "names of attributes": ("<a>|</a>", "<b c#=''/>"),
    "attributes": ("<a |/>", " c#=''"),
    "prefixes": ("<a>|</a>", "<b xmlns:c#='u'/>"),
    "prefixes of an element": ("<a |/>", " xmlns:c#='u'"),
    "attributes without an end": ("<a |", " c#=''"),
    "namespaces": ("<a>|</a>", "<b xmlns='u#'/>"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_is_limited_in_more_than_bytes(name: str) -> None:
    around, part = DOCUMENTS[name]
    data = around.replace("|", filled(part)).encode()
    tracemalloc.start()
    try:
        with pytest.raises(errors.Refused, match="the document has "):
            parse(data)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_large_document_of_few_names_is_read(encoding: str) -> None:
    text = '<a xmlns:o="u">' + '<o:b o:c="1" d="2">text</o:b>' * 50_000 + f"<!--{'x' * 500_000}--></a>"
    assert parse(text.encode(encoding)) == 50_001


def test_tag_as_long_as_allowed_is_read() -> None:
    assert parse(b'<a b="' + b"x" * (smallxml.LONGEST - 10) + b'"/>') == 1
    with pytest.raises(errors.Refused, match="a tag of more than"):
        parse(b'<a b="' + b"x" * (3 * smallxml.LONGEST) + b'"/>')
