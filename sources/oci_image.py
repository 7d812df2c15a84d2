"""An image or artifact as its documents tell: index, manifest and configuration, each verified."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from importer import errors
from sources import blobs, labels, oci, oci_disk

#: An index may name indexes; nobody goes deeper for a good reason.
DEEPEST_INDEX = 3
#: What an artifact has for a configuration: ``{}``.
EMPTY = "sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"
CONFIG_TYPES = (
    "application/vnd.oci.image.config.v1+json",
    "application/vnd.docker.container.image.v1+json",
)
#: Images that are an operating system to boot from rather than a disk in a container.
BOOTABLE = ("containers.bootc", "ostree.bootable")


@dataclasses.dataclass(frozen=True, slots=True)
class Image:
    """``digest``: of what the reference names. ``platforms``: of its index, if there is one."""

    digest: str
    platforms: list[str]
    manifest: oci.Manifest
    config: Mapping[str, Any]

    def labels(self) -> dict[str, str]:
        """Return the labels in the environment that the image sets (contract, Labels)."""
        variables = self._runtime().get("Env")
        return labels.from_environment(variables if isinstance(variables, list) else [])

    @property
    def platform(self) -> str:
        """Return the platform that the configuration states."""
        system, architecture = self.config.get("os"), self.config.get("architecture")
        return f"{system}/{architecture}" if system and architecture else "unstated"

    def check(self, architecture: str, name: str) -> None:
        """Refuse an image for another architecture, and a bootable container."""
        oci.check_platform(self.config, architecture, name)
        stated = self._runtime().get("Labels")
        stated = stated if isinstance(stated, dict) else {}
        for label in BOOTABLE:
            if stated.get(label) in {"1", "true"}:
                reason = (
                    f"{name} is an operating system to boot ({label}), not a disk; build a disk of it first"
                )
                raise errors.Refused(format="container image", rule="bootable container", reason=reason)

    def _runtime(self) -> Mapping[str, Any]:
        runtime = self.config.get("config")
        return runtime if isinstance(runtime, dict) else {}


def resolve(store: oci_disk.Store, architecture: str) -> Image:
    """Read what a reference names, down to the configuration of the image for ``architecture``.

    Raises ``errors.WrongPlatform``, ``errors.DigestMismatch``, ``errors.Unsupported``, ``errors.Refused``.
    """
    data = store.root()
    document = oci.parse(data, store.name)
    platforms: list[str] = []
    depth = 0
    while isinstance(document, oci.Index):
        depth += 1
        if depth > DEEPEST_INDEX:
            raise errors.Unsupported(reason=f"{store.name}: indexes nested more than {DEEPEST_INDEX} deep")
        platforms = platforms or oci.platforms(document.manifests)
        chosen = oci.choose(document, architecture, store.name)
        document = oci.parse(store.manifest(chosen), store.name)
    image = Image(oci.digest(data), platforms, document, _config(store, document.config))
    image.check(architecture, store.name)
    return image


def _config(store: oci_disk.Store, descriptor: oci.Descriptor) -> Mapping[str, Any]:
    """Return the configuration; an artifact's may be anything, and is nothing then."""
    if descriptor.media_type not in CONFIG_TYPES and descriptor.digest == EMPTY:
        return {}
    reader = store.blob(descriptor)
    try:
        data = blobs.read_all(reader, oci.LARGEST_MANIFEST, store.name)
    finally:
        reader.close()
    try:
        return oci.load(data, store.name)
    except errors.Unsupported:
        if descriptor.media_type in CONFIG_TYPES:
            raise
        return {}
