"""Checks of archives that are left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "formats/tar/sparse.py",
        "takes a sparse map with another number of extents than stated",
        '    if records.get(b"GNU.sparse.numblocks") != b"%d" % (len(extents) // 2) or len(extents) % 2:\n',
        "    if False:\n",
        "tests/formats/tar/test_archive_sparse.py::test_map_in_an_extended_header_is_read[0]",
    ),
    mutant(
        "formats/tar/sparse.py",
        "reads numbers of a sparse map that are not decimal",
        "        if not _DECIMAL.fullmatch(value):\n",
        "        if False:\n",
        "tests/formats/tar/test_archive_sparse.py::test_malformed_map_in_an_extended_header_is_corrupt[records1]",
    ),
    mutant(
        "formats/tar/sparse.py",
        "reads the records of a sparse map in any order",
        "            if key != next(keys):\n",
        "            if False:\n",
        "tests/formats/tar/test_archive_sparse.py::test_malformed_map_in_an_extended_header_is_corrupt[records6]",
    ),
    mutant(
        "formats/tar/sparse.py",
        "accepts overlapping extents of a sparse file",
        "        if offset < end:\n",
        "        if False:\n",
        "tests/formats/tar/test_archive_sparse.py::test_contradictory_sparse_map_is_corrupt[extents0-100]",
    ),
    mutant(
        "formats/tar/sparse.py",
        "accepts extents beyond the end of a sparse file",
        "    if end > size or size >= 1 << 63 or total != stored:\n",
        "    if False:\n",
        "tests/formats/tar/test_archive_sparse.py::test_map_in_an_extended_header_is_read[0]",
    ),
    mutant(
        "formats/tar/sparse.py",
        "does not limit the extents of a sparse file",
        "    if count > MAX_EXTENTS:\n",
        "    if False:\n",
        "tests/formats/tar/test_walk.py::test_endless_sparse_map_is_refused[]",
    ),
    mutant(
        "formats/tar/archive.py",
        "unpacks outside the volume",
        '    if ".." in parts:\n',
        "    if False:\n",
        "tests/formats/tar/test_archive_refusals.py::test_unsafe_name_is_refused[..]",
    ),
    mutant(
        "formats/tar/archive.py",
        "does not limit the depth of folders",
        "    if len(parts) > _DEEPEST:\n",
        "    if False:\n",
        "tests/formats/tar/test_archive_refusals.py::test_unsafe_name_is_refused[name7]",
    ),
    mutant(
        "formats/tar/archive.py",
        "unpacks more than fits into the volume",
        "        if needed > self._limit:\n",
        "        if False:\n",
        "tests/formats/tar/test_archive.py::test_content_above_limit_is_too_large",
    ),
    mutant(
        "formats/tar/archive.py",
        "ignores data behind the end of an archive",
        '            if data.strip(b"\\0") or self.at - start > _LARGEST_END:\n',
        "            if False:\n",
        "tests/formats/tar/test_archive.py::test_data_after_the_end_is_garbage",
    ),
    mutant(
        "formats/tar/headers.py",
        "accepts a repeated record in an extended header",
        "        if key in found and key not in REPEATED:\n",
        "        if False:\n",
        "tests/formats/tar/test_archive_refusals.py::test_malformed_extended_header_is_corrupt[records1]",
    ),
    mutant(
        "formats/ova/package.py",
        "accepts a package without members",
        "        if not self.members:\n",
        "        if False:\n",
        "tests/formats/ova/test_package.py::test_archive_without_members_is_refused",
    ),
    mutant(
        "formats/ova/package.py",
        "accepts a package that was cut before its manifest",
        "        if self.checksums is None and not self.has_end_mark:\n",
        "        if False:\n",
        "tests/formats/ova/test_package.py::test_archive_without_its_end_needs_a_manifest",
    ),
    mutant(
        "formats/ova/package.py",
        "accepts a second manifest",
        "        if self.checksums is not None:\n",
        "        if False:\n",
        "tests/formats/ova/test_package.py::test_manifest_is_unique_and_lists_the_descriptor",
    ),
    mutant(
        "formats/ova/package.py",
        "accepts a manifest without the descriptor",
        "        if member.name not in self.checksums:\n",
        "        if False:\n",
        "tests/formats/ova/test_package.py::test_manifest_is_unique_and_lists_the_descriptor",
    ),
    mutant(
        "formats/ova/package.py",
        "does not limit the members of a package",
        "            if self._count > _MOST:\n",
        "            if False:\n",
        "tests/formats/ova/test_package.py::test_endless_archive_is_refused[part-more than 4096 members]",
    ),
)
