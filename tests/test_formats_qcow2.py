"""The qcow2 reader's rules: what is refused, and what an image must hold."""

from __future__ import annotations

import struct

import pytest

from formats import mapped, pieces, qcow2, qcow2_claims, qcow2_clusters, qcow2_header, qcow2_tables
from importer import errors
from tests import disks as disks_module

CLUSTER = 65536
COPIED = 1 << 63
PACKED = 1 << 62


def header(
    *,
    version: int = 3,
    backing: int = 0,
    bits: int = 16,
    size: int = 1 << 20,
    crypt: int = 0,
    l1: tuple[int, int] = (1, 3 * CLUSTER),
    refcounts: tuple[int, int] = (CLUSTER, 1),
    snapshots: tuple[int, int] = (0, 0),
    features: int = 0,
    autoclear: int = 0,
    order: int = 4,
    length: int = 112,
    compression: int = 0,
    extensions: bytes = b"",
) -> bytes:
    """Return the first cluster of an image; each argument is a field of the specification."""
    head = struct.pack(
        ">4sIQIIQIIQQIIQ", b"QFI\xfb", version, backing, 8, bits, size, crypt, *l1, *refcounts, *snapshots
    )
    if version == 3:
        head += struct.pack(">QQQIIB7x", features, 0, autoclear, order, length, compression)
    return (head + extensions).ljust(CLUSTER, b"\0")


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)


def test_good_header() -> None:
    found = qcow2_header.parse(header(features=1, extensions=extension(0x6803F857, bytes(48))))
    assert found.dirty
    assert (found.virtual_size, found.cluster_size, found.l1_needed) == (1 << 20, CLUSTER, 1)
    assert qcow2_header.parse(header(version=2)).version == 2
    assert qcow2_header.parse(header(features=8, compression=1)).compression == "zstd"
    assert qcow2_header.parse(header(features=16)).table_entries == CLUSTER // 16


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"backing": 200}, "backing_file"),
        ({"crypt": 1}, "encryption"),
        ({"crypt": 2}, "encryption"),
        ({"features": 4}, "data_file"),
        ({"features": 32}, "unknown_features"),
        ({"features": 1 << 63}, "unknown_features"),
        ({"extensions": extension(0x0537BE77, bytes(16))}, "encryption"),
    ],
)
def test_refused(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(errors.Refused, match=rule):
        qcow2_header.parse(header(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 1},
        {"version": 4},
        {"features": 8, "compression": 2},
    ],
)
def test_unsupported(fields: dict[str, object]) -> None:
    with pytest.raises(errors.Unsupported):
        qcow2_header.parse(header(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"features": 2},
        {"bits": 8},
        {"bits": 22},
        {"bits": 13, "features": 16},
        {"size": 513},
        {"size": 1 << 63},
        {"l1": (0, 3 * CLUSTER)},
        {"l1": ((32 << 20) // 8 + 1, 3 * CLUSTER)},
        {"l1": (1, 3 * CLUSTER + 8)},
        {"size": 0, "l1": (0, 1 << 63)},
        {"refcounts": (CLUSTER, 0)},
        {"refcounts": (CLUSTER + 512, 1)},
        {"refcounts": (CLUSTER, 129)},
        {"snapshots": (65537, 0)},
        {"snapshots": (0, 512)},
        {"autoclear": 2},
        {"order": 7},
        {"length": 96},
        {"length": 113},
        {"length": 1 << 31},
        {"features": 8, "compression": 0},
        {"features": 0, "compression": 1},
        {"extensions": struct.pack(">II", 0x6803F857, 0xFFFFFFFF)},
    ],
)
def test_contradictions(fields: dict[str, object]) -> None:
    with pytest.raises(errors.Corrupt):
        qcow2_header.parse(header(**fields))


@pytest.mark.parametrize("length", [0, 4, 71, 72, 103])
def test_cut_header(length: int) -> None:
    with pytest.raises(errors.Truncated):
        qcow2_header.parse(header()[:length])


@pytest.mark.parametrize(
    "l1",
    [CLUSTER * 4 + 512, 1, 1 << 62, CLUSTER * 4 | 1 << 56],
    ids=["unaligned", "reserved", "reserved-high", "reserved-56"],
)
def test_malformed_l1(l1: int) -> None:
    with pytest.raises(errors.Corrupt):
        lengths(image(l1=l1))


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
def test_l2_in_the_wrong_place(l1: int, reason: str) -> None:
    with pytest.raises(errors.Corrupt, match=reason):
        lengths(image(l1=l1))


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
def test_malformed_l2(entries: list[int], reason: str) -> None:
    with pytest.raises(errors.Corrupt, match=reason):
        lengths(image(l2=entries))


@pytest.mark.parametrize("length", [65536, 2 * CLUSTER, 3 * CLUSTER, 4 * CLUSTER, 4 * CLUSTER + 100])
def test_cut_tables(length: int) -> None:
    with pytest.raises(errors.Truncated):
        lengths(image(l2=[])[:length])


def test_two_tables_in_one_cluster() -> None:
    head = header(size=2 << 29, l1=(2, 3 * CLUSTER))
    data = head + bytes(2 * CLUSTER) + struct.pack(">QQ", 4 * CLUSTER, 4 * CLUSTER).ljust(2 * CLUSTER, b"\0")
    with pytest.raises(errors.Corrupt, match="twice"):
        lengths(data)


def test_zero_clusters_are_of_version_3() -> None:
    assert lengths(image(l2=[1, CLUSTER * 5 | 1, COPIED])) == 5 * CLUSTER
    with pytest.raises(errors.Corrupt, match="malformed"):
        lengths(image(version=2, l2=[1]))


def test_required_length() -> None:
    assert lengths(image(l2=[0, CLUSTER * 7, CLUSTER * 6])) == 8 * CLUSTER
    assert lengths(image(l2=[PACKED | 3 << 54 | CLUSTER * 6 + 100])) == 6 * CLUSTER + 3 * 512 + 1
    # The file need not hold what is behind the end of the disk.
    assert lengths(image(size=CLUSTER + 512, l2=[0, CLUSTER * 7, CLUSTER * 6])) == 7 * CLUSTER + 512


def test_subclusters() -> None:
    reader = qcow2_header.parse(header(features=16))
    part = CLUSTER // 32
    table = struct.pack(">QQQQQQ", 5 * CLUSTER, 0xFFFFFFFF, 6 * CLUSTER, 0b11 | 0b1100 << 32, 7 * CLUSTER, 6)
    pieces = qcow2_tables.decode(reader, table.ljust(CLUSTER, b"\0"), 0)
    whole, size = CLUSTER + 2 * part, 2 * part
    assert pieces == [
        (5 * CLUSTER, whole, 0, whole, False),
        (7 * CLUSTER + part, size, 2 * CLUSTER + part, size, False),
    ]
    for malformed in ((0, 1), (CLUSTER * 5, 1 | 1 << 32), (CLUSTER * 5 | 1, 1)):
        with pytest.raises(errors.Corrupt):
            qcow2_tables.decode(reader, struct.pack(">QQ", *malformed).ljust(CLUSTER, b"\0"), 0)


def test_subclusters_behind_the_end_of_the_disk() -> None:
    """The last cluster may have some: first two within the disk, one across its end, the rest behind."""
    part = CLUSTER // 32
    reader = qcow2_header.parse(header(features=16, size=CLUSTER + 2 * part + 512))
    table = struct.pack(">QQQQ", 0, 0, 5 * CLUSTER, 0x00FF00FF).ljust(CLUSTER, b"\0")
    length = 2 * part + 512
    assert qcow2_tables.decode(reader, table, 0) == [(5 * CLUSTER, length, CLUSTER, length, False)]
    table = struct.pack(">QQQQ", 0, 0, 5 * CLUSTER, 0xFF00FF02).ljust(CLUSTER, b"\0")
    assert qcow2_tables.decode(reader, table, 0) == [(5 * CLUSTER + part, part, CLUSTER + part, part, False)]


def test_a_large_empty_disk_costs_nothing() -> None:
    data = header(size=1 << 50, bits=21, l1=(2048, 3 << 21), refcounts=(1 << 21, 1)).ljust(8 << 21, b"\0")
    assert lengths(data) == (3 << 21) + 2048 * 8
    source = qcow2.read_image(lambda offset, length: data[offset : offset + length], len(data))
    (window,) = source.windows()
    assert list(window.holes()) == [(0, 1 << 50)]


def test_tables_of_a_large_disk_are_loaded_in_parts() -> None:
    """Each of the many tables maps one cluster, the last of its reach."""
    count, reach, tables = mapped.WINDOW // 64 + 10, 512 * 64, 1 << 20
    head = header(bits=9, size=count * reach, l1=(count, 1024), refcounts=(512, 1))[:512]
    l1 = struct.pack(f">{count}Q", *range(tables, tables + 1024 * count, 1024))
    pairs = b"".join(struct.pack(">504xQ512x", tables + 1024 * n + 512) for n in range(count))
    data = (head + bytes(512) + l1).ljust(tables, b"\0") + pairs
    source = qcow2.read_image(lambda offset, length: data[offset : offset + length], len(data))
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


def test_claims_have_a_limit() -> None:
    claims = qcow2_claims.Claims(qcow2_header.parse(header()), 1 << 60)
    with pytest.raises(errors.Unsupported):
        claims.take(1 << 55, 512)


@pytest.mark.parametrize(("packed", "most"), [(False, 1 << 20), (True, 4 << 20)])
def test_batches(packed: bool, most: int) -> None:
    def piece(host: int, length: int) -> pieces.Piece:
        return pieces.Piece(host, length, host, length, packed=packed)

    half, far = most // 2, 100 << 20
    given = [
        piece(0, half),
        piece(half, half),
        piece(most, half),
        piece(most + half + 1000, 512),
        piece(far, 512),
    ]
    found = list(pieces.batches(given, far + 100))
    assert [batch[:2] for batch in found] == [(0, most), (most, half + 1512), (far, 100)]
    assert [len(batch.pieces) for batch in found] == [2, 2, 1]


def test_a_long_piece_is_read_in_several() -> None:
    given = [pieces.Piece(0, (2 << 20) + 512, 4096, (2 << 20) + 512, packed=False)]
    found = list(pieces.batches(given, 3 << 20))
    assert [batch[:2] for batch in found] == [(0, 1 << 20), (1 << 20, 1 << 20), (2 << 20, 512)]
    assert [batch.pieces[0].guest for batch in found] == [4096, 4096 + (1 << 20), 4096 + (2 << 20)]


def test_tables_are_read_whole() -> None:
    table = pieces.Piece(2 << 20, 2 << 20, 0, 512 << 30, packed=False)
    (batch,) = pieces.whole([table], 8 << 20)
    assert batch == (2 << 20, 2 << 20, [table])


@pytest.mark.parametrize("compression", ["zlib", "zstd"])
def test_clusters_of_the_wrong_size(disks: disks_module.Disks, compression: str) -> None:
    data = disks.image(f"qcow2-{compression}").read_bytes()
    source = qcow2.read_image(lambda offset, length: data[offset : offset + length], len(data))
    (window,) = source.windows()
    for batch in window.tables():
        for table in batch.pieces:
            window.load(table, data[table.host : table.host + table.length])
    packed = [piece for batch in window.data() for piece in batch.pieces if piece.packed]
    longest = max(packed, key=lambda piece: piece.length)
    body = data[longest.host :][: longest.length]
    good = qcow2_clusters.inflater(compression, CLUSTER)
    assert good(body) == source.inflate(body, longest.guest)
    assert len(good(body)) == CLUSTER
    for inflate, wrong in (
        (qcow2_clusters.inflater(compression, CLUSTER // 2), body),
        (qcow2_clusters.inflater(compression, CLUSTER * 2), body),
        (good, body[: len(body) // 2]),
        (good, b""),
        (good, b"\xff" * 600),
    ):
        with pytest.raises(errors.Corrupt):
            inflate(wrong)


def image(
    *, version: int = 3, size: int = 1 << 20, l1: int = 4 * CLUSTER, l2: list[int] | None = None
) -> bytes:
    """Return an image of eight clusters: header, refcounts (two), L1, L2, data (three)."""
    entries = l2 or []
    return b"".join(
        part.ljust(CLUSTER, b"\0")
        for part in (
            header(version=version, size=size),
            *(b"", b""),
            struct.pack(">Q", l1),
            struct.pack(f">{len(entries)}Q", *entries),
            *(b"\x11", b"\x22", b"\x33"),
        )
    )


def lengths(data: bytes) -> int:
    return qcow2.required_length(lambda offset, length: data[offset : offset + length], len(data))
