"""The registry source: the disk in a container image's file system, or an artifact that is a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from typing import Any

from cdi_worker import errors
from cdi_worker.formats import readers, signature
from cdi_worker.images import image
from cdi_worker.sources import base, labels
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.registry import api, blobs, documents, layer, locations

log = logging.getLogger(__name__)


class RegistrySource(base.Source):
    """The only file in /disk of an image, or the file of an artifact.

    Opening it reads manifest, configuration and the layers from the top down to the disk. Digests are
    verified: of documents when they are read, of blobs at their end. There is no random access, because a
    blob can only be verified when it is read completely; the engine still fetches it in parallel ranges.

    The tag is resolved once: all later requests are for digests in the document that was verified.
    """

    def __init__(
        self,
        location: locations.Registry,
        cancel: base.Cancel,
        reference: oci_reference.ArchiveReference | None = None,
    ) -> None:
        self._location = location
        self._cancel = cancel
        self._reference = reference or oci_reference.parse(location.endpoint)
        self.name = str(self._reference)
        self._store: layer.Store | None = None
        self._disk: layer.Disk | None = None
        self._fresh = True
        self._once = False
        self._description: Mapping[str, object] = {}
        self._provenance = base.Provenance()
        self._engine = image.Engine()

    def open(self, opening: base.Opening) -> base.Facts:
        # An attempt before this one may have failed halfway.
        self.close()
        obstacle: errors.Error | None = None
        signatures: tuple[signature.Signature, ...] = ()
        name, architecture = self.name, self._location.architecture
        judge = None
        if opening.signed_by:
            from cdi_worker.sources.registry import signatures as stored
            from cdi_worker.sources.trust import images

            judge = images.Judge(self._reference, opening.signed_by)
        self._engine = opening.engine
        store = self._store = self._open_store()
        image = choose(store, architecture)
        if judge is not None:
            assert isinstance(store, api.Registry)  # noqa: S101  (nobody judges an archive)
            candidates = (each for digest in image.digests for each in stored.find(store, digest))
            signatures = (judge.find(candidates, image.digests),)
        config = read_config(store, image.manifest.config, architecture)
        listed_as = documents.contradiction(image.entry, config) if image.entry else ""
        if listed_as and signatures:
            # Only the image may be signed, and the index be written by others.
            raise errors.Untrusted(url=name, fault=signature.OTHER_DATA, reason=listed_as)
        if listed_as:
            # Unsigned images often have a wrong configuration, and there is nothing to verify.
            log.warning("wrong platform url=%r: %s", name, listed_as)
        try:
            disk = layer.find(store, image.manifest, self._reference.choice, self._location.annotations)
        except documents.Ambiguous as err:
            # The first one can be examined.
            disk, obstacle = layer.Disk(store, err.first), err
        self._disk = disk
        verified = {"manifest": image.digests[0], "layer": disk.blob.digest}
        disk_labels = labels.from_environment(_object(config.get("config")).get("Env"))
        self._provenance = base.Provenance(labels=disk_labels, verified=verified)
        self._description = _description(image, config, disk, disk_labels, signatures)
        log.info("source url=%r digest=%r disk=%r size=%d", name, image.digests[0], disk.path, disk.size)
        return base.Facts(
            name=name,
            size=disk.size,
            head=disk.head,
            identity=f"{disk.blob.digest} {disk.path}".rstrip(),
            disk_size=disk.blob.disk_size,
            signatures=signatures,
            once=self._once,
            obstacle=obstacle,
        )

    @property
    def wire(self) -> base.Wire | None:
        # A layer is compressed, and holes of a disk in it take no bytes.
        return None if self._disk is None else base.Wire(self._disk.blob.size, self._ordered)

    def describe(self) -> Mapping[str, object]:
        return self._description

    def finish(self) -> base.Provenance:
        return self._provenance

    def digest(self) -> str:
        """Return the digest of the manifest or index, for callers that poll a tag: no image is read."""
        with contextlib.closing(self):
            self._store = self._open_store()
            return self._store.digest()

    def _open_store(self) -> layer.Store:
        assert isinstance(self._reference, oci_reference.Reference)  # noqa: S101  (archives: ``packages.oci``)
        return api.Registry(self._reference, self._location, self._cancel, self._engine)

    def close(self) -> None:
        """Close all connections and stop the threads that fetch and verify."""
        if self._disk is not None:
            self._disk.close()
        if self._store is not None:
            self._store.close()

    def _ordered(self, cancel: base.Cancel, advance: Callable[[int], None]) -> base.Reader:
        """Return a reader of the disk. The engine reads its blob."""
        if self._disk is None:
            raise errors.SourceError(reason=f"{self.name}: the source is not open")
        if not self._fresh:
            # What was read before may have been of another blob: it was not verified.
            self._disk.close()
            before, self._disk = self._disk, self._disk.again()
            if (before.path, before.size) != (self._disk.path, self._disk.size):
                then, now = (f"{each.path!r} of {each.size} bytes" for each in (before, self._disk))
                raise errors.SourceChanged(url=self.name, what="disk", before=then, now=now)
        self._fresh = False
        self._disk.report(advance)
        # Closing the reader leaves the disk open for ``verify``.
        disk = self._disk
        return readers.RangesReader(lambda _, into: disk.readinto(into), 0, sys.maxsize)

    def verify(self) -> None:
        """Read the rest of the blob; check its digest, and that the layer has no second disk."""
        if self._disk is not None:
            self._disk.finish()


def _description(
    image: Image,
    config: Mapping[str, Any],
    disk: layer.Disk,
    disk_labels: Mapping[str, str],
    signatures: tuple[signature.Signature, ...],
) -> dict[str, object]:
    """Return digest, platforms, layers, disk and labels of the image."""
    system, architecture = config.get("os"), config.get("architecture")
    layers = [
        {"digest": item.digest, "size": item.size, "mediaType": item.media_type}
        for item in image.manifest.layers
    ]
    disks = [
        {
            "name": item.disk_name,
            "size": item.annotations.get(documents.DISK_SIZE, ""),
            "title": item.title,
            "mediaType": item.media_type,
        }
        for item in documents.disks(image.manifest)
    ]
    return {
        "digest": image.digests[0],
        "platforms": image.platforms
        or [f"{system}/{architecture}" if system and architecture else "unstated"],
        "layers": layers,
        "disk": disk.path or disk.blob.media_type,
        "diskLayer": disk.blob.digest,
        "labels": disk_labels,
        **({"signatures": [dataclasses.asdict(each) for each in signatures]} if signatures else {}),
        **({"disks": disks} if disks else {}),
    }


#: Limit for nested indexes.
DEEPEST_INDEX = 3
#: Digest of ``{}``, the configuration of an artifact.
EMPTY = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
CONFIG_TYPES = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
#: Labels of bootable container images, which contain an operating system and no disk.
BOOTABLE = ("containers.bootc", "ostree.bootable")


@dataclasses.dataclass(frozen=True)
class Image:
    """The image for an architecture. ``digests``: of the reference's document, ..., and of the manifest.

    ``platforms``, ``entry``: those of the index, and what it says about the manifest; empty without an index.
    """

    digests: tuple[str, ...]
    platforms: list[str]
    manifest: documents.Manifest
    entry: documents.Descriptor | None = None


def choose(store: layer.Store, architecture: str) -> Image:
    """Read index and manifest of the image for ``architecture``.

    Raises ``errors.WrongPlatform``, ``errors.DigestMismatch``, ``errors.Unsupported``, ``errors.Refused``.
    """
    data = store.root()
    digests = [documents.digest(data)]
    document = documents.parse(data, store.name)
    platforms: list[str] = []
    chosen = None
    while isinstance(document, documents.Index):
        if len(digests) > DEEPEST_INDEX:
            raise errors.Unsupported(reason=f"{store.name}: indexes nested more than {DEEPEST_INDEX} deep")
        platforms = platforms or documents.platforms(document.manifests)
        chosen = documents.choose(document, architecture, store.name)
        digests.append(chosen.digest)
        document = documents.parse(store.manifest(chosen), store.name)
    return Image(tuple(digests), platforms, document, chosen)


def read_config(store: layer.Store, of: documents.Descriptor, architecture: str) -> Mapping[str, Any]:
    """Return the configuration of an image; empty if an artifact's is not a JSON object.

    Raises ``errors.WrongPlatform`` for another architecture, ``errors.Refused`` for a bootable container, and
    the errors of ``choose``.
    """
    config: Mapping[str, Any] = {}
    if of.media_type in CONFIG_TYPES or of.digest != EMPTY:
        with contextlib.closing(store.blob(of)) as reader:
            data = blobs.read_all(reader, documents.LARGEST_MANIFEST, store.name)
        try:
            config = documents.load(data, store.name)
        except errors.Unsupported:
            if of.media_type in CONFIG_TYPES:
                raise
    documents.check_platform(config, architecture, store.name)
    stated = _object(_object(config.get("config")).get("Labels"))
    for label in BOOTABLE:
        if stated.get(label) in ("1", "true"):  # of any type: a list has no hash
            what = f"{store.name} is a bootable container image ({label}), not a disk"
            reason = f"{what}; build a disk image from it"
            raise errors.Refused(format="container", rule="bootable container", reason=reason)
    return config


def _object(value: object) -> Mapping[str, Any]:
    """Return a JSON object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}
