"""Checksums of the bytes as served."""

from __future__ import annotations

import hashlib

import pytest

from cdi_worker import errors
from cdi_worker.formats import checksum, readers

DATA = b"disk" * 100_000
ALGORITHMS = ("md5", "sha1", "sha256", "sha512")


def read_and_verify(data, expected, step):
    reader = checksum.HashingReader(readers.BytesReader(data), expected)
    buffer = memoryview(bytearray(step))
    while reader.readinto(buffer):
        pass
    reader.verify()


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_checksum_is_compared(algorithm):
    digest = hashlib.new(algorithm, DATA, usedforsecurity=False).hexdigest()
    for stated, step in ((f"{algorithm}:{digest}", 1 << 20), (f"{algorithm}:{digest}".upper(), 999)):
        read_and_verify(DATA, checksum.parse(stated), step)
    for data in (b"", DATA[:-1], DATA + b"x"):
        calculated = hashlib.new(algorithm, data, usedforsecurity=False).hexdigest()
        with pytest.raises(errors.ChecksumMismatch) as caught:
            read_and_verify(data, checksum.parse(f"{algorithm}:{digest}"), 1 << 20)
        expected = f"expected {algorithm}:{digest}, calculated {algorithm}:{calculated}"
        assert str(caught.value) == f"checksum mismatch: {expected}"


def test_blanks_around_the_parts_are_ignored():
    digest = hashlib.sha256(DATA).hexdigest()
    assert checksum.parse(f" SHA256 :\t{digest.upper()} \n") == checksum.Checksum("sha256", digest)


@pytest.mark.parametrize(
    "text",
    ["", ":", "sha256", "sha256:", "sha256:00", "crc32:00000000", "md5:" + "g" * 32, "md5:" + "0" * 33,
     "0" * 64, "sha3_256:" + "0" * 64, "md5 " + "0" * 32, "md5::" + "0" * 31, "md5:" + "\u0660" * 32],
)  # fmt: skip
def test_malformed_checksum_is_refused(text):
    with pytest.raises(errors.RequestError):
        checksum.parse(text)


@pytest.mark.parametrize("wrong", ALGORITHMS)
def test_all_checksums_that_are_stated_are_verified(wrong):
    right = {name: hashlib.new(name, DATA, usedforsecurity=False).hexdigest() for name in ALGORITHMS}
    read_and_verify(DATA, checksum.parse(" , ".join(f"{name}:{right[name]}" for name in ALGORITHMS)), 999)
    for order in (ALGORITHMS, ALGORITHMS[::-1]):
        stated = right | {wrong: "0" * len(right[wrong])}
        expected = checksum.parse(",".join(f"{name}:{stated[name]}" for name in order))
        with pytest.raises(errors.ChecksumMismatch, match=f"expected {wrong}:0"):
            read_and_verify(DATA, expected, 999)


def test_two_checksums_of_one_algorithm_are_both_verified():
    right = hashlib.sha256(DATA).hexdigest()
    twice = checksum.parse(f"sha256:{right},SHA256:{right.upper()}")
    assert str(twice) == f"sha256:{right}"
    read_and_verify(DATA, twice, 999)
    with pytest.raises(errors.ChecksumMismatch):
        read_and_verify(DATA, checksum.parse(f"sha256:{right},sha256:{64 * '0'}"), 999)


@pytest.mark.parametrize("text", [",", f"md5:{32 * '0'},", f",md5:{32 * '0'}", f"md5:{32 * '0'},sha256:0"])
def test_malformed_checksum_among_several_is_refused(text):
    with pytest.raises(errors.RequestError):
        checksum.parse(text)
