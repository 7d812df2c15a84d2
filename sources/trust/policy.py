"""The policy of the containers tools: which images are accepted, by registry and repository.

containers-policy.json(5). Like them, a policy with anything unknown in it is refused as a whole.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from cdi_worker import errors
from cdi_worker.formats import smalljson
from cdi_worker.sources import reference, smallfile
from cdi_worker.sources.trust import identity

ACCEPT, REJECT, SIGSTORE = "insecureAcceptAnything", "reject", "sigstoreSigned"
#: Signatures of GnuPG, which are not in the registry.
FOREIGN: Final = frozenset({"signedBy", "signedBaseLayer"})
LARGEST: Final = 1 << 20
#: Where a requirement may have its keys: the value is a path, paths, PEM in base64, or several.
KEYS: Final = ("keyPath", "keyPaths", "keyData", "keyDatas")
#: The transports that a policy may name (containers-transports(5), containers-policy.json(5)).
TRANSPORTS: Final = (
    "docker", "oci-archive", "atomic", "containers-storage", "dir", "docker-archive", "docker-daemon", "oci",
    "ostree", "sif", "tarball",
)  # fmt: skip
_WILDCARD: Final = re.compile(r"\*(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)+")
REKOR: Final = tuple(f"rekorPublic{name[0].upper()}{name[1:]}" for name in KEYS)


@dataclasses.dataclass(frozen=True, slots=True)
class Material:
    """Keys or certificates: files, and contents (PEM). Files are read when an image needs them."""

    paths: tuple[str, ...] = ()
    contents: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.paths or self.contents)

    def read(self) -> bytes:
        """Return all of it. Raises ``errors.RequestError``."""
        return b"\n".join((*(smallfile.read(path, LARGEST) for path in self.paths), *self.contents))


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """A requirement: ``kind``, and for signatures the keys, one of which must have signed.

    ``other``: what it demands that is not supported: a transparency log, or certificates instead of keys.
    """

    kind: str
    keys: Material = Material()
    rule: identity.Rule = identity.exact_or_digest
    other: str = ""

    def describe(self) -> str:
        """Return what it demands, for messages."""
        return f"{self.kind} with {self.other}" if self.other else self.kind


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """A policy: requirements by transport and scope. ``path`` is for messages."""

    path: str
    default: tuple[Requirement, ...]
    transports: Mapping[str, Mapping[str, tuple[Requirement, ...]]]

    @property
    def accepts_everything(self) -> bool:
        """Whether it demands nothing of any image in a registry."""
        given = [self.default, *self.transports.get("docker", {}).values()]
        return all(each.kind == ACCEPT for requirements in given for each in requirements)

    def requirements(
        self, of: reference.Reference | reference.ArchiveReference
    ) -> tuple[str, tuple[Requirement, ...]]:
        """Return the requirements for an image, all of which count, and the scope that they come from."""
        archive = isinstance(of, reference.ArchiveReference)
        transport = "oci-archive" if archive else "docker"
        scoped = self.transports.get(transport, {})
        for scope in _archive_scopes(of) if isinstance(of, reference.ArchiveReference) else scopes(of):
            if scope in scoped:
                return f"{transport}:{scope}", scoped[scope]
        return "default", self.default


def scopes(of: reference.Reference) -> Iterator[str]:
    """Yield the scopes of an image, the closest first: itself, its parents, its domains, everything."""
    name = of.name
    yield f"{name}@{of.digest}" if of.digest else f"{name}:{of.tag}"
    while True:
        yield name
        parent, slash, _ = name.rpartition("/")
        if not slash:
            break
        name = parent
    domain = name.partition(":")[0]
    while "." in domain:
        domain = domain.partition(".")[2]
        yield f"*.{domain}"
    yield ""


def _archive_scopes(of: reference.ArchiveReference) -> Iterator[str]:
    path = Path(of.path).resolve()
    yield f"{path}:{of.tag}"
    yield from map(str, (path, *path.parents[:-1]))
    yield ""


def check_scope(transport: str, scope: str) -> None:
    """Raise ``errors.RequestError`` for a scope that is not one of any image: the default would decide.

    containers-policy.json(5), "Supported transports and their scopes". Scopes of transports that are not
    imported from have no effect here.
    """
    if scope and transport == "docker" and not _WILDCARD.fullmatch(scope):
        _check_image(scope)
    if scope and transport == "oci-archive":
        _check_path(scope)


def _check_path(scope: str) -> None:
    """Check the path of an archive, or of a folder above it."""
    try:
        path = str(Path(scope).resolve())
    except (ValueError, OSError, RuntimeError) as err:
        # A zero byte, a character that no name has, or links in a circle.
        raise errors.RequestError(f"it is not a path: {err}") from err
    if scope != path:
        raise errors.RequestError(f"scopes are absolute paths without links: write {path}")


def _check_image(scope: str) -> None:
    """Check a host, a namespace, a repository, or an image with its tag or digest."""
    host, slash, rest = scope.partition("/")
    if "://" in scope:
        raise errors.RequestError(f"a scope has no scheme: write {scope.partition('://')[2]}")
    if not (set(".:[") & set(host) or host == "localhost"):
        raise errors.RequestError(f"a scope begins with a host: {reference.HUB}/{scope.removeprefix('/')}")
    found = reference.named(scope if slash else f"{scope}/any")
    is_image = bool(found.tag or found.digest)
    at = f"@{found.digest}" if found.digest else f":{found.tag}"
    # Docker Hub has other names, and a part of the name that may be left out; a namespace of it has not.
    name = f"{found.host}/{found.repository if is_image else rest}" if slash else found.host
    if scope != (wanted := f"{name}{at}" if is_image else name):
        raise errors.RequestError(f"images have another name in a policy: write {wanted}")


def read(path: str) -> Policy:
    """Return the policy in a file. Raises ``errors.RequestError``."""
    document = _load(smallfile.read(path, LARGEST), path)
    unknown = set(document) - {"default", "transports"}
    if unknown:
        raise errors.RequestError(f"{path}: unknown member {min(unknown)!r}")
    transports = document.get("transports", {})
    if "default" not in document:
        raise errors.RequestError(f"{path}: no default; add what applies to all other images")
    found: dict[str, dict[str, tuple[Requirement, ...]]] = {}
    for transport, scoped in _mapping(transports, path, "transports").items():
        where = f"transports.{transport}"
        if transport not in TRANSPORTS:
            hint = errors.supported(transport, TRANSPORTS)
            raise errors.RequestError(f"{path}: unknown transport {transport!r}; {hint}")
        entries = _mapping(scoped, path, where).items()
        found[transport] = {scope: _requirements(of, path, f"{where}.{scope}") for scope, of in entries}
        for scope in found[transport]:
            try:
                check_scope(transport, scope)
            except errors.RequestError as err:
                raise errors.RequestError(f"{path}: {where}: {scope!r} matches no image: {err}") from err
    return Policy(path, _requirements(document["default"], path, "default"), found)


def _requirements(found: Any, path: str, where: str) -> tuple[Requirement, ...]:
    if not isinstance(found, list) or not found:
        raise errors.RequestError(f"{path}: {where}: expected a list of requirements, with at least one")
    return tuple(_requirement(_mapping(each, path, where), f"{path}: {where}") for each in found)


def _requirement(fields: Mapping[str, Any], where: str) -> Requirement:
    kind = fields.get("type")
    if isinstance(kind, str) and (kind in FOREIGN or (kind in {ACCEPT, REJECT} and len(fields) == 1)):
        return Requirement(kind)
    if kind != SIGSTORE:
        raise errors.RequestError(f"{where}: unknown requirement {kind!r}, or one with unknown members")
    where = f"{where}: {SIGSTORE}"
    if unknown := set(fields) - {"type", "signedIdentity", "fulcio", "pki", *KEYS, *REKOR}:
        raise errors.RequestError(f"{where}: unknown member {min(unknown)!r}")
    given = [name for name in (*KEYS, "fulcio", "pki") if name in fields]
    logs = [name for name in REKOR if name in fields]
    if len(given) != 1 or len(logs) > 1:
        signers, log = (", ".join(names) for names in ((*KEYS, "fulcio", "pki"), REKOR))
        raise errors.RequestError(f"{where}: expected one of {signers}; at most one of {log}")
    (name,), other = given, "a transparency log" if logs else ""
    for log in logs:
        _keys(fields[log], log, where)
    rule: identity.Rule = identity.exact_or_digest
    if "signedIdentity" in fields:
        rule = identity.rule(fields["signedIdentity"], where)
    if name == "fulcio":
        if not logs:
            raise errors.RequestError(f"{where}: fulcio needs one of {', '.join(REKOR)}")
        _check_fulcio(fields[name], where)
    if name in {"fulcio", "pki"}:
        return Requirement(SIGSTORE, rule=rule, other=name)
    return Requirement(SIGSTORE, _keys(fields[name], name, where), rule, other)


def _check_fulcio(given: Any, where: str) -> None:
    """Raise ``errors.RequestError`` for a malformed requirement of certificates."""
    fields = _mapping(given, where, "fulcio")
    authorities = [name for name in ("caPath", "caData") if name in fields]
    texts = {name: fields.get(name) for name in ("oidcIssuer", "subjectEmail")}
    if len(authorities) != 1 or set(fields) != {*authorities, *texts} or not all(texts.values()):
        expected = "caPath or caData, oidcIssuer and subjectEmail"
        raise errors.RequestError(f"{where}: fulcio: expected {expected}")
    name = authorities[0]
    _keys(fields[name], "keyPath" if name == "caPath" else "keyData", where)


def _keys(value: Any, name: str, where: str) -> Material:
    """Return the keys that a member names or contains."""
    each = value if name.lower().endswith("s") else [value]
    if not isinstance(each, list) or not each or not all(isinstance(item, str) and item for item in each):
        raise errors.RequestError(f"{where}: malformed {name}")
    if name.lower().rstrip("s").endswith("path"):
        return Material(tuple(each))
    try:
        return Material(contents=tuple(base64.b64decode(item, validate=True) for item in each))
    except (binascii.Error, ValueError) as err:
        raise errors.RequestError(f"{where}: {name} is not base64") from err


def _load(data: bytes, path: str) -> dict[str, Any]:
    try:
        return dict(_mapping(smalljson.parse(data, unique=True), path, "the policy"))
    except ValueError as err:
        raise errors.RequestError(f"{path}: not a policy: {err}") from err


def _mapping(value: Any, path: str, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise errors.RequestError(f"{path}: {where}: expected an object")
    return value
