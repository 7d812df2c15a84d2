"""qcow2 headers: what is refused, unsupported or contradictory."""

from __future__ import annotations

import struct

import pytest

from cdi_worker import errors
from cdi_worker.formats.qcow2 import header
from tests.support import qcow2_parts


def test_valid_header_is_parsed() -> None:
    found = header.parse(
        qcow2_parts.header(features=1, extensions=qcow2_parts.extension(0x6803F857, bytes(48)))
    )
    assert (found.virtual_size, found.cluster_size, found.l1_needed) == (1 << 20, qcow2_parts.CLUSTER, 1)
    assert header.parse(qcow2_parts.header(version=2)).version == 2
    assert header.parse(qcow2_parts.header(features=8, compression=1)).compression == "zstd"
    assert header.parse(qcow2_parts.header(features=16)).table_entries == qcow2_parts.CLUSTER // 16


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"backing": 200}, "backing_file"),
        ({"crypt": 1}, "encryption"),
        ({"crypt": 2}, "encryption"),
        ({"features": 4}, "data_file"),
        ({"features": 32}, "unknown_features"),
        ({"features": 1 << 63}, "unknown_features"),
        ({"extensions": qcow2_parts.extension(0x0537BE77, bytes(16))}, "encryption"),
    ],
)
def test_unsafe_feature_is_refused(fields: dict[str, object], rule: str) -> None:
    with pytest.raises(errors.Refused, match=rule):
        header.parse(qcow2_parts.header(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"version": 1},
        {"version": 4},
        {"features": 8, "compression": 2},
    ],
)
def test_unknown_version_or_compression_is_unsupported(fields: dict[str, object]) -> None:
    with pytest.raises(errors.Unsupported):
        header.parse(qcow2_parts.header(**fields))


@pytest.mark.parametrize(
    "fields",
    [
        {"features": 2},
        {"bits": 8},
        {"bits": 22},
        {"bits": 13, "features": 16},
        {"size": 513},
        {"size": 1 << 63},
        {"l1": (0, 3 * qcow2_parts.CLUSTER)},
        {"l1": ((32 << 20) // 8 + 1, 3 * qcow2_parts.CLUSTER)},
        {"l1": (1, 3 * qcow2_parts.CLUSTER + 8)},
        {"size": 0, "l1": (0, 1 << 63)},
        {"refcounts": (qcow2_parts.CLUSTER, 0)},
        {"refcounts": (qcow2_parts.CLUSTER + 512, 1)},
        {"refcounts": (qcow2_parts.CLUSTER, 129)},
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
def test_contradictory_fields_are_corrupt(fields: dict[str, object]) -> None:
    with pytest.raises(errors.Corrupt):
        header.parse(qcow2_parts.header(**fields))


@pytest.mark.parametrize("length", [0, 4, 71, 72, 103])
def test_cut_header_is_truncated(length: int) -> None:
    with pytest.raises(errors.Truncated):
        header.parse(qcow2_parts.header()[:length])
