"""qcow2 tables: malformed entries, and the length a file must have."""

from __future__ import annotations

import struct

import pytest

from cdi_worker import errors
from cdi_worker.formats.mapped import image
from cdi_worker.formats.qcow2 import check, header, layout
from cdi_worker.formats.qcow2 import tables as qcow2_tables
from tests.support import disks as disks_module
from tests.support import placing, qcow2_parts
from tests.support.qcow2_parts import CLUSTER, COPIED, PACKED


@pytest.mark.parametrize(
    "l1",
    [CLUSTER * 4 + 512, 1, 1 << 62, CLUSTER * 4 | 1 << 56],
    ids=["unaligned", "reserved", "reserved-high", "reserved-56"],
)
def test_malformed_l1_entry_is_corrupt(l1: int) -> None:
    with pytest.raises(errors.Corrupt):
        lengths(qcow2_parts.image(l1=l1))


@pytest.mark.parametrize(
    ("l1", "reason"),
    [
        (CLUSTER * 100, "truncated"),
        (CLUSTER, "twice"),
        (CLUSTER * 3, "twice"),
        ((1 << 56) - CLUSTER, "truncated"),
    ],
    ids=["behind-the-end", "refcounts", "l1", "far"],
)
def test_l2_table_in_the_wrong_place_is_corrupt(l1: int, reason: str) -> None:
    with pytest.raises(errors.Corrupt, match=reason):
        lengths(qcow2_parts.image(l1=l1))


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ([CLUSTER * 5 | 2], "malformed"),
        ([CLUSTER * 5 | 1 << 57], "malformed"),
        ([CLUSTER * 5 + 512], "malformed"),
        ([CLUSTER * 100], "truncated"),
        ([CLUSTER * 4], "twice"),
        ([CLUSTER * 3], "twice"),
        ([0, CLUSTER], "twice"),
        ([CLUSTER * 5, CLUSTER * 5], "twice"),
        ([CLUSTER * 5, CLUSTER * 6, 0, CLUSTER * 6 | COPIED], "twice"),
        ([PACKED | CLUSTER * 5, CLUSTER * 5], "twice"),
        ([PACKED | CLUSTER * 100], "truncated"),
        ([PACKED | CLUSTER * 5, PACKED | CLUSTER * 5], "overlaps"),
        ([PACKED | 2 << 54 | CLUSTER * 5, PACKED | CLUSTER * 5 + 1000], "overlaps"),
        ([PACKED | CLUSTER * 4], "twice"),
    ],
)
def test_malformed_l2_entry_is_corrupt(entries: list[int], reason: str) -> None:
    with pytest.raises(errors.Corrupt, match=reason):
        lengths(qcow2_parts.image(l2=entries))


@pytest.mark.parametrize("length", [65536, 2 * CLUSTER, 3 * CLUSTER, 4 * CLUSTER, 4 * CLUSTER + 100])
def test_cut_tables_are_truncated(length: int) -> None:
    with pytest.raises(errors.Truncated):
        lengths(qcow2_parts.image(l2=[])[:length])


def test_two_tables_in_one_cluster_are_corrupt() -> None:
    head = qcow2_parts.header(size=2 << 29, l1=(2, 3 * CLUSTER))
    data = head + bytes(2 * CLUSTER) + struct.pack(">QQ", 4 * CLUSTER, 4 * CLUSTER).ljust(2 * CLUSTER, b"\0")
    with pytest.raises(errors.Corrupt, match="twice"):
        lengths(data)


def test_zero_clusters_require_version_3() -> None:
    assert lengths(qcow2_parts.image(l2=[1, CLUSTER * 5 | 1, COPIED])) == 5 * CLUSTER
    with pytest.raises(errors.Corrupt, match="malformed"):
        lengths(qcow2_parts.image(version=2, l2=[1]))


def test_required_length_ends_with_the_last_cluster() -> None:
    assert lengths(qcow2_parts.image(l2=[0, CLUSTER * 7, CLUSTER * 6])) == 8 * CLUSTER
    assert lengths(qcow2_parts.image(l2=[PACKED | 3 << 54 | CLUSTER * 6 + 100])) == 6 * CLUSTER + 3 * 512 + 1
    # The file need not contain data behind the end of the disk.
    assert (
        lengths(qcow2_parts.image(size=CLUSTER + 512, l2=[0, CLUSTER * 7, CLUSTER * 6])) == 7 * CLUSTER + 512
    )


def test_subclusters_are_decoded() -> None:
    reader = header.parse(qcow2_parts.header(features=16))
    part = CLUSTER // 32
    table = struct.pack(">QQQQQQ", 5 * CLUSTER, 0xFFFFFFFF, 6 * CLUSTER, 0b11 | 0b1100 << 32, 7 * CLUSTER, 6)
    pieces = qcow2_tables.decode(reader, table.ljust(CLUSTER, b"\0"), 0)
    whole, size = CLUSTER + 2 * part, 2 * part
    assert pieces == [
        (5 * CLUSTER, whole, 0, whole, False, ()),
        (7 * CLUSTER + part, size, 2 * CLUSTER + part, size, False, ()),
    ]
    for malformed in ((0, 1), (CLUSTER * 5, 1 | 1 << 32), (CLUSTER * 5 | 1, 1)):
        with pytest.raises(errors.Corrupt):
            qcow2_tables.decode(reader, struct.pack(">QQ", *malformed).ljust(CLUSTER, b"\0"), 0)


def test_subclusters_behind_the_end_of_the_disk_are_ignored() -> None:
    """The last cluster has two subclusters within the disk, one across its end, and the rest behind it."""
    part = CLUSTER // 32
    reader = header.parse(qcow2_parts.header(features=16, size=CLUSTER + 2 * part + 512))
    table = struct.pack(">QQQQ", 0, 0, 5 * CLUSTER, 0x00FF00FF).ljust(CLUSTER, b"\0")
    length = 2 * part + 512
    assert qcow2_tables.decode(reader, table, 0) == [(5 * CLUSTER, length, CLUSTER, length, False, ())]
    table = struct.pack(">QQQQ", 0, 0, 5 * CLUSTER, 0xFF00FF02).ljust(CLUSTER, b"\0")
    assert qcow2_tables.decode(reader, table, 0) == [
        (5 * CLUSTER + part, part, CLUSTER + part, part, False, ())
    ]


def test_large_empty_disk_needs_no_memory() -> None:
    data = qcow2_parts.header(size=1 << 50, bits=21, l1=(2048, 3 << 21), refcounts=(1 << 21, 1)).ljust(
        8 << 21, b"\0"
    )
    assert lengths(data) == (3 << 21) + 2048 * 8
    source = placing.image_of(data)
    (window,) = source.windows()
    assert list(window.holes()) == [(0, 1 << 50)]


def test_tables_of_a_large_disk_are_loaded_in_windows() -> None:
    """Each of the many tables maps one cluster, the last one it can map."""
    count, reach, tables = image.WINDOW // 64 + 10, 512 * 64, 1 << 20
    head = qcow2_parts.header(bits=9, size=count * reach, l1=(count, 1024), refcounts=(512, 1))[:512]
    l1 = struct.pack(f">{count}Q", *range(tables, tables + 1024 * count, 1024))
    pairs = b"".join(struct.pack(">504xQ512x", tables + 1024 * n + 512) for n in range(count))
    data = (head + bytes(512) + l1).ljust(tables, b"\0") + pairs
    source = placing.image_of(data)
    windows, holes, guests = 0, [], []
    for window in source.windows():
        for batch in window.tables():
            for table in batch.pieces:
                window.load(table, data[table.host : table.host + table.length])
        window.check()
        windows += 1
        holes += window.holes()
        guests += [piece.guest for batch in window.data() for piece in batch.pieces]
    assert windows == 2
    assert holes == [(n * reach, reach - 512) for n in range(count)]
    assert guests == [n * reach + reach - 512 for n in range(count)]


@pytest.mark.parametrize(("host", "length"), [(1 << 20, 512), ((1 << 20) + 34, 478), ((1 << 20) + 34, 990)])
def test_compressed_data_begins_in_the_file_and_reaches_its_last_sector(host: int, length: int) -> None:
    needed = max(host, host + length - 512) + 1
    head = header.parse(qcow2_parts.header())
    layout.Qcow2Allocation(head, needed).share(host, length)
    with pytest.raises(errors.Truncated, match=f"the tables need {needed} bytes"):
        layout.Qcow2Allocation(head, needed - 1).share(host, length)


def test_too_large_an_allocation_is_unsupported() -> None:
    allocation = layout.Qcow2Allocation(header.parse(qcow2_parts.header()), 1 << 60)
    with pytest.raises(errors.Unsupported):
        allocation.take(1 << 55, 512)


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_compressed_cluster_of_the_wrong_size_is_corrupt(disks: disks_module.Disks, compression: str) -> None:
    data = disks.image(f"qcow2-{compression}").read_bytes()
    source = placing.image_of(data)
    (window,) = source.windows()
    for batch in window.tables():
        for table in batch.pieces:
            window.load(table, data[table.host : table.host + table.length])
    packed = [piece for batch in window.data() for piece in batch.pieces if piece.compressed]
    longest = max(packed, key=lambda piece: piece.length)
    body = data[longest.host :][: longest.length]
    assert len(window.inflate(body, longest)) == CLUSTER
    head = header.parse(data[: 64 << 10])
    shorter, longer = (head._replace(cluster_bits=head.cluster_bits + more) for more in (-1, 1))
    for inflate, wrong in (
        (layout.Qcow2Layout(shorter).inflate, body),
        (layout.Qcow2Layout(longer).inflate, body),
        (window.inflate, body[: len(body) // 2]),
        (window.inflate, b""),
        (window.inflate, b"\xff" * 600),
    ):
        with pytest.raises(errors.Corrupt):
            inflate(wrong, longest)


def lengths(data: bytes) -> int:
    return check.required_length(placing.view(data))
