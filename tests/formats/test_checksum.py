"""Checksums of the bytes as served."""

from __future__ import annotations

import hashlib

import pytest

from cdi_worker import errors
from cdi_worker.formats import checksum, readers

DATA = b"disk" * 100_000
ALGORITHMS = ("md5", "sha1", "sha256", "sha512")


def served(data, wanted, step):
    reader = checksum.HashingReader(readers.Bytes(data), wanted)
    buffer = memoryview(bytearray(step))
    while reader.readinto(buffer):
        pass
    reader.verify()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("case", [str.lower, str.upper])
@pytest.mark.parametrize("step", [999, 1 << 20])
def test_match(algorithm, case, step):
    wanted = checksum.parse(case(f"{algorithm}:{hashlib.new(algorithm, DATA).hexdigest()}"))
    served(DATA, wanted, step)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("data", [b"", DATA[:-1], DATA + b"x"])
def test_mismatch(algorithm, data):
    wanted, got = hashlib.new(algorithm, DATA).hexdigest(), hashlib.new(algorithm, data).hexdigest()
    with pytest.raises(errors.ChecksumMismatch) as caught:
        served(data, checksum.parse(f"{algorithm}:{wanted}"), 1 << 20)
    assert (
        str(caught.value) == f"checksum mismatch: expected {algorithm}:{wanted}, calculated {algorithm}:{got}"
    )


@pytest.mark.parametrize(
    "text",
    ["", ":", "sha256", "sha256:", "sha256:00", "crc32:00000000", "md5:" + "g" * 32, "md5:" + "0" * 33,
     "0" * 64, "sha3_256:" + "0" * 64, "md5 " + "0" * 32, "md5::" + "0" * 31, "md5:" + "\u0660" * 32],
)  # fmt: skip
def test_malformed(text):
    with pytest.raises(errors.RequestError):
        checksum.parse(text)
