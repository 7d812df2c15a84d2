"""Archives and their headers, made by hand, and what comes of reading them."""

from __future__ import annotations

import io
import tarfile

from cdi_worker.formats.tar import archive
from tests.support import reading

LIMIT = 1 << 30


def unpacked(data, step=1 << 20, limit=LIMIT):
    """Return {path: (entry, {offset: data})}."""
    opened = archive.Archive(reading.Portions(data, step), limit_bytes=limit)
    found = {}
    for entry in opened:
        pieces = {}
        for offset, length in entry.runs():
            buffer = memoryview(bytearray(length))
            count = 0
            while count < length:
                got = opened.readinto(buffer[count:])
                assert got
                count += got
            pieces[offset] = bytes(buffer)
        assert opened.readinto(memoryview(bytearray(1))) == 0
        found["/".join(entry.path)] = (entry, pieces)
    return found


def member(name, data=b"", **fields):
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def packed(*members, dialect=tarfile.GNU_FORMAT, **options):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dialect, **options) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return file.getvalue()


def block(**fields):
    """Return a header block with fields of tarfile.TarInfo."""
    return member("name", **fields)[0].tobuf(tarfile.GNU_FORMAT)


def resummed(header, offset, data):
    """Write over a header and make its checksum right."""
    changed = bytearray(header)
    changed[offset : offset + len(data)] = data
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


END = bytes(1024)


def pax(records, kind=b"x", then=None):
    body = b"".join(records)
    header = resummed(block(size=len(body)), 156, kind) + body + bytes(-len(body) % 512)
    return header + (then or block()) + END


def record(key, value):
    length = len(key) + len(value) + 3
    total = length + len(str(length))
    total = length + len(str(total))
    return b"%d %s=%s\n" % (total, key, value)


def gnu_sparse(runs, size, stored):
    slots = b"".join(b"%011o\0%011o\0" % run for run in runs).ljust(96, b"\0")
    header = resummed(block(size=stored), 156, b"S")
    return resummed(header, 386, slots + b"\0" + b"%011o\0" % size) + bytes(stored + -stored % 512) + END


def pax_sparse(text, size, stored):
    records = [record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0")]
    records += [record(b"GNU.sparse.name", b"s"), record(b"GNU.sparse.realsize", b"%d" % size)]
    data = text + bytes(-len(text) % 512) + bytes(stored)
    return pax(records, then=block(size=len(data)) + data + bytes(-len(data) % 512))
