"""The source of a DataVolume (``spec.source``) as typed values."""

from __future__ import annotations

import dataclasses
import re
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from formats import checksum
from importer import contract, documents, errors

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


def parse(spec: documents.Fields) -> Source:
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
