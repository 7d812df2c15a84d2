"""Files with the checksums of other files, as sha256sum writes them: SHA256SUMS, CHECKSUM, disk.qcow2.sha256.

Lines have the form of GNU coreutils (``HEX  NAME``, ``HEX *NAME``; a backslash before the line announces
escaped characters in the name) or of BSD and ``--tag`` (``SHA256 (NAME) = HEX``). A file may have nothing but
``HEX``. Other lines are ignored, as sha256sum does: comments, and a signature around the lines.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from cdi_worker import errors
from cdi_worker.formats import checksum

#: Bytes of a file: a mirror with 40,000 images has 4 MiB.
LARGEST: Final = 8 << 20

#: The algorithms by the number of their hex digits, where the line does not name one.
_LENGTHS: Final = {32: "md5", 40: "sha1", 64: "sha256", 128: "sha512"}
_GNU: Final = re.compile(r"(\\?)([0-9A-Fa-f]{32,128}) [ *](.+)")
_BSD: Final = re.compile(r"(\\?)(MD5|SHA1|SHA256|SHA512) ?\((.+)\) ?= ?([0-9A-Fa-f]{32,128})")
_ALONE: Final = re.compile(r"[0-9A-Fa-f]{32,128}")
_ESCAPE: Final = re.compile(r"\\(.)")
_CHARACTERS: Final = {"n": "\n", "r": "\r", "\\": "\\"}


class Line(NamedTuple):
    """The checksum of the file ``name``: ``ALGORITHM:HEX``, in lower case. ``name`` may be missing: empty."""

    name: str
    checksum: str


def parse(data: bytes) -> Iterator[Line]:
    """Yield the lines with checksums."""
    # A byte that is not UTF-8 may be part of a name.
    texts = [text.strip(" \t\r") for text in data.decode("utf-8", "surrogateescape").split("\n")]
    texts = [text for text in texts if text]
    for text in texts:
        escaped = algorithm = name = ""
        if found := _GNU.fullmatch(text):
            escaped, digits, name = found.groups()
        elif found := _BSD.fullmatch(text):
            escaped, algorithm, name, digits = found.groups()
        elif len(texts) == 1 and _ALONE.fullmatch(text):
            digits = text
        else:
            continue
        expected = _LENGTHS.get(len(digits))
        if expected and algorithm.lower() in {"", expected}:
            if escaped:
                name = _ESCAPE.sub(lambda found: _CHARACTERS.get(found[1], found[0]), name)
            yield Line(name, f"{expected}:{digits.lower()}")


def find(data: bytes, name: str) -> str:
    """Return the checksums of the file ``name`` in a file with checksums, as ``checksum.parse`` reads them.

    There is one for each algorithm, the strongest first. The name may have folders before it in the file, if
    no line has the name alone. Raises ``errors.SourceError`` if there is no such line, or if several
    contradict each other.
    """
    lines = [line._replace(name=line.name.removeprefix("./")) for line in parse(data)]
    found = {line.checksum for line in lines if line.name in {name, ""}}
    found = found or {line.checksum for line in lines if posixpath.basename(line.name) == name}
    if not found:
        raise errors.SourceError(reason=f"no line with a checksum of {name!r}")
    if len({each.partition(":")[0] for each in found}) < len(found):
        raise errors.SourceError(reason=f"several lines with different checksums of {name!r}")
    strength = {algorithm: number for number, algorithm in enumerate(checksum.ALGORITHMS)}
    return ",".join(sorted(found, key=lambda each: strength[each.partition(":")[0]], reverse=True))
