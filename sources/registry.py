"""Container registries and OCI archives: the disk in an image's file system, or an artifact that is one."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Self

from importer import errors
from sources import base, oci_archive, oci_disk, oci_image, oci_reference, registry_store

log = logging.getLogger(__name__)


def source(location: base.Location, cancel: base.Cancel) -> RegistrySource:
    """Return the source for ``IMPORTER_SOURCE=registry``."""
    return RegistrySource(location, cancel)


def digest(location: base.Location, cancel: base.Cancel) -> str:
    """Return the digest of the manifest or index that the endpoint names, for who watches a tag."""
    store = _open(location, cancel)
    try:
        return store.digest()
    finally:
        store.close()


class RegistrySource(base.Source):
    """The one file below /disk of an image, or the file of an artifact.

    Opening it reads manifest and configuration, and the layers from the topmost down to the disk.
    Digests are verified: of documents when they are read, of a blob at its end. There are no ranges:
    a blob of which only parts are read cannot be verified. It is fetched in parallel all the same.
    """

    def __init__(self, location: base.Location, cancel: base.Cancel) -> None:
        self._location = location
        self._cancel = cancel
        self._reference = oci_reference.parse(location.endpoint)
        self.name = str(self._reference)
        self._store: oci_disk.Store | None = None
        self._image: oci_image.Image | None = None
        self._disk: oci_disk.Disk | None = None
        self._fresh = True

    def __enter__(self) -> Self:
        try:
            self._store = _open(self._location, self._cancel)
            self._image = oci_image.resolve(self._store, self._location.architecture)
            self._disk = oci_disk.find(self._store, self._image.manifest, self._reference.choice)
        except BaseException:
            self.close()
            raise
        disk = self._disk
        self.size, self.head = disk.size, disk.head
        self.identity = f"{disk.blob.digest} {disk.path}".rstrip()
        log.info(
            "source url=%r digest=%r disk=%r size=%d", self.name, self._image.digest, disk.path, disk.size
        )
        return self

    def interrupt(self) -> None:
        if self._store is not None:
            self._store.interrupt()

    def close(self) -> None:
        """End all connections, and the threads that fetch and verify."""
        if self._disk is not None:
            self._disk.close()
        if self._store is not None:
            self._store.close()

    def stream(self, offset: int = 0) -> base.Reader:
        """Return the disk's bytes from 0: a blob has to pass as a whole to be verified."""
        if offset or self._disk is None:
            raise errors.NoRanges(url=self.name, reason="its bytes are verified in order")
        if not self._fresh:
            self._disk.close()
            self._disk = self._disk.again()
        self._fresh = False
        return _Stream(self._disk)

    def verify(self) -> None:
        """Read on to the end of the blob: its digest is right, and a layer has no second disk."""
        if self._disk is not None:
            self._disk.finish()

    def labels(self) -> Mapping[str, str]:
        return self._image.labels() if self._image else {}

    def describe(self) -> Mapping[str, object]:
        """Return what the image is, for people."""
        if self._image is None or self._disk is None:
            return {}
        layers = [
            {"digest": item.digest, "size": item.size, "mediaType": item.media_type}
            for item in self._image.manifest.layers
        ]
        return {
            "digest": self._image.digest,
            "platforms": self._image.platforms or [self._image.platform],
            "layers": layers,
            "disk": self._disk.path or self._disk.blob.media_type,
            "diskLayer": self._disk.blob.digest,
            "labels": self._image.labels(),
        }


class _Stream:
    """The disk as a reader. Closing it leaves the disk open: ``verify`` still has to read its blob's end."""

    def __init__(self, disk: oci_disk.Disk) -> None:
        self._disk = disk

    def readinto(self, into: memoryview, /) -> int:
        return self._disk.readinto(into)

    def close(self) -> None:
        """Leave the disk to the source."""


def _open(location: base.Location, cancel: base.Cancel) -> oci_disk.Store:
    reference = oci_reference.parse(location.endpoint)
    if isinstance(reference, oci_reference.ArchiveReference):
        return oci_archive.Archive(reference)
    return registry_store.Registry(reference, location, cancel)
