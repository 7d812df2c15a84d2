# ruff: noqa: E501 - lines of the product
"""What makes a disk durable, and usable only when it is whole, left out."""

from __future__ import annotations

from tests.proofs.mutation.mutant import mutant

CUTS = "tests/end_to_end/test_power_cut.py"
FILE = "tests/images/targets/test_file.py"
BLOCK = "tests/images/targets/test_block.py"
DIGESTS = "tests/scratch/test_digests.py"
CLAIM = "tests/images/targets/test_claim.py"
GROUP = "tests/images/targets/test_group.py"

MUTANTS = (
    mutant(
        "images/targets/storage.py",
        "forgets a failed write: a later commit succeeds",
        "            self._failure = errors.target_error(self.path, err, doing)\n            raise self._failure from err\n"
        "        except errors.TargetError as err:\n            self._failure = err\n            raise\n",
        "            raise errors.target_error(self.path, err, doing) from err\n",
        "tests/images/targets",
    ),
    mutant(
        "images/targets/base.py",
        "leaves the padding of the last sector as it was",
        "                self.storage.zero(self._end, max(end, self.withheld))\n",
        "                pass\n",
        BLOCK,
    ),
    mutant(
        "images/targets/file.py",
        "renames the disk before it is synced",
        "        self.storage.sync()\n        self.storage.close()\n",
        "        self.storage.close()\n",
        CUTS,
    ),
    mutant(
        "images/targets/block.py",
        "writes the head of a device at once, with the sector that makes it usable",
        "        last = _first_data(self.head, self._sector)\n        data = bytes(self.head[last])",
        "        last = slice(0, 0)\n        data = bytes(self.head[last])",
        CUTS,
    ),
    mutant(
        "images/targets/block.py",
        "removes the record before the disk is complete",
        "            self.head[last] = self._no_data(last)\n",
        "            self.head[last] = bytes(len(data))\n",
        f"{BLOCK}::test_record_stays_until_the_disk_is_complete",
    ),
    mutant(
        "images/targets/block.py",
        "erases an old disk before its own record is there",
        "            self._put(part.start, memoryview(self._no_data(part)))\n",
        "            self._put(part.start, memoryview(bytes(part.stop - part.start)))\n",
        f"{BLOCK}::test_record_stays_until_the_disk_is_complete",
    ),
    mutant(
        "images/targets/checkpoint.py",
        "goes on without a checkpoint on a full file system",
        "            if is_full or err.errno",
        "            if err.errno",
        "tests/images/targets/test_checkpoint.py::test_checkpoint_that_finds_no_space_is_an_error",
    ),
    mutant(
        "images/targets/block.py",
        "does not sync the head before the sector that makes it usable",
        "        self._put(0, memoryview(self.head))\n        self.fsync()\n",
        "        self._put(0, memoryview(self.head))\n",
        CUTS,
    ),
    mutant(
        "images/targets/block.py",
        "does not sync the data before another disk of the group is usable",
        "    def _ready(self, _size: int) -> None:\n        self.storage.sync()\n",
        "    def _ready(self, _size: int) -> None:\n        pass\n",
        GROUP,
    ),
    mutant(
        "images/targets/block.py",
        "does not erase the sector that makes an old disk usable",
        "        if claim.holder(old[: claim.RECORD]) is None:\n",
        "        if False:\n",
        CUTS,
    ),
    mutant(
        "images/targets/block.py",
        "does not read the head back after it was written",
        "        if self._device.first(len(first)) != first:",
        "        if False:",
        BLOCK,
    ),
    mutant(
        "images/targets/claim.py",
        "takes the lock of an unlinked file for the disk's",
        "    return os.path.samestat(os.fstat(fd), os.lstat(name))",
        "    return True",
        CLAIM,
    ),
    mutant(
        "sources/web/http.py",
        "accepts a range that begins elsewhere",
        "        if start != offset or end < start:",
        "        if end < start:",
        "tests/sources/web/test_http.py::test_range_that_begins_elsewhere_is_no_answer",
    ),
    mutant(
        "sources/objects/s3.py",
        "reads another version of an object after it was replaced",
        'headers = {**headers, "If-Match": self.etag}',
        "headers = {**headers}",
        "tests/sources/objects",
    ),
    mutant(
        "images/targets/storage.py",
        "writes on after another run has taken the target over",
        ("        self.claim.guard()\n        try:\n            yield\n"),
        ("        try:\n            yield\n"),
        "tests/images/targets/test_claim.py::test_stale_run_on_another_machine_writes_no_longer_than_an_interval",
    ),
    mutant(
        "images/targets/file.py",
        "publishes whatever has the name of the incomplete disk",
        ('        if not is_same:\n            raise self.storage.claim.lose(f"another run has removed'),
        ('        if False:\n            raise self.storage.claim.lose(f"another run has removed'),
        "tests/images/targets/test_claim.py::test_replaced_part_is_not_renamed",
    ),
    mutant(
        "images/targets/file.py",
        "leaves the file's mode to the umask",
        "                os.fchmod(fd, options.permissions)  # open(2) has applied the umask\n",
        "                pass\n",
        "tests/images/targets/test_file.py::test_mode_is_the_one_given_or_that_of_the_umask",
    ),
    mutant(
        "images/targets/storage.py",
        "zeroes a huge disk without looking at the cancel",
        ("            if self._cancel.is_set():\n                raise errors.Cancelled\n"),
        "",
        "tests/images/targets/test_block.py::test_cancel_interrupts_long_zeroing",
    ),
    mutant(
        "images/targets/file.py",
        "keeps the bytes of an earlier attempt behind the end of the disk",
        "            os.ftruncate(self.storage.fd, self._end)\n",
        "",
        "tests/images/targets/test_file.py::test_longer_resumed_file_is_truncated",
    ),
    mutant(
        "images/targets/block.py",
        "writes the first MiB of a device with the others",
        "        super().write(offset + inside, data[inside:])",
        "        super().write(offset, data)",
        "tests/images/targets/test_block.py::test_head_is_written_last",
    ),
    mutant(
        "images/targets/file.py",
        "overwrites a disk that appeared during the import",
        "        if is_refused and os.path.lexists(self.path):\n",
        "        if False:\n",
        "tests/images/targets/test_claim.py::test_file_that_appears_meanwhile_is_not_replaced",
    ),
    mutant(
        "images/targets/block.py",
        "accepts a disk that is larger than the device",
        "        if size is not None and size > device_size:\n",
        "        if False:\n",
        "tests/images/targets/test_block.py::test_too_small_device_is_refused",
    ),
    mutant(
        "images/targets/block.py",
        "leaves old bytes behind a disk that has shrunk",
        "                ladder.zero(*part)\n",
        "                pass\n",
        "tests/end_to_end/test_chains.py::test_disk_that_shrinks_and_grows_between_stages_has_no_old_bytes",
    ),
    mutant(
        "images/targets/storage.py",
        "forgets the unaligned edges of a direct write",
        "        self._write_cached(offset, data[:first])\n",
        "",
        "tests/images/targets/test_block.py::test_threads_that_share_sectors_lose_nothing",
    ),
    mutant(
        "images/targets/base.py",
        "makes a disk usable after another run has taken it over",
        "            self._check_claim()\n            if self.has_begun:\n",
        "            if self.has_begun:\n",
        "tests/images/targets/test_claim.py::test_stale_run_on_another_machine_does_not_finish",
    ),
    mutant(
        "images/targets/file.py",
        "does not sync the directory after the rename",
        "            remove(changing(self.path))  # replaced by the new disk\n            kernel.sync_directory(self._directory)\n",
        "            remove(changing(self.path))  # replaced by the new disk\n",
        CUTS,
    ),
)
