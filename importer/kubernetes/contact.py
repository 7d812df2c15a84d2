"""The contact to the source of a DataVolume, to find out whether its import needs scratch space."""

from __future__ import annotations

import base64
import dataclasses
import pathlib
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import workspace
from cdi_worker.importer import contract, inspection
from cdi_worker.importer import request as request_module
from cdi_worker.importer.kubernetes import datavolume, documents
from cdi_worker.sources import base, fields, smallfile, staged, trust

#: Sources whose need for scratch depends on their data.
UNKNOWN_SCRATCH = frozenset({"http", "s3", "gcs", "registry"})
USER, PASSWORD, TOKEN = "accessKeyId", "secretKey", "sessionToken"
#: The field of a source that names its Secret.
REFERENCE = "secretRef"
#: Fields of a Secret or ConfigMap with values in base64 and as text.
VALUES = {"Secret": ("data", "stringData"), "ConfigMap": ("binaryData", "data")}
#: Largest Secret or ConfigMap, in bytes (Kubernetes, MaxSecretSize).
LIMIT = 1 << 20


def needs_scratch(
    volume: datavolume.DataVolume,
    references: References,
    overhead: Fraction,
    cancel: cancelling.Cancel,
) -> bool | None:
    """Return whether the source's data needs scratch; None if that does not depend on its data.

    Raises ``RequestError`` with all missing Secrets, ConfigMaps and keys.
    """
    if volume.source.kind not in UNKNOWN_SCRATCH or volume.is_archive:
        return None
    with workspace.Workspace() as folder:
        reading = Reading(volume, references, folder, contract.environment())
        request = reading.request(overhead)
        if reading.faults:
            raise errors.RequestError(*reading.faults)
        result = inspection.inspect(request, cancel)
    if result.plan is None:
        raise result.obstacle or errors.RequestError(f"{result.source}: no route")
    return result.plan.scratch or result.plan.spill


class References:
    """The values of the Secrets and ConfigMaps that a DataVolume refers to, by name and key.

    ``directory`` has a folder for each object, with a file for each key.

    Raises ``RequestError`` for objects that are malformed.
    """

    def __init__(self, parts: list[documents.Document], directory: str | None = None) -> None:
        self._directory = directory
        self._objects: dict[tuple[str, str], dict[str, bytes]] = {}
        faults: list[str] = []
        for document in parts:
            if document.kind in VALUES:
                self._objects[document.kind, document.name] = _content(document, faults)
        if faults:
            raise errors.RequestError(*faults)

    def find(self, kind: str, name: str) -> Mapping[str, bytes] | None:
        """Return the values of a Secret or ConfigMap (``kind``), or None if there is no such object."""
        if (kind, name) in self._objects:
            return self._objects[kind, name]
        folder = None if self._directory is None else pathlib.Path(self._directory, name)
        if folder is None or not folder.is_dir():
            return None
        # Kubernetes mounts secrets as links into ..data.
        keys = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != ".")
        return {path.name: smallfile.read(path, LIMIT) for path in keys}


def _content(document: documents.Document, faults: list[str]) -> dict[str, bytes]:
    """Return an object's values by key. Messages name keys but never show values."""
    content: dict[str, bytes] = {}
    where = f"{document.kind} {document.name}" if document.name else document.where
    encoded, plain = VALUES[document.kind]
    for field in (encoded, plain):
        entries = {} if document.content.get(field) is None else document.content[field]
        if not isinstance(entries, dict):
            faults.append(f"{where}: {field}: is not a mapping")
            continue
        for key, value in entries.items():
            if isinstance(value, str) and field == plain:
                content[key] = value.encode()
            elif isinstance(value, str):
                try:
                    content[key] = base64.b64decode("".join(value.split()), validate=True)
                except ValueError:
                    faults.append(f"{where}: {field}.{key}: is not base64")
            elif value is not None:
                faults.append(f"{where}: {field}.{key}: is not a string; put it in quotes")
    return content


@dataclasses.dataclass
class Reading:
    """Makes an import request from a DataVolume; missing values are added to ``faults``, with their paths.

    ``folder``: for certificates and other files that sources read; it must outlive the request.
    """

    volume: datavolume.DataVolume
    references: References
    folder: str
    env: Mapping[str, str]
    faults: list[str] = dataclasses.field(default_factory=list)

    def request(self, overhead: Fraction) -> request_module.Request:
        """Return the request of the first stage, without a target."""
        volume, claim, demand = self.volume, self.volume.claim, self.volume.demand
        size = None if claim.size is None else claim.size_with(overhead)
        if name := demand.get("signed_by"):
            keys = self._values(f"metadata.annotations[{datavolume.SIGNED_BY}]", "ConfigMap", name)
            demand["signed_by"] = self._write("signed-by", b"\n".join(keys[key] for key in sorted(keys)))
        settings = {
            "content_type": volume.content_type,
            "room": request_module.Room(size=size, overhead=overhead),
            "preallocation": volume.preallocation,
            "checksum": volume.source.value("checksum"),
            "disk": volume.disk,
            "demand": trust.Demand(**demand),
        }
        return request_module.make(volume.source.provider.name, self._location(), "", settings)

    def _location(self) -> base.Location:
        source = self.volume.source
        where = f"spec.source.{source.kind}"
        if source.value("imageStream"):
            self.faults.append(f"{where}.imageStream: image streams exist only within the cluster; use url")
        reading = contract.Reading(self.env)

        def given(field: fields.Field) -> Any:
            if field.entry:
                # A file with one entry of the source's Secret, which then has no user and password.
                path, name = f"{where}.{REFERENCE}", source.secret
                values = self._values(path, "Secret", name, (field.entry,)) if name else {}
                return self._write(field.entry, values[field.entry]) if field.entry in values else None
            if field.key:
                return source.value(field.key)
            return reading.field(field) if field.ambient else None

        location = source.provider.fill(source.url, self._access(where), given)
        self.faults += reading.faults
        stages = self.volume.checkpoints
        if not stages or not isinstance(location, staged.Staged):
            return location
        first, is_final = stages[0], self.volume.final and len(stages) == 1
        return dataclasses.replace(
            location, previous=first.previous, current=first.current, final=is_final
        ).at_stage()

    def _access(self, where: str) -> base.Access:
        source = self.volume.source
        path = f"{where}.{REFERENCE}"
        is_file = any(field.key == REFERENCE for field, _ in source.provider.table.values())
        has_login = source.secret and not is_file
        login = self._values(path, "Secret", source.secret, (USER, PASSWORD)) if has_login else {}
        headers = [fields.header(each) for each in source.value("extraHeaders", ())]
        for index, name in enumerate(source.value("secretExtraHeaders", ())):
            path_of_headers = f"{where}.secretExtraHeaders[{index}]"
            values = self._values(path_of_headers, "Secret", name)
            for key in sorted(values):
                try:
                    headers.append(fields.header(self._text(path_of_headers, values, key)))
                except errors.RequestError:
                    self.faults.append(f"{path_of_headers}: Secret {name}, key {key}: malformed extra header")
        name = source.value("certConfigMap")
        bundles = self._values(f"{where}.certConfigMap", "ConfigMap", name) if name else {}
        return base.Access(
            user=self._text(path, login, USER),
            password=self._text(path, login, PASSWORD),
            session_token=self._text(path, login, TOKEN),
            headers=tuple(headers),
            ca_files=tuple(
                self._write(f"ca-{index}", bundles[key]) for index, key in enumerate(sorted(bundles))
            ),
            insecure=bool(source.value("insecureSkipVerify")),
            **contract.Reading(self.env).fields(base.Access, base.PROXIES),
        )

    def _values(self, path: str, kind: str, name: str, required: tuple[str, ...] = ()) -> Mapping[str, bytes]:
        """Return the values of an object; add a fault if the object or a required key is missing."""
        values = self.references.find(kind, name)
        if values is None:
            self.faults.append(f"{path}: no {kind} {name} in the manifest or below --secrets")
            return {}
        self.faults += [f"{path}: {kind} {name} has no key {key}" for key in required if key not in values]
        return values

    def _text(self, path: str, values: Mapping[str, bytes], key: str) -> str:
        try:
            return values.get(key, b"").decode().strip("\r\n")
        except UnicodeDecodeError:
            self.faults.append(f"{path}: key {key} is not UTF-8")
            return ""

    def _write(self, name: str, data: bytes) -> str:
        """Write ``data`` to a private file and return its path."""
        path = pathlib.Path(self.folder, name)
        path.touch(mode=0o600)
        path.write_bytes(data)
        return str(path)
