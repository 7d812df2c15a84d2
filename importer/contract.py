"""The worker contract's inputs: the environment and the mounts of a pod, read here and nowhere else."""

from __future__ import annotations

import dataclasses
import logging
import os
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from fractions import Fraction
from pathlib import Path

from formats import checksum
from importer import errors, request, units
from sources import base

log = logging.getLogger(__name__)

CONTENT_TYPES = ("kubevirt", "archive")
#: Sources whose bytes may be an archive.
ARCHIVE_SOURCES = frozenset({"http", "local"})
#: A registry's folder of certificates may hold other files (containers-certs.d(5)).
REGISTRY_CERTIFICATES = (".crt", ".pem")
#: The labels that OpenSSL takes for one (PEM_read_bio_X509_AUX).
CERTIFICATE = re.compile(rb"^-----BEGIN (X509 |TRUSTED )?CERTIFICATE-----", re.MULTILINE)
HEADER = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")


@dataclasses.dataclass(frozen=True, slots=True)
class Paths:
    """Where a pod has its mounts, and its metrics (0: nowhere). The command line may name others."""

    data: str = "/data"
    block: str = "/dev/cdi-block-volume"
    scratch: str = "/scratch"
    termination_log: str = "/dev/termination-log"
    extra_headers: str = "/extraheaders"
    metrics_port: int = 8443
    vddk_libdir: str = "/opt/vmware-vix-disklib-distrib"
    vddk_config: str = "/vddk-args/vddk-config-file"


def environment() -> dict[str, str]:
    """Return the process's environment: the only place that reads it."""
    return dict(os.environ)


def role(env: Mapping[str, str]) -> str | None:
    """Return ``importer``, ``uploadserver`` or ``cloner``; None when nothing tells (contract, Roles)."""
    if env.get("IMPORTER_SOURCE"):
        return "importer"
    if env.get("CLIENT_NAME") or env.get("TLS_CERT_FILE"):
        return "uploadserver"
    if env.get("UPLOAD_URL"):
        return "cloner"
    return None


def import_request(env: Mapping[str, str], paths: Paths) -> request.Request:
    """Return the request that the environment makes; raises ``RequestError`` with all its faults."""
    reading = Reading(env)
    source = env.get("IMPORTER_SOURCE", "")
    content_type = env.get("IMPORTER_CONTENTTYPE") or "kubevirt"
    is_block = Path(paths.block).exists()
    target = (
        paths.block if is_block else paths.data if content_type == "archive" else f"{paths.data}/disk.img"
    )
    made = request.Request(
        source=source,
        location=_location(reading, paths),
        target=target,
        volume=None if is_block else paths.data,
        content_type=content_type,
        scratch=paths.scratch if Path(paths.scratch).is_dir() else None,
        image_size=reading.quantity("IMPORTER_IMAGE_SIZE"),
        overhead=reading.fraction("FILESYSTEM_OVERHEAD"),
        preallocation=reading.boolean("PREALLOCATION"),
        direct=env.get("CACHE_MODE") == "TRYNONE",
        checksum=env.get("IMPORTER_CHECKSUM") or None,
        owner_uid=env.get("OWNER_UID", ""),
    )
    check(made, reading.faults)
    return made


def check(made: request.Request, faults: list[str] | None = None) -> None:
    """Raise ``RequestError`` for a request that makes no sense, with all its faults."""
    faults = list(faults or [])
    if made.content_type not in CONTENT_TYPES:
        faults.append(f"content type {made.content_type!r} is none of {', '.join(CONTENT_TYPES)}")
    if made.is_archive and made.source == "none":
        faults.append("a blank disk cannot be an archive")
    elif made.is_archive and made.source not in ARCHIVE_SOURCES:
        faults.append(f"source {made.source!r} cannot give an archive")
    if made.is_archive and Path(made.target).is_block_device():
        faults.append("an archive needs a volume with a file system, not a block device")
    faults += _location_faults(made)
    if made.checksum is not None:
        try:
            checksum.parse(made.checksum)
        except errors.RequestError as err:
            faults += err.faults
    if faults:
        raise errors.RequestError(*faults)


def _location_faults(made: request.Request) -> Iterator[str]:
    if made.source != "none" and not made.location.endpoint:
        yield "no endpoint (IMPORTER_ENDPOINT) given"
    if made.location.previous and not made.location.current:
        yield "a previous checkpoint without a current one"
    if made.source in {"local", "volume"} and _is_same(made.location.endpoint, made.target):
        yield "source and target are the same file"


def _is_same(source: str, target: str) -> bool:
    try:
        return Path(source.removeprefix("file://")).samefile(target)
    except OSError:
        return False


def parse_header(text: str) -> tuple[str, str]:
    """Return name and value of ``Name: value`` (RFC 9110, 5.1 and 5.5). The text may be secret."""
    found = HEADER.fullmatch(text.strip())
    if not found:
        raise errors.RequestError("malformed extra header: wants 'Name: value' on one line")
    return found[1], found[2].strip()


def endpoint(address: str, env: Mapping[str, str]) -> str:
    """Return ``address``; one of Google's leads to the emulator of the environment, if there is one."""
    emulator = env.get("STORAGE_EMULATOR_HOST", "").rstrip("/")
    if not emulator or not address.startswith("gs://"):
        return address
    scheme = "" if "://" in emulator else "http://"
    return f"{scheme}{emulator}/{urllib.parse.quote(address.removeprefix('gs://'))}"


def certificate_files(directory: str, endings: tuple[str, ...] = ("",)) -> tuple[str, ...]:
    """Return the certificate files of a mounted directory: regular files, no leading dot, by ``endings``.

    What else a ConfigMap holds is passed over, as upstream's workers do.
    """
    if not directory:
        return ()
    found = []
    try:
        for path in sorted(Path(directory).iterdir()):
            if not path.is_file() or path.name.startswith(".") or not path.name.endswith(endings):
                continue
            if CERTIFICATE.search(path.read_bytes()):
                found.append(str(path))
            else:
                log.warning("no certificates in path=%r", str(path))
    except FileNotFoundError:
        return ()
    except OSError as err:
        raise errors.RequestError(f"{err.filename}: {os.strerror(err.errno or 0).lower()}") from err
    return tuple(found)


def header_files(directory: str) -> tuple[tuple[str, str], ...]:
    """Return the secret headers below ``directory``, one for each file.

    Kubernetes mounts a secret as links into ``..data``: what starts with a dot is not looked at,
    links are followed.
    """
    found: list[tuple[str, str]] = []
    for root, folders, files in os.walk(directory, followlinks=False):
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
    """Typed values of an environment; faults are collected, not raised one by one."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self.env = env
        self.faults: list[str] = []

    def boolean(self, name: str) -> bool:
        value = self.env.get(name, "false")
        if value not in {"true", "false"}:
            self.faults.append(f"{name}={value!r} is neither true nor false")
        return value == "true"

    def quantity(self, name: str) -> int | None:
        value = self.env.get(name, "")
        if not value:
            return None
        try:
            return units.parse_quantity(value)
        except errors.RequestError as err:
            self.faults.append(f"{name}: {err}")
            return None

    def fraction(self, name: str) -> Fraction:
        value = self.env.get(name) or "0"
        try:
            return parse_overhead(value)
        except errors.RequestError as err:
            self.faults.append(f"{name}: {err}")
            return Fraction(0)

    def headers(self) -> tuple[tuple[str, str], ...]:
        prefix = "IMPORTER_EXTRA_HEADER_"
        names = [name for name in self.env if name.startswith(prefix)]
        found = []
        for name in sorted(names, key=lambda item: (len(item), item)):
            try:
                found.append(parse_header(self.env[name]))
            except errors.RequestError as err:
                self.faults.append(f"{name}: {err}")
        return tuple(found)

    def either_case(self, name: str) -> str:
        return self.env.get(name) or self.env.get(name.upper()) or ""


def parse_overhead(text: str) -> Fraction:
    """Return the fraction of a file system that a disk must leave free, 0 to 1."""
    if not re.fullmatch(r"\d*\.?\d+|\d+\.", text):
        raise errors.RequestError(f"{text!r} is not a fraction such as 0.06")
    value = Fraction(text)
    if value >= 1:
        raise errors.RequestError(f"{text!r} is not below 1")
    return value


def _location(reading: Reading, paths: Paths) -> base.Location:
    env = reading.env
    certificates: tuple[str, ...] = ()
    secret_headers: tuple[tuple[str, str], ...] = ()
    try:
        endings = REGISTRY_CERTIFICATES if env.get("IMPORTER_SOURCE") == "registry" else ("",)
        certificates = certificate_files(env.get("IMPORTER_CERT_DIR", ""), endings)
        certificates += certificate_files(env.get("IMPORTER_PROXY_CERT_DIR", ""))
        secret_headers = header_files(paths.extra_headers)
    except errors.RequestError as err:
        reading.faults += err.faults
    access = base.Access(
        user=env.get("IMPORTER_ACCESS_KEY_ID", ""),
        password=env.get("IMPORTER_SECRET_KEY", ""),
        session_token=env.get("IMPORTER_SESSION_TOKEN", ""),
        headers=reading.headers() + secret_headers,
        ca_files=certificates,
        insecure=env.get("INSECURE_TLS") == "true",
        http_proxy=reading.either_case("http_proxy"),
        https_proxy=reading.either_case("https_proxy"),
        no_proxy=reading.either_case("no_proxy"),
    )
    return base.Location(
        endpoint=endpoint(env.get("IMPORTER_ENDPOINT", ""), env),
        access=access,
        architecture=env.get("IMPORTER_REGISTRY_IMAGE_ARCHITECTURE", ""),
        credentials_file=env.get("GOOGLE_APPLICATION_CREDENTIALS", ""),
        disk_id=env.get("IMPORTER_DISK_ID", ""),
        uuid=env.get("IMPORTER_UUID", ""),
        backing_file=env.get("IMPORTER_BACKING_FILE", ""),
        thumbprint=env.get("IMPORTER_THUMBPRINT", ""),
        previous=env.get("IMPORTER_PREVIOUS_CHECKPOINT", ""),
        current=env.get("IMPORTER_CURRENT_CHECKPOINT", ""),
        final=env.get("IMPORTER_FINAL_CHECKPOINT") == "true",
        vddk_libdir=paths.vddk_libdir,
        vddk_config=paths.vddk_config if Path(paths.vddk_config).is_file() else "",
        **_node_pull(reading),
    )


def _node_pull(reading: Reading) -> dict[str, str]:
    """Return the hand-shake files of a node pull; none for the usual pull by the pod."""
    env = reading.env
    method = env.get("IMPORTER_PULL_METHOD") or "pod"
    if method not in {"pod", "node"}:
        reading.faults.append(f"IMPORTER_PULL_METHOD={method!r} is neither pod nor node")
    if method != "node":
        return {}
    names = {"ready_file": "IMPORTER_READY_FILE", "done_file": "IMPORTER_DONE_FILE"}
    reading.faults += [f"{name} is needed for a node pull" for name in names.values() if not env.get(name)]
    return {field: env.get(name, "") for field, name in names.items()}
