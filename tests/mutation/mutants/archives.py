# ruff: noqa: E501 - lines of the product
"""Checks of archives that are left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "formats/ova/manifest.py",
        "parse: does not check found.setdefault(name, stated) != stated",
        "        if found.setdefault(name, stated) != stated:\n",
        "        if False:\n",
        "tests/formats/ova/test_descriptor.py::test_lines_of_manifests_are_read[SHA256(a b.vmdk)= {}]",
    ),
    mutant(
        "formats/tar/archive.py",
        "_next_header: does not check header.started",
        "                if header.started:\n",
        "                if False:\n",
        "tests/formats/tar/test_archive_refusals.py::test_malformed_archive_is_corrupt[data6]",
    ),
    mutant(
        "formats/tar/archive.py",
        "add: does not check any((key in _CHECKED or key.startswith(b'GNU.sparse.') for ke...",
        '            if any(key in _CHECKED or key.startswith(b"GNU.sparse.") for key in headers.records(data)):\n',
        "            if False:\n",
        "tests/formats/tar/test_archive_refusals.py::test_global_header_with_entry_field_is_refused[path]",
    ),
    mutant(
        "formats/tar/archive.py",
        "archive_path: does not check len(name) > _MAX_PATH or any((len(part.encode(errors...",
        '    if len(name) > _MAX_PATH or any(len(part.encode(errors="surrogateescape")) > _MAX_NAME for part in parts):\n',
        "    if False:\n",
        "tests/formats/tar/test_archive_refusals.py::test_unsafe_name_is_refused[name5]",
    ),
    mutant(
        "formats/tar/headers.py",
        "_take: does not check len(data) < count",
        "        if len(data) < count:\n",
        "        if False:\n",
        "tests/formats/tar/test_archive.py::test_archive_cut_anywhere_is_truncated",
    ),
    mutant(
        "formats/tar/sparse.py",
        "listed: does not check records.get(b'GNU.sparse.numblocks') != b'%d' % (len(exten...",
        '    if records.get(b"GNU.sparse.numblocks") != b"%d" % (len(extents) // 2) or len(extents) % 2:\n',
        "    if False:\n",
        "tests/formats/tar/test_archive_sparse.py::test_map_in_an_extended_header_is_read[0]",
    ),
)
