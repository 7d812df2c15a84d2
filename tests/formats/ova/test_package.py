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
        self._held = readers.BytesReader(b"")

    def readinto(self, into: memoryview, /) -> int:
        while not (count := self._held.readinto(into)):
            if (part := next(self._parts, None)) is None:
                return 0
            self._held = readers.BytesReader(part)
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


def _next_of(data: bytes) -> list[str]:
    found = package.Package(readers.BytesReader(data))
    return [member.name for member in iter(found.next, None)]


def test_archive_without_members_is_refused() -> None:
    for data in (bytes(1024), header(tarfile.DIRTYPE) + bytes(1024)):
        with pytest.raises(errors.Refused, match="the archive is empty"):
            _next_of(data)


def test_archive_without_its_end_needs_a_manifest() -> None:
    """A file that was cut where the manifest begins looks whole otherwise."""
    disk = ovas.Disk(bytes(512))
    without, with_manifest = (ovas.ova(disk, listed=listed) for listed in ("none", "first"))
    assert _next_of(without) == ["vm.ovf", disk.name]
    with pytest.raises(errors.Truncated, match="without an end mark and without a manifest"):
        _next_of(without.rstrip(b"\0") + bytes(512 - len(without.rstrip(b"\0")) % 512 + 512))
    cut = with_manifest[: with_manifest.rindex(b"vm-disk1.vmdk\0") + 512 + 512]
    assert _next_of(cut) == ["vm.ovf", "vm.mf", disk.name]


def test_manifest_is_unique_and_lists_the_descriptor() -> None:
    disk = ovas.Disk(bytes(512))
    text = ovas.descriptor([disk])
    stated = ovas.manifest([("vm.ovf", text), (disk.name, disk.data)])
    assert _next_of(ovas.packed(("vm.ovf", text), ("vm.mf", stated), (disk.name, disk.data)))
    other = ovas.manifest([("vm.ovf", b"other"), (disk.name, disk.data)])
    for manifests, kind in (
        ([("a.mf", stated), ("b.mf", stated)], errors.Refused),
        ([("vm.mf", ovas.manifest([(disk.name, disk.data)]))], errors.Refused),
        ([("vm.mf", other)], errors.ChecksumMismatch),
    ):
        with pytest.raises(kind):
            _next_of(ovas.packed(("vm.ovf", text), *manifests, (disk.name, disk.data)))


def _descriptor() -> bytes:
    data = ovas.descriptor([ovas.Disk(b"")])
    return ovas.packed(("vm.ovf", data))[: 512 + -(-len(data) // 512) * 512]
