# ruff: noqa: E501 - lines of the product
"""Checks of uploads that are left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "formats/clone.py",
        "accepts bytes behind the end of a clone",
        "        if self._reader.readinto(self._packed[:1]):\n",
        "        if False:\n",
        "tests/formats/test_clone.py::test_bytes_behind_the_end_are_corrupt",
    ),
    mutant(
        "importer/send/sender.py",
        "takes an error of the server for success",
        "    if not answer.is_good:\n",
        "    if False:\n",
        "tests/importer/send/test_file.py::test_command_needs_a_url_and_a_token_only",
    ),
    mutant(
        "importer/send/sender.py",
        "continues an upload that the server has lost without creating it again",
        "                if losses > LOSSES or (now is None and not self.begin(stream.length)):\n",
        "                if False:\n",
        "tests/importer/send/test_file.py::test_restarted_server_gets_the_upload_again",
    ),
    mutant(
        "importer/upload/connection.py",
        "waits for a silent client without limit",
        "            if not self._ready(select.POLLIN, limit, interruptible=interruptible):\n",
        "            if False:\n",
        "tests/importer/upload/test_breaks.py::test_offset_is_exact_after_a_cut[silence-False]",
    ),
    mutant(
        "importer/upload/connection.py",
        "takes a line that is cut",
        "            if not more:\n",
        "            if False:\n",
        "tests/importer/upload/test_breaks.py::test_offset_is_exact_after_a_cut[end of TLS-True]",
    ),
    mutant(
        "importer/upload/server.py",
        "begins an upload while another one runs",
        "            if self.running is not None and not self.running.work.done():\n",
        "            if False:\n",
        "tests/importer/upload/test_breaks.py::test_new_upload_is_possible_while_a_connection_hangs[upload]",
    ),
    mutant(
        "importer/upload/settings.py",
        "serves with settings that have faults",
        ("    if faults:\n        raise errors.RequestError(*faults)\n"),
        "",
        "tests/importer/upload/test_life.py::test_all_errors_of_the_environment_are_reported",
    ),
    mutant(
        "importer/upload/http.py",
        "accepts a request that another server reads as two",
        '        if b"transfer-encoding" in names and (b"content-length" in names or head.http_version == b"1.0"):\n',
        "        if False:\n",
        "tests/importer/upload/test_http.py::test_malformed_request_is_refused",
    ),
    mutant(
        "importer/send/file.py",
        "makes one disk of two versions of a file",
        "        if now != self._version:\n",
        "        if False:\n",
        "tests/importer/send/test_file.py::test_file_changed_during_the_upload_is_no_disk",
    ),
    mutant(
        "importer/upload/resumable.py",
        "answers for an upload under any name",
        'name not in {"", session.name}:',
        "False:",
        "tests/importer/upload/test_resumable.py::test_replaced_upload_is_unknown",
    ),
    mutant(
        "importer/send/file.py",
        "sends the end of a file before its checksum is verified",
        ("        if not left:\n            digest.verify()\n"),
        "",
        "tests/importer/send/test_file.py::test_checksum_is_verified_for_servers_without_checksums",
    ),
    mutant(
        "importer/upload/http.py",
        "accepts the certificate of any client",
        "    if request.client_name != client_name:\n",
        "    if False:\n",
        "tests/contract/test_upload.py::test_other_clients_and_paths_are_refused",
    ),
    mutant(
        "importer/upload/resumable.py",
        "accepts more bytes than declared",
        "    if length is not None and session.offset + (request.length or 0) > length:\n",
        "    if False:\n",
        "tests/importer/upload/test_resumable.py::test_invalid_request_is_refused",
    ),
    mutant(
        "importer/upload/connection.py",
        "reads a line of any length",
        "            if len(self._ahead) > longest + 1:\n",
        "            if False:\n",
        "tests/importer/upload/test_connection.py::test_too_long_line_is_refused",
    ),
    mutant(
        "importer/upload/resumable.py",
        "accepts a body that begins elsewhere",
        '    if request.headers.get("upload-offset") != str(session.offset):\n',
        "    if False:\n",
        "tests/importer/upload/test_resumable.py::test_upload_in_parts_is_complete",
    ),
)
