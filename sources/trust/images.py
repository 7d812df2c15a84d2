"""Whether an image has the signatures that are demanded of it, before any byte of its disk is fetched."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import bundle, keys, simple
from cdi_worker.sources import reference
from cdi_worker.sources.trust import Candidate, Demand, identity, keyfiles, policy

log = logging.getLogger(__name__)

#: Returns what a signature says once it is verified. Raises ``errors.Untrusted``.
Verify: TypeAlias = Callable[[Candidate], signature.Signature]


@dataclasses.dataclass(frozen=True, slots=True)
class Check:
    """One signature that an image must have. ``where``: who demands it.

    ``named``: whether a bundle must name the image, too; those of cosign name only its digest.
    """

    where: str
    verify: Verify
    rule: identity.Rule
    named: bool
    annotations: tuple[tuple[str, str], ...] = ()

    def accept(
        self, candidate: Candidate, digests: Sequence[str], of: reference.Reference
    ) -> signature.Signature:
        """Return the signature. Raises ``errors.Untrusted`` if it is not the one that is demanded."""
        if candidate.fault is not None:
            raise candidate.fault
        found = self.verify(candidate)
        found.check(digests, self.annotations, candidate.name)
        # A bundle of cosign names no reference; a payload of the older form has a member for it.
        if not found.reference and candidate.simple is None and not self.named:
            return found
        if not found.reference:
            reason = f"{found.signer} signed no reference, and {self.where} demands one"
            raise errors.Untrusted(url=candidate.name, fault=signature.OTHER_REFERENCE, reason=reason)
        try:
            is_same = self.rule(of, reference.named(found.reference))
        except errors.RequestError:
            is_same = False
        if not is_same:
            reason = f"{found.signer} signed {found.reference}, not {of.name}{_target(of)} ({self.where})"
            raise errors.Untrusted(url=candidate.name, fault=signature.OTHER_REFERENCE, reason=reason)
        return found


class Judge:
    """What is demanded of the image ``of``. Reads keys and policy when it is made.

    Raises ``errors.RequestError`` for malformed files, ``errors.Untrusted`` for an image that is refused
    whatever its signatures are.
    """

    def __init__(self, demand: Demand, of: reference.Reference | reference.ArchiveReference) -> None:
        self._checks = [*_demanded(demand), *_of_policy(demand.policy, of)]
        if isinstance(of, reference.ArchiveReference):
            if self._checks:
                reason = "an OCI archive has no signatures that could be verified; import from the registry"
                raise errors.Untrusted(url=str(of), fault=signature.UNVERIFIABLE, reason=reason)
            return
        self._of = of

    def check(
        self, candidates: Iterator[Candidate], digests: Sequence[str]
    ) -> tuple[signature.Signature, ...]:
        """Return the demanded signatures among ``candidates``, which are read as far as they are needed.

        ``digests``: of the index, if there is one, and manifest. The signature of an index vouches for the
        manifests in it. Raises ``errors.Untrusted``.
        """
        copies = itertools.tee(candidates, len(self._checks))
        return tuple(self._fulfil(*each, digests) for each in zip(self._checks, copies, strict=True))

    def _fulfil(
        self, check: Check, candidates: Iterator[Candidate], digests: Sequence[str]
    ) -> signature.Signature:
        failed = []
        for each in candidates:
            try:
                found = check.accept(each, digests, self._of)
            except errors.Untrusted as err:
                log.info("signature not accepted: %s", err)
                failed.append(err)
            else:
                log.info("signed by=%r digest=%s reference=%r", found.signer, found.digest, found.reference)
                return found
        if (closest := signature.worst(failed)) is None:
            reason = f"{' and '.join(digests)}: not signed, and {check.where} demands a signature"
            raise errors.Untrusted(url=str(self._of), fault=signature.MISSING, reason=reason)
        more = f"; {len(failed)} signatures were tried" if len(failed) > 1 else ""
        text = f"{closest.fields['reason']}{more}"
        raise errors.Untrusted(url=str(self._of), fault=closest.fields["fault"], reason=text) from closest


def _demanded(demand: Demand) -> Iterator[Check]:
    if demand.signed_by:
        known = _keys(demand.signed_by)
        verify = functools.partial(_by_keys, known)
        yield Check(
            demand.signed_by, verify, identity.same_image, named=False, annotations=demand.annotations
        )
    elif demand.is_keyless:
        from cdi_worker.sources.trust import keyless

        where, verify_it = f"--certificate-identity {demand.identity}", keyless.verify(demand)
        yield Check(where, verify_it, identity.same_image, named=False, annotations=demand.annotations)


def _keys(path: str) -> tuple[keys.Key, ...]:
    """Return the keys in a file, or in the files of a mounted ConfigMap. Raises ``errors.RequestError``."""
    found = tuple(key for name, data in keyfiles.read(path) for key in keys.read(data, name))
    if not found:
        raise errors.RequestError(f"{path}: no file with a public key in it")
    return found


def _of_policy(path: str | None, of: reference.Reference | reference.ArchiveReference) -> Iterator[Check]:
    """Yield the signatures that a policy demands. Raises ``errors.Untrusted`` for a rejected image."""
    if not path:
        return
    scope, requirements = policy.read(path).requirements(of)
    where = f"{path} ({scope})"
    log.info("policy path=%r scope=%r requirements=%r", path, scope, [each.kind for each in requirements])
    for each in requirements:
        if each.kind == policy.REJECT:
            raise errors.Untrusted(url=str(of), fault=signature.REJECTED, reason=f"{where} rejects it")
        if each.kind != policy.ACCEPT:
            if each.kind != policy.SIGSTORE or each.other:
                reason = f"{where} demands {each.describe()}, which is not supported"
                raise errors.Untrusted(url=str(of), fault=signature.UNVERIFIABLE, reason=reason)
            known = keys.read(each.keys.read(), where)
            yield Check(where, functools.partial(_by_keys, known), each.rule, named=True)


def _by_keys(known: Sequence[keys.Key], candidate: Candidate) -> signature.Signature:
    verify = functools.partial(keys.signer, known)
    if candidate.simple is not None:
        return simple.verified(candidate.simple, verify, candidate.name)
    return bundle.verified(candidate.bundle or b"", verify, candidate.name)


def _target(of: reference.Reference) -> str:
    return f"@{of.digest}" if of.digest else f":{of.tag}"
