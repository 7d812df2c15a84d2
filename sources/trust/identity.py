"""Whether a signature is for the image that was requested, by the reference in it.

containers-policy.json(5), "signedIdentity"; an image is known by host and repository, and a tag or a digest.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Final, TypeAlias

from cdi_worker import errors
from cdi_worker.sources import reference

Reference: TypeAlias = reference.Reference
#: Returns whether the first reference, as requested, is the second, as signed.
Rule: TypeAlias = Callable[[Reference, Reference], bool]


def same_repository(wanted: Reference, signed: Reference) -> bool:
    """``matchRepository``: the tags do not count."""
    return wanted.name == signed.name


def same_image(wanted: Reference, signed: Reference) -> bool:
    """The rule of ``--signed-by``: the repository, and the tag if both name one. cosign signs no tag."""
    is_tagged = bool(signed.tag) and not wanted.digest
    return same_repository(wanted, signed) and (not is_tagged or wanted.tag == signed.tag)


def exact(wanted: Reference, signed: Reference) -> bool:
    """``matchExact``: repository and tag, or repository and digest."""
    if not (signed.tag or signed.digest):
        return False
    if wanted.digest:
        return same_repository(wanted, signed) and wanted.digest == signed.digest
    return same_repository(wanted, signed) and (wanted.tag, "") == (signed.tag, signed.digest)


def exact_or_digest(wanted: Reference, signed: Reference) -> bool:
    """``matchRepoDigestOrExact``: for a request by digest, which is compared anyway, the repository only."""
    if wanted.digest:
        return bool(signed.tag or signed.digest) and same_repository(wanted, signed)
    return exact(wanted, signed)


def _fixed(rule: Rule, stated: Reference, _wanted: Reference, signed: Reference) -> bool:
    """``exactReference`` and ``exactRepository``: a reference in place of the requested one."""
    return rule(stated, signed)


def _remapped(prefix: str, signed_prefix: str, wanted: Reference, signed: Reference) -> bool:
    """``remapIdentity``: the signature of an image that was copied from ``signed_prefix`` to ``prefix``."""
    name = wanted.name
    if name == prefix or name.startswith(f"{prefix}/"):
        moved = reference.named(signed_prefix + name.removeprefix(prefix))
        wanted = dataclasses.replace(wanted, host=moved.host, repository=moved.repository)
    return exact_or_digest(wanted, signed)


RULES: Final[dict[str, Rule]] = {
    "matchExact": exact,
    "matchRepoDigestOrExact": exact_or_digest,
    "matchRepository": same_repository,
}


def rule(document: Any, where: str) -> Rule:
    """Return the rule of a policy's ``signedIdentity``. Raises ``errors.RequestError``."""
    fields = dict(document) if isinstance(document, dict) else {}
    kind = fields.pop("type", None)
    if not all(isinstance(value, str) for value in (kind, *fields.values())):
        raise errors.RequestError(f"{where}: malformed signedIdentity: a value is not a string")
    if kind in RULES and not fields:
        return RULES[kind]
    try:
        if kind == "exactReference" and set(fields) == {"dockerReference"}:
            return functools.partial(_fixed, exact, reference.named(fields["dockerReference"]))
        if kind == "exactRepository" and set(fields) == {"dockerRepository"}:
            return functools.partial(_fixed, same_repository, reference.named(fields["dockerRepository"]))
        if kind == "remapIdentity" and set(fields) == {"prefix", "signedPrefix"}:
            for each in fields.values():
                _check_prefix(each)
            return functools.partial(_remapped, fields["prefix"], fields["signedPrefix"])
    except errors.RequestError as err:
        raise errors.RequestError(f"{where}: malformed signedIdentity: {err}") from err
    raise errors.RequestError(f"{where}: malformed signedIdentity {kind!r}")


def _check_prefix(prefix: str) -> None:
    # A host alone is a prefix, too; the last part of a reference without a slash would be a repository.
    reference.named(prefix if "/" in prefix else f"{prefix}/repository")
