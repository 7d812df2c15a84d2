"""What a document may cost: bytes of XML can stand for many times as many bytes of memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.formats import smallxml
from tests.support import repository

MiB = 1 << 20
SIZE = 24 * MiB
#: In KiB.
MOST_MEMORY = 48 << 10


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


PROGRAM = """
import pathlib, resource, sys
from tests.formats.test_smallxml import parse
from cdi_worker import errors
data = pathlib.Path(sys.argv[1]).read_bytes()
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    parse(data)
except errors.Refused as err:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, err)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", DOCUMENTS)
def test_document_is_limited_in_more_than_bytes(tmp_path: Path, name: str) -> None:
    path = tmp_path / "document"
    around, part = DOCUMENTS[name]
    path.write_text(around.replace("|", filled(part)))
    command = [sys.executable, "-c", PROGRAM, path]
    done = subprocess.run(command, cwd=repository.ROOT, check=True, capture_output=True, text=True)
    assert "the document has " in done.stdout
    assert int(done.stdout.split()[0]) < MOST_MEMORY


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_large_document_of_few_names_is_read(encoding: str) -> None:
    text = '<a xmlns:o="u">' + '<o:b o:c="1" d="2">text</o:b>' * 50_000 + f"<!--{'x' * 500_000}--></a>"
    assert parse(text.encode(encoding)) == 50_001


def test_tag_as_long_as_allowed_is_read() -> None:
    assert parse(b'<a b="' + b"x" * (smallxml.LONGEST - 10) + b'"/>') == 1
    with pytest.raises(errors.Refused, match="a tag of more than"):
        parse(b'<a b="' + b"x" * (3 * smallxml.LONGEST) + b'"/>')
