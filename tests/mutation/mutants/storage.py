# ruff: noqa: E501 - lines of the product
"""What makes a disk durable, and usable only when it is whole, left out."""

from __future__ import annotations

from tests.mutation.mutant import mutant

CUTS = "tests/crash/test_power_cut.py"
FILE = "tests/images/target/test_file.py"
BLOCK = "tests/images/target/test_block.py"
DIGESTS = "tests/scratch/test_digests.py"
CLAIM = "tests/images/target/test_claim.py"

MUTANTS = (
    mutant(
        "images/target/base.py",
        "forgets a failed write: a later commit succeeds",
        "            self._failure = errors.target_error(self.path, err, doing)\n            raise self._failure from err",
        "            raise errors.target_error(self.path, err, doing) from err",
        "tests/images/target",
    ),
    mutant(
        "images/target/base.py",
        "leaves the padding of the last sector as it was",
        "            self._zero(self._end, end)\n            self._flush_zeros()",
        "            self._flush_zeros()",
        BLOCK,
    ),
    mutant(
        "images/target/file.py",
        "renames the disk before it is synced",
        "        os.fsync(self._fd)\n        self._close_files()\n        self._check_claim()",
        "        self._close_files()\n        self._check_claim()",
        CUTS,
    ),
    mutant(
        "images/target/block.py",
        "writes the head of a device at once, with the sector that makes it usable",
        "        last = _first_data(self._head, self._sector)\n        data = bytes(self._head[last])",
        "        last = slice(0, 0)\n        data = bytes(self._head[last])",
        CUTS,
    ),
    mutant(
        "images/target/block.py",
        "does not sync the head before the sector that makes it usable",
        "        self._put(0, memoryview(self._head))\n        os.fsync(self._fd)\n",
        "        self._put(0, memoryview(self._head))\n",
        CUTS,
    ),
    mutant(
        "images/target/block.py",
        "does not sync the data before the head",
        "        os.fsync(self._fd)\n        self._check_claim()\n        if self._stored is not None",
        "        self._check_claim()\n        if self._stored is not None",
        CUTS,
        equivalent="the sync of the head, before the sector that makes it usable, is one of the data, too",
    ),
    mutant(
        "images/target/block.py",
        "does not erase the sector that makes an old disk usable",
        "        if first.stop and claim.holder(old[: claim.RECORD]) is None:",
        "        if False:",
        CUTS,
    ),
    mutant(
        "images/target/block.py",
        "does not read the head back after it was written",
        "        if claim.read_past_cache(self._fd, len(first)) != first:",
        "        if False:",
        BLOCK,
    ),
    mutant(
        "scratch/digests.py",
        "leaves the position out of a unit's digest",
        'found.append(encrypt((start + offset).to_bytes(12), b"", unit)[:TAG])',
        'found.append(encrypt((0).to_bytes(12), b"", unit)[:TAG])',
        DIGESTS,
    ),
    mutant(
        "images/target/claim.py",
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
)
