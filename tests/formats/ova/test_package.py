"""Archives without end."""

from __future__ import annotations

import itertools
import tarfile

import pytest

from cdi_worker import errors
from cdi_worker.formats import readers
from cdi_worker.formats.ova import package
from tests.support import ovas


class Endless:
    """Return ``first``, then ``part`` for ever, but at most 128 MiB so that a failure ends."""

    def __init__(self, first: bytes, part: bytes) -> None:
        self._parts = itertools.chain([first], itertools.repeat(part, (1 << 27) // len(part)))
        self._held = readers.Bytes(b"")

    def readinto(self, into: memoryview, /) -> int:
        while not (count := self._held.readinto(into)):
            if (part := next(self._parts, None)) is None:
                return 0
            self._held = readers.Bytes(part)
        return count

    def close(self) -> None:
        pass


def header(kind: bytes, size: int = 0) -> bytes:
    info = tarfile.TarInfo("folder")
    info.type, info.size = kind, size
    return info.tobuf(tarfile.USTAR_FORMAT)


@pytest.mark.parametrize(
    ("part", "rule"),
    [
        (header(tarfile.DIRTYPE), "more than 4096 members"),
        (header(tarfile.XGLTYPE, 1 << 20) + bytes(1 << 20), "extension headers of more than"),
    ],
)
def test_endless_archive_is_refused(part: bytes, rule: str) -> None:
    found = package.Package(Endless(_descriptor(), part))
    with pytest.raises(errors.Refused, match=rule):
        all(iter(found.next, None))


def _descriptor() -> bytes:
    data = ovas.descriptor([ovas.Disk(b"")])
    return ovas.packed(("vm.ovf", data))[: 512 + -(-len(data) // 512) * 512]
