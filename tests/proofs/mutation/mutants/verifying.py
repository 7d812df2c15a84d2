# ruff: noqa: E501 - lines of the product
"""What a verification compares, and confirms, left out: each verdict is seen wrong."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

SINK = "images/sinks/verified.py"
VERIFY = "importer/verification.py"
PAIRS = "tests/end_to_end/test_verify_pairs.py"
TESTS = "tests/end_to_end/test_verify.py"

MUTANTS = (
    mutant(
        SINK,
        "takes data for equal",
        "        for first, end in spans.joined(compared.unlike(stored, start, data)):\n",
        "        for first, end in ():\n",
        PAIRS,
    ),
    mutant(
        SINK,
        "takes what is on the disk for a hole where the source has one",
        "                        if not is_zero:\n                            yield low + begin, stored[begin:stop]\n",
        "                        if False:\n                            yield low + begin, stored[begin:stop]\n",
        PAIRS,
    ),
    mutant(
        SINK,
        "does not compare the rest of a file",
        "        if size < self.size and not is_device:\n",
        "        if False:\n",
        PAIRS,
    ),
    mutant(
        SINK,
        "compares the rest of a device",
        "        if size < self.size and not is_device:\n",
        "        if size < self.size:\n",
        f"{TESTS}::test_rest_of_a_device_is_not_compared_and_that_of_a_file_is",
    ),
    mutant(
        SINK,
        "does not note what is missing at the end of the disk",
        "        for start, end in self._parts(self.size, size) if size > self.size else ():\n",
        "        for start, end in ():\n",
        f"{TESTS}::test_image_larger_than_the_disk_differs",
    ),
    mutant(
        VERIFY,
        "takes a disk for different whatever was found",
        "        return not self.differed and self.size <= self.disk_size\n",
        "        return False\n",
        PAIRS,
    ),
    mutant(
        "importer/destination.py",
        "has a verdict about a file that was written meanwhile",
        "    if _state(path) != before:\n",
        "    if False:\n",
        f"{TESTS}::test_disk_that_changes_is_an_error",
    ),
    mutant(
        "images/targets/finished.py",
        "opens the disk for writing",
        "_FLAGS: Final = os.O_RDONLY",
        "_FLAGS: Final = os.O_RDWR",
        f"{TESTS}::test_disk_is_opened_without_write_access",
    ),
)
