"""Image references: ``docker://…`` (registry, repository, tag or digest) and ``oci-archive:…``."""

from __future__ import annotations

import dataclasses
import re

from cdi_worker import errors

DOCKER = "docker://"
ARCHIVE = "oci-archive:"

HUB = "docker.io"
#: Docker Hub's API has another host than its references; a reference without a host is on Docker Hub.
HUB_API = "registry-1.docker.io"
HUB_NAMES = frozenset({HUB, "index.docker.io", HUB_API})

# The grammar of github.com/distribution/reference.
_HOST = re.compile(r"(?:[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_REPOSITORY = re.compile(r"[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*(?:/[a-z0-9]+(?:(?:\.|_|__|-+)[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_ANY_DIGEST = "sha256:" + 64 * "0"
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}|sha512:[0-9a-f]{128}")


@dataclasses.dataclass(frozen=True)
class Reference:
    """An image or artifact in a registry. ``digest`` overrides ``tag``.

    ``choice``: the file of an artifact, by digest, title or media type; empty: the only one.
    """

    host: str
    repository: str
    tag: str = "latest"
    digest: str = ""
    choice: str = ""

    @property
    def api_host(self) -> str:
        """Return host and port of the registry's API."""
        return HUB_API if self.host == HUB else self.host

    @property
    def name(self) -> str:
        """Return host and repository."""
        return f"{self.host}/{self.repository}"

    @property
    def target(self) -> str:
        """Return the digest or tag for the manifest's URL."""
        return self.digest or self.tag

    def __str__(self) -> str:
        at = f"@{self.digest}" if self.digest else f":{self.tag}"
        choice = f"#{self.choice}" if self.choice else ""
        return f"{DOCKER}{self.host}/{self.repository}{at}{choice}"


@dataclasses.dataclass(frozen=True)
class ArchiveReference:
    """An image in a tar of an OCI layout. ``tag`` may be empty if there is only one image."""

    path: str
    tag: str = ""
    choice: str = ""

    def __str__(self) -> str:
        tag = f":{self.tag}" if self.tag else ""
        return f"{ARCHIVE}{self.path}{tag}"


def parse(endpoint: str) -> Reference | ArchiveReference:
    """Parse an endpoint. Raises ``errors.RequestError``."""
    if endpoint.startswith(ARCHIVE):
        rest, _, choice = endpoint.removeprefix(ARCHIVE).partition("#")
        path, colon, tag = rest.rpartition(":")
        is_tagged = bool(colon) and "/" not in tag
        if not is_tagged:
            path, tag = rest, ""
        if not path or (is_tagged and not _TAG.fullmatch(tag)):
            raise errors.RequestError(f"{ARCHIVE}{rest}: expected oci-archive:path[:tag]")
        return ArchiveReference(path, tag, choice)
    if endpoint.startswith(DOCKER):
        rest, _, choice = endpoint.removeprefix(DOCKER).partition("#")
        found = parse_name(rest)
        return dataclasses.replace(found, tag=found.tag or "latest", choice=choice)
    raise errors.RequestError(
        f"{endpoint!r}: expected docker://host/repository[:tag|@digest] or oci-archive:path[:tag]"
    )


def is_digest(text: str) -> bool:
    """Return whether ``text`` is a sha256 or sha512 digest (OCI image specification, "Digests")."""
    return _DIGEST.fullmatch(text) is not None


def parse_name(name: str) -> Reference:
    """Parse ``[host/]repository[:tag][@digest]``, without a default for the tag. Raises ``RequestError``."""
    rest, at, digest = name.partition("@")
    host, slash, repository = rest.partition("/")
    if not slash or not (set(".:[") & set(host) or host == "localhost"):
        host, repository = HUB, rest
    repository, colon, tag = repository.partition(":")
    # Names of hosts have no case (RFC 4343): whose image it is must not depend on how a request writes them.
    host = host.lower()
    if host in HUB_NAMES:
        host = HUB
        repository = repository if "/" in repository else f"library/{repository}"
    for what, text, grammar in (
        ("host", host, _HOST),
        ("repository", repository, _REPOSITORY),
        ("tag", tag if colon else "latest", _TAG),
        ("digest", digest if at else _ANY_DIGEST, _DIGEST),
    ):
        if not grammar.fullmatch(text):
            # The text before an @ may be user and password: it is not shown.
            where = "" if at else f" {text!r}"
            wanted = "docker://host[:port]/repository[:tag|@digest], the repository in lower case"
            raise errors.RequestError(f"malformed {what}{where}: expected {wanted}")
    return Reference(host, repository, tag, digest)
