"""What to do about a failure, as a value: each front end has its own names for the settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

#: Settings, by the library's names: fields of ``base.Access`` and of locations.
CA: Final = "ca_files"
PATIENCE: Final = "patience"
SLOWEST: Final = "slowest"
INSECURE: Final = "insecure"
THUMBPRINT: Final = "thumbprint"
CERTIFICATE: Final = "certificate"
TOKEN: Final = "token"  # noqa: S105  (a name)
#: What is set outside: of the process, and of the container runtime.
ROOT: Final = "root"
DEVICE: Final = "device"

#: An action, and the setting that does it; empty if no setting of ours does.
Way = tuple[str, str]


class Remedy(tuple[Way, ...]):
    """Ways to mend a failure. As text, it has the names of the library."""

    __slots__ = ()

    def words(self, names: Mapping[str, str] | None = None) -> str:
        """Return the ways as one sentence. One whose setting has no name in ``names`` is left out."""
        ways = [
            f"{what} ({setting if names is None else names[setting]})" if setting else what
            for what, setting in self
            if not setting or names is None or setting in names
        ]
        return ", or ".join(ways)

    def __str__(self) -> str:
        return self.words()


#: A container runtime gives the device of a pod to root, whatever user the pod runs as, unless configured.
NOT_OURS: Final = Remedy(
    [("run as root, or as a member of its group", ROOT), ("give it to the pod's user", DEVICE)]
)
#: Of an upload server, which answers 401.
LOGIN: Final = Remedy([("give the client's certificate", CERTIFICATE), ("a token", TOKEN)])
