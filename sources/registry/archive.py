"""A tar archive of an OCI image layout, read in place without unpacking.

OCI image specification, "Image Layout"; containers-transports(5), oci-archive.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from collections.abc import Mapping

from cdi_worker import errors
from cdi_worker.formats import detect, readers
from cdi_worker.formats.tar import headers
from cdi_worker.formats.tar import walk as tar_walk
from cdi_worker.images import image
from cdi_worker.sources import base, smallfile
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.registry import blobs, documents

INDEX = "index.json"
#: More files than any image has.
MOST_BLOBS = 100_000
#: Longer than ``blobs/sha512/`` and 128 digits.
LONGEST_NAME = 255


class OciLayout:
    """The blobs of an OCI image layout, by digest."""

    def __init__(
        self, reference: oci_reference.ArchiveReference, cancel: base.Cancel, engine: image.Engine
    ) -> None:
        self.reference = reference
        self.name = str(reference)
        self._cancel = cancel
        self._engine = engine

    def close(self) -> None:
        """Close the archive."""

    def _part(self, name: str) -> base.Image:
        """Open a file of the archive. Raises ``errors.Unreachable`` if there is none."""
        raise NotImplementedError

    def root(self) -> bytes:
        """Return the manifest or index of the reference.

        With a tag: the entry of index.json with that reference name. Without: the only entry, or index.json
        itself if its entries are the platforms of one image.
        """
        with contextlib.closing(self._part(INDEX).rest(self._cancel, 0)) as reader:
            data = blobs.read_all(reader, documents.LARGEST_MANIFEST, self.name)
        index = documents.parse(data, self.name)
        if not isinstance(index, documents.Index):
            raise self._unreachable(f"{INDEX} is not an image index")
        entries = index.manifests
        if tag := self.reference.tag:
            entries = tuple(item for item in entries if _is_named(item, tag))
        if len(entries) == 1:
            return self.manifest(entries[0])
        if not tag and entries and all(item.architecture for item in entries):
            return data
        found = ", ".join(item.annotations.get(documents.REF_NAME, item.digest) for item in index.manifests)
        raise self._unreachable(f"{len(entries)} images match; choose one by its tag: {found or 'none'}")

    def manifest(self, descriptor: documents.Descriptor) -> bytes:
        """Return the manifest of an index entry, verified."""
        with contextlib.closing(self.blob(descriptor)) as reader:
            return blobs.read_all(reader, documents.LARGEST_MANIFEST, self.name)

    def look_up(self, _kind: str, _target: str) -> None:
        """Return None: an archive is of one image, without its signatures."""

    def digest(self) -> str:
        """Return the digest of the manifest or index."""
        return documents.digest(self.root())

    def blob(self, descriptor: documents.Descriptor) -> blobs.Verified:
        """Return a reader of the blob, which verifies size and digest at the end."""
        part = self._part("blobs/" + descriptor.digest.replace(":", "/"))
        if part.facts.size != descriptor.size:
            name = f"{self.name}: blob {descriptor.digest}"
            raise documents.other_size(name, descriptor, part.facts.size)
        return blobs.Verified(descriptor, self.name, part, self._cancel.child())

    def _missing(self, name: str) -> errors.Unreachable:
        return self._unreachable(f"has no {name}; check that it is a complete OCI archive")

    def _unreachable(self, reason: str) -> errors.Unreachable:
        return errors.Unreachable(url=self.name, reason=reason)


class Indexed(OciLayout):
    """An archive of which all headers are read, and files in place."""

    #: Offset and size of each file.
    _members: Mapping[str, tuple[int, int]]

    def _part(self, name: str) -> base.Image:
        if name not in self._members:
            raise self._missing(name)
        return self._at(*self._members[name]).image(base.Opening(self._engine))

    def _at(self, offset: int, size: int) -> base.Source:
        """Return these bytes of the archive."""
        raise NotImplementedError

    def _find_blobs(self, stream: io.BufferedReader, end: int, most: int = MOST_BLOBS) -> None:
        """Find the files of the tar, which has ``end`` bytes. Reads only headers."""
        found: dict[str, tuple[int, int]] = {}
        self._members = found
        walk = tar_walk.Walk(stream)
        try:
            for entry in walk.within(end):
                if len(found) > most:
                    raise self._unreachable("truncated, or not an OCI archive")
                if name := file_name(entry):
                    found[name] = entry.offset, entry.size
        except errors.ImageError as err:
            if isinstance(err, errors.Truncated) and walk.at >= headers.BLOCK:
                raise self._unreachable("truncated, or not an OCI archive") from err
            raise self._unreachable("not a tar archive; decompress a compressed one first") from err
        except OSError as err:
            raise self._unreachable(errors.words(err)) from err


class Archive(Indexed):
    """An archive in a local file."""

    def __init__(
        self, reference: oci_reference.ArchiveReference, cancel: base.Cancel, engine: image.Engine
    ) -> None:
        super().__init__(reference, cancel, engine)
        try:
            self._file = open(reference.path, "rb", opener=smallfile.open_without_wait)  # noqa: SIM115 - closed by close()
        except OSError as err:
            raise self._unreachable(errors.words(err)) from err
        try:
            found = os.fstat(self._file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise self._unreachable("is not a regular file")
            self._find_blobs(self._file, found.st_size)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _at(self, offset: int, size: int) -> base.Source:
        return _Part(self._file.fileno(), offset, size, self.name)


def file_name(entry: tar_walk.Member) -> str:
    """Return the name of a file of a layout; empty for anything else."""
    is_file = entry.type == headers.FILE and len(entry.name) <= LONGEST_NAME
    return entry.name.removeprefix("./") if is_file else ""


def _is_named(item: documents.Descriptor, tag: str) -> bool:
    """Return whether an entry has the tag, alone or at the end of a full reference (as buildah writes it)."""
    name = item.annotations.get(documents.REF_NAME, "")
    return name == tag or name.endswith(f":{tag}")


class _Part(base.Source):
    """A part of a file. The caller owns the descriptor."""

    def __init__(self, fd: int, offset: int, size: int, name: str) -> None:
        self.name = name
        self._size = size
        self._fd = fd
        self._offset = offset

    def open(self, opening: base.Opening) -> base.Facts:
        head = memoryview(bytearray(min(self._size, detect.HEAD)))
        head = head[: readers.fill(self.stream(), head)]
        return base.Facts(name=self.name, size=self._size, head=bytes(head))

    def stream(self, offset: int = 0) -> base.Reader:
        return readers.RangesReader(self._read_range, self._offset + offset, self._offset + self._size)

    def _read_range(self, offset: int, into: memoryview) -> int:
        try:
            return os.preadv(self._fd, [into], offset)
        except OSError as err:
            reason = errors.words(err)
            raise errors.TransferFailed(url=self.name, offset=offset, reason=reason) from err
