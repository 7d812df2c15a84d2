"""Tar archives and headers made by hand, and a reader for them."""

from __future__ import annotations

import io
import pathlib
import tarfile

from cdi_worker.formats.tar import archive
from tests.support import processes, reading

LIMIT = 1 << 30
#: Options of GNU tar for each format of sparse files.
DIALECTS = {
    "gnu": ["--format=gnu"],
    **{version: ["--format=posix", f"--sparse-version={version}"] for version in ("0.0", "0.1", "1.0")},
}


def sparse(folder: pathlib.Path, dialect: str, *names: str) -> bytes:
    """Return an archive of files of a folder as ``tar --sparse`` writes it."""
    path = folder / "sparse.tar"
    options = ("--sparse", *DIALECTS[dialect], f"--file={path}", f"--directory={folder}")
    processes.run("tar", "-c", *options, *names)
    return path.read_bytes()


def unpacked(data, step=1 << 20, limit=LIMIT):
    """Return ``{path: (entry, {offset: data})}``, read in steps of ``step`` bytes."""
    opened = archive.Archive(reading.ShortReads(data, step), limit_bytes=limit)
    found = {}
    for entry in opened:
        pieces = {}
        for offset, length in entry.extents():
            buffer = memoryview(bytearray(length))
            count = 0
            while count < length:
                got = opened.readinto(buffer[count:])
                assert got
                count += got
            pieces[offset] = bytes(buffer)
        if entry.kind == "file":  # a directory of an incremental dump has a list of names, which nobody reads
            assert opened.readinto(memoryview(bytearray(1))) == 0
        found["/".join(entry.path)] = (entry, pieces)
    return found


def member(name, data=b"", **fields):
    """Return a ``tarfile.TarInfo`` and its data; ``fields`` are attributes of TarInfo."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def packed(*members, dialect=tarfile.GNU_FORMAT, **options):
    """Return an archive of members, written by tarfile."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=dialect, **options) as made:
        for info, data in members:
            made.addfile(info, io.BytesIO(data))
    return file.getvalue()


def block(**fields):
    """Return a header block; ``fields`` are attributes of ``tarfile.TarInfo``."""
    return member("name", **fields)[0].tobuf(tarfile.GNU_FORMAT)


def resummed(header, offset, data):
    """Overwrite bytes of a header and correct its checksum."""
    changed = bytearray(header)
    changed[offset : offset + len(data)] = data
    changed[148:156] = b" " * 8
    changed[148:156] = b"%06o\0 " % sum(changed[:512])
    return bytes(changed)


END = bytes(1024)


def pax(records, kind=b"x", then=None):
    """Return an archive: a pax header with the records, and the blocks that follow it."""
    body = b"".join(records)
    header = resummed(block(size=len(body)), 156, kind) + body + bytes(-len(body) % 512)
    return header + (then or block()) + END


def record(key, value):
    """Return a pax record, whose length includes itself."""
    length = len(key) + len(value) + 3
    total = length + len(str(length))
    total = length + len(str(total))
    return b"%d %s=%s\n" % (total, key, value)


def gnu_sparse(runs, size, stored):
    """Return an archive with an old-style GNU sparse file: its runs, its size and the bytes stored."""
    slots = b"".join(b"%011o\0%011o\0" % run for run in runs).ljust(96, b"\0")
    header = resummed(block(size=stored), 156, b"S")
    return resummed(header, 386, slots + b"\0" + b"%011o\0" % size) + bytes(stored + -stored % 512) + END


def pax_sparse(text, size, stored):
    """Return an archive with a GNU sparse file of version 1.0, whose map is ``text``."""
    records = [record(b"GNU.sparse.major", b"1"), record(b"GNU.sparse.minor", b"0")]
    records += [record(b"GNU.sparse.name", b"s"), record(b"GNU.sparse.realsize", b"%d" % size)]
    data = text + bytes(-len(text) % 512) + bytes(stored)
    return pax(records, then=block(size=len(data)) + data + bytes(-len(data) % 512))
