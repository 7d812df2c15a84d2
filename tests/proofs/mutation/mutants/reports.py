"""Secrets, and what is reported, left unchecked."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "cdi_worker/masking.py",
        "does not find a secret that is encoded twice",
        "inner = _spans(decoded, needles, depth - 1)",
        "inner = _spans(decoded, needles, 0)",
        "tests/importer/test_masking.py::test_secret_is_masked_in_every_encoding",
    ),
    mutant(
        "cdi_worker/masking.py",
        "shows the secrets of a traceback",
        "        if record.exc_info:\n",
        "        if False:\n",
        "tests/importer/test_masking.py::test_log_of_a_library_is_masked_with_its_tracebacks",
    ),
    mutant(
        "cdi_worker/masking.py",
        "keeps all secrets for ever",
        "        while len(self._kept) > KEPT or sum(map(len, self._kept)) > KEPT_LENGTH:\n",
        "        while False:\n",
        "tests/importer/test_masking.py::test_memory_of_secrets_is_bounded",
    ),
    mutant(
        "importer/report.py",
        "ends with status 0 although the message that it failed cannot be written",
        "return report.status if report.unsaid is None else report.unsaid",
        "return report.status",
        "tests/contract/test_importer.py::test_failure_of_status_0_needs_its_message",
    ),
    mutant(
        "importer/progress.py",
        "counts what is kept twice",
        "        before, self.passed = self.passed, max(self._advance, self._count)\n",
        "        before, self.passed = self.passed, self.passed + count\n",
        "tests/importer/test_progress_resumed.py::test_what_was_counted_in_advance_is_not_counted_twice",
    ),
    mutant(
        "cdi_worker/masking.py",
        "does not find a secret that a server has percent-encoded",
        '    _Codec("%", _PERCENT, lambda found: chr(int(found[1], 16))),\n',
        "",
        "tests/importer/test_masking.py::test_secret_is_masked_in_every_encoding",
    ),
    mutant(
        "cdi_worker/masking.py",
        "shows a password with a slash in an address",
        '    return rest.rpartition("@")[0] if is_odd else ""',
        '    return ""',
        "tests/importer/test_masking.py::test_address_is_shown_without_its_secrets",
    ),
    mutant(
        "cdi_worker/masking.py",
        "masks a part of every digest that contains a short secret",
        "len(each) < WORD and each.isalnum()",
        "False",
        "tests/importer/test_masking.py::test_words_are_masked_as_words",
    ),
    mutant(
        "importer/report.py",
        "cuts a termination message of JSON in the middle",
        ("    if len(text.encode()) <= LIMIT:\n        return text\n"),
        "    return text\n",
        "tests/importer/test_report.py::test_message_has_at_most_4096_bytes",
    ),
    mutant(
        "importer/progress.py",
        "fails an import when the reader of its progress closes the pipe",
        "        with self._printing, contextlib.suppress(OSError):\n",
        "        with self._printing:\n",
        "tests/importer/test_terminal.py::test_closed_pipe_does_not_end_an_import",
    ),
    mutant(
        "cdi_worker/masking.py",
        "does not find a secret that a server has encoded as HTML",
        '    _Codec("&", re',
        '    _Codec("\\0", re',
        "tests/importer/test_masking.py::test_secret_is_masked_in_every_encoding",
    ),
    mutant(
        "cdi_worker/masking.py",
        "masks what CDI's controllers search for",
        " or _is_phrase(text, wanted, at)",
        "",
        "tests/importer/test_masking.py::test_words_are_masked_as_words",
    ),
    mutant(
        "importer/progress.py",
        "begins a resumed import at 0 %",
        "            kept, skipped = self._ahead or (0, 0)\n",
        "            kept, skipped = 0, 0\n",
        "tests/importer/test_progress_resumed.py::test_percentage_never_falls_whatever_is_kept",
    ),
    mutant(
        "cdi_worker/masking.py",
        "shows the signature in a query",
        ("        if _is_secret(name, value):\n            yield from (value, _plain(value)"),
        ("        if False:\n            yield from (value, _plain(value)"),
        "tests/importer/test_masking.py::test_secret_values_of_a_query_are_masked_wherever_they_are",
    ),
    mutant(
        "importer/progress.py",
        "lets the percentage fall after a fall-back",
        "self.percent = max(self.percent, start + (end - start) * min(1.0, self.count / self.total))",
        "self.percent = start + (end - start) * min(1.0, self.count / self.total)",
        "tests/importer/test_progress.py::test_percentage_does_not_fall_when_a_phase_begins_again",
    ),
)
