"""Checks of trust that are left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "formats/checksum.py",
        "takes a malformed checksum",
        "    if len(digest) != length or not set(digest) <= set(string.hexdigits):\n",
        "    if False:\n",
        "tests/formats/test_checksum.py::test_malformed_checksum_is_refused[sha256:]",
    ),
    mutant(
        "sources/registry/auth.py",
        "sends credentials over plain http",
        '        if destination.startswith("http://") and not self._access.insecure:\n',
        "        if False:\n",
        "tests/sources/registry/test_auth.py::test_credentials_are_not_sent_unencrypted",
    ),
    mutant(
        "sources/registry/documents.py",
        "takes a document with another digest",
        "    if calculated != expected:\n",
        "    if False:\n",
        "tests/sources/registry/test_source_faults.py::test_document_with_another_digest_is_refused",
    ),
    mutant(
        "sources/reference.py",
        "takes a malformed address of an OCI archive",
        "    if not path or (is_tagged and not _TAG.fullmatch(tag)):\n",
        "    if False:\n",
        "tests/sources/test_reference.py::test_malformed_reference_is_refused[oci-archive:]",
    ),
)
