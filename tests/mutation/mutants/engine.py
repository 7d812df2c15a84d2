"""Checks of engine that are left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "images/engine/cancelling.py",
        "check: does not check self.is_set()",
        ("        if self.is_set():\n            raise self.error()\n"),
        ("        if False:\n            raise self.error()\n"),
        "tests/images/engine/test_ahead.py::test_leaving_with_a_full_queue_stops_the_thread",
    ),
    mutant(
        "images/engine/responses.py",
        "read: does not check self._kept > self.most",
        "            if self._kept > self.most:\n",
        "            if False:\n",
        "tests/images/engine/test_responses.py::test_body_is_read_up_to_the_limit[None-chunked]",
    ),
    mutant(
        "images/export/handshake.py",
        "negotiate: does not check flags & ~(_FIXED_NEWSTYLE | _NO_ZEROES)",
        "    if flags & ~(_FIXED_NEWSTYLE | _NO_ZEROES):\n",
        "    if False:\n",
        "tests/images/export/test_server_hostile.py::test_unknown_client_flags_close_the_connection[4]",
    ),
    mutant(
        "images/export/handshake.py",
        "receive: does not check len(data) < length",
        "        if len(data) < length:\n",
        "        if False:\n",
        "tests/images/export/test_server.py::test_slow_read_does_not_delay_others",
    ),
    mutant(
        "images/export/server.py",
        "__exit__: does not check self._failure is not None and is_consequence",
        "        if self._failure is not None and is_consequence:\n",
        "        if False:\n",
        "tests/images/export/test_server.py::test_block_raises_the_source_error",
    ),
)
