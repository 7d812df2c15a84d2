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
#: What only a person can do who has typed a command; not said elsewhere.
COMMAND: Final = "command"
USER: Final = "user and password"

#: An action, and the setting that does it; empty if no setting of ours does.
Way = tuple[str, str]


class Remedy(tuple[Way, ...]):
    """Ways to mend a failure. As text, it has the names of the library."""

    __slots__ = ()

    def words(self, names: Mapping[str, str] | None = None) -> str:
        """Return the ways as one sentence. One whose setting has no name in ``names`` is left out."""
        ways = []
        for what, setting in self:
            name = setting if names is None else names.get(setting)
            if not setting or (setting == COMMAND and names is not None and name is not None):
                ways.append(what)
            elif name is not None and setting != COMMAND:
                ways.append(f"{what} ({name})")
        return ", or ".join(ways)

    def __str__(self) -> str:
        return self.words()


#: A container runtime gives the device of a pod to root, whatever user the pod runs as, unless configured.
NOT_OURS: Final = Remedy(
    [("run as root, or as a member of its group", ROOT), ("give it to the pod's user", DEVICE)]
)
#: Of an upload server, which answers 401.
LOGIN: Final = Remedy([("give the client's certificate", CERTIFICATE), ("a token", TOKEN)])
#: Of a server that answers 401.
PASSWORD: Final = Remedy([("give them", USER)])
#: Of a target that may not be written to.
PERMISSIONS: Final = Remedy([("check the permissions, or name another target", COMMAND)])
#: Of what prevents reading a source at all, by the reason.
BY_REASON: Final = {
    reason: Remedy([(what, COMMAND)])
    for reason, what in {
        "connection refused": "check host and port, and that the server runs",
        "connect: connection refused": "check host and port, and that the server runs",
        "unknown host": "check the name of the host",
        "no such file or directory": "check the path; a URL begins with https://",
        "connect: no such file or directory": "check the path of the socket",
        "is a directory": "name the file of the disk",
        "permission denied": "check the permissions of the file",
    }.items()
}
