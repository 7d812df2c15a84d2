"""The disk of an image or artifact: search, ordered reads, verification to the end of its blob."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import posixpath
from collections.abc import Iterator, Mapping
from typing import Protocol

from cdi_worker import errors, masking
from cdi_worker.formats import readers
from cdi_worker.formats.compressed import decompress
from cdi_worker.formats.tar import headers, walk
from cdi_worker.sources import base
from cdi_worker.sources.registry import blobs, documents


class Store(Protocol):
    """Manifests and blobs: a registry, or an archive."""

    name: str

    def root(self) -> bytes:
        """Return the manifest or index of the reference."""

    def manifest(self, descriptor: documents.Descriptor, /) -> bytes:
        """Return the manifest of an index entry, verified."""

    def blob(self, descriptor: documents.Descriptor, /) -> blobs.Verified:
        """Return a reader of the blob, which verifies size and digest at the end."""

    def digest(self) -> str:
        """Return the digest of the manifest or index."""

    def close(self) -> None: ...


class Disk:
    """A reader of the disk in a blob. ``head``: its first bytes, which ``readinto`` returns too.

    ``hidden``: names in a layer that the layers above hide; None: the blob itself is the disk. ``is_found``:
    False if the layer, which is read to its end and verified then, has no disk.
    """

    def __init__(self, store: Store, blob: documents.Descriptor, hidden: Hidden | None = None) -> None:
        self.blob = blob
        #: Opens the disk again, from its start.
        self.again = functools.partial(Disk, store, blob, hidden)
        reader = store.blob(blob)
        #: Takes the callback for the bytes of the blob; see ``image.Arrivals``.
        self.report = reader.arrivals.report
        self._layer: Layer | None = None
        self._content: base.Reader = reader
        self.is_found, self.path, self.size = True, blob.title, blob.size
        if hidden is not None:
            name = f"{store.name}: layer {blob.digest}"
            self._content = self._layer = Layer(plain(reader, reader.head), hidden, name)
        try:
            if self._layer is not None:
                self.is_found = self._layer.find()
                self.path, self.size = self._layer.path, self._layer.size
            self._peeked = readers.Peek(self._content, min(base.HEAD_SIZE, self.size))
            if self._layer is not None and self.size <= base.HEAD_SIZE:
                # Perhaps a README: a second file is named before the format of this one is.
                self._layer.finish()
        except BaseException:
            self.close()
            raise
        self.head = self._peeked.head

    def readinto(self, into: memoryview, /) -> int:
        return self._peeked.readinto(into)

    def close(self) -> None:
        """Close the blob. Safe to call twice."""
        self._content.close()

    def finish(self) -> None:
        """Read the blob to its end, where its digest is verified. Safe to call twice."""
        if self._layer is not None:
            self._layer.finish()
            return
        rest = memoryview(bytearray(base.HEAD_SIZE))
        while self._content.readinto(rest):
            pass

    def hides(self) -> Hidden:
        """Return the names hidden from the layers below."""
        return Hidden() if self._layer is None else self._layer.hides()


def find(
    store: Store,
    manifest: documents.Manifest,
    choice: str,
    annotations: Mapping[str, str] | None = None,
) -> Disk:
    """Return an artifact's file, or the topmost file below /disk. Layers below it are not fetched.

    Raises ``errors.Unsupported`` if there is no disk, and the errors of ``Layer``.
    """
    chosen = documents.artifact(manifest, choice, store.name, annotations)
    if chosen is not None:
        return Disk(store, chosen)
    hidden = Hidden()
    for blob in reversed(manifest.layers):
        if hidden.everything:
            break
        if blob.is_foreign:
            reason = f"{store.name}: layer {blob.digest} is not in the registry ({blob.media_type})"
            raise errors.Refused(format="container", rule="foreign layer", reason=reason)
        disk = Disk(store, blob, hidden)
        if disk.is_found:
            return disk
        hidden = disk.hides()
        disk.close()
    where = f"none below /disk in {len(manifest.layers)} layers"
    raise errors.Unsupported(reason=f"{store.name}: failed to find VM disk image file: {where}")


FOLDER = "disk"
WHITEOUT = ".wh."
OPAQUE = ".wh..wh..opq"
#: Limit of the hidden names that are kept.
MOST_HIDDEN = 1000
LONGEST_NAME = 255  # NAME_MAX


def plain(reader: base.Reader, head: bytes) -> base.Reader:
    """Return a reader of the tar of a layer, which is compressed with gzip or zstd or not at all.

    ``head``: the first bytes, which show the compression. The media type is ignored: some images have a
    wrong one.
    """
    for kind in ("gz", "zst"):
        if decompress.KINDS[kind].magic.match(head):
            return decompress.open(kind, reader)
    return reader


@dataclasses.dataclass(frozen=True)
class Hidden:
    """Names in /disk that upper layers hide from the layers below; ``everything``: all of them."""

    names: frozenset[str] = frozenset()
    everything: bool = False


class Layer:
    """A layer, read in one pass. ``hidden``: names hidden by the layers above; ``name`` is for messages.

    ``find`` seeks to the disk, ``readinto`` reads it, ``finish`` reads the rest of the layer and checks that
    there is no second disk. ``path`` and ``size`` are those of the disk.
    """

    def __init__(self, reader: base.Reader, hidden: Hidden, name: str) -> None:
        self.close = reader.close
        self._file: base.Reader
        self._tar = self._file = walk.Walk(reader)
        self._hidden = hidden
        self._name = name
        self._disk = ""
        self._whiteouts: set[str] = set()
        self._opaque = False
        self.path = ""
        self.size = 0

    def find(self) -> bool:
        """Seek to the disk. Return False if the layer, read to its end, has no disk."""
        with self._name_errors():
            while entry := self._tar.next():
                if self._look(entry):
                    self._file = self._tar.file()
                    self.path, self.size = f"/{FOLDER}/{self._disk}", entry.size
                    return True
            self._tar.drain()
            return False

    def readinto(self, into: memoryview, /) -> int:
        """Read the disk."""
        with self._name_errors():
            return self._file.readinto(into)

    def finish(self) -> None:
        """Read the layer to its end. Raises ``errors.Refused`` if there is more than one disk."""
        with self._name_errors():
            while entry := self._tar.next():
                self._look(entry)
            self._tar.drain()
        self._file = self._tar  # at its end
        if self._disk in self._whiteouts:
            raise self._refused("whiteout", f"{self.path} is both added and removed in the same layer")

    def hides(self) -> Hidden:
        """Return the names hidden from the layers below. Call it after the layer was read to its end."""
        return Hidden(self._hidden.names | self._whiteouts, self._hidden.everything or self._opaque)

    @contextlib.contextmanager
    def _name_errors(self) -> Iterator[None]:
        """Add the layer's name to errors of decompression and tar."""
        try:
            yield
        except errors.Corrupt as err:
            raise type(err)(**{**err.fields, "format": f"{err.fields['format']} of {self._name}"}) from err

    def _look(self, entry: walk.Member) -> bool:
        """Record an entry. Return whether it is the first disk."""
        parts = [part for part in posixpath.normpath(f"/{entry.name}").split("/") if part]
        if parts in ([OPAQUE], [WHITEOUT + FOLDER], [FOLDER, OPAQUE]):
            self._opaque = True
            return False
        if parts[:1] != [FOLDER] or (parts == [FOLDER] and entry.type == headers.DIRECTORY):
            return False
        path, name = f"/{'/'.join(parts)}", parts[1] if len(parts) > 1 else ""
        if parts[-1].startswith(WHITEOUT):
            if len(parts) == 2:
                name = name.removeprefix(WHITEOUT)
                count = len(self._hidden.names) + len(self._whiteouts)
                if len(name) > LONGEST_NAME or count >= MOST_HIDDEN:
                    reason = f"more than {MOST_HIDDEN} whiteouts, or one with too long a name"
                    raise self._refused("whiteout", reason)
                self._whiteouts.add(name)
            return False
        if name in self._hidden.names:
            return False
        if entry.type in {headers.SYMLINK, headers.HARD_LINK}:
            raise self._refused("link", f"{path} is a link to {entry.link!r}; the disk must be a file")
        if entry.type == headers.DIRECTORY or len(parts) != 2:
            raise self._refused("directory", f"{path}: expected one file in /{FOLDER}, no directories")
        if entry.type not in {headers.FILE, headers.SPARSE}:
            raise self._refused("file type", f"{path} is not a regular file")
        if len(name) > LONGEST_NAME:
            reason = f"{masking.quoted(path)}: the name is longer than {LONGEST_NAME} characters"
            raise self._refused("name", reason)
        if self._disk:
            reason = f"two files in /{FOLDER}, expected one: /{FOLDER}/{self._disk}, {path}"
            raise self._refused("one disk", reason)
        self._disk = name
        return True

    def _refused(self, rule: str, reason: str) -> errors.Refused:
        return errors.Refused(format="container", rule=rule, reason=f"{self._name}: {reason}")
