"""Indexes, manifests and configurations of OCI and Docker images. No network, no files.

OCI image specification 1.1; Docker image manifest version 2, schema 2.
"""

from __future__ import annotations

import dataclasses
import hashlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from cdi_worker import errors, units
from cdi_worker.formats import smalljson
from cdi_worker.sources import reference

#: Accepted media types of manifests and indexes. Docker's schema 1 is obsolete and not accepted.
ACCEPT = (
    "application/vnd.oci.image.manifest.v1+json, application/vnd.docker.distribution.manifest.v2+json, "
    "application/vnd.oci.image.index.v1+json, application/vnd.docker.distribution.manifest.list.v2+json"
)
#: Registries must accept manifests of 4 MiB (OCI distribution specification); most accept no larger ones.
LARGEST_MANIFEST = 4 << 20
TITLE = "org.opencontainers.image.title"
#: ORAS sets this annotation if the title is a directory's.
UNPACK = "io.deis.oras.content.unpack"
REF_NAME = "org.opencontainers.image.ref.name"
#: Annotations of a disk: the name of its volume in the virtual machine, and its size (enhancement 256).
DISK_NAME = "io.kubevirt.disk.name"
DISK_SIZE = "io.kubevirt.disk.size"
DISK_TYPE = "application/vnd.kubevirt.disk."
_LAYER_PREFIXES = ("application/vnd.oci.image.layer.", "application/vnd.docker.image.rootfs.")
_ARCHITECTURES = {
    "x86_64": "amd64",
    "aarch64": "arm64",
    "armv7l": "arm",
    "armv6l": "arm",
    "i386": "386",
    "i686": "386",
}


@dataclasses.dataclass(frozen=True)
class Descriptor:
    """A descriptor of a blob or manifest. ``architecture`` and ``system`` may be empty."""

    media_type: str
    digest: str
    size: int
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    architecture: str = ""
    system: str = ""
    variant: str = ""
    artifact_type: str = ""

    @property
    def title(self) -> str:
        return self.annotations.get(TITLE, "")

    @property
    def disk_name(self) -> str:
        return self.annotations.get(DISK_NAME, "")

    @property
    def disk_size(self) -> int | None:
        """The size of the disk in bytes, None if it is not stated. Raises ``errors.Refused``."""
        stated = self.annotations.get(DISK_SIZE)
        try:
            return None if stated is None else units.parse_quantity(stated)
        except ValueError as err:
            raise errors.Refused(format="artifact", rule="size", reason=f"{DISK_SIZE}: {err}") from err

    @property
    def label(self) -> str:
        """Return the file as messages name it."""
        return self.disk_name or self.title or f"{self.media_type} {self.digest}"

    @property
    def platform(self) -> str:
        """Return the platform as ``system/architecture/variant``."""
        return "/".join(filter(None, (self.system, self.architecture, self.variant))) or "unstated"

    @property
    def is_attestation(self) -> bool:
        """Whether this is a BuildKit attestation rather than an image."""
        return self.architecture == "unknown" or "vnd.docker.reference.type" in self.annotations

    @property
    def is_foreign(self) -> bool:
        return "nondistributable" in self.media_type or ".foreign." in self.media_type

    @property
    def is_layer(self) -> bool:
        """Whether this is a file system layer (a tar) rather than a single file with a title."""
        is_tar = not self.media_type or self.media_type.startswith(_LAYER_PREFIXES)
        return is_tar and (not self.title or self.annotations.get(UNPACK) == "true")


@dataclasses.dataclass(frozen=True)
class Index:
    """A Docker manifest list or an OCI index."""

    manifests: tuple[Descriptor, ...]


@dataclasses.dataclass(frozen=True)
class Manifest:
    """An image or an artifact. ``layers``: lowest first."""

    config: Descriptor
    layers: tuple[Descriptor, ...]


def parse(data: bytes, name: str) -> Index | Manifest:
    """Parse an index or manifest. ``name`` is used in messages.

    Raises ``errors.Unsupported``, or ``errors.Refused`` for a document that is both.
    """
    document = load(data, name)
    if document.get("schemaVersion") == 1 or "fsLayers" in document:
        what = "Docker image manifest schema 1 is obsolete; push the image again with a current tool"
        raise errors.Unsupported(reason=f"{name}: {what}")
    if "manifests" in document and "layers" in document:
        # Clients could disagree on its type: CVE-2021-41190.
        reason = f"{name}: both an index and a manifest"
        raise errors.Refused(format="container", rule="ambiguous", reason=reason)
    key = "manifests" if "manifests" in document else "layers"
    if key not in document:
        raise errors.Unsupported(reason=f"{name}: neither an image index nor an image manifest")
    if not isinstance(document[key], list):
        raise errors.Unsupported(reason=f"{name}: malformed {key}")
    descriptors = tuple(_descriptor(item, name) for item in document[key])
    if key == "manifests":
        return Index(descriptors)
    return Manifest(_descriptor(document.get("config"), name), descriptors)


def load(data: bytes, name: str) -> dict[str, Any]:
    """Return the JSON object in ``data``, without repeated names. Raises ``errors.Unsupported``."""
    try:
        # Who signs it may use a parser that takes the first of two members with one name.
        document = smalljson.parse(data, unique=True)
    except ValueError as err:
        reason = f"{name}: not JSON, or a name in it is repeated, or it is nested too deeply"
        raise errors.Unsupported(reason=reason) from err
    if not isinstance(document, dict):
        raise errors.Unsupported(reason=f"{name}: not a JSON object")
    return document


def digest(data: bytes, algorithm: str = "sha256") -> str:
    """Return the digest of ``data``."""
    return f"{algorithm}:{hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()}"


def check(data: bytes, expected: str, name: str) -> None:
    """Raise ``errors.DigestMismatch`` unless ``data`` has the digest ``expected``."""
    calculated = digest(data, expected.partition(":")[0])
    if calculated != expected:
        raise errors.DigestMismatch(url=name, expected=expected, calculated=calculated)


def normal_architecture(wanted: str) -> str:
    """Return the OCI name of an architecture. Empty: this machine's."""
    name = (wanted or platform.machine()).lower()
    return _ARCHITECTURES.get(name, name)


def choose(index: Index, wanted: str, name: str) -> Descriptor:
    """Return the manifest for architecture ``wanted``; empty: this machine's, or the only one there is.

    A disk may be for a virtual machine of another architecture than this one. A single manifest without a
    platform matches; ``check_platform`` checks its configuration later. Raises ``errors.WrongPlatform`` with
    the available platforms.
    """
    architecture = normal_architecture(wanted)
    images = [item for item in index.manifests if not item.is_attestation]
    fitting = [item for item in images if item.architecture == architecture]
    linux = [item for item in fitting if item.system in {"linux", ""}]
    if found := linux or fitting:
        return found[0]
    if len(images) == 1 and not (wanted and images[0].architecture):
        return images[0]
    raise errors.WrongPlatform(url=name, wanted=architecture, found=", ".join(platforms(images)) or "nothing")


def platforms(images: Sequence[Descriptor]) -> list[str]:
    """Return the platforms of an index, sorted, without attestations."""
    return sorted({item.platform for item in images if not item.is_attestation})


def check_platform(config: Mapping[str, Any], wanted: str, name: str) -> None:
    """Raise ``errors.WrongPlatform`` if an image is for another architecture than ``wanted``.

    If ``wanted`` is empty, every image matches, else only one that states its architecture.
    """
    if not wanted:
        return
    stated = config.get("architecture")
    architecture = normal_architecture(wanted)
    if not isinstance(stated, str) or not stated:
        raise errors.WrongPlatform(url=name, wanted=architecture, found="an image without a platform")
    if normal_architecture(stated) != architecture:
        system = config.get("os") or "linux"
        raise errors.WrongPlatform(url=name, wanted=architecture, found=f"{system}/{stated}")


def contradiction(entry: Descriptor, config: Mapping[str, Any]) -> str:
    """Return how the platform of an image in an index differs from the one in its configuration; else empty.

    What either does not state does not count.
    """
    stated = _mapping(config)
    ours, theirs = (
        normal_architecture(each or "unstated") for each in (entry.architecture, stated.get("architecture"))
    )
    pairs = (entry.system, stated.get("os", "")), (ours, theirs), (entry.variant, stated.get("variant", ""))
    if all(listed in {"", "unstated", own} or own in {"", "unstated"} for listed, own in pairs):
        return ""
    own = "/".join(filter(None, (stated.get(name) for name in ("os", "architecture", "variant"))))
    return f"its index lists it as {entry.platform}, and it is {own}"


class Ambiguous(errors.Refused):
    """Several files of an artifact may be the disk. ``first``: the first of them."""

    def __init__(self, *, first: Descriptor, **fields: object) -> None:
        self.first = first
        super().__init__(**fields)


def artifact(
    manifest: Manifest, choice: str, name: str, annotations: Mapping[str, str] | None = None
) -> Descriptor | None:
    """Return the layer that is the disk itself, or None for an image of a file system.

    ``choice``: digest, title, name of the disk or media type; ``annotations``: those that the layer has.
    Without them: the layer with a KubeVirt disk type, else the only layer that is a single file. Raises
    ``errors.Refused`` unless exactly one layer matches.
    """
    layers = [item for item in manifest.layers if (annotations or {}).items() <= item.annotations.items()]
    if choice:
        layers = [
            each for each in layers if choice in {each.digest, each.title, each.disk_name, each.media_type}
        ]
    elif not annotations:
        layers = disks(manifest) or [item for item in manifest.layers if not item.is_layer]
        if not layers:
            return None
    if len(layers) == 1:
        return layers[0]
    names = ", ".join(item.label for item in layers or disks(manifest) or manifest.layers)
    shown = (f"{key}={value}" for key, value in (annotations or {}).items())
    wanted = " ".join(filter(None, (repr(choice) if choice else "", *shown)))
    what = "several files" if layers else f"no file {wanted}"
    how = "choose one with #title, #digest or #media-type, or by an annotation"
    fields = {"format": "artifact", "rule": "one disk", "reason": f"{name}: {what} among: {names}; {how}"}
    raise Ambiguous(first=layers[0], **fields) if layers else errors.Refused(**fields)


def disks(manifest: Manifest) -> list[Descriptor]:
    """Return the layers with a KubeVirt disk type (KubeVirt enhancement 256)."""
    return [item for item in manifest.layers if item.media_type.startswith(DISK_TYPE)]


def _descriptor(item: object, name: str) -> Descriptor:
    if not isinstance(item, dict):
        raise errors.Unsupported(reason=f"{name}: malformed descriptor")
    size, value = item.get("size"), item.get("digest")
    if not isinstance(value, str) or not reference.is_digest(value):
        raise errors.Unsupported(reason=f"{name}: a descriptor has no valid digest")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise errors.Unsupported(reason=f"{name}: a descriptor has no valid size")
    stated = _mapping(item.get("platform"))
    return Descriptor(
        media_type=str(item.get("mediaType") or ""),
        digest=value,
        size=size,
        annotations=_mapping(item.get("annotations")),
        architecture=stated.get("architecture", ""),
        system=stated.get("os", ""),
        variant=stated.get("variant", ""),
        artifact_type=str(item.get("artifactType") or ""),
    )


def _mapping(value: object) -> dict[str, str]:
    """Return the string values of a JSON object; empty if ``value`` is not an object."""
    if not isinstance(value, dict):
        return {}
    return {key: text for key, text in value.items() if isinstance(text, str)}
