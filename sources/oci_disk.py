"""The disk of an image or artifact: found, read in order, and checked to the end of its blob."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Protocol

from formats import peek
from importer import errors
from sources import blobs, layer, oci

HEAD_SIZE = 256 * 1024


class Store(Protocol):
    """Where manifests and blobs are: a registry or an archive."""

    name: str

    def root(self) -> bytes: ...
    def manifest(self, descriptor: oci.Descriptor, /) -> bytes: ...
    def blob(self, descriptor: oci.Descriptor, /) -> blobs.Verified: ...
    def digest(self) -> str: ...
    def interrupt(self) -> None: ...
    def close(self) -> None: ...


class Disk:
    """A disk in order. ``head``: its first bytes, which ``readinto`` gives again."""

    path = ""
    size = 0

    def __init__(self, store: Store, blob: oci.Descriptor) -> None:
        self.blob = blob
        self.head = b""
        self._store = store
        self._reader = store.blob(blob)
        self._given = 0
        self._finished = False

    def readinto(self, into: memoryview, /) -> int:
        if count := min(len(into), len(self.head) - self._given):
            into[:count] = self.head[self._given : self._given + count]
            self._given += count
            return count
        return self.read_on(into)

    def close(self) -> None:
        """Let go of the blob. Safe to call twice."""
        self._reader.close()

    def look(self) -> None:
        """Read the head."""
        head = bytearray(min(HEAD_SIZE, self.size))
        self.head = bytes(head[: peek.fill(self, memoryview(head))])

    def read_on(self, into: memoryview) -> int:
        """Read what follows the head."""
        raise NotImplementedError

    def finish(self) -> None:
        """Read the blob to its end, where its digest is verified. Safe to call twice."""
        if not self._finished:
            self.read_rest()
        self._finished = True

    def read_rest(self) -> None:
        """Read the blob to its end."""
        raise NotImplementedError

    def again(self) -> Disk:
        """Return the same disk from its start."""
        raise NotImplementedError


class FileDisk(Disk):
    """A blob that is the disk itself."""

    def __init__(self, store: Store, blob: oci.Descriptor) -> None:
        super().__init__(store, blob)
        self.path = blob.title
        self.size = blob.size
        self.look()

    def read_on(self, into: memoryview) -> int:
        return self._reader.readinto(into)

    def read_rest(self) -> None:
        rest = memoryview(bytearray(HEAD_SIZE))
        while self.read_on(rest):
            pass

    def again(self) -> Disk:
        return FileDisk(self._store, self.blob)


class LayerDisk(Disk):
    """A file in a layer, once ``find`` has found it; ``hidden``: what the layers above hide."""

    def __init__(self, store: Store, blob: oci.Descriptor, hidden: layer.Hidden) -> None:
        super().__init__(store, blob)
        self._hidden = hidden
        self._name = f"{store.name}: layer {blob.digest}"
        self._layer = layer.Layer(layer.plain(self._reader, self._reader.head), hidden, self._name)

    def find(self) -> bool:
        """Go to the disk; False when the layer, read to its verified end, has none."""
        with self._named():
            if not self._layer.find():
                return False
        self.path, self.size = self._layer.path, self._layer.size
        self.look()
        return True

    def hides(self) -> layer.Hidden:
        """Return what is hidden from the layers below."""
        return self._layer.hides()

    def read_on(self, into: memoryview) -> int:
        with self._named():
            return self._layer.readinto(into)

    def read_rest(self) -> None:
        with self._named():
            self._layer.finish()

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Say of a broken compression or tar where it is."""
        try:
            yield
        except errors.Corrupt as err:
            raise type(err)(**{**err.fields, "format": f"{err.fields['format']} of {self._name}"}) from err

    def again(self) -> Disk:
        disk = LayerDisk(self._store, self.blob, self._hidden)
        disk.find()
        return disk


def find(store: Store, manifest: oci.Manifest, choice: str) -> Disk:
    """Return an artifact's file, or the topmost file below /disk. No layer below that is fetched.

    Raises ``errors.Unsupported`` when there is none, and what ``layer.Layer`` raises.
    """
    chosen = oci.artifact(manifest, choice, store.name)
    if chosen is not None:
        return FileDisk(store, chosen)
    hidden = layer.Hidden()
    for blob in reversed(manifest.layers):
        if hidden.everything:
            break
        if blob.is_foreign:
            reason = f"{store.name}: layer {blob.digest} is not in the registry ({blob.media_type})"
            raise errors.Refused(format="container image", rule="foreign layer", reason=reason)
        disk = LayerDisk(store, blob, hidden)
        with contextlib.ExitStack() as stack:
            stack.callback(disk.close)
            if disk.find():
                stack.pop_all()
                return disk
            hidden = disk.hides()
    count = len(manifest.layers)
    reason = f"{store.name}: failed to find VM disk image file: none below /disk in {count} layers"
    raise errors.Unsupported(reason=reason)
