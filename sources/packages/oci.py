"""An OCI archive: a local file, or one that another source serves, such as KubeVirt's export of a machine.

By ranges only the headers, the documents and the disk are read. A stream is read once if its documents come
before the disk, as KubeVirt writes them (enhancement 256), else twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import checksum, readers, views
from cdi_worker.formats.tar import headers, walk
from cdi_worker.images import image
from cdi_worker.sources import base
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.local import file
from cdi_worker.sources.packages import part, passing
from cdi_worker.sources.registry import blobs, documents, layer, locations
from cdi_worker.sources.registry import source as registry

#: Files of an archive that is read by ranges: each header costs a request.
_MOST: Final = 4096
#: Bytes of all documents of a stream. Each may have ``documents.LARGEST_MANIFEST``.
_DOCUMENTS: Final = 64 << 20
_INDEX: Final = "index.json"
#: Longer than ``blobs/sha512/`` and 128 digits.
_LONGEST_NAME: Final = 255
_FIRST = re.compile(r"oci-layout|index\.json|blobs/sha(?:256|512)/[0-9a-f]+")


def is_archive(head: bytes) -> bool:
    """Return whether a tar archive that begins with ``head`` is an OCI image layout."""
    return _FIRST.fullmatch(walk.first_file(head).removeprefix("./")) is not None


def source(location: locations.Registry, cancel: base.Cancel) -> registry.RegistrySource:
    """Return the source for an image in a registry, or in an archive that is a local file."""
    is_archive = location.endpoint.startswith(oci_reference.ARCHIVE)
    return (FileSource if is_archive else registry.RegistrySource)(location, cancel)


class PackedSource(registry.RegistrySource):
    """The disk ``choice`` (see ``reference.Reference``) in ``whole``, an open OCI archive.

    ``expected``: the checksum of the whole archive, or None. Closing it leaves ``whole`` open.
    """

    def __init__(
        self, whole: base.Image, choice: str, expected: checksum.Checksum | None, cancel: base.Cancel
    ) -> None:
        name = whole.facts.name
        reference = oci_reference.ArchiveReference(name, choice=choice)
        super().__init__(locations.Registry(name), cancel, reference)
        self.name = name
        self._whole = whole
        self._expected = expected

    def finish(self) -> base.Provenance:
        whole, disk = self._whole.finish(), super().finish()
        return base.Provenance(
            labels=disk.labels, info=whole.info, verified={**disk.verified, **whole.verified}
        )

    def verify(self) -> None:
        super().verify()
        if isinstance(self._store, _Passing):
            self._store.finish()
        self._whole.verify()

    def _open_store(self) -> layer.Store:
        assert isinstance(self._reference, oci_reference.ArchiveReference)  # noqa: S101  (see ``__init__``)
        self._once = self._whole.facts.once
        read = self._whole.at_random(self._cancel) if self._expected is None else None
        what = (str(self._reference), self._reference.tag, self._cancel, self._engine, self._whole)
        return _Passing(*what, self._expected) if read is None else _Ranged(*what, read)


class FileSource(PackedSource):
    """The disk in an archive in a local file or pipe: ``oci-archive:PATH``."""

    def __init__(self, location: locations.Registry, cancel: base.Cancel) -> None:
        registry.RegistrySource.__init__(self, location, cancel)
        assert isinstance(self._reference, oci_reference.ArchiveReference)  # noqa: S101  (see ``source``)
        self._file = file.LocalSource(self._reference.path, cancel, location.access)
        self._expected = None

    def close(self) -> None:
        super().close()
        self._file.close()

    def _open_store(self) -> layer.Store:
        self._whole = self._file.image(base.Opening(self._engine))
        return super()._open_store()


@dataclasses.dataclass(eq=False)
class _Layout:
    """The blobs of an OCI image layout, by digest."""

    name: str
    tag: str
    cancel: base.Cancel
    engine: image.Engine
    whole: base.Image

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
        part = self._part(_INDEX)
        with self.cancel.child() as stop, contextlib.closing(part.rest(stop, 0)) as reader:
            data = blobs.read_all(reader, documents.LARGEST_MANIFEST, self.name)
        index = documents.parse(data, self.name)
        if not isinstance(index, documents.Index):
            raise self._unreachable(f"{_INDEX} is not an image index")
        entries = index.manifests
        if tag := self.tag:
            entries = tuple(item for item in entries if _is_named(item, tag))
        if len(entries) == 1:
            return self.manifest(entries[0])
        if not tag and entries and all(item.architecture for item in entries):
            return data
        tags = ", ".join(item.annotations.get(documents.REF_NAME, item.digest) for item in index.manifests)
        raise self._unreachable(f"{len(entries)} images match; choose one by its tag: {tags or 'none'}")

    def manifest(self, descriptor: documents.Descriptor) -> bytes:
        with contextlib.closing(self.blob(descriptor)) as reader:
            return blobs.read_all(reader, documents.LARGEST_MANIFEST, self.name)

    def digest(self) -> str:
        return documents.digest(self.root())

    def blob(self, descriptor: documents.Descriptor) -> blobs.Verified:
        part = self._part("blobs/" + descriptor.digest.replace(":", "/"))
        return blobs.Verified(descriptor, self.name, part, self.cancel.child())

    def _missing(self, name: str) -> errors.Unreachable:
        return self._unreachable(f"has no {name}; check that it is a complete OCI archive")

    def _unreachable(self, reason: str) -> errors.Unreachable:
        return errors.Unreachable(url=self.name, reason=reason)


@dataclasses.dataclass(eq=False)
class _Ranged(_Layout):
    """An archive that is read by ranges: first all headers, then files in place."""

    read: views.Read

    def __post_init__(self) -> None:
        #: Offset and size of each file.
        self._members: dict[str, tuple[int, int]] = {}
        entries = walk.Walk(part.seekable(self.whole, self.read))
        try:
            for entry in entries.within(self.whole.facts.size or 0):
                if len(self._members) > _MOST:
                    raise self._unreachable("truncated, or not an OCI archive")
                if name := _file_name(entry):
                    self._members[name] = entry.offset, entry.size
        except errors.ImageError as err:
            if isinstance(err, errors.Truncated) and entries.at >= headers.BLOCK:
                raise self._unreachable("truncated, or not an OCI archive") from err
            raise self._unreachable("not a tar archive; decompress a compressed one first") from err

    def _part(self, name: str) -> base.Image:
        if name not in self._members:
            raise self._missing(name)
        found = part.Part(self.whole, *self._members[name], self.read)
        return found.image(base.Opening(self.engine))


@dataclasses.dataclass(eq=False)
class _Passing(_Layout):
    """An archive that passes once. Its documents are kept; one blob at a time can be read."""

    expected: checksum.Checksum | None

    def __post_init__(self) -> None:
        self._documents: dict[str, bytes] = {}
        self._passed: set[str] = set()
        self._pass = self._begin()

    def close(self) -> None:
        self._pass.close()

    def finish(self) -> None:
        """Verify the checksum of the whole archive, if there is one. Safe to call twice."""
        if self.expected is not None:
            self._pass.finish()

    def _begin(self) -> passing.Pass[walk.Walk]:
        self._passed.clear()
        opened = functools.partial(walk.Walk, kind="OCI archive")
        return passing.Pass(self.whole, self.cancel, self.expected, opened)

    def _part(self, name: str) -> base.Image:
        if name in self._passed and not self.whole.facts.once:
            # Another attempt to read the disk.
            self.close()
            self._pass = self._begin()
        while name not in self._documents:
            entry = self._pass.archive.next()
            if entry is None or name in self._passed:
                raise self._late(name) if name in self._passed else self._missing(name)
            if not (found := _file_name(entry)):
                continue
            if entry.size <= documents.LARGEST_MANIFEST:
                if entry.size + sum(map(len, self._documents.values())) > _DOCUMENTS:
                    reason = f"{self.name}: more than {_DOCUMENTS} bytes of documents"
                    raise errors.Refused(format="container", rule="size", reason=reason)
                document = bytearray(entry.size)
                readers.fill(self._pass.archive, memoryview(document))
                self._documents[found] = bytes(document)
                continue
            self._passed.add(found)
            if found == name:
                file = passing.PassingFile(self._pass.archive, entry.size, self.name)
                return file.image(base.Opening(self.engine))
            if _INDEX not in self._documents and self.whole.facts.once:
                raise self._late(_INDEX)
        data = self._documents[name]
        file = passing.PassingFile(readers.BytesReader(data), len(data), self.name)
        return file.image(base.Opening(self.engine))

    def _late(self, name: str) -> errors.Unsupported:
        reason = (
            f"{self.name}: has {name} in another order than it is needed, and the source has no byte ranges"
        )
        return errors.Unsupported(reason=f"{reason}; download the archive first")


def _file_name(entry: walk.Member) -> str:
    """Return the name of a file of a layout; empty for anything else."""
    is_file = entry.type == headers.FILE and len(entry.name) <= _LONGEST_NAME
    return entry.name.removeprefix("./") if is_file else ""


def _is_named(item: documents.Descriptor, tag: str) -> bool:
    """Return whether an entry has the tag, alone or at the end of a full reference (as buildah writes it)."""
    name = item.annotations.get(documents.REF_NAME, "")
    return name == tag or name.endswith(f":{tag}")
