"""Checks of targets that are left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

MUTANTS = (
    mutant(
        "images/target/base.py",
        "_reach: does not check self._limit is not None and end > self._limit",
        "        if self._limit is not None and end > self._limit:\n",
        "        if False:\n",
        "tests/images/target/test_block.py::test_stream_of_unknown_size_ends_with_the_device",
    ),
    mutant(
        "images/target/copy.py",
        "copy_runs: does not check not thin and total + length > limit",
        "            if not thin and total + length > limit:\n",
        "            if False:\n",
        "tests/images/target/test_copy.py::test_copy_up_to_the_limit_is_allowed",
    ),
    mutant(
        "images/target/open.py",
        "check_replaceable: does not check not stat.S_ISREG(os.lstat(path).st_mode)",
        "            if not stat.S_ISREG(os.lstat(path).st_mode):\n",
        "            if False:\n",
        "tests/images/target/test_claim.py::test_special_file_is_never_replaced[False]",
    ),
)
