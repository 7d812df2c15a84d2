"""The phases of an oVirt image transfer."""

from __future__ import annotations

import contextlib
import dataclasses

from tests.support import imageiod

ENDED = {"finished_success", "finished_failure", "finished_cleanup"}
#: The phase that follows each phase by itself.
NEXT = {
    "finalizing_success": "finished_success",
    "cancelled_system": "finalizing_failure",
    "finalizing_failure": "finished_failure",
    "cancelled_user": "finalizing_cleanup",
    "finalizing_cleanup": "finished_cleanup",
    "initializing": "transferring",
    "resuming": "transferring",
}


@dataclasses.dataclass
class Transfer:
    """A transfer. ``log``: its phases so far. ``admitted``: whether the host has its ticket."""

    id: str
    disk: str
    volume: imageiod.Volume
    form: str
    log: list[str] = dataclasses.field(default_factory=list)
    ticket: str = ""
    admitted: bool = False
    since: float = 0.0
    export: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)

    @property
    def phase(self) -> str:
        """Return the current phase."""
        return self.log[-1]
