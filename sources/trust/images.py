"""Verify the demanded signature of an image, before any byte of its disk is fetched."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Sequence

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import bundle, keys, simple
from cdi_worker.sources import reference, smallfile
from cdi_worker.sources.trust import Candidate

log = logging.getLogger(__name__)


class Judge:
    """Finds the signature of the image ``of`` by one of the keys in ``path``, a file or a mounted ConfigMap.

    Raises ``errors.RequestError`` for malformed keys, ``errors.Untrusted`` for an archive.
    """

    def __init__(self, of: reference.Reference | reference.ArchiveReference, path: str) -> None:
        if isinstance(of, reference.ArchiveReference):
            reason = "an OCI archive has no signatures that could be verified; import from the registry"
            raise errors.Untrusted(url=str(of), fault=signature.UNVERIFIABLE, reason=reason)
        self._of = of
        self._path = path
        self._keys = tuple(key for name, data in smallfile.read_each(path) for key in keys.read(data, name))
        if not self._keys:
            raise errors.RequestError(f"{path}: no file with a public key in it")

    def find(self, candidates: Iterator[Candidate], digests: Sequence[str]) -> signature.Signature:
        """Return the first valid signature; candidates after it are not read.

        ``digests``: of the index, if there is one, and manifest. The signature of an index vouches for the
        manifests in it. Raises ``errors.Untrusted``.
        """
        failed = []
        verify = functools.partial(keys.signer, self._keys)
        for each in candidates:
            try:
                if isinstance(each.content, errors.Untrusted):
                    raise each.content
                if isinstance(each.content, bytes):
                    found = bundle.verified(each.content, verify, each.name)
                else:
                    found = simple.verified(each.content, verify, each.name)
                found.check(digests, each.name)
                self._check_reference(found, each)
            except errors.Untrusted as err:
                log.info("signature not accepted: %s", err)
                failed.append(err)
            else:
                log.info("signed by=%r digest=%s reference=%r", found.signer, found.digest, found.reference)
                return found
        if (closest := signature.worst(failed)) is None:
            reason = f"{' and '.join(digests)}: not signed, and {self._path} demands a signature"
            raise errors.Untrusted(url=str(self._of), fault=signature.MISSING, reason=reason)
        more = f"; {len(failed)} signatures were tried" if len(failed) > 1 else ""
        text = f"{closest.fields['reason']}{more}"
        raise errors.Untrusted(url=str(self._of), fault=closest.fields["fault"], reason=text) from closest

    def _check_reference(self, found: signature.Signature, candidate: Candidate) -> None:
        """Raise ``errors.Untrusted`` for the signature of another image.

        A bundle of cosign names no reference; a payload of the older form has a member for it.
        """
        if not found.reference and isinstance(candidate.content, bytes):
            return
        of = self._of
        at = f"@{of.digest}" if of.digest else f":{of.tag}"
        reason = f"{found.signer} signed {found.reference or 'no reference'}, not {of.name}{at}"
        try:
            is_same = same_image(of, reference.parse_name(found.reference))
        except errors.RequestError:
            is_same = False
        if not is_same:
            raise errors.Untrusted(url=candidate.name, fault=signature.OTHER_REFERENCE, reason=reason)


def same_image(wanted: reference.Reference, signed: reference.Reference) -> bool:
    """Return whether an image was signed as the requested one: by repository, and tag if both name one.

    cosign signs no tag. A requested digest is compared with the signed one.
    """
    is_tagged = bool(signed.tag) and not wanted.digest
    return wanted.name == signed.name and (not is_tagged or wanted.tag == signed.tag)
