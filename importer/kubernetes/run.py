"""Run a DataVolume's import on this machine, onto a file, directory or device."""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import pathlib
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction
from typing import Any

from cdi_worker import errors, masking, units
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, execute, progress, request, survey
from cdi_worker.importer.kubernetes import datavolume, references, signed
from cdi_worker.importer.settings import Room, Settings
from cdi_worker.sources import base, fields, staged

#: Sources that need ``--from``: the manifest does not say where their bytes are on this machine.
LOCAL = frozenset({"upload", "pvc"})
SECRET, CONFIG_MAP = "Secret", "ConfigMap"
USER, PASSWORD, TOKEN = "accessKeyId", "secretKey", "sessionToken"
#: The field of a source that names its Secret.
REFERENCE = "secretRef"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a manifest does not say of its import on this machine. ``origin``: the file to upload, or the
    volume to clone.

    ``folder``: for certificates and other files that sources read; it must outlive the run. ``after``: the
    checkpoint already on the target. ``mounts``: the files of sources, by option.
    """

    target: str
    folder: str
    origin: str = ""
    after: str = ""
    mounts: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class Planner:
    """Makes import requests from a DataVolume; missing values are added to ``faults``, with their paths."""

    volume: datavolume.DataVolume
    keys: references.References
    place: Place
    settings: Settings
    env: Mapping[str, str]
    faults: list[str]

    def requests(self) -> list[request.Request]:
        """Return one request for each stage."""
        full = self._request()
        try:
            stages = self.volume.stages_after(self.place.after)
        except errors.RequestError as err:
            self.faults += err.faults
            return []
        return [
            dataclasses.replace(full, location=self._staged(full.location, stage, stages[-1]))
            for stage in stages
        ] or [full]

    def _staged(self, location: base.Location, stage: base.Stage, last: base.Stage) -> base.Location:
        if not isinstance(location, staged.Staged):
            return location
        is_final = self.volume.final and stage is last
        made = dataclasses.replace(location, previous=stage.previous, current=stage.current, final=is_final)
        return made.at_stage()

    def _request(self) -> request.Request:
        volume, claim = self.volume, self.volume.claim
        given = self.settings.room
        overhead = Fraction(0) if given is None or claim.block else given.overhead
        settings = self.settings._replace(
            content_type=volume.content_type,
            room=Room(size=None if claim.size is None else claim.size_with(overhead), overhead=overhead),
            preallocation=volume.preallocation,
            checksum=volume.source.checksum or None,
            disk=volume.source.disk,
            demand=signed.demand(volume.annotations, self._signer) | dict(self.settings.demand),
        )
        target = request.disk_path(self.place.target, settings)
        return request.make(volume.source.provider.name, self._location(), target, settings)

    def _location(self) -> base.Location:
        source, place = self.volume.source, self.place
        where = f"spec.source.{source.kind}"
        self.faults += self._unreachable(where)
        reading = contract.Reading(self.env)

        def given(field: fields.Field) -> Any:
            if field.entry:
                return self._entry(where, field)
            if field.key:
                return source.value(field.key)
            if field.mount:
                return place.mounts.get(field.option)
            return reading.field(field) if field.ambient else None

        made = source.provider.fill(place.origin or source.url, self._access(where), given)
        self.faults += reading.faults
        return made

    def _unreachable(self, where: str) -> Iterator[str]:
        """Yield the faults of a source that cannot be read outside the cluster, or not without ``--from``."""
        source, origin = self.volume.source, self.place.origin
        if source.kind == "snapshot":
            yield f"{where}: snapshots can be read only within the cluster"
        if source.image_stream:
            yield f"{where}.imageStream: image streams exist only within the cluster; use url"
        if source.kind in LOCAL and not origin:
            yield f"{where}: no file, device or directory given; use --from"
        if source.kind not in LOCAL | {""} and origin:
            yield f"{where}: --from is only for the sources {' and '.join(sorted(LOCAL))}"

    def _entry(self, where: str, field: fields.Field) -> str | None:
        """Return the path of a file with the entry of the Secret or ConfigMap that a field names."""
        name = self.volume.source.value(field.key)
        if not name:
            return None
        kind = SECRET if field.key == REFERENCE else CONFIG_MAP
        held = self._held(f"{where}.{field.key}", kind, name, (field.entry,))
        return self._kept(field.entry, held[field.entry]) if field.entry in held else None

    def _access(self, where: str) -> base.Access:
        source = self.volume.source
        path = f"{where}.{REFERENCE}"
        # Some sources read the Secret as a file instead (field.entry).
        is_file = any(field.key == REFERENCE for field, _ in source.provider.table.values())
        held = (
            {} if is_file or not source.secret else self._held(path, SECRET, source.secret, (USER, PASSWORD))
        )
        return self.settings.access(
            user=self._text(path, held, USER),
            password=self._text(path, held, PASSWORD),
            session_token=self._text(path, held, TOKEN),
            headers=tuple(contract.parse_header(header) for header in source.headers) + self._headers(),
            ca_files=self._certificates(),
            insecure=source.insecure,
            **contract.Reading(self.env).proxies(),
        )

    def _signer(self, where: str, name: str, entry: str) -> str:
        """Return the path of a file with an entry of a ConfigMap, with all of them for ``*``."""
        if entry == "*":
            held = self._held(where, CONFIG_MAP, name)
            return self._kept("signed-by", b"\n".join(held[key] for key in sorted(held)))
        held = self._held(where, CONFIG_MAP, name, (entry,))
        return self._kept(entry, held.get(entry, b""))

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

    def _headers(self) -> tuple[tuple[str, str], ...]:
        found = []
        for index, name in enumerate(self.volume.source.secret_headers):
            path = f"spec.source.{self.volume.source.kind}.secretExtraHeaders[{index}]"
            held = self._held(path, SECRET, name)
            for key in sorted(held):
                try:
                    found.append(contract.parse_header(self._text(path, held, key)))
                except errors.RequestError:
                    self.faults.append(f"{path}: Secret {name}, key {key}: malformed extra header")
        return tuple(found)

    def _certificates(self) -> tuple[str, ...]:
        source = self.volume.source
        if not source.certificates:
            return ()
        held = self._held(f"spec.source.{source.kind}.certConfigMap", CONFIG_MAP, source.certificates)
        return tuple(self._kept(f"ca-{index}", held[key]) for index, key in enumerate(sorted(held)))

    def _kept(self, name: str, data: bytes) -> str:
        """Write ``data`` to a private file and return its path."""
        path = pathlib.Path(self.place.folder, name)
        path.touch(mode=0o600)
        path.write_bytes(data)
        return str(path)


def run(
    volume: datavolume.DataVolume,
    stages: list[request.Request],
    status: Status,
    reporter: progress.Progress,
    cancel: cancelling.Cancel,
) -> None:
    """Import all stages. Raises ``errors.Error`` after the status has reported it.

    The report of each stage replaces the one before.
    """
    status.to("Pending", "the manifest is valid")
    try:
        if volume.source.kind == "blank":
            _check_room(stages[0])
        for number, wanted in enumerate(stages, 1):
            current = wanted.stage.current
            status.to(status.scheduled, f"checkpoint {current}" if current else wanted.target)
            both = progress.Several(reporter, Watch(status))
            result = execute.run(wanted, both, cancel)
            if current and not wanted.stage.final:
                more = "" if number < len(stages) else f"; continue with --after {current}"
                status.to("Paused", f"checkpoint {current} copied{more}")
            else:
                status.to("Succeeded", f"{units.format_size(result.size)} by {result.plan.route}")
    except errors.Error as err:
        status.to("Failed", str(err))
        raise


def _check_room(wanted: request.Request) -> None:
    """Raise ``TooLarge`` if the target is smaller than requested: a cluster would not bind such a volume."""
    room = survey.room(wanted)
    size = wanted.room.size or 0
    needed = size if room.block else units.usable_space(size, wanted.room.overhead)
    if room.usable < needed:
        raise errors.TooLarge(virtual_size=needed, available=room.available)


#: The conditions Bound, Running and Ready in each phase.
CONDITIONS = {
    "Pending": (False, False, False),
    "ImportScheduled": (True, False, False),
    "ImportInProgress": (True, True, False),
    "UploadScheduled": (True, False, False),
    "UploadReady": (True, True, False),
    "CloneScheduled": (True, False, False),
    "CloneInProgress": (True, True, False),
    "Paused": (True, False, False),
    "Succeeded": (True, False, True),
    "Failed": (True, False, False),
}
#: The phases before and during the transfer, by source; of all others, ``IMPORT``.
PHASES = {"upload": ("UploadScheduled", "UploadReady"), "pvc": ("CloneScheduled", "CloneInProgress")}
IMPORT = ("ImportScheduled", "ImportInProgress")
#: Reasons of the condition Running, by phase.
REASONS = {"Paused": "Completed", "Succeeded": "Completed", "Failed": "Error"}


class Status:
    """Prints each change of phase once, as a line of text or as the API's object in JSON."""

    def __init__(self, name: str, source: str, write: Callable[[str], object], *, as_json: bool) -> None:
        self.phase = ""
        self._name = name
        self.scheduled, self.in_progress = PHASES.get(source, IMPORT)
        self._print = write
        self._as_json = as_json
        self._since: dict[str, tuple[bool, str]] = {}

    def to(self, phase: str, message: str = "") -> None:
        """Print a change of phase. ``message``: that of the condition Running."""
        if phase == self.phase:
            return
        self.phase = phase
        conditions = self._conditions(phase, message)
        if self._as_json:
            done = "100.0%" if phase == "Succeeded" else "N/A"
            found = {"claimName": self._name, "phase": phase, "progress": done, "conditions": conditions}
            self._print(json.dumps(masking.masked(found)))
            return
        shown = " ".join(f"{condition['type']}={condition['status']}" for condition in conditions)
        self._print(f"{phase:<16} {shown}{'  ' + message if message else ''}")

    def _conditions(self, phase: str, message: str) -> list[dict[str, str]]:
        now = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        bound, running, ready = CONDITIONS[phase]
        reasons = {
            "Bound": "Bound" if bound else "Pending",
            "Running": "TransferRunning" if running else REASONS.get(phase, ""),
            "Ready": "TransferRunning" if running else "",
        }
        made = []
        for kind, value in (("Bound", bound), ("Running", running), ("Ready", ready)):
            before, since = self._since.get(kind, (not value, now))
            self._since[kind] = value, since if before == value else now
            made.append(
                {
                    "type": kind,
                    "status": str(value),
                    "reason": reasons[kind],
                    "message": message if kind == "Running" else "",
                    "lastTransitionTime": self._since[kind][1],
                    "lastHeartbeatTime": now,
                }
            )
        return made


class Watch(progress.NullProgress):
    """Progress that sets the status to in progress when the source has answered."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def phase(self, name: str, total: int | None) -> None:
        if name != "connect":
            self._status.to(self._status.in_progress)
