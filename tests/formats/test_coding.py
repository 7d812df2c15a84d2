"""Content codings are undone or refused, never written to a disk."""

from __future__ import annotations

import bz2
import gzip
import logging
import lzma

import pytest

from cdi_worker import errors, masking
from cdi_worker.formats import coding
from cdi_worker.formats.zstd import zstd

DATA = b"a disk" * 1000
PACKED = {
    "gzip": gzip.compress(DATA),
    "zstd": zstd.compress(DATA),
    "bzip2": bz2.compress(DATA),
    "xz": lzma.compress(DATA),
}


@pytest.mark.parametrize("header", ["", "identity", " Identity ", "aws-chunked", "aws-chunked,identity", ","])
def test_identity_is_accepted(header: str) -> None:
    coding.check(header, DATA, "http://h/disk")


@pytest.mark.parametrize("name", PACKED)
def test_compression_that_is_undone_is_accepted(name: str) -> None:
    for header in (name, name.upper(), f"x-{name}", f"identity, {name}", f"{name},aws-chunked"):
        coding.check(header, PACKED[name], "http://h/disk")
        coding.check(header, b"", "http://h/disk")


@pytest.mark.parametrize("name", PACKED)
def test_header_that_contradicts_the_content_is_refused(name: str) -> None:
    with pytest.raises(errors.Unsupported, match=f"content encoding '{name}', but it is not {name}"):
        coding.check(name, DATA, "http://h/disk")


@pytest.mark.parametrize("header", ["br", "deflate", "compress", "gzip, gzip", "gzip, br", "dcb", "x" * 5000])
def test_unknown_coding_is_refused(header: str) -> None:
    with pytest.raises(errors.Unsupported, match="sent with the content encoding") as caught:
        coding.check(header, PACKED["gzip"], "http://h/disk")
    assert len(str(caught.value)) < 250


class Owner:
    pass


@pytest.mark.parametrize("before", [52, 60, 68])
def test_no_part_of_a_secret_in_a_header_is_logged(before: int, caplog: pytest.LogCaptureFixture) -> None:
    """A long header is cut only after it was masked: a part of a secret is not recognized any more."""
    owner = Owner()
    masking.register(owner, "Zx9-Kq27Lm84Tr55")
    with caplog.at_level(logging.DEBUG), pytest.raises(errors.Unsupported) as caught:
        coding.check(f"none, {'y' * before}Zx9-Kq27Lm84Tr55", DATA, "http://h/disk")
    assert "meaningless content encoding" in caplog.text
    assert "zx9" not in f"{caplog.text}{caught.value}".lower()
