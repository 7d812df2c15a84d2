"""The status of a DataVolume: the documented phases and conditions, printed as they change."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable

from importer import progress

#: What the conditions are in each phase: Bound, Running, Ready.
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
#: What the names of the phases begin with, by source.
VERBS = {"upload": "Upload", "pvc": "Clone"}
#: Why a condition is what it is, where the phase alone does not say it.
REASONS = {"Paused": "Completed", "Succeeded": "Completed", "Failed": "Error"}


class Status:
    """Tells of every change once, as a line for people or as the API's object for programs."""

    def __init__(self, name: str, source: str, say: Callable[[str], object], *, as_json: bool) -> None:
        self.phase = ""
        self._name = name
        self._verb = VERBS.get(source, "Import")
        self._say = say
        self._as_json = as_json
        self._since: dict[str, tuple[bool, str]] = {}

    def pending(self) -> None:
        self._to("Pending", "the manifest is well-formed")

    def scheduled(self, message: str) -> None:
        self._to(f"{self._verb}Scheduled", message)

    def in_progress(self) -> None:
        self._to("UploadReady" if self._verb == "Upload" else f"{self._verb}InProgress", "")

    def paused(self, message: str) -> None:
        self._to("Paused", message)

    def succeeded(self, message: str) -> None:
        self._to("Succeeded", message)

    def failed(self, message: str) -> None:
        self._to("Failed", message)

    def _to(self, phase: str, message: str) -> None:
        if phase == self.phase:
            return
        self.phase = phase
        conditions = self._conditions(phase, message)
        if self._as_json:
            done = "100.0%" if phase == "Succeeded" else "N/A"
            said = {"claimName": self._name, "phase": phase, "progress": done, "conditions": conditions}
            self._say(json.dumps(said))
            return
        shown = " ".join(f"{condition['type']}={condition['status']}" for condition in conditions)
        self._say(f"{phase:<16} {shown}{'  ' + message if message else ''}")

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
    """A progress that sees the transfer begin: when the source has answered."""

    def __init__(self, status: Status) -> None:
        self._status = status

    def phase(self, name: str, total: int | None) -> None:
        if name != "connect":
            self._status.in_progress()
