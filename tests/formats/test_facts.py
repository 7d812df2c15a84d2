"""Tables of a file are read with few requests and few extra bytes."""

from __future__ import annotations

import pytest

from cdi_worker.formats import views

MIB = 1 << 20


@pytest.mark.parametrize(
    ("distance", "requests", "most"),
    [
        (2048, 1, 64 * 2048),
        (65536 + 2048, 4, 4 * MIB),  # a sparse disk: a table after each grain
        (16 * MIB, 64, 64 * 2048),  # a fully allocated one
    ],
)
def test_neighbouring_tables_are_read_together(distance: int, requests: int, most: int) -> None:
    read: list[int] = []

    def pread(offset: int, length: int) -> bytes:
        read.append(length)
        return b"".join(
            (at // distance).to_bytes(2) if at % distance == 0 else b"--"
            for at in range(offset, offset + length, 2)
        )

    view = views.View(b"", pread, 1 << 40)
    found = [int.from_bytes(table[:2]) for table in view.tables((distance * i for i in range(64)), 2048)]
    assert found == list(range(64))
    assert len(read) == requests
    assert sum(read) <= most
