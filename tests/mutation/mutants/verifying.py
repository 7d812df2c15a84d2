# ruff: noqa: E501 - lines of the product
"""What a verification compares, and confirms, left out: each verdict is seen wrong."""

from __future__ import annotations

from tests.mutation.mutant import mutant

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
        VERIFY,
        "reports a difference that the source does not repeat",
        "    if not verified.same(first, second, 0):\n",
        "    if False:\n",
        f"{TESTS}::test_changed_source_is_an_error",
    ),
    mutant(
        VERIFY,
        "reports a difference that the disk does not repeat",
        "    if not verified.same(first, second, 1):\n",
        "    if False:\n",
        f"{TESTS}::test_device_that_changes_is_an_error",
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
    mutant(
        "importer/sampling.py",
        "leaves out the starts of partitions",
        "        found += [(start, start + SUPERBLOCK) for start in partitions.starts(head)]\n",
        "",
        f"{TESTS}::test_sample_has_the_start_of_each_partition",
    ),
    mutant(
        "importer/sampling.py",
        "takes any size that is stated for that of a sample",
        "size = min(size or whole, whole)",
        "size = size or whole",
        f"{TESTS}::test_sample_of_an_image_larger_than_the_disk",
    ),
    mutant(
        "importer/sampling.py",
        "keeps a piece of memory for each MiB of a sample",
        "        while length > MOST * piece:\n",
        "        while False:\n",
        f"{TESTS}::test_large_sample_has_few_pieces",
    ),
    mutant(
        "importer/sampling.py",
        "takes the end of a larger disk for that of the image",
        "self.places(size, ",
        "self.places(whole, ",
        f"{TESTS}::test_sample_has_the_end_of_the_image_on_a_larger_device",
    ),
    mutant(
        "importer/sampling.py",
        "leaves out what follows the image",
        "        found.add(size, whole)\n",
        "",
        f"{TESTS}::test_sample_has_the_end_of_the_image_on_a_larger_device",
    ),
    mutant(
        "importer/mapped.py",
        "maps a compressed file as if it were a disk",
        "        if not (request.format or request.is_qcow2):\n",
        "        if False:\n",
        "tests/end_to_end/test_maps.py::test_map_of_an_image_is_that_of_its_disk",
    ),
    mutant(
        SINK,
        "compares only the selected part of a range of a map",
        "                if self._parts(part[0], part[1]):\n",
        "                if self._parts(part[0], part[0] + 1) == [(part[0], part[0] + 1)]:\n",
        "tests/end_to_end/test_maps.py::test_sample_compares_ranges_of_the_map_whole[sparse]",
    ),
    mutant(
        "importer/together.py",
        "forgets the checksum of an OVA whose disks are compared",
        "disk=disk.file, checksum=request.checksum, demand=request.demand",
        "disk=disk.file",
        "tests/end_to_end/test_ova_all.py::test_command_has_a_verdict_for_each_disk",
    ),
    mutant(
        "importer/commands/disk.py",
        "has the verdict of the first disk of several",
        "all(each.is_equal for each in found)",
        "found[0].is_equal",
        "tests/end_to_end/test_ova_all.py::test_command_has_a_verdict_for_each_disk",
    ),
    mutant(
        "importer/sampling.py",
        "ignores the seed",
        "random.Random(self.seed).sample",
        "random.Random().sample",
        f"{TESTS}::test_sample_finds_what_it_reads_and_the_seed_repeats_it",
    ),
    mutant(
        "importer/roles/run.py",
        "runs another role than a verification",
        '        if paths.settings.verify and role != "importer":\n',
        "        if False:\n",
        f"{TESTS}::test_only_an_import_is_verified_in_a_pod",
    ),
    mutant(
        "importer/audit.py",
        "takes what is read back for right",
        "        if compare.differing:\n",
        "        if False:\n",
        "tests/importer/test_audit.py::test_whole_disk_is_compared_with_what_was_received",
    ),
    mutant(
        "images/readback.py",
        "does not compare a disk that is cut off",
        '        for record in self.records:\n            self._differs(self._noted.compare(record, b""))\n',
        "        pass\n",
        "tests/importer/test_audit.py::test_disk_that_is_cut_off_differs",
    ),
    mutant(
        "importer/routes/delivery.py",
        "does not compare the end of a stream that is read back",
        "        attempt.outcome.receiving.end(size)\n",
        "        pass\n",
        "tests/importer/test_audit.py::test_whole_disk_is_compared_with_what_was_received",
    ),
)
