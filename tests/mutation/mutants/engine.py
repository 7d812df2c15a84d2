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
    mutant(
        "images/engine/resume.py",
        "continues a stream without comparing the sector before",
        "            if again != last:\n",
        "            if False:\n",
        "tests/images/engine/test_resume.py::test_stream_continued_at_another_byte_is_read_from_the_beginning",
    ),
    mutant(
        "images/engine/resume.py",
        "starts over with the bytes of another stream",
        "        if crc != self._crc:\n",
        "        if False:\n",
        "tests/images/engine/test_resume.py::test_changed_content_is_refused_on_resume",
    ),
    mutant(
        "images/engine/seams.py",
        "retries ranges whose answers end at once for ever",
        "        if self._thread.fruitless >= _FRUITLESS:\n",
        "        if False:\n",
        "tests/images/engine/test_seams.py::test_fruitless_answers_end_the_ranges",
    ),
    mutant(
        "images/engine/resume.py",
        "accepts a stream that is longer than stated",
        "        if self._size is not None and self.position + count > self._size:\n",
        "        if False:\n",
        "tests/images/engine/test_resume.py::test_stream_longer_than_stated_is_refused",
    ),
    mutant(
        "images/engine/resume.py",
        "accepts a stream that ends early",
        "        if not count and self._size is not None and self.position < self._size:\n",
        "        if False:\n",
        "tests/images/engine/test_resume.py::test_early_end_is_resumed",
    ),
    mutant(
        "images/engine/retry.py",
        "counts slow storage as a slow source",
        ("        self._since += idle\n        self._unbroken += idle\n"),
        "",
        "tests/images/engine/test_resume.py::test_time_of_the_reader_is_not_silence_of_the_source",
    ),
    mutant(
        "images/engine/seams.py",
        "does not read across 4 GiB before it trusts ranges behind",
        "        if self._size > _BORDER:\n",
        "        if False:\n",
        "tests/images/engine/test_seams.py::test_offsets_of_32_bits_are_found",
    ),
    mutant(
        "images/engine/fetch.py",
        "believes a table that another request reads otherwise",
        "        if again != part:\n",
        "        if False:\n",
        "tests/images/engine/test_seams.py::test_shifted_table_is_found",
    ),
    mutant(
        "images/engine/seams.py",
        "does not compare what two requests have before their seam",
        "            if not (before.endswith(left) or left.endswith(before)):\n",
        "            if False:\n",
        "tests/images/engine/test_seams.py::test_bytes_before_a_seam_are_compared",
    ),
    mutant(
        "images/engine/fetch.py",
        "retries a read whose attempt has ended",
        (
            "                if self._scope.is_set():\n"
            "                    raise self._scope.error() from err\n"
        ),
        "",
        "tests/images/engine/test_fetch.py::test_read_that_was_ended_is_not_retried",
    ),
    mutant(
        "images/engine/seams.py",
        "does not compare what two requests have behind their seam",
        "            if not (after.startswith(right) or right.startswith(after)):\n",
        "            if False:\n",
        "tests/images/engine/test_seams.py::test_bytes_behind_a_seam_are_compared",
    ),
    mutant(
        "sources/local/file.py",
        "waits for a silent pipe for ever",
        "            happened = poll.poll(self._meter.left * 1000)\n",
        "            happened = poll.poll()\n",
        "tests/sources/local/test_file.py::test_silent_standard_input_is_given_up",
    ),
    mutant(
        "images/engine/seams.py",
        "delivers data before the tables that placed it are confirmed",
        "            self._changed.wait_for(lambda: not self._left or self._scope.is_set())\n",
        "            pass\n",
        "tests/images/engine/test_seams.py::test_data_waits_for_a_table_that_another_thread_confirms",
    ),
    mutant(
        "images/engine/seams.py",
        "believes ranges behind 4 GiB that begin elsewhere",
        "        if data[start : start + length] != self._read(offset + start, length):\n",
        "        if False:\n",
        "tests/images/engine/test_seams.py::test_offsets_of_32_bits_are_found",
    ),
    mutant(
        "images/engine/retry.py",
        "takes a byte now and then for progress",
        "        elif now - self._unbroken > self._limit:\n",
        "        elif False:\n",
        "tests/images/engine/test_retry.py::test_bytes_below_the_floor_do_not_restart_the_limit",
    ),
    mutant(
        "images/engine/retry.py",
        "reads from a peer that sends hardly anything for ever",
        "        elif self._seconds >= self._limit:\n",
        "        elif False:\n",
        "tests/images/engine/test_retry.py::test_peer_below_the_floor_is_given_up",
    ),
)
