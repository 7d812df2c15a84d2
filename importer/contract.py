"""Inputs of the worker contract: a pod's environment and mounts. Only this module reads the environment."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from cdi_worker import errors, units
from cdi_worker.importer.settings import Settings

if TYPE_CHECKING:
    from fractions import Fraction

    from cdi_worker.sources import fields

log = logging.getLogger(__name__)

#: The PEM labels that OpenSSL accepts for a certificate (PEM_read_bio_X509_AUX).
CERTIFICATE = rb"(?m)^-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----"
HEADER = r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)"

#: The mode of a disk's file, whatever the umask: the virtual machine has access by its group.
FILE_MODE = 0o660
#: Our own variables begin with it. Others are CDI's, which controllers may leave empty, or of other tools.
PREFIX = "CDI_WORKER"
#: What follows the name of a Service in the variables that Kubernetes sets for it, with their values
#: (Kubernetes, "Accessing Services", environment variables). A setting may also be named ..._PORT.
_INJECTED = re.compile(
    r"(_SERVICE_HOST|_SERVICE_PORT(_[A-Z0-9_]+)?|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*"
    "|_PORT=(tcp|udp|sctp)://.*",
    re.DOTALL,
)
_BORDER = re.compile("_(?=SERVICE_|PORT)")
#: Seconds to wait for another run on the volume: a deleted pod gets 30 s to end by default. After them the
#: pod fails, and the kubelet starts it again.
WAIT = 60.0


class Variable(NamedTuple):
    """An environment variable that a role or the commands read (those of a source: ``sources.fields``).

    Each reader has a table of its own, ``VARIABLES``. ``meaning``: Markdown for the documentation.
    ``required``: an empty one is a fault.
    """

    name: str
    meaning: str
    default: str = ""
    required: bool = False


CREDENTIALS = (
    Variable("IMPORTER_ACCESS_KEY_ID", "user, or access key"),
    Variable("IMPORTER_SECRET_KEY", "password, or secret key"),
    Variable("IMPORTER_SESSION_TOKEN", "session token of temporary S3 keys"),
)
PROXIES = (
    Variable("http_proxy", "proxy for `http` URLs; also in upper case"),
    Variable("https_proxy", "proxy for `https` URLs; also in upper case"),
    Variable("no_proxy", "hosts and networks without a proxy; also in upper case"),
)
#: How a disk is written.
WRITING = (
    Variable("FILESYSTEM_OVERHEAD", "fraction of the file system to leave free, such as `0.06`", "0"),
    Variable("PREALLOCATION", "`true`: allocate every byte of the disk", "false"),
)
OWNER = Variable("OWNER_UID", "label of the metrics; a resumed import must have the same one")
HEADERS = Variable("IMPORTER_EXTRA_HEADER_<n>", "extra HTTP header, `Name: value`")


#: The settings of a pod where an administrator has set nothing.
POD = Settings(existing="remove", permissions=FILE_MODE, wait=WAIT)


class Paths(NamedTuple):
    """Paths of a pod's mounts, and its port of metrics (0: none). The command line may override them.

    ``mounts``: mounts of sources that differ from the default in ``sources.fields``, by option. ``settings``:
    what an administrator has set for all imports; the policy for signatures only if it is mounted.
    """

    data: str = "/data"
    block: str = "/dev/cdi-block-volume"
    scratch: str = "/scratch"
    termination_log: str = "/dev/termination-log"
    extra_headers: str = "/extraheaders"
    metrics_port: int = 8443
    signature_policy: str = "/etc/containers/policy.json"
    mounts: Mapping[str, str] = MappingProxyType({})
    settings: Settings = POD

    def mounted(self, field: fields.Field) -> str | None:
        """Return the path of a source's mount, None for a file that does not exist."""
        path = self.mounts.get(field.option, field.mount)
        return path if not field.file or Path(path).is_file() else None


def environment() -> dict[str, str]:
    """Return a copy of the process's environment, without what Kubernetes sets for Services.

    In the namespace of a Service named ``listen`` or ``cdi-worker-metrics``, each pod has LISTEN_PORT or
    CDI_WORKER_METRICS_PORT. The variables of the cluster's API server are kept.
    """
    env = dict(os.environ)
    end = "_SERVICE_HOST"
    services = {name.removesuffix(end) for name in env if name.endswith(end)} - {"KUBERNETES"}
    return {name: value for name, value in env.items() if not _is_injected(name, value, services)}


def _is_injected(name: str, value: str, services: Collection[str]) -> bool:
    return any(
        name[: border.start()] in services and _INJECTED.fullmatch(f"{name[border.start() :]}={value}")
        for border in (_BORDER.finditer(name) if services else ())
    )


def own(env: Mapping[str, str]) -> list[str]:
    """Return the names of our own variables in ``env``."""
    return [name for name in env if name.startswith(f"{PREFIX}_")]


def own_faults(
    env: Mapping[str, str], known: Collection[str], may_be_empty: Collection[str] = ()
) -> Iterator[str]:
    """Yield a message for each of our own variables that is empty or not among ``known``.

    It may be a demand that would be dropped: its name is misspelt, or a script's variable is not set.
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


def parse_header(text: str) -> tuple[str, str]:
    """Return name and value of ``Name: value`` (RFC 9110, 5.1 and 5.5). The text may be secret."""
    found = re.fullmatch(HEADER, text.strip())
    if not found:
        raise errors.RequestError("malformed extra header; expected 'Name: value' on one line")
    return found[1], found[2].strip()


def parse_annotation(text: str) -> tuple[str, str]:
    """Return key and value of ``KEY=VALUE``. Raises ``errors.RequestError``."""
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise errors.RequestError(f"{text!r}: expected KEY=VALUE")
    return key, value


def certificate_files(directory: str, endings: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    """Return the certificate files in ``directory``: regular files, no leading dot, with one of ``endings``.

    Other files of a ConfigMap are ignored, as in upstream's workers.
    """
    if not directory:
        return ()
    found = []
    try:
        for path in sorted(Path(directory).iterdir()):
            if not path.is_file() or path.name.startswith(".") or not path.name.endswith(endings):
                continue
            if re.search(CERTIFICATE, path.read_bytes()):
                found.append(str(path))
            else:
                log.warning("file ignored: it contains no certificate path=%r", str(path))
    except FileNotFoundError:
        return ()
    except OSError as err:
        raise errors.RequestError(f"{err.filename}: {errors.words(err)}") from err
    return tuple(found)


def header_files(directory: str) -> tuple[tuple[str, str], ...]:
    """Return the secret headers below ``directory``, one per file.

    Kubernetes mounts a secret as symbolic links into ``..data``: links are followed, names with a leading dot
    are skipped.
    """
    found: list[tuple[str, str]] = []

    def fail(err: OSError) -> None:
        if not isinstance(err, FileNotFoundError):
            raise errors.RequestError(f"{err.filename}: {errors.words(err)}") from err

    for root, folders, files in os.walk(directory, onerror=fail, followlinks=False):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            path = Path(root, name)
            if name.startswith(".") or not path.is_file():
                continue
            try:
                found.append(parse_header(path.read_text(encoding="utf-8")))
            except (errors.RequestError, OSError, UnicodeDecodeError) as err:
                raise errors.RequestError(f"{path}: malformed extra header") from err
    return tuple(found)


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
        return value

    def boolean(self, name: str) -> bool:
        value = self.env.get(name, self._variables[name].default)
        if value not in {"true", "false"}:
            self.faults.append(f"{name}={value!r} is neither true nor false")
        return value == "true"

    def quantity(self, name: str) -> int | None:
        value = self.text(name)
        if not value:
            return None
        try:
            return units.parse_quantity(value)
        except errors.RequestError as err:
            self.faults.append(f"{name}: {err}")
            return None

    def field(self, field: fields.Field) -> Any:
        """Return the value of a location's field, None if its variable is not set or empty."""
        names = (field.env, *field.more) if field.env else ()
        value = next((self.env[name] for name in names if self.env.get(name)), None)
        if not value:
            return None
        if field.flag:
            return value == "true"
        try:
            return field.parse(value)
        except errors.RequestError as err:
            self.faults += [f"{field.env}: {fault}" for fault in err.faults]
        except ValueError as err:
            self.faults.append(f"{field.env}: {err}")
        return None

    def fraction(self, name: str) -> Fraction | int:
        try:
            return parse_overhead(self.text(name))
        except errors.RequestError as err:
            self.faults.append(f"{name}: {err}")
            return 0

    def headers(self) -> tuple[tuple[str, str], ...]:
        prefix = HEADERS.name.removesuffix("<n>")
        names = [name for name in self.env if name.startswith(prefix)]
        found = []
        for name in sorted(names, key=lambda item: (len(item), item)):
            try:
                found.append(parse_header(self.env[name]))
            except errors.RequestError as err:
                self.faults.append(f"{name}: {err}")
        return tuple(found)

    def proxies(self) -> dict[str, str]:
        """Return the proxies of an access, in either letter case."""
        return {name: self.env.get(name) or self.env.get(name.upper()) or "" for name, *_ in PROXIES}


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
