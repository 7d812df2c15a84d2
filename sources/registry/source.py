"""The registry source: the disk in a container image's file system, or an artifact that is a disk."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cdi_worker import errors
from cdi_worker.formats import readers, signature
from cdi_worker.images import image
from cdi_worker.sources import base, labels
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.registry import api, archive, blobs, documents, layer, locations

if TYPE_CHECKING:
    from cdi_worker.sources.trust import images

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
        self._engine = image.Engine()

    def open(self, opening: base.Opening) -> base.Facts:
        try:
            judge: images.Judge | None = opening.judging(self._reference) if opening.judging else None
            self._engine = opening.engine
            self._store = self._open_store()
            chosen = choose(self._store, self._location.architecture)
            signatures = self._verified(self._store, judge, chosen.digests) if judge else ()
            found = resolve(self._store, chosen, self._location.architecture)
            self._check_platform(chosen, found, is_signed=bool(signatures))
            self._disk, obstacle = self._find(self._store, found.manifest)
        except BaseException:
            self.close()
            raise
        disk = self._disk
        log.info("source url=%r digest=%r disk=%r size=%d", self.name, found.digest, disk.path, disk.size)
        return base.Facts(
            name=self.name,
            size=disk.size,
            head=disk.head,
            identity=f"{disk.blob.digest} {disk.path}".rstrip(),
            disk_size=disk.blob.disk_size,
            signatures=signatures,
            verified={"manifest": found.digest, "layer": disk.blob.digest},
            obstacle=obstacle,
            labels=found.labels(),
            description=_description(found, disk, signatures),
            # A layer is compressed, and holes of a disk in it take no bytes.
            wire=base.Wire(disk.blob.size, self._ordered),
        )

    def digest(self) -> str:
        """Return the digest of the manifest or index, for callers that poll a tag: no image is read."""
        with contextlib.closing(self._open_store()) as store:
            return store.digest()

    def _open_store(self) -> layer.Store:
        if isinstance(self._reference, oci_reference.ArchiveReference):
            return archive.Archive(self._reference, self._cancel, self._engine)
        return api.Registry(self._reference, self._location, self._cancel, self._engine)

    def _verified(
        self, store: layer.Store, judge: images.Judge, digests: tuple[str, ...]
    ) -> tuple[signature.Signature, ...]:
        from cdi_worker.sources.registry import signatures

        return judge.check((each for digest in digests for each in signatures.find(store, digest)), digests)

    def _check_platform(self, chosen: Chosen, image: Image, *, is_signed: bool) -> None:
        """Refuse a signed image that an index lists for another platform: others may have written the index.

        Unsigned images often have a wrong configuration, and there is nothing to verify.
        """
        found = documents.contradiction(chosen.entry, image.config) if chosen.entry else ""
        if found and is_signed:
            raise errors.Untrusted(url=self.name, fault=signature.OTHER_DATA, reason=found)
        if found:
            log.warning("wrong platform url=%r: %s", self.name, found)

    def _find(
        self, store: layer.Store, manifest: documents.Manifest
    ) -> tuple[layer.Disk, errors.Error | None]:
        """Return the disk; of several the first one, which can be examined, and why it is not imported."""
        try:
            return layer.find(store, manifest, self._reference.choice, self._location.annotations), None
        except documents.Ambiguous as err:
            return layer.Disk(store, err.first), err

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
            self._open_again(self._disk)
        self._fresh = False
        self._disk.report(advance)
        # Closing the reader leaves the disk open for ``verify``.
        disk = self._disk
        return readers.Consecutive(lambda _, into: disk.readinto(into), 0, sys.maxsize)

    def _open_again(self, before: layer.Disk) -> None:
        """Open the disk again. What was read before may have been of another blob: it was not verified."""
        before.close()
        self._disk = now = before.again()
        if (before.path, before.size) != (now.path, now.size):
            then, found = (f"{disk.path!r} of {disk.size} bytes" for disk in (before, now))
            raise errors.SourceChanged(url=self.name, what="disk", before=then, now=found)

    def verify(self) -> None:
        """Read the rest of the blob; check its digest, and that the layer has no second disk."""
        if self._disk is not None:
            self._disk.finish()


def _description(
    image: Image, disk: layer.Disk, signatures: tuple[signature.Signature, ...]
) -> dict[str, object]:
    """Return digest, platforms, layers, disk and labels of the image."""
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
        "digest": image.digest,
        "platforms": image.platforms or [image.platform],
        "layers": layers,
        "disk": disk.path or disk.blob.media_type,
        "diskLayer": disk.blob.digest,
        "labels": image.labels(),
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


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """A container image. ``digest``: of the reference's manifest or index; ``platforms``: of the index."""

    digest: str
    platforms: list[str]
    manifest: documents.Manifest
    config: Mapping[str, Any]

    def labels(self) -> dict[str, str]:
        """Return the labels in the image's environment (contract, Labels)."""
        variables = self._runtime().get("Env")
        return labels.from_environment(variables if isinstance(variables, list) else [])

    @property
    def platform(self) -> str:
        """Return the platform in the configuration."""
        system, architecture = self.config.get("os"), self.config.get("architecture")
        return f"{system}/{architecture}" if system and architecture else "unstated"

    def check(self, architecture: str, name: str) -> None:
        """Refuse an image for another architecture and a bootable container image."""
        documents.check_platform(self.config, architecture, name)
        stated = self._runtime().get("Labels")
        stated = stated if isinstance(stated, dict) else {}
        for label in BOOTABLE:
            if stated.get(label) in ("1", "true"):  # of any type: a list has no hash
                reason = (
                    f"{name} is a bootable container image ({label}), not a disk; build a disk image from it"
                )
                raise errors.Refused(format="container", rule="bootable container", reason=reason)

    def _runtime(self) -> Mapping[str, Any]:
        runtime = self.config.get("config")
        return runtime if isinstance(runtime, dict) else {}


@dataclasses.dataclass(frozen=True, slots=True)
class Chosen:
    """The manifest for an architecture. ``digests``: of the reference's document, and of the manifest.

    ``entry``: what an index says about it; None without an index.
    """

    digests: tuple[str, ...]
    platforms: list[str]
    manifest: documents.Manifest
    entry: documents.Descriptor | None = None


def choose(store: layer.Store, architecture: str) -> Chosen:
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
    return Chosen(tuple(digests), platforms, document, chosen)


def resolve(store: layer.Store, chosen: Chosen, architecture: str) -> Image:
    """Read the configuration of an image. Raises the errors of ``choose``."""
    image = Image(
        chosen.digests[0], chosen.platforms, chosen.manifest, _config(store, chosen.manifest.config)
    )
    image.check(architecture, store.name)
    return image


def _config(store: layer.Store, descriptor: documents.Descriptor) -> Mapping[str, Any]:
    """Return the configuration; empty if an artifact's is not a JSON object."""
    if descriptor.media_type not in CONFIG_TYPES and descriptor.digest == EMPTY:
        return {}
    reader = store.blob(descriptor)
    try:
        data = blobs.read_all(reader, documents.LARGEST_MANIFEST, store.name)
    finally:
        reader.close()
    try:
        return documents.load(data, store.name)
    except errors.Unsupported:
        if descriptor.media_type in CONFIG_TYPES:
            raise
        return {}
