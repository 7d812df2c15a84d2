"""The contact to the source of a DataVolume, to find out whether its import needs scratch space."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import workspace
from cdi_worker.importer import contract, inspection, request
from cdi_worker.importer.kubernetes import datavolume, references, signed
from cdi_worker.sources import base, fields, staged, trust

#: Sources whose need for scratch depends on their data.
UNKNOWN_SCRATCH = frozenset({"http", "s3", "gcs", "registry"})
SECRET, CONFIG_MAP = "Secret", "ConfigMap"
USER, PASSWORD, TOKEN = "accessKeyId", "secretKey", "sessionToken"
#: The field of a source that names its Secret.
REFERENCE = "secretRef"


def needs_scratch(
    volume: datavolume.DataVolume,
    keys: references.References,
    overhead: Fraction,
    cancel: cancelling.Cancel,
) -> bool | None:
    """Return whether the source's data needs scratch; None if that does not depend on its data.

    Raises ``RequestError`` with all missing Secrets, ConfigMaps and keys.
    """
    if volume.source.kind not in UNKNOWN_SCRATCH or volume.is_archive:
        return None
    with workspace.Workspace() as folder:
        reading = Reading(volume, keys, folder, contract.environment())
        made = reading.request(overhead)
        if reading.faults:
            raise errors.RequestError(*reading.faults)
        facts = inspection.inspect(made, cancel)
    if facts.plan is None:
        raise facts.obstacle or errors.RequestError(f"{facts.source}: no route")
    return facts.plan.scratch or facts.plan.spill


@dataclasses.dataclass
class Reading:
    """Makes an import request from a DataVolume; missing values are added to ``faults``, with their paths.

    ``folder``: for certificates and other files that sources read; it must outlive the request.
    """

    volume: datavolume.DataVolume
    keys: references.References
    folder: str
    env: Mapping[str, str]
    faults: list[str] = dataclasses.field(default_factory=list)

    def request(self, overhead: Fraction) -> request.Request:
        """Return the request of the first stage, without a target."""
        volume, claim = self.volume, self.volume.claim
        if claim.block:
            overhead = Fraction(0)
        size = None if claim.size is None else claim.size_with(overhead)
        settings = {
            "content_type": volume.content_type,
            "room": request.Room(size=size, overhead=overhead),
            "preallocation": volume.preallocation,
            "checksum": volume.source.value("checksum"),
            "disk": volume.source.disk,
            "demand": trust.Demand(**signed.demand(volume.annotations, self._signers)),
        }
        return request.make(volume.source.provider.name, self._location(), "", settings)

    def _location(self) -> base.Location:
        source = self.volume.source
        where = f"spec.source.{source.kind}"
        if source.image_stream:
            self.faults.append(f"{where}.imageStream: image streams exist only within the cluster; use url")
        reading = contract.Reading(self.env)

        def given(field: fields.Field) -> Any:
            if field.entry:
                return self._entry(where, field.entry)
            if field.key:
                return source.value(field.key)
            return reading.field(field) if field.ambient else None

        made = source.provider.fill(source.url, self._access(where), given)
        self.faults += reading.faults
        stages = self.volume.checkpoints
        if not stages or not isinstance(made, staged.Staged):
            return made
        first, is_final = stages[0], self.volume.final and len(stages) == 1
        made = dataclasses.replace(made, previous=first.previous, current=first.current, final=is_final)
        return made.at_stage()

    def _entry(self, where: str, entry: str) -> str | None:
        """Return the path of a file with an entry of the source's Secret, None if it has none."""
        name = self.volume.source.secret
        held = self._held(f"{where}.{REFERENCE}", SECRET, name, (entry,)) if name else {}
        return self._kept(entry, held[entry]) if entry in held else None

    def _access(self, where: str) -> base.Access:
        source = self.volume.source
        path = f"{where}.{REFERENCE}"
        # Some sources read the Secret as a file instead (field.entry).
        is_file = any(field.key == REFERENCE for field, _ in source.provider.table.values())
        secret = "" if is_file else source.secret
        held = self._held(path, SECRET, secret, (USER, PASSWORD)) if secret else {}
        return base.Access(
            user=self._text(path, held, USER),
            password=self._text(path, held, PASSWORD),
            session_token=self._text(path, held, TOKEN),
            headers=(*map(fields.header, source.headers), *self._secret_headers()),
            ca_files=self._certificates(),
            insecure=source.insecure,
            **contract.Reading(self.env).fields(base.Access, base.PROXIES),
        )

    def _signers(self, where: str, name: str) -> str:
        """Return the path of a file with the public keys in a ConfigMap."""
        held = self._held(where, CONFIG_MAP, name)
        return self._kept("signed-by", b"\n".join(held[key] for key in sorted(held)))

    # -- Secrets and ConfigMaps ---------------------------------------------------------------

    def _held(self, path: str, kind: str, name: str, required: tuple[str, ...] = ()) -> Mapping[str, bytes]:
        """Return the values of an object; add a fault if the object or a required key is missing."""
        held = self.keys.find(kind, name)
        if held is None:
            self.faults.append(f"{path}: no {kind} {name} in the manifest or below --secrets")
            return {}
        self.faults += [f"{path}: {kind} {name} has no key {key}" for key in required if key not in held]
        return held

    def _text(self, path: str, held: Mapping[str, bytes], key: str) -> str:
        try:
            return held.get(key, b"").decode().strip("\r\n")
        except UnicodeDecodeError:
            self.faults.append(f"{path}: key {key} is not UTF-8")
            return ""

    def _secret_headers(self) -> Iterator[tuple[str, str]]:
        for index, name in enumerate(self.volume.source.secret_headers):
            path = f"spec.source.{self.volume.source.kind}.secretExtraHeaders[{index}]"
            held = self._held(path, SECRET, name)
            for key in sorted(held):
                try:
                    yield fields.header(self._text(path, held, key))
                except errors.RequestError:
                    self.faults.append(f"{path}: Secret {name}, key {key}: malformed extra header")

    def _certificates(self) -> tuple[str, ...]:
        source = self.volume.source
        if not source.certificates:
            return ()
        held = self._held(f"spec.source.{source.kind}.certConfigMap", CONFIG_MAP, source.certificates)
        return tuple(self._kept(f"ca-{index}", held[key]) for index, key in enumerate(sorted(held)))

    def _kept(self, name: str, data: bytes) -> str:
        """Write ``data`` to a private file and return its path."""
        path = pathlib.Path(self.folder, name)
        path.touch(mode=0o600)
        path.write_bytes(data)
        return str(path)
