"""The source of a DataVolume (``spec.source``) as typed values."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from cdi_worker import contract, errors, request, units
from cdi_worker.formats import checksum
from cdi_worker.kubernetes import documents

#: Sources that copy a disk in stages.
MULTI_STAGE = frozenset({"imageio", "vddk"})
#: Sources that are an object of the cluster, which knows its own size.
CLONES = frozenset({"pvc", "snapshot"})
#: Sources that may give an archive.
ARCHIVES = frozenset({"http", "upload"}) | CLONES


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Where the data comes from. ``kind``: the name below ``spec.source``; the rest by its kind.

    ``secret``, ``certificates`` and ``extra_arguments`` are names of a Secret and of ConfigMaps.
    ``namespace`` and ``name``: those of the claim or snapshot to clone.
    """

    kind: str
    url: str = ""
    secret: str = ""
    certificates: str = ""
    headers: tuple[str, ...] = ()
    secret_headers: tuple[str, ...] = ()
    checksum: str = ""
    image_stream: str = ""
    node_pull: bool = False
    architecture: str = ""
    disk_id: str = ""
    insecure: bool = False
    uuid: str = ""
    backing_file: str = ""
    thumbprint: str = ""
    init_image: str = ""
    extra_arguments: str = ""
    namespace: str = ""
    name: str = ""


def parse_source(spec: documents.Fields) -> Source:
    """Return the one source that ``spec`` names, of no kind where there is none or several."""
    if "sourceRef" in spec:
        spec.fault("sourceRef", "refers to a DataSource of a cluster; name the source itself in spec.source")
    spec.value("sourceRef")
    source = spec.fields("source")
    kinds = source.names()
    if not kinds and "sourceRef" not in spec:
        spec.fault("source", f"missing; wants one of {', '.join(SOURCES)}")
    if len(kinds) > 1:
        spec.fault("source", f"wants one source, found {len(kinds)}: {', '.join(kinds)}")
    for kind in kinds:
        if kind not in SOURCES:
            source.fault(kind, f"unknown source; one of {', '.join(SOURCES)}")
    known = [kind for kind in kinds if kind in SOURCES]
    made = [_one_source(kind, source.fields(kind)) for kind in known]
    return made[0] if len(made) == 1 else Source(kind="")


def _one_source(kind: str, given: documents.Fields) -> Source:
    made = Source(kind=kind, **SOURCES[kind](given))
    given.end()
    return made


def _http(given: documents.Fields) -> dict[str, Any]:
    headers = []
    for path, header in given.texts("extraHeaders"):
        try:
            contract.parse_header(header)
            headers.append(header)
        except errors.RequestError as err:
            given.fault(path, str(err))
    said = given.text("checksum")
    if said:
        try:
            checksum.parse(said)
        except errors.RequestError as err:
            given.fault("checksum", str(err))
    return {
        "url": _address(given, "http", "https"),
        "secret": given.name("secretRef"),
        "certificates": given.name("certConfigMap"),
        "headers": tuple(headers),
        "secret_headers": tuple(_names(given, "secretExtraHeaders")),
        "checksum": said,
    }


def _s3(given: documents.Fields) -> dict[str, Any]:
    return {
        "url": _address(given, "http", "https", "s3"),
        "secret": given.name("secretRef"),
        "certificates": given.name("certConfigMap"),
    }


def _gcs(given: documents.Fields) -> dict[str, Any]:
    return {"url": _address(given, "gs", "http", "https"), "secret": given.name("secretRef")}


def _registry(given: documents.Fields) -> dict[str, Any]:
    node_pull = given.choice("pullMethod", ("pod", "node")) == "node"
    stream = given.text("imageStream")
    if ("url" in given) == ("imageStream" in given):
        given.fault("url", "wants either url or imageStream")
    if stream and not node_pull:
        given.fault("imageStream", "needs pullMethod node")
    platform = given.fields("platform")
    architecture = platform.text("architecture")
    platform.end()
    given.value("url")
    return {
        "url": _address(given, "docker", "oci-archive") if "url" in given else "",
        "image_stream": stream,
        "node_pull": node_pull,
        "secret": given.name("secretRef"),
        "certificates": given.name("certConfigMap"),
        "architecture": architecture,
    }


def _imageio(given: documents.Fields) -> dict[str, Any]:
    insecure = given.flag("insecureSkipVerify")
    return {
        "url": _address(given, "http", "https"),
        "disk_id": given.text("diskId", required=True),
        "secret": given.name("secretRef", required=True),
        "certificates": given.name("certConfigMap", required=not insecure),
        "insecure": insecure,
    }


def _vddk(given: documents.Fields) -> dict[str, Any]:
    return {
        "url": _address(given, "http", "https"),
        "uuid": given.text("uuid", required=True),
        "backing_file": given.text("backingFile", required=True),
        "thumbprint": given.text("thumbprint", required=True),
        "secret": given.name("secretRef", required=True),
        "init_image": given.text("initImageURL"),
        "extra_arguments": given.name("extraArgs"),
    }


def _clone(given: documents.Fields) -> dict[str, Any]:
    return {
        "namespace": given.name("namespace", required=True),
        "name": given.name("name", required=True),
    }


def _nothing(_given: documents.Fields) -> dict[str, Any]:
    return {}


#: The names below ``spec.source``, and what reads their fields.
SOURCES: Mapping[str, Callable[[documents.Fields], dict[str, Any]]] = {
    "http": _http,
    "s3": _s3,
    "gcs": _gcs,
    "registry": _registry,
    "upload": _nothing,
    "blank": _nothing,
    "imageio": _imageio,
    "vddk": _vddk,
    "pvc": _clone,
    "snapshot": _clone,
}


def _address(given: documents.Fields, *schemes: str) -> str:
    """Return the URL; messages do not repeat it, since it may hold a password."""
    url = given.text("url", required=True)
    try:
        parts = urllib.parse.urlsplit(url)
        good = not url or (parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/")))
    except ValueError:
        good = False
    if not good or re.search(r"[\s\x00-\x1f\x7f]", url):
        given.fault("url", f"is no address that begins with {', '.join(f'{scheme}:' for scheme in schemes)}")
    return url


def _names(given: documents.Fields, name: str) -> list[str]:
    found = []
    for path, value in given.texts(name):
        if documents.NAME.fullmatch(value):
            found.append(value)
        else:
            given.fault(path, "is no name of a Secret")
    return found


API_VERSION = "cdi.kubevirt.io/v1beta1"
#: Names the ConfigMap with arguments for VDDK where ``spec.source.vddk.extraArgs`` does not.
VDDK_ARGUMENTS = "cdi.kubevirt.io/storage.pod.vddk.extraargs"
#: Requests that a claim is bound at once, not when a virtual machine first wants it.
BIND_IMMEDIATELY = "cdi.kubevirt.io/storage.bind.immediate.requested"
ACCESS_MODES = ("ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod")


@dataclasses.dataclass(frozen=True, slots=True)
class Claim:
    """The volume that is asked for. ``size`` in bytes, None where the source's decides.

    ``section``: ``pvc`` is taken as it is, to ``storage`` the overhead of a file system is added.
    ``spec``: the section as the manifest has it.
    """

    section: str
    size: int | None
    block: bool
    storage_class: str | None
    spec: Mapping[str, Any]

    def size_with(self, overhead: Fraction) -> int:
        """Return the bytes of the volume on which a disk of ``size`` bytes has room."""
        size = self.size or 0
        return size if self.section == "pvc" or self.block else units.volume_size(size, overhead)


@dataclasses.dataclass(frozen=True, slots=True)
class Checkpoint:
    """A stage: what has changed from ``previous`` (empty: everything) to ``current``."""

    previous: str
    current: str


@dataclasses.dataclass(frozen=True, slots=True)
class DataVolume:
    """What a manifest asks for. ``final``: nothing follows after the last checkpoint."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    source: Source
    claim: Claim
    content_type: str
    preallocation: bool
    checkpoints: tuple[Checkpoint, ...]
    final: bool
    priority_class: str

    @property
    def is_archive(self) -> bool:
        return self.content_type == "archive"

    def stages_after(self, copied: str) -> tuple[Checkpoint, ...]:
        """Return the stages that follow the one of checkpoint ``copied``; empty: all of them.

        Raises ``RequestError`` where there is no such checkpoint, or nothing follows.
        """
        if not copied:
            return self.checkpoints
        names = [stage.current for stage in self.checkpoints]
        if copied not in names:
            raise errors.RequestError(f"spec.checkpoints: none of them has current {copied!r}")
        following = self.checkpoints[names.index(copied) + 1 :]
        if not following:
            raise errors.RequestError(f"spec.checkpoints: nothing follows {copied!r}")
        return following


def find(found: list[documents.Document]) -> documents.Document:
    """Return the one DataVolume among documents. Raises ``RequestError``."""
    volumes = [document for document in found if document.kind == "DataVolume"]
    if len(volumes) != 1:
        kinds = ", ".join(document.kind or "a document without kind" for document in found) or "nothing"
        raise errors.RequestError(f"wants one DataVolume, found {len(volumes)} (there is {kinds})")
    return volumes[0]


def parse(document: documents.Document, faults: list[str]) -> DataVolume:
    """Return the values of a DataVolume; what is wrong with them is added to ``faults``, by path."""
    top = documents.Fields(document.content, "", faults)
    if (version := top.value("apiVersion")) != API_VERSION:
        top.fault("apiVersion", f"{version!r} is not {API_VERSION}")
    top.value("kind")
    top.value("status")
    metadata = top.fields("metadata")
    name = metadata.name("name", required=True)
    spec = top.fields("spec")
    if "spec" not in top:
        top.fault("spec", "missing")
    top.end()
    annotations = metadata.strings("annotations")
    source = parse_source(spec)
    if source.kind == "vddk" and not source.extra_arguments:
        named = documents.Fields(annotations, "metadata.annotations", faults).name(VDDK_ARGUMENTS)
        source = dataclasses.replace(source, extra_arguments=named)
    volume = DataVolume(
        name=name,
        namespace=metadata.name("namespace"),
        labels=metadata.strings("labels"),
        annotations=annotations,
        source=source,
        claim=_claim(spec, source),
        content_type=spec.choice("contentType", request.CONTENT_TYPES) or "kubevirt",
        preallocation=spec.flag("preallocation"),
        checkpoints=_checkpoints(spec, source),
        final=spec.flag("finalCheckpoint"),
        priority_class=spec.name("priorityClassName"),
    )
    spec.end()
    _check_archive(spec, volume)
    return volume


def _check_archive(spec: documents.Fields, volume: DataVolume) -> None:
    if not volume.is_archive:
        return
    if volume.source.kind and volume.source.kind not in ARCHIVES:
        spec.fault("contentType", f"source {volume.source.kind} cannot give an archive")
    if volume.claim.block:
        spec.fault("contentType", "an archive needs a volume with a file system, not volumeMode Block")


def _checkpoints(spec: documents.Fields, source: Source) -> tuple[Checkpoint, ...]:
    found = []
    for index, entry in enumerate(spec.entries("checkpoints")):
        given = documents.Fields(entry, f"spec.checkpoints[{index}]", spec.faults)
        if "previous" not in given:
            given.fault("previous", "missing (empty text for the first stage)")
        found.append(Checkpoint(given.text("previous"), given.text("current", required=True)))
        given.end()
    if found and source.kind and source.kind not in MULTI_STAGE:
        spec.fault(
            "checkpoints",
            f"source {source.kind} has none, only {' and '.join(sorted(MULTI_STAGE))}",
        )
    return tuple(found)


def _claim(spec: documents.Fields, source: Source) -> Claim:
    sections = [name for name in ("pvc", "storage") if name in spec]
    if len(sections) != 1:
        spec.fault("storage", f"wants either spec.pvc or spec.storage, found {len(sections) or 'neither'}")
    section = sections[0] if sections else "storage"
    other = "pvc" if section == "storage" else "storage"
    spec.value(other)
    given = spec.fields(section)
    modes = list(given.texts("accessModes"))
    for path, mode in modes:
        if mode not in ACCESS_MODES:
            given.fault(path, f"{mode!r} is none of {', '.join(ACCESS_MODES)}")
    if sections and section == "pvc" and len(modes) != 1:
        given.fault("accessModes", "wants one access mode")
    block = given.choice("volumeMode", ("Filesystem", "Block")) == "Block"
    storage_class = given.value("storageClassName")
    given.text("storageClassName")
    for passed_on in ("selector", "volumeName", "volumeAttributesClassName"):
        given.value(passed_on)
    for name in ("dataSource", "dataSourceRef"):
        if given.value(name) is not None:
            given.fault(name, "another source; name it in spec.source")
    size = _size(
        given,
        required=bool(sections) and not (section == "storage" and source.kind in CLONES),
    )
    given.end()
    whole = spec.value(section)
    content = whole if isinstance(whole, Mapping) else {}
    return Claim(section, size, block, storage_class, content)


def _size(given: documents.Fields, *, required: bool) -> int | None:
    resources = given.fields("resources")
    requests = resources.fields("requests")
    resources.value("limits")
    resources.end()
    value = requests.value("storage")
    requests.end()
    if value is None:
        if required:
            requests.fault("storage", "missing: the size of the disk")
        return None
    try:
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            raise errors.RequestError(f"{type(value).__name__} is no quantity such as 10Gi, 500M or 1e9")
        size = units.parse_quantity(str(value))
    except errors.RequestError as err:
        requests.fault("storage", str(err))
        return None
    if size == 0:
        requests.fault("storage", "has to be more than 0")
    return size
