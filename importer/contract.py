"""Inputs of the worker contract: a pod's environment and mounts. Only this module reads the environment."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cdi_worker import errors
from cdi_worker.sources import fields

if TYPE_CHECKING:
    from fractions import Fraction

log = logging.getLogger(__name__)

#: The mode of a disk's file, whatever the umask: the virtual machine has access by its group.
FILE_MODE = 0o660
#: Prefix of our own variables. Others are CDI's, which controllers may leave empty, or those of other tools.
PREFIX = "CDI_WORKER"
#: OpenSSL reads the first, botocore the others.
LIBRARY_FILES = (
    "SSL_CERT_FILE",
    "AWS_CONFIG_FILE",
    "AWS_SHARED_CREDENTIALS_FILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE",
)
#: What follows the name of a Service in the variables that Kubernetes sets for it, with their values
#: (Kubernetes, "Accessing Services", environment variables). A setting may also be named ..._PORT.
_INJECTED = re.compile(
    r"(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    "|_PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)
_BORDER = re.compile("_(?=SERVICE_|PORT)")
#: Where an init container finds the volume for VMware's library (CDI, ``initImageURL``).
LIBRARY_VOLUME = "/opt"
#: Seconds to wait for another run on the volume: a deleted pod gets 30 s to end by default. After them the
#: pod fails, and the kubelet starts it again.
WAIT = 60.0


class Variable(NamedTuple):
    """An environment variable that a role or the commands read (those of a source: ``sources.fields``).

    Each reader has a table of its own, ``VARIABLES``. ``meaning``: Markdown for the documentation.
    ``required``: an empty one is a fault. ``parse``: converts the text; raises ``errors.RequestError``.
    """

    name: str
    meaning: str
    default: str = ""
    required: bool = False
    parse: Callable[[str], str] = str


HEADERS = Variable("IMPORTER_EXTRA_HEADER_<n>", "extra HTTP header, `Name: value`")


#: What a pod's role sets, by field of ``request.Request``, where an administrator has set nothing.
POD: Mapping[str, Any] = MappingProxyType({"existing": "remove", "permissions": FILE_MODE, "wait": WAIT})
#: In place of a value of ``existing``: compares the disk, and changes nothing.
COMPARE = "compare"
#: The fault of a setting that only the role of importer has.
NOT_VERIFIED = f"{PREFIX}_VERIFY: only the disk of an import can be verified"


class Paths(NamedTuple):
    """Paths of a pod's mounts, and its port of metrics (0: none). The command line may override them.

    ``mounts``: mounts of sources that differ from the default in ``sources.fields``, by option. ``settings``:
    what an administrator has set for all imports, by field of ``request.Request``; ``access``: for all
    servers, by field of ``base.Access``. ``policy``: a file of the containers tools, which other workers may
    read and this one does not.
    """

    data: str = "/data"
    block: str = "/dev/cdi-block-volume"
    scratch: str = "/scratch"
    termination_log: str = "/dev/termination-log"
    extra_headers: str = "/extraheaders"
    metrics_port: int = 8443
    policy: str = "/etc/containers/policy.json"
    mounts: Mapping[str, str] = MappingProxyType({})
    settings: Mapping[str, Any] = POD
    access: Mapping[str, Any] = MappingProxyType({})

    def refuse_demand(self, name: str, reason: str) -> None:
        """Raise ``errors.Untrusted`` if a signature is demanded of ``name``, which has none."""
        if "demand" in self.settings:
            self.settings["demand"].refuse(name, reason)

    def mounted(self, field: fields.Field) -> str | None:
        """Return the path of a source's mount, None for a file that does not exist."""
        path = self.mounts.get(field.option, field.mount)
        try:
            return path if not field.file or _is_file(path) else None
        except OSError as err:
            raise errors.RequestError(f"{path}: {errors.words(err)}") from err


def environment() -> dict[str, str]:
    """Return a copy of the process's environment, without what Kubernetes sets for Services.

    In the namespace of a Service named ``listen`` or ``cdi-worker-metrics``, each pod has LISTEN_PORT or
    CDI_WORKER_METRICS_PORT. The variables of the cluster's API server are kept.
    """
    env = dict(os.environ)
    end = "_SERVICE_HOST"
    services = {name.removesuffix(end) for name in env if name.endswith(end)} - {"KUBERNETES"}
    if not services:
        return env
    return {
        name: value
        for name, value in env.items()
        if not any(
            name[: border.start()] in services and _INJECTED.fullmatch(f"{name[border.start() :]}={value}")
            for border in _BORDER.finditer(name)
        )
    }


def file_faults(env: Mapping[str, str]) -> Iterator[str]:
    """Yield a message for each variable whose file a library opens itself, if it is a pipe.

    Such an open waits for the writer, and no signal ends it.
    """
    for name in LIBRARY_FILES:
        with contextlib.suppress(OSError):
            if name in env and stat.S_ISFIFO(Path(env[name]).stat().st_mode):
                yield f"{name}: {env[name]}: is a pipe; name a file"


def own(env: Mapping[str, str]) -> list[str]:
    """Return the names of our own variables in ``env``."""
    return [name for name in env if name.startswith(f"{PREFIX}_")]


def own_faults(
    env: Mapping[str, str], known: Collection[str], may_be_empty: Collection[str] = ()
) -> Iterator[str]:
    """Yield a message for each of our own variables that is empty or not among ``known``.

    It may be a requirement that would be ignored: its name is misspelt, or a script's variable is not set.
    """
    for name in own(env):
        if name not in known:
            hint = errors.did_you_mean(name, known) or "no setting has this name; unset it"
            yield f"{name}: unknown variable; {hint}"
        elif not env[name].strip() and name not in may_be_empty:
            yield f"{name}: empty; give it a value or unset it"


def role(env: Mapping[str, str]) -> str | None:
    """Return ``importer``, ``uploadserver`` or ``cloner``; None if none is selected (contract, Roles)."""
    if env.get("IMPORTER_SOURCE"):
        return "importer"
    if env.get("CLIENT_NAME") or env.get("TLS_CERT_FILE"):
        return "uploadserver"
    if env.get("UPLOAD_URL"):
        return "cloner"
    return None


def is_library_image(env: Mapping[str, str]) -> bool:
    """Return whether this is the init container of ``initImageURL``, if it has no arguments and no role."""
    return "KUBERNETES_SERVICE_HOST" in env and os.path.ismount(LIBRARY_VOLUME)


def certificate_files(directory: str, endings: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    """Return the certificate files in ``directory``: regular files, no leading dot, with one of ``endings``.

    Other files of a ConfigMap are ignored, as in upstream's workers.
    """
    found = []
    for path, content in _files(directory, endings):
        # Imported when used: few pods have certificates (start-up time).
        from cdi_worker.sources import certificates

        if certificates.holds_any(content):
            found.append(str(path))
        else:
            log.warning("file ignored: it contains no certificate path=%r", str(path))
    return tuple(found)


def header_files(directory: str) -> tuple[tuple[str, str], ...]:
    """Return the secret headers below ``directory``, one per file."""
    found = []
    for path, content in _files(directory, below=True):
        try:
            found.append(fields.header(content.decode()))
        except (errors.RequestError, UnicodeDecodeError) as err:
            raise errors.RequestError(f"{path}: malformed extra header") from err
    return tuple(found)


def _files(
    directory: str, endings: tuple[str, ...] = ("",), *, below: bool = False
) -> Iterator[tuple[Path, bytes]]:
    """Yield the files of a mounted Secret or ConfigMap with their content; ``below``: also in its folders.

    Kubernetes mounts them as symbolic links into ``..data``: links to files are followed, names with a
    leading dot are skipped.
    """

    def fail(err: OSError) -> None:
        if not isinstance(err, FileNotFoundError):
            raise err

    path = Path(directory)
    try:
        for root, folders, names in os.walk(directory, onerror=fail):
            folders[:] = sorted(name for name in folders if below and not name.startswith("."))
            for name in sorted(names):
                path = Path(root, name)
                if not name.startswith(".") and name.endswith(endings) and _is_file(path):
                    yield path, path.read_bytes()
    except OSError as err:
        raise errors.RequestError(f"{err.filename or path}: {errors.words(err)}") from err


def _is_file(path: str | Path) -> bool:
    """Return whether a path is a regular file, also through links. Raises ``OSError`` if that is unknown."""
    try:
        return stat.S_ISREG(Path(path).stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as err:
        if err.errno != errno.ELOOP:
            raise
        return False


class Reading:
    """Reads values from an environment and collects all faults in ``faults``.

    ``variables``: the only ones that it reads by name.
    """

    def __init__(self, env: Mapping[str, str], variables: Iterable[Variable] = ()) -> None:
        self.env = env
        self.faults: list[str] = []
        self._variables = {each.name: each for each in variables}

    def text(self, name: str) -> str:
        """Return a value, or its default if it is not set or empty."""
        variable = self._variables[name]
        value = self.env.get(name) or variable.default
        if variable.required and not value:
            self.faults.append(f"{name} is not set")
        try:
            return variable.parse(value)
        except errors.RequestError as err:
            self.faults.append(f"{name}: {err}")
            return ""

    def field(self, field: fields.Field) -> Any:
        """Return the value of a declared field, None if its variable is not set or empty."""
        if field.strict and self.env.get(field.env, "false") not in {"true", "false"}:
            self.faults.append(f"{field.env}={self.env[field.env]!r} is neither true nor false")
        names = (field.env, *field.more) if field.env else ()
        name = next((name for name in names if self.env.get(name)), None)
        if not name:
            return None
        value = self.env[name]
        if field.flag:
            return value == field.on
        try:
            return field.parse(value)
        except errors.RequestError as err:
            self.faults += [f"{name}: {fault}" for fault in err.faults]
        except ValueError as err:
            self.faults.append(f"{name}: {err}")
        return None

    def fields(self, owner: type[Any], role: str) -> dict[str, Any]:
        """Return the values of the declared fields of a dataclass whose variables ``role`` reads."""
        return fields.values(owner, lambda field: self.field(field) if field.is_read_by(role) else None)

    def headers(self) -> tuple[tuple[str, str], ...]:
        prefix = HEADERS.name.removesuffix("<n>")
        names = [name for name in self.env if name.startswith(prefix)]
        found = []
        for name in sorted(names, key=lambda item: (len(item), item)):
            try:
                found.append(fields.header(self.env[name]))
            except errors.RequestError as err:
                self.faults.append(f"{name}: {err}")
        return tuple(found)


def parse_overhead(text: str) -> Fraction | int:
    """Return the fraction of a file system to leave free, at least 0 and below 1. Raises ``RequestError``."""
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", text):
        raise errors.RequestError(f"{text!r} is not a fraction such as 0.06")
    if not text.strip("0."):
        return 0
    from fractions import Fraction

    value = Fraction(text)
    if value >= 1:
        raise errors.RequestError(f"{text!r} is not below 1")
    return value
