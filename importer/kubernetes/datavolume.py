"""A DataVolume (cdi.kubevirt.io/v1beta1) as typed values, checked against the API."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import pathlib
import re
import urllib.parse
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

from cdi_worker import errors, sources, units
from cdi_worker.formats import checksum, smalljson
from cdi_worker.importer.kubernetes import documents, schema
from cdi_worker.sources import base, fields

API_VERSION = "cdi.kubevirt.io/v1beta1"
#: Names the ConfigMap with arguments for VDDK where ``spec.source.vddk.extraArgs`` does not.
VDDK_ARGUMENTS = "cdi.kubevirt.io/storage.pod.vddk.extraargs"
#: The prefix of our own annotations.
PREFIX = "cdi-worker/"
#: The disk of an OVA, by file name, disk id or number.
DISK = f"{PREFIX}disk"
#: The same for a layer of an artifact in a registry: lines of KEY=VALUE.
LAYER_ANNOTATION = f"{PREFIX}layer-annotation"
#: Names a ConfigMap, all of whose entries are public keys.
SIGNED_BY = f"{PREFIX}signed-by"
#: The annotations that require a signature, and the fields of ``trust.Demand``.
DEMANDS: Mapping[str, str] = {SIGNED_BY: "signed_by", f"{PREFIX}checksum-file": "checksum_file"}
#: Requests that the claim is bound at once, not when a virtual machine first uses it.
BIND_IMMEDIATELY = "cdi.kubevirt.io/storage.bind.immediate.requested"
#: Where a VirtualMachine of KubeVirt has DataVolumes.
TEMPLATES = "spec.dataVolumeTemplates"
#: The kind of source that provides the bytes, where its name is another.
KINDS = {"blank": "none", "upload": "local", "pvc": "volume", "snapshot": "volume"}
#: Sources that are an object of the cluster, which knows its own size.
CLONES = frozenset({"pvc", "snapshot"})
#: Sources that may give an archive.
ARCHIVES = frozenset({"http", "upload", "kubevirt"}) | CLONES
#: Sources that CDI's API does not have, and the types of their fields.
OWN: Mapping[str, Mapping[str, str]] = {
    "kubevirt": {
        "url": "string",
        "secretRef": "string",
        "certConfigMap": "string",
        "extraHeaders": "array",
        "secretExtraHeaders": "array",
        "insecureSkipVerify": "boolean",
    },
    "vsphere": {
        "url": "string",
        "uuid": "string",
        "thumbprint": "string",
        "secretRef": "string",
        "certConfigMap": "string",
        "insecureSkipVerify": "boolean",
        "snapshot": "string",
        "quiesce": "boolean",
    },
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where the data comes from. ``kind``: the name below ``spec.source``. ``fields``: what is below it."""

    kind: str
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def url(self) -> str:
        return str(self.fields.get("url", ""))

    @property
    def secret(self) -> str:
        """The name of the Secret."""
        return str(self.fields.get("secretRef", ""))

    @property
    def node_pull(self) -> bool:
        return self.fields.get("pullMethod") == "node"

    @property
    def provider(self) -> sources.kind.Kind:
        """The kind of source that provides the bytes; ``none`` if the manifest names none."""
        return sources.find(KINDS.get(self.kind, self.kind or "none"))

    def value(self, path: str, default: Any = None) -> Any:
        """Return the value at a path of names with dots, or ``default``."""
        found: Any = self.fields
        for name in path.split("."):
            found = found.get(name, default) if isinstance(found, Mapping) else default
        return found


@dataclasses.dataclass(frozen=True)
class VolumeClaim:
    """The requested volume. ``size``: in bytes, None if it is that of the source.

    ``section``: ``pvc`` is used as it is; for ``storage`` the overhead of the file system is added.
    ``spec``: the section as the manifest has it.
    """

    section: str
    size: int | None
    spec: Mapping[str, Any]

    @property
    def block(self) -> bool:
        return self.spec.get("volumeMode") == "Block"

    @property
    def storage_class(self) -> str | None:
        return self.spec.get("storageClassName")

    def size_with(self, overhead: Fraction | int) -> int:
        """Return the size, in bytes, of a volume that holds a disk of ``size`` bytes."""
        size = self.size or 0
        return size if self.section == "pvc" or self.block else units.volume_size(size, overhead)


@dataclasses.dataclass(frozen=True)
class DataVolume:
    """The values of a manifest. ``final``: the last checkpoint is the end of the migration."""

    name: str
    namespace: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    source: Source
    claim: VolumeClaim
    content_type: str
    preallocation: bool
    checkpoints: tuple[base.Stage, ...]
    final: bool
    priority_class: str
    service_account: str

    @property
    def is_archive(self) -> bool:
        return self.content_type == "archive"

    @property
    def disk(self) -> str:
        """The disk of an OVA."""
        return self.annotations.get(DISK, "")

    @property
    def demand(self) -> dict[str, str]:
        """The annotations that require a signature, by field of ``trust.Demand``."""
        return {field: self.annotations[name] for name, field in DEMANDS.items() if name in self.annotations}

    def stages_after(self, copied: str) -> tuple[base.Stage, ...]:
        """Return the stages after checkpoint ``copied``, or all of them if it is empty.

        Raises ``RequestError`` if there is no such checkpoint, or no stage after it, or several of KubeVirt.
        """
        stages = self.checkpoints
        if copied:
            names = [stage.current for stage in stages]
            if copied not in names:
                raise errors.RequestError(f"spec.checkpoints: no checkpoint has current {copied!r}")
            stages = stages[names.index(copied) + 1 :]
            if not stages:
                raise errors.RequestError(f"spec.checkpoints: no checkpoint follows {copied!r}")
        # The second stage would read the backup of the first again, which looks like a full one.
        if self.source.kind == "kubevirt" and len(stages) > 1:
            raise errors.RequestError(
                f"spec.checkpoints: {len(stages)} stages, but every backup has its own URL; remove the "
                "checkpoints after that of spec.source.kubevirt.url, and give the one before it with --after"
            )
        return stages


def find(found: list[documents.Document]) -> list[documents.Document]:
    """Return the DataVolumes in documents. Raises ``RequestError`` if there is none, or a name twice."""
    volumes = [each for document in found for each in _volumes(document)]
    if not volumes:
        kinds = ", ".join(document.kind or "a document without kind" for document in found) or "none"
        raise errors.RequestError(
            f"expected a DataVolume, or a VirtualMachine with {TEMPLATES}, found none (documents: {kinds})"
        )
    counts = collections.Counter((document.namespace, document.name) for document in volumes)
    twice = ["/".join(filter(None, name)) for name, count in counts.items() if count > 1]
    if twice:
        raise errors.RequestError(*(f"DataVolume {name}: appears twice; remove one" for name in twice))
    return volumes


def _volumes(document: documents.Document) -> Iterable[documents.Document]:
    """Yield a DataVolume, and those that KubeVirt would create of the templates of a VirtualMachine."""
    if document.kind == "DataVolume":
        yield document
    for index, template in enumerate(templates(document)):
        if not isinstance(template, Mapping):
            raise errors.RequestError(f"{document.where}: {TEMPLATES}[{index}]: is not an object (a mapping)")
        content = {"apiVersion": API_VERSION, **template, "kind": "DataVolume"}
        if document.namespace and isinstance(metadata := content.get("metadata"), Mapping):
            content["metadata"] = {"namespace": document.namespace, **metadata}
        yield documents.Document(document.where, content, f"{TEMPLATES}[{index}].")


def templates(document: documents.Document) -> list[Any]:
    """Return the templates of DataVolumes that a VirtualMachine has. Raises ``RequestError``."""
    spec = document.content.get("spec")
    if document.kind != "VirtualMachine" or not isinstance(spec, Mapping):
        return []
    found = spec.get("dataVolumeTemplates") or []
    if not isinstance(found, list):
        raise errors.RequestError(f"{document.where}: {TEMPLATES}: is not a list")
    return found


def parse_all(found: list[documents.Document]) -> list[DataVolume]:
    """Return the values of several DataVolumes. Raises ``RequestError`` with the faults of all, by name."""
    volumes, faults = [], []
    for document in found:
        own: list[str] = []
        volumes.append(parse(document, own))
        named = f"{document.name or document.where}: " if len(found) > 1 else ""
        faults += [f"{named}{fault}" for fault in own]
    if faults:
        raise errors.RequestError(*faults)
    return volumes


def parse(document: documents.Document, faults: list[str]) -> DataVolume:
    """Return the values of a DataVolume; each fault is added to ``faults``, with its path."""
    found: dict[str, str] = {}
    content = schema.check(document.content, _schema(), found)
    metadata, spec = content.get("metadata", {}), content.get("spec", {})
    source = _source(spec, metadata, found)
    volume = DataVolume(
        name=metadata.get("name", ""),
        namespace=metadata.get("namespace", ""),
        labels=metadata.get("labels", {}),
        annotations=metadata.get("annotations", {}),
        source=source,
        claim=_claim(spec, source, found),
        content_type=spec.get("contentType", "kubevirt"),
        preallocation=spec.get("preallocation", False),
        checkpoints=tuple(
            base.Stage(stage.get("previous", ""), stage.get("current", ""))
            for stage in spec.get("checkpoints", ())
        ),
        final=spec.get("finalCheckpoint", False),
        priority_class=spec.get("priorityClassName", ""),
        service_account=spec.get("serviceAccountName", ""),
    )
    _check_source(volume, found)
    known = {*DEMANDS, DISK, LAYER_ANNOTATION}
    for name, value in volume.annotations.items():
        # An unknown one may be a misspelled requirement, which must not be skipped.
        if name.startswith(PREFIX) and name not in known:
            found[f"metadata.annotations[{name}]"] = f"unknown; {errors.supported(name, sorted(known))}"
        elif name.startswith(PREFIX) and not value.strip():
            found[f"metadata.annotations[{name}]"] = "is empty"
    faults += (f"{document.path}{path}: {what}" for path, what in found.items())
    return volume


# -- rules for single fields ------------------------------------------------------------------


def _check_name(text: str) -> None:
    if text and (len(text) > 253 or not documents.NAME.fullmatch(text)):
        allowed = "lower-case letters, digits, '-' and '.', at most 253 characters"
        raise errors.RequestError(f"{schema.shown(text)} is not a name ({allowed})")


def _check_url(schemes: Iterable[str], url: str) -> None:
    """Refuse a URL with another scheme. Messages do not repeat the URL: it may contain a password."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in schemes and bool(parts.netloc or parts.path.strip("/"))
    except ValueError:
        good = False
    if not good or re.search(r"[\s\x00-\x1f\x7f]", url):
        raise errors.RequestError(
            f"is not a URL that begins with {' or '.join(f'{one}:' for one in schemes)}"
        )


NAME = {"check": _check_name}
#: Rules for a field below ``spec.source``, by its name.
FIELDS: Mapping[str, Any] = {
    "secretRef": NAME,
    "certConfigMap": NAME,
    "extraArgs": NAME,
    "name": NAME,
    "namespace": NAME,
    "secretExtraHeaders": {"items": NAME},
    "extraHeaders": {"items": {"check": fields.header}},
    "checksum": {"check": checksum.parse},
    "pullMethod": {"enum": ["pod", "node"]},
}
WEB = ("http", "https")
#: For each source: the schemes of its URL, and the fields that an import needs.
SOURCES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "http": (WEB, ("url",)),
    "s3": ((*WEB, "s3"), ("url",)),
    "gcs": (("gs", *WEB), ("url",)),
    "registry": (("docker", "oci-archive"), ()),
    "upload": ((), ()),
    "blank": ((), ()),
    "imageio": (WEB, ("url", "diskId", "secretRef")),
    "vddk": (WEB, ("url", "uuid", "backingFile", "thumbprint", "secretRef")),
    "kubevirt": (("kubevirt", "https"), ("url",)),
    "vsphere": (("vsphere", *WEB), ("url", "secretRef")),
    "pvc": ((), ("namespace", "name")),
    "snapshot": ((), ("namespace", "name")),
}


def _source_rules(schemes: tuple[str, ...], required: tuple[str, ...]) -> dict[str, Any]:
    fields = {**FIELDS, "url": {"check": functools.partial(_check_url, schemes)}}
    filled = {name: {"minLength": 1, **fields.get(name, {})} for name in ("url", *required)}
    return {"required": required, "properties": fields | filled}


VOLUME: Mapping[str, Any] = {
    "properties": {
        "accessModes": {
            "items": {"enum": ["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]}
        },
        "volumeMode": {"enum": ["Filesystem", "Block"]},
    }
}
STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
#: What CDI's controllers and an import require beyond the published schema.
RULES: Mapping[str, Any] = {
    "required": ["apiVersion", "metadata"],
    "properties": {
        "apiVersion": {"const": API_VERSION},
        "metadata": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": {"type": "string", "minLength": 1} | NAME,
                "namespace": {"type": "string"} | NAME,
                "labels": STRINGS,
                "annotations": {**STRINGS, "properties": {VDDK_ARGUMENTS: {"type": "string"} | NAME}},
            },
        },
        "spec": {
            "properties": {
                "source": {"properties": {kind: _source_rules(*of) for kind, of in SOURCES.items()}},
                "checkpoints": {"items": {"properties": {"current": {"minLength": 1}}}},
                "pvc": VOLUME,
                "storage": VOLUME,
                "priorityClassName": NAME,
                "serviceAccountName": NAME,
            }
        },
    },
}


@functools.cache
def _schema() -> Mapping[str, Any]:
    # Published by CDI: tools/schemas.
    published = smalljson.parse(pathlib.Path(__file__).with_name("datavolume.json").read_bytes())
    known = published["properties"]["spec"]["properties"]["source"]["properties"]
    strings = {"items": {"type": "string"}}
    for source, types in OWN.items():
        own = {name: {"type": kind} | (strings if kind == "array" else {}) for name, kind in types.items()}
        known[source] = {"type": "object", "properties": own, "additionalProperties": False}
    return {"allOf": [published, RULES]}


# -- rules between fields ---------------------------------------------------------------------


def _source(spec: Mapping[str, Any], metadata: Mapping[str, Any], found: dict[str, str]) -> Source:
    """Return the source in ``spec``; its kind is empty if there are none or several."""
    given = spec.get("source", {})
    if "sourceRef" in spec:
        found["spec.sourceRef"] = "refers to a DataSource of a cluster; name the source itself in spec.source"
    elif not given and not any(path.startswith("spec.source") for path in found):
        found["spec.source"] = f"missing; one of {', '.join(SOURCES)}"
    if len(given) > 1:
        found["spec.source"] = f"expected one source, found {len(given)}: {', '.join(given)}"
    if len(given) != 1:
        return Source(kind="")
    ((kind, fields),) = given.items()
    annotations = metadata.get("annotations", {})
    if kind == "vddk" and VDDK_ARGUMENTS in annotations:
        fields = {"extraArgs": annotations[VDDK_ARGUMENTS]} | fields
    if kind == "registry" and LAYER_ANNOTATION in annotations:
        fields = {"layerAnnotation": annotations[LAYER_ANNOTATION]} | fields
    return Source(kind=kind, fields=fields)


def _check_source(volume: DataVolume, found: dict[str, str]) -> None:
    source = volume.source
    where = f"spec.source.{source.kind}"
    if source.kind == "registry":
        image_stream = source.value("imageStream")
        if bool(source.url) == bool(image_stream):
            found.setdefault(f"{where}.url", "expected either url or imageStream")
        if image_stream and not source.node_pull:
            found.setdefault(f"{where}.imageStream", "needs pullMethod node")
    if source.kind == "imageio" and not (source.value("insecureSkipVerify") or source.value("certConfigMap")):
        found.setdefault(f"{where}.certConfigMap", "missing")
    if source.kind == "vsphere" and not (source.value("uuid") or source.url.startswith("vsphere:")):
        found.setdefault(f"{where}.uuid", "missing: the UUID of the virtual machine")
    logins = ("secretRef", "secretExtraHeaders", "extraHeaders")
    if source.kind == "kubevirt" and not any(map(source.value, logins)):
        found.setdefault(f"{where}.secretRef", "missing: the Secret with the token of the export")
    if volume.checkpoints and source.kind:
        staged = sorted(kind for kind in {*SOURCES} - {*KINDS} if sources.find(kind).location_type.staged)
        if source.kind not in staged:
            only = f"{', '.join(staged[:-1])} and {staged[-1]}"
            found.setdefault("spec.checkpoints", f"source {source.kind} has no checkpoints, only {only}")
    for index, (before, stage) in enumerate(itertools.pairwise(volume.checkpoints), 1):
        # A change id of VMware, with "/", names the checkpoint in another way. A device cannot remember the
        # checkpoint on it, so that a stage in the wrong place would make a wrong disk.
        if stage.previous and "/" not in stage.previous and stage.previous != before.current:
            what = f"{stage.previous!r} is not {before.current!r}, the current checkpoint of the stage before"
            found.setdefault(f"spec.checkpoints[{index}].previous", what)
    if volume.is_archive and source.kind and source.kind not in ARCHIVES:
        found.setdefault("spec.contentType", f"source {source.kind} cannot provide an archive")
    if volume.is_archive and volume.claim.block:
        needed = "an archive needs a volume with a file system; remove volumeMode: Block"
        found.setdefault("spec.contentType", needed)


def _claim(spec: Mapping[str, Any], source: Source, found: dict[str, str]) -> VolumeClaim:
    sections = [name for name in ("pvc", "storage") if name in spec]
    if len(sections) != 1:
        count = len(sections) or "neither"
        found.setdefault("spec.storage", f"expected either spec.pvc or spec.storage, found {count}")
    section = sections[0] if sections else "storage"
    given = spec.get(section, {})
    if section == "pvc" and len(given.get("accessModes", ())) != 1:
        found.setdefault("spec.pvc.accessModes", "expected one access mode")
    for name in ("dataSource", "dataSourceRef"):
        if name in given:
            found.setdefault(f"spec.{section}.{name}", "not supported; name the source in spec.source")
    path = f"spec.{section}.resources.requests.storage"
    quantity = given.get("resources", {}).get("requests", {}).get("storage")
    size = None
    try:
        if quantity is not None and not (size := units.parse_quantity(str(quantity))):
            raise ValueError("must be greater than 0")
    except ValueError as err:
        found.setdefault(path, str(err))
    if quantity is None and sections and not (section == "storage" and source.kind in CLONES):
        found.setdefault(path, "missing: the size of the disk")
    return VolumeClaim(section, size, given)
