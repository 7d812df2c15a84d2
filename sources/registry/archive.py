"""The documents and blobs of an OCI image layout in a tar archive, which ``sources.packages.oci`` reads.

OCI image specification, "Image Layout"; containers-transports(5), oci-archive.
"""

from __future__ import annotations

import contextlib

from cdi_worker import errors
from cdi_worker.formats.tar import headers, walk
from cdi_worker.images import image
from cdi_worker.sources import base
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.registry import blobs, documents

INDEX = "index.json"
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

    def digest(self) -> str:
        """Return the digest of the manifest or index."""
        return documents.digest(self.root())

    def blob(self, descriptor: documents.Descriptor) -> blobs.Verified:
        """Return a reader of the blob, which verifies size and digest at the end."""
        part = self._part("blobs/" + descriptor.digest.replace(":", "/"))
        return blobs.Verified(descriptor, self.name, part, self._cancel.child())

    def _missing(self, name: str) -> errors.Unreachable:
        return self._unreachable(f"has no {name}; check that it is a complete OCI archive")

    def _unreachable(self, reason: str) -> errors.Unreachable:
        return errors.Unreachable(url=self.name, reason=reason)


def file_name(entry: walk.Member) -> str:
    """Return the name of a file of a layout; empty for anything else."""
    is_file = entry.type == headers.FILE and len(entry.name) <= LONGEST_NAME
    return entry.name.removeprefix("./") if is_file else ""


def _is_named(item: documents.Descriptor, tag: str) -> bool:
    """Return whether an entry has the tag, alone or at the end of a full reference (as buildah writes it)."""
    name = item.annotations.get(documents.REF_NAME, "")
    return name == tag or name.endswith(f":{tag}")
