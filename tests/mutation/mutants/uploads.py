# ruff: noqa: E501 - lines of the product
"""Checks of uploads that are left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "formats/clone.py",
        "_finish: does not check self._reader.readinto(self._packed[:1])",
        "        if self._reader.readinto(self._packed[:1]):\n",
        "        if False:\n",
        "tests/formats/qcow2/test_stream.py::test_stream_reader_keeps_enough_bytes",
    ),
    mutant(
        "importer/send/sender.py",
        "_check: does not check not answer.is_good",
        "    if not answer.is_good:\n",
        "    if False:\n",
        "tests/importer/send/test_file.py::test_command_needs_a_url_and_a_token_only",
    ),
    mutant(
        "importer/send/sender.py",
        "send: does not check restarts > RESTARTS or not self.begin(stream.length)",
        "                if restarts > RESTARTS or not self.begin(stream.length):\n",
        "                if False:\n",
        "tests/importer/send/test_file.py::test_restarted_server_gets_the_upload_again",
    ),
    mutant(
        "importer/upload/connection.py",
        "_take: does not check not self._ready(select.POLLIN, limit, interruptible=interru...",
        "            if not self._ready(select.POLLIN, limit, interruptible=interruptible):\n",
        "            if False:\n",
        "tests/importer/upload/test_breaks.py::test_offset_is_exact_after_a_cut[silence-False]",
    ),
    mutant(
        "importer/upload/connection.py",
        "line: does not check not more",
        "            if not more:\n",
        "            if False:\n",
        "tests/importer/upload/test_breaks.py::test_offset_is_exact_after_a_cut[end of TLS-True]",
    ),
    mutant(
        "importer/upload/http.py",
        "_read_trailer: does not check count == TRAILERS",
        "        if count == TRAILERS:\n",
        "        if False:\n",
        "tests/importer/upload/test_http.py::test_malformed_chunk_is_refused[65 trailers]",
    ),
    mutant(
        "importer/upload/http.py",
        "readinto: does not check not count",
        (
            "        if not count:\n"
            '            raise ConnectionError(f"the client closed the connection {self._left} bytes before the end")\n'
        ),
        (
            "        if False:\n"
            '            raise ConnectionError(f"the client closed the connection {self._left} bytes before the end")\n'
        ),
        "tests/importer/upload/test_breaks.py::test_offset_is_exact_after_a_cut[end of TLS-False]",
    ),
    mutant(
        "importer/upload/resumable.py",
        "_delete: does not check not session.is_open",
        (
            "    if not session.is_open:\n"
            "        # All bytes have been received and become a disk: 204 would wrongly report them as deleted.\n"
        ),
        "    if False:\n",
        "tests/importer/upload/test_breaks.py::test_complete_upload_cannot_be_deleted",
    ),
    mutant(
        "importer/upload/server.py",
        "_admission: does not check self._ending or (self.running is not None and (not sel...",
        "            if self._ending or (self.running is not None and not self.running.work.done()):\n",
        "            if False:\n",
        "tests/importer/upload/test_breaks.py::test_new_upload_is_possible_while_a_connection_hangs[upload]",
    ),
)
