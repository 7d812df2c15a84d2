"""The part of a journal's key that depends on the location: all settings that select the bytes of a disk.

Every field of a location counts, also of a plugin or a later version, unless it is declared as a credential
or as tuning. Credentials may be renewed between two runs, and the second one still resumes the first.
"""

from __future__ import annotations

import dataclasses
import hashlib
import urllib.parse
from typing import Any, Final

from cdi_worker.sources import base, fields

#: Headers that are credentials on every server. Another header may select the content.
_HEADERS: Final = frozenset((
    "authorization", "proxy-authorization", "x-api-key", "x-auth-token", "x-amz-security-token",
    "x-kubevirt-export-token", "private-token", "job-token", "deploy-token", "x-jfrog-art-api",
))  # fmt: skip


def _v4(prefix: str) -> tuple[frozenset[str], frozenset[str]]:
    names = ("Algorithm", "Credential", "Date", "Expires", "SignedHeaders", "Signature")
    needed = frozenset(f"{prefix}-{name}" for name in ("Credential", "Date", "Signature"))
    return needed, frozenset({*(f"{prefix}-{name}" for name in names), f"{prefix}-Security-Token"})


def _signature(needed: str, more: str = "") -> tuple[frozenset[str], frozenset[str]]:
    return frozenset(needed.split()), frozenset(f"{needed} {more}".split())


#: Query parameters of signed URLs: those that a signature has, and all that are renewed with it. A parameter
#: without the others is not a signature, and selects.
_SIGNATURES: Final = (
    _v4("X-Amz"),
    _v4("X-Goog"),
    _signature("AWSAccessKeyId Expires Signature", "x-amz-security-token"),
    _signature("GoogleAccessId Expires Signature"),
    _signature("OSSAccessKeyId Expires Signature", "security-token"),
    # CloudFront, with a predefined policy and with one of its own.
    _signature("Key-Pair-Id Expires Signature"),
    _signature("Key-Pair-Id Policy Signature"),
    # Azure's shared access signature; its version is not that of the object, which is "versionid".
    _signature(
        "sv sig", "se sp sr st sip spr ss srt ses sdd si skoid sktid skt ske sks skv saoid suoid scid"
    ),
    # OpenStack Swift.
    _signature("temp_url_sig temp_url_expires", "temp_url_ip_range temp_url_prefix"),
)


def digest(location: base.Location) -> str:
    """Return a digest of the settings that select the bytes. With equal digests only the object can differ.

    A secret that is not recognized as one, such as a token in a header, changes the digest.
    """
    return hashlib.sha256(repr(_selecting(location)).encode("utf-8", "surrogatepass")).hexdigest()


def _selecting(value: Any) -> Any:
    """Return the names and values of a dataclass that select, without those that have their defaults."""
    if isinstance(value, base.Access):
        # The others are credentials, or say how bytes are fetched. Temporary keys have a new name each time.
        user = "" if value.session_token else value.user
        headers = tuple((name.lower(), text) for name, text in value.headers if name.lower() not in _HEADERS)
        return [pair for pair in (("user", user), ("headers", headers)) if pair[1]]
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return value
    declared = fields.table(type(value))
    found: list[tuple[str, Any]] = []
    for field in dataclasses.fields(value):
        about = declared.get(field.name, (fields.Field(), None))[0]
        own = getattr(value, field.name)
        chosen = _address(own) if field.name == "endpoint" else _selecting(own)
        if own != field.default and chosen != [] and about.selects and not about.secret:
            found.append((field.name, chosen))
    return found


def _address(endpoint: str) -> str:
    """Return an address without its password, and a URL of the web without a signature.

    Nothing is decoded or sorted: servers distinguish such addresses.
    """
    scheme, separator, rest = endpoint.partition("://")
    if not separator:
        return endpoint
    host, slash, path = rest.partition("/")
    user, at, server = host.rpartition("@")
    address = f"{scheme}://{user.partition(':')[0]}{at}{server}{slash}{path}"
    if scheme.lower() not in {"http", "https"} or "?" not in address:
        return address
    base_url, _, query = address.partition("?")
    query, mark, fragment = query.partition("#")
    pairs = [(urllib.parse.unquote_plus(pair.partition("=")[0]), pair) for pair in query.split("&")]
    names = {name for name, _ in pairs}
    renewed = {name for needed, names_of in _SIGNATURES if needed <= names for name in names_of}
    unsigned = "&".join(pair for name, pair in pairs if name not in renewed)
    return f"{base_url}?{unsigned}{mark}{fragment}"
