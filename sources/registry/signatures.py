"""The signatures that a registry holds for a manifest, as bytes; nothing in them is verified here.

cosign, "SIGNATURE_SPEC.md" (the tag), "BUNDLE_SPEC.md"; OCI distribution specification, "Listing Referrers".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import bundle, simple
from cdi_worker.sources.registry import blobs, documents
from cdi_worker.sources.trust import Candidate

if TYPE_CHECKING:
    from cdi_worker.sources.registry.api import Registry

log = logging.getLogger(__name__)

#: Signatures of one manifest that are read: each takes a request.
MOST: Final = 64
#: Artifacts that may be signatures. Some registries do not keep the type.
TYPES: Final = frozenset(
    {
        bundle.MEDIA_TYPE,
        "application/vnd.dev.cosign.artifact.sig.v1+json",
        "application/vnd.oci.empty.v1+json",
        "",
    }
)
PREDICATE: Final = "dev.sigstore.bundle.predicateType"


def find(store: Registry, digest: str) -> Iterator[Candidate]:
    """Yield the signatures of the manifest with this digest, at most ``MOST``."""
    for count, found in enumerate(_all(store, digest)):
        if count == MOST:
            log.warning("more signatures than are read most=%d digest=%s", MOST, digest)
            return
        yield found


def _all(store: Registry, digest: str) -> Iterator[Candidate]:
    tag = digest.replace(":", "-")
    if (data := store.look_up("manifests", f"{tag}.sig")) is not None:
        yield from _layers(store, data)
    listed = store.look_up("referrers", digest)
    if listed is None:
        # A registry without the API: clients keep the list in a tag.
        listed = store.look_up("manifests", tag)
    index = None if listed is None else _parse(store, listed)
    for entry in index.manifests if isinstance(index, documents.Index) else ():
        if (
            entry.artifact_type in TYPES
            and entry.annotations.get(PREDICATE, bundle.PREDICATE) == bundle.PREDICATE
        ):
            try:
                data = store.manifest(entry)
            except (errors.DigestMismatch, errors.Unreachable, errors.Unsupported) as err:
                yield _unreadable(store, entry, err)
            else:
                yield from _layers(store, data)


def _layers(store: Registry, data: bytes) -> Iterator[Candidate]:
    """Yield the signatures in a manifest, one for each layer."""
    manifest = _parse(store, data)
    for layer in manifest.layers if isinstance(manifest, documents.Manifest) else ():
        if layer.media_type == simple.MEDIA_TYPE:
            yield _read(store, layer, simple.LARGEST)
        elif layer.media_type == bundle.MEDIA_TYPE:
            yield _read(store, layer, bundle.LARGEST)


def _read(store: Registry, layer: documents.Descriptor, limit: int) -> Candidate:
    name = f"{store.name}: {layer.digest}"
    if layer.size > limit:
        return Candidate(name, signature.malformed(name, f"it has {layer.size} bytes, more than {limit}"))
    try:
        with contextlib.closing(store.blob(layer)) as reader:
            data = blobs.read_all(reader, limit, name)
    except (errors.DigestMismatch, errors.Unreachable, errors.Unsupported) as err:
        return _unreadable(store, layer, err)
    is_simple = layer.media_type == simple.MEDIA_TYPE
    return Candidate(name, simple.Signed(data, layer.annotations) if is_simple else data)


def _parse(store: Registry, data: bytes) -> documents.Index | documents.Manifest | None:
    """Return a document; None, which has no signatures, for one that cannot be read."""
    try:
        return documents.parse(data, f"{store.name}: signatures")
    except (errors.Unsupported, errors.Refused) as err:
        log.warning("%s", err)
        return None


def _unreadable(store: Registry, of: documents.Descriptor, err: errors.Error) -> Candidate:
    name = f"{store.name}: {of.digest}"
    return Candidate(name, signature.malformed(name, err))
