# ruff: noqa: E501 - lines of the product
"""Checks of sources that are left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "sources/kubevirt/export.py",
        "__enter__: does not check self.head and (not self.head.startswith(b'\\x1f\\x8b\\x08'))",
        '        if self.head and not self.head.startswith(b"\\x1f\\x8b\\x08"):\n',
        "        if False:\n",
        "tests/sources/kubevirt/test_export.py::test_damaged_gzip_never_makes_a_disk[<lambda>-does not begin like gzip]",
    ),
    mutant(
        "sources/kubevirt/maps.py",
        "_add: does not check len(page) > LARGEST_PAGE",
        "        if len(page) > LARGEST_PAGE:\n",
        "        if False:\n",
        "tests/sources/kubevirt/test_backup.py::test_map_that_cannot_be_one_is_refused[enormous page]",
    ),
    mutant(
        "sources/kubevirt/maps.py",
        "read: does not check not self.size",
        "        if not self.size:\n",
        "        if False:\n",
        "tests/sources/kubevirt/test_backup.py::test_map_that_cannot_be_one_is_refused[empty]",
    ),
    mutant(
        "sources/nbd/client.py",
        "_check: does not check error == errno.EMSGSIZE",
        "        if error == errno.EMSGSIZE:\n",
        "        if False:\n",
        "tests/sources/nbd/test_hostile.py::test_half_of_a_read_that_is_sent_twice_is_refused[0-True]",
    ),
    mutant(
        "sources/nbd/handshake.py",
        "_negotiate: does not check not handle.aio_is_negotiating() and server.folder",
        (
            "    if not handle.aio_is_negotiating() and server.folder:\n"
            "        # nbdkit without TLS closes the connection when it is asked for it.\n"
        ),
        "    if False:\n",
        "tests/sources/nbd/test_source.py::test_tls_must_be_that_of_the_address",
    ),
    mutant(
        "sources/vmware/machine.py",
        "_at: does not check len(matching) != 1",
        "        if len(matching) != 1:\n",
        "        if False:\n",
        "tests/sources/vmware/test_session.py::test_wrong_location_is_explained[changes2-no snapshot 'snapshot-99'; available: snapshot-11 \\\\(stage 0\\\\), snap]",
    ),
    mutant(
        "sources/vmware/session.py",
        "_pinned: does not check not re.fullmatch('[0-9A-F]{40}', digits)",
        '    if not re.fullmatch(r"[0-9A-F]{40}", digits):\n',
        "    if False:\n",
        "tests/sources/vmware/test_session.py::test_malformed_thumbprint_is_refused",
    ),
    mutant(
        "sources/web/http.py",
        "_check_range: does not check not found",
        "        if not found:\n",
        "        if False:\n",
        "tests/sources/web/test_http_ranges.py::test_response_of_another_range_is_refused[later4-NoRanges]",
    ),
    mutant(
        "sources/web/http.py",
        "_raise_status: does not check response.status_code == 200",
        "        if response.status_code == 200:\n",
        "        if False:\n",
        "tests/sources/web/test_http_ranges.py::test_response_of_another_range_is_refused[later5-NoRanges]",
    ),
)
