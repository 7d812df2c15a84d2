"""Checks of container images and their registries that are left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "sources/registry/documents.py",
        "accepts a manifest that is also an index",
        '    if "manifests" in document and "layers" in document:\n',
        "    if False:\n",
        "tests/sources/registry/test_documents.py::test_document_with_manifests_and_layers_is_refused",
    ),
    mutant(
        "sources/registry/documents.py",
        "imports the image of another architecture",
        "    if normal_architecture(stated) != architecture:\n",
        "    if False:\n",
        "tests/sources/registry/test_source.py::test_image_is_chosen_by_platform[True]",
    ),
    mutant(
        "sources/registry/documents.py",
        "accepts a malformed digest",
        "    if not isinstance(value, str) or not reference.is_digest(value):\n",
        "    if False:\n",
        "tests/sources/registry/test_documents.py::test_malformed_document_is_refused[data2]",
    ),
    mutant(
        "sources/registry/blobs.py",
        "reads a blob beyond its size",
        "        if self._done > self._descriptor.size:\n",
        "        if False:\n",
        "tests/sources/registry/test_blobs.py::test_long_blob_is_not_read_to_its_end",
    ),
    mutant(
        "sources/registry/blobs.py",
        "accepts a blob that was cut",
        "        if self._done != self._descriptor.size:\n",
        "        if False:\n",
        "tests/sources/registry/test_blobs.py::test_blob_of_another_size_than_stated_is_refused[900-1]",
    ),
    mutant(
        "sources/registry/blobs.py",
        "does not compare the digest of a blob",
        "        if calculated != expected:\n",
        "        if False:\n",
        "tests/sources/registry/test_blobs.py::test_wrong_digest_is_refused[other-1]",
    ),
    mutant(
        "sources/registry/blobs.py",
        "does not limit the size of a document",
        "    if done > limit:\n",
        "    if False:\n",
        "tests/sources/registry/test_blobs.py::test_read_all_is_bounded",
    ),
    mutant(
        "sources/registry/layer.py",
        "follows a link in a layer",
        "        if entry.type in {headers.SYMLINK, headers.HARD_LINK}:\n",
        "        if False:\n",
        "tests/sources/registry/test_layer.py::test_invalid_disk_is_refused[entries0-link-/disk/a]",
    ),
    mutant(
        "sources/registry/layer.py",
        "fetches a foreign layer",
        "        if blob.is_foreign:\n",
        "        if False:\n",
        "tests/sources/registry/test_source_faults.py::test_foreign_layer_is_refused",
    ),
    mutant(
        "sources/registry/source.py",
        "does not limit nested indexes",
        "        if len(digests) > DEEPEST_INDEX:\n",
        "        if False:\n",
        "tests/sources/registry/test_source.py::test_nested_index_is_followed",
    ),
    mutant(
        "sources/trust/images.py",
        "accepts a signature for another name",
        "        if not is_same:\n",
        "        if False:\n",
        "tests/sources/trust/test_images.py::test_tag_that_was_signed_counts",
    ),
    mutant(
        "sources/registry/auth.py",
        "asks any realm for a token",
        '        if not realm.startswith(("https://", "http://")):\n',
        "        if False:\n",
        "tests/sources/registry/test_auth.py::test_unusable_challenge_is_reported[Bearer]",
    ),
)
