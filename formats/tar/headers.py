"""Parse tar headers: POSIX ustar and pax, GNU tar, and the formats before POSIX.

https://www.gnu.org/software/tar/manual/html_section/Tar-Internals.html
"""

from __future__ import annotations

import functools
import re
import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from cdi_worker import errors, masking

BLOCK = 512
#: Maximum bytes of a long name or an extended header. Pax sparse formats 0.0 and 0.1 keep their maps in it:
#: about 20 bytes per extent in 0.1, 70 in 0.0.
LARGEST_HEADER = 16 << 20
_FIELDS = struct.Struct("100s8s16x12s12s8sc100s8s80x155s12x")
_CHECKSUM, _SPACES = slice(148, 156), b" " * 8
_NUMBER = re.compile(rb" *([0-7]*)[ \0]*")
_RECORD = re.compile(rb"([1-9][0-9]{0,8}) ")

FILE, HARD_LINK, SYMLINK, DIRECTORY = b"0", b"1", b"2", b"5"
EXTENDED, GLOBAL = b"x", b"g"
LONG_NAME, LONG_LINK, SPARSE, LABEL, DUMPDIR = b"L", b"K", b"S", b"V", b"D"  # of GNU tar
ACL, SOLARIS_EXTENDED = b"A", b"X"  # of Solaris tar

#: Types without data, whatever their size field: links, devices, directories and FIFOs. Some tools state the
#: size of the file in a hard link, and the size of the directory's blocks in a directory.
WITHOUT_DATA = frozenset(b"123456"[at : at + 1] for at in range(6))
#: Keys that pax sparse format 0.0 repeats for every extent.
REPEATED = frozenset({b"GNU.sparse.offset", b"GNU.sparse.numbytes"})

_FILES = (FILE, b"\0", b"7")


class Raw(NamedTuple):
    """The fields of one header block. ``block``: its bytes."""

    name: bytes
    mode: int
    size: int
    mtime: int
    type: bytes
    link: bytes
    block: bytes


def parse(block: bytes) -> Raw:
    """Parse one header block. Raises ``errors.Corrupt``."""
    name, mode, size, mtime, checksum, kind, link, magic, prefix = _FIELDS.unpack(block)
    stated = number(checksum)
    # The bytes of the checksum count as spaces. The lower half of Adler-32, from 0, is the sum of the bytes
    # modulo 65521, which 256 bytes do not reach.
    total = (zlib.adler32(block[:256], 0) & 0xFFFF) + (zlib.adler32(block[256:], 0) & 0xFFFF)
    if stated != total - sum(block[_CHECKSUM]) + len(_SPACES) * _SPACES[0]:
        # Some old programs write the sum of signed bytes.
        padded = block[: _CHECKSUM.start] + _SPACES + block[_CHECKSUM.stop :]
        if stated != sum(struct.unpack(f"{BLOCK}b", padded)):
            raise corrupt("a header has a wrong checksum")
    name = _text(name)
    if magic.startswith(b"ustar\0") and (prefix := _text(prefix)):
        name = prefix + b"/" + name
    kind = FILE if kind in _FILES else kind
    return Raw(name, number(mode), number(size), number(mtime), kind, _text(link), block)


@functools.lru_cache(1024)
def number(field: bytes) -> int:
    """Parse a numeric field: octal digits, or base-256 of GNU tar. Raises ``errors.Corrupt``.

    The headers of an archive have few different fields, and parsing four of them took 3 us per file.
    """
    if field[0] == 0x80:
        return int.from_bytes(field[1:])
    if field[0] == 0xFF:
        return int.from_bytes(field, signed=True)
    match = _NUMBER.fullmatch(field)
    if not match:
        raise corrupt(f"{field!r} is not a number")
    return int(match[1] or b"0", 8)


def records(data: bytes) -> dict[bytes, bytes]:
    """Return the records of a pax extended header; the last one of each key of ``REPEATED``.

    Raises ``errors.Corrupt``.
    """
    found: dict[bytes, bytes] = {}
    for key, value in pairs(data):
        if key in found and key not in REPEATED:
            raise corrupt(f"an extended header has a duplicate record {masking.quoted(key, 50)!r}")
        found[key] = value
    return found


def pairs(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield key and value of each record ``length key=value`` of a pax extended header, in order.

    Raises ``errors.Corrupt``.
    """
    at = 0
    while at < len(data) and data[at]:
        match = _RECORD.match(data, at)
        end = at + int(match[1]) if match else 0
        if not match or match.end() >= end or end > len(data) or data[end - 1] != 0x0A:
            raise corrupt("an extended header is malformed")
        key, equals, value = data[match.end() : end - 1].partition(b"=")
        if not equals:
            raise corrupt(f"an extended header has an invalid record {masking.quoted(key, 50)!r}")
        yield key, value
        at = end


def decimal(records: dict[bytes, bytes], key: bytes) -> int:
    """Return the number in a record of a pax extended header. Raises ``errors.Corrupt``, also without one."""
    text = records.get(key, b"")
    if not text.isdigit() or len(text) > 19:
        raise corrupt(f"{key!r} is {masking.quoted(text, 50)!r}, expected a number")
    return int(text)


def corrupt(reason: str) -> errors.Corrupt:
    """Return the error of a malformed archive."""
    return errors.Corrupt(format="tar", reason=reason)


def refused(rule: str, reason: str) -> errors.Refused:
    """Return the error of a safety rule."""
    return errors.Refused(format="tar", rule=rule, reason=reason)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]
