"""Malformed archives and those that would write outside are refused."""

from __future__ import annotations

import contextlib
import random
import struct
import tarfile
import time

import hypothesis
import pytest
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.formats.tar import archive, headers
from tests.support import hostile_archives, tar_parts

NOISE = random.Random(1).randbytes(100_000)


RULES = {
    "absolute": "absolute",
    "dotdot": "dotdot",
    "dotdot-deep": "dotdot",
    "hardlink-out": "dotdot",
    "hardlink-absolute": "absolute",
    "character-device": "type",
    "block-device": "type",
    "fifo": "type",
}
BROKEN = {
    "huge-sparse": errors.TooLarge,
    "promised": errors.Truncated,
    "truncated": errors.Truncated,
    "garbage": errors.Corrupt,
}


@pytest.mark.parametrize("name", RULES)
def test_hostile_archive_is_refused(disks, name):
    data = hostile_archives.archive(disks, name).read_bytes()
    with pytest.raises(errors.Refused) as caught:
        tar_parts.unpacked(data)
    assert caught.value.fields["rule"] == RULES[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", BROKEN)
def test_broken_archive_is_detected(disks, name):
    with pytest.raises(BROKEN[name]):
        tar_parts.unpacked(hostile_archives.archive(disks, name).read_bytes(), limit=2 << 30)


@pytest.mark.parametrize("target", ["", "a" * 4096])
def test_symlink_that_no_file_system_stores_is_refused(target):
    records = [tar_parts.record(b"linkpath", target.encode())]
    link = tar_parts.resummed(tar_parts.block(), 156, b"2")
    with pytest.raises(errors.Refused, match="link"):
        tar_parts.unpacked(tar_parts.pax(records, then=link))


@pytest.mark.parametrize("target", [".", "a/b", "..", "../../b", "a/../../b", "/", "//b", "/a/../..", "a/"])
def test_symlink_is_kept_as_it_is(target):
    """It is data: nothing is created or opened through it."""
    link = tar_parts.member("a/l", type=tarfile.SYMTYPE, linkname=target)
    assert tar_parts.unpacked(tar_parts.packed(link))["a/l"][0].link == target


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../a", "a/..", "n" * 256, "d/" * 2100 + "n", "d/" * 256 + "n"]
)
def test_unsafe_name_is_refused(name):
    with pytest.raises(errors.Refused):
        tar_parts.unpacked(tar_parts.packed(tar_parts.member(name, b"x")))


@pytest.mark.parametrize("kind", [b"3", b"4", b"6", b"M", b"N", b"\xff"])
def test_other_entry_type_is_refused(kind):
    with pytest.raises(errors.Refused, match="type"):
        tar_parts.unpacked(tar_parts.resummed(tar_parts.block(), 156, kind) + tar_parts.END)


def test_volume_label_is_skipped():
    assert list(
        tar_parts.unpacked(
            tar_parts.resummed(tar_parts.block(), 156, b"V") + tar_parts.packed(tar_parts.member("a"))
        )
    ) == ["a"]


@pytest.mark.parametrize(
    "data",
    [
        b"x" * 512 + tar_parts.END,
        tar_parts.resummed(tar_parts.block(), 124, b"-1234567890\0") + tar_parts.END,
        tar_parts.resummed(tar_parts.block(), 124, b"\xff" * 12) + tar_parts.END,
        tar_parts.resummed(tar_parts.block(), 124, b"\x80" + b"\xff" * 11) + tar_parts.END,
        tar_parts.resummed(tar_parts.block(size=512), 0, b"d/\0") + bytes(512) + tar_parts.END,
        tar_parts.resummed(tar_parts.block(size=512), 156, b"5") + b"x" * 512 + tar_parts.END,
        tar_parts.resummed(tar_parts.block(size=5), 156, b"L") + b"name".ljust(512, b"\0") + tar_parts.END,
        (tar_parts.resummed(tar_parts.block(size=5), 156, b"L") + b"name".ljust(512, b"\0")) * 2
        + tar_parts.block()
        + tar_parts.END,
    ],
)
def test_malformed_archive_is_corrupt(data):
    with pytest.raises(errors.Corrupt):
        tar_parts.unpacked(data)


@pytest.mark.parametrize("at", [0, 99, 124, 148, 156, 400, 511])
def test_header_with_another_checksum_is_corrupt(at):
    """A header of which one bit has changed, in storage or on the way: a name, a size, or padding."""
    whole = bytearray(tarfile.TarInfo("disk.img").tobuf())
    headers.parse(bytes(whole))
    whole[at] ^= 1
    with pytest.raises(errors.Corrupt, match="wrong checksum"):
        headers.parse(bytes(whole))


def test_oversized_extended_header_is_refused():
    for kind in b"LKxg":
        data = tar_parts.resummed(tar_parts.block(size=1 << 40), 156, bytes([kind]))
        with pytest.raises(errors.Refused, match="header"):
            tar_parts.unpacked(data + tar_parts.END)


@pytest.mark.parametrize(
    "records",
    [
        [b"x"],
        [b"5 a=\n", b"5 a=\n"],
        [tar_parts.record(b"GNU.sparse.map", b"0,1")] * 2,
        [b"999 path=a\n"],
        [b"6 path=a\n"],
        [b"7 path\n"],
        [b"0 path=a\n"],
        [tar_parts.record(b"path", b"a\0b")],
        [tar_parts.record(b"size", b"-1")],
        [tar_parts.record(b"size", b"\xd9\xa1")],
        [tar_parts.record(b"size", b"9" * 19)],
        [tar_parts.record(b"GNU.sparse.major", b"1"), tar_parts.record(b"GNU.sparse.minor", b"0")],
    ],
)
def test_malformed_extended_header_is_corrupt(records):
    with pytest.raises(errors.Corrupt):
        tar_parts.unpacked(tar_parts.pax(records))


@pytest.mark.parametrize("key", [b"path", b"linkpath", b"size", b"GNU.sparse.name"])
def test_global_header_with_entry_field_is_refused(key):
    with pytest.raises(errors.Refused, match="header"):
        tar_parts.unpacked(tar_parts.pax([tar_parts.record(key, b"a")], b"g"))


def test_global_comment_is_ignored():
    assert list(tar_parts.unpacked(tar_parts.pax([tar_parts.record(b"comment", b"a" * 40)], b"g"))) == [
        "name"
    ]


@hypothesis.given(data=st.data())
@hypothesis.settings(
    deadline=None, max_examples=300, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
def test_mutated_archive_raises_only_our_errors(disks, data):
    good = (
        tar_parts.gnu_sparse([(0, 10), (50, 10)], 100, 20)[:-1024]
        + tar_parts.pax_sparse(b"1\n5\n20\n", 100, 20)[:-1024]
    )
    bad = bytearray(
        good + tar_parts.packed(tar_parts.member("a" * 200, NOISE[:600]), dialect=tarfile.PAX_FORMAT)
    )
    for _ in range(data.draw(st.integers(1, 5))):
        at = data.draw(st.integers(0, len(bad) - 1))
        value = data.draw(st.binary(min_size=1, max_size=9))
        bad[at : at + len(value)] = value
        start = at // 512 * 512
        if data.draw(st.booleans()) and len(bad) >= start + 512:
            header = bytes(bad[start : start + 512])
            with contextlib.suppress(struct.error):
                bad[start : start + 512] = tar_parts.resummed(header, 0, header[:1])
    started = time.process_time()
    with contextlib.suppress(errors.Error):
        tar_parts.unpacked(bytes(bad))
    assert time.process_time() - started < 30


@hypothesis.given(st.binary(min_size=1, max_size=12))
def test_number_field_is_an_integer_or_corrupt(field):
    with contextlib.suppress(errors.Corrupt):
        assert isinstance(headers.number(field), int)


@pytest.mark.parametrize(
    ("name", "is_refused"),
    [
        ("é" * 127, False),
        ("é" * 128, True),
        ("/".join(["é" * 100] * 20), False),
        ("/".join(["é" * 100] * 21), True),
    ],
)
def test_length_of_a_name_is_that_of_its_bytes(name: str, is_refused: bool) -> None:
    with pytest.raises(errors.Refused) if is_refused else contextlib.nullcontext():
        archive.archive_path(name)
