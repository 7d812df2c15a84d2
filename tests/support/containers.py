"""Container images and artifacts as bytes: layers, configurations, manifests and indexes."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from cdi_worker.formats.zstd import zstd
from cdi_worker.sources.registry import documents

#: This machine's architecture, as images name it.
MACHINE = documents.normal_architecture("")
OCI = "application/vnd.oci.image"
DOCKER = "application/vnd.docker"
COMPRESS = {
    "": lambda data: data,
    "+gzip": lambda data: gzip.compress(data, 1, mtime=0),
    "+zstd": lambda data: zstd.compress(data, level=1),
}


@dataclasses.dataclass(frozen=True)
class Entry:
    """An entry of a layer, a file by default. ``link``: the target of a link."""

    name: str
    data: bytes = b""
    kind: bytes = tarfile.REGTYPE
    link: str = ""


def disk(data: bytes, name: str = "disk/disk.img") -> tuple[Entry, Entry]:
    """Return the entries of a layer that holds a disk and nothing else."""
    return Entry("disk/", kind=tarfile.DIRTYPE), Entry(name, data)


def tar(entries: Iterable[Entry], form: int = tarfile.PAX_FORMAT) -> bytes:
    """Return a tar archive of the entries, in order."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=form) as archive:
        for entry in entries:
            info = tarfile.TarInfo(entry.name)
            info.type, info.linkname, info.size = entry.kind, entry.link, len(entry.data)
            info.mode, info.uid, info.gid = 0o440, 107, 107
            archive.addfile(info, io.BytesIO(entry.data))
    return out.getvalue()


@dataclasses.dataclass(frozen=True)
class Blob:
    """Content and the fields of its descriptor in a manifest."""

    data: bytes
    media_type: str
    annotations: Mapping[str, str] = dataclasses.field(default_factory=dict)
    platform: Mapping[str, str] | None = None

    @property
    def digest(self) -> str:
        """Return the SHA-256 digest as OCI writes it."""
        return f"sha256:{hashlib.sha256(self.data).hexdigest()}"

    @property
    def descriptor(self) -> dict[str, Any]:
        """Return the descriptor of the blob (OCI image specification, descriptor.md)."""
        document: dict[str, Any] = {
            "mediaType": self.media_type, "digest": self.digest, "size": len(self.data)
        }  # fmt: skip
        if self.annotations:
            document["annotations"] = dict(self.annotations)
        if self.platform:
            document["platform"] = dict(self.platform)
        return document


def layer(*entries: Entry, compression: str = "+gzip") -> Blob:
    """Return a file-system layer with the entries."""
    return Blob(COMPRESS[compression](tar(entries)), f"{OCI}.layer.v1.tar{compression}")


def titled_layer(data: bytes, title: str, media_type: str = f"{OCI}.layer.v1.tar") -> Blob:
    """Return a layer that is a plain file, as ORAS pushes it."""
    return Blob(data, media_type, {"org.opencontainers.image.title": title})


def config(
    architecture: str = MACHINE, env: Iterable[str] = (), labels: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Return the configuration of an image."""
    return {
        "architecture": architecture,
        "os": "linux",
        "config": {"Env": list(env), "Labels": dict(labels or {})},
        "rootfs": {"type": "layers", "diff_ids": []},
    }


@dataclasses.dataclass(frozen=True)
class Image:
    """An image or artifact: ``layers`` lowest first, ``config`` a document or any blob.

    ``docker``: use Docker's media types instead of OCI's.
    """

    layers: tuple[Blob, ...]
    config: Mapping[str, Any] | Blob = dataclasses.field(default_factory=config)
    docker: bool = False

    @property
    def config_blob(self) -> Blob:
        """Return the configuration as a blob."""
        if isinstance(self.config, Blob):
            return self.config
        kind = f"{DOCKER}.container.image.v1+json" if self.docker else f"{OCI}.config.v1+json"
        return Blob(json.dumps(self.config).encode(), kind)

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """Return the layers and the configuration."""
        return (*self.layers, self.config_blob)

    @property
    def manifest(self) -> Blob:
        """Return the manifest as a blob."""
        kind = f"{DOCKER}.distribution.manifest.v2+json" if self.docker else f"{OCI}.manifest.v1+json"
        layers = [blob.descriptor for blob in self.layers]
        if self.docker:
            layers = [{**item, "mediaType": f"{DOCKER}.image.rootfs.diff.tar.gzip"} for item in layers]
        document = {
            "schemaVersion": 2, "mediaType": kind, "config": self.config_blob.descriptor, "layers": layers
        }  # fmt: skip
        return Blob(json.dumps(document).encode(), kind)


EMPTY_CONFIG = Blob(b"{}", "application/vnd.oci.empty.v1+json")


def machine(**disks: tuple[bytes, str]) -> Image:
    """Return a virtual machine as KubeVirt exports it: in each layer a packed raw disk of the stated size."""
    layers = []
    for name, (data, size) in disks.items():
        annotations = {
            "io.kubevirt.disk.name": name,
            "io.kubevirt.disk.size": size,
            "org.opencontainers.image.title": f"{name}.raw.zst",
        }
        layers.append(Blob(data, "application/vnd.kubevirt.disk.raw+zstd", annotations))
    kind = "application/vnd.kubevirt.virtualmachine.config.v1+json"
    return Image(tuple(layers), Blob(b'{"kind": "VirtualMachine"}', kind))


def index(*manifests: Blob, docker: bool = False) -> Blob:
    """Return an index (Docker: a manifest list) of the manifests."""
    kind = f"{DOCKER}.distribution.manifest.list.v2+json" if docker else f"{OCI}.index.v1+json"
    document = {
        "schemaVersion": 2, "mediaType": kind, "manifests": [item.descriptor for item in manifests]
    }  # fmt: skip
    return Blob(json.dumps(document).encode(), kind)


def for_platform(blob: Blob, architecture: str, system: str = "linux") -> Blob:
    """Return a manifest with a platform, for an index."""
    return dataclasses.replace(blob, platform={"architecture": architecture, "os": system})


def archive(path: Path, tags: Mapping[str, Image]) -> Path:
    """Write ``archived`` to a file."""
    path.write_bytes(archived(tags))
    return path


def archived(tags: Mapping[str, Image]) -> bytes:
    """Return an OCI archive with an image per tag; an empty tag makes an entry without a name."""
    entries = [Entry("oci-layout", b'{"imageLayoutVersion": "1.0.0"}')]
    roots = []
    for tag, image in tags.items():
        entries += [blob_entry(blob) for blob in (*image.blobs, image.manifest)]
        names = {"org.opencontainers.image.ref.name": tag} if tag else {}
        roots.append(dataclasses.replace(image.manifest, annotations=names))
    return tar([*entries, Entry("index.json", index(*roots).data)])


def image_of(path: Path, compression: str = "+gzip") -> Image:
    """Return an image with the disk at ``path`` between other layers."""
    return Image(
        (
            layer(Entry("disk/old.img", b"old" * 100)),
            layer(Entry("etc/a"), *disk(path.read_bytes()), compression=compression),
            layer(Entry("disk/.wh.old.img"), Entry("etc/b")),
        )
    )


def blob_entry(blob: Blob) -> Entry:
    """Return a blob as an entry of an OCI archive."""
    return Entry(f"blobs/{blob.digest.replace(':', '/')}", blob.data)
