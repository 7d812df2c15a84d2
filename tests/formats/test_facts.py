"""Tables of a file, read with few requests and no more bytes than that takes."""

from __future__ import annotations

import pytest

from cdi_worker.formats import facts

MIB = 1 << 20


@pytest.mark.parametrize(
    ("apart", "requests", "most"),
    [
        (2048, 1, 64 * 2048),
        (65536 + 2048, 4, 4 * MIB),  # a sparse disk: a table after each grain
        (16 * MIB, 64, 64 * 2048),  # a full one
    ],
)
def test_tables(apart: int, requests: int, most: int) -> None:
    read: list[int] = []

    def pread(offset: int, length: int) -> bytes:
        read.append(length)
        return b"".join(
            (at // apart).to_bytes(2) if at % apart == 0 else b"--"
            for at in range(offset, offset + length, 2)
        )

    view = facts.View(b"", pread, 1 << 40)
    found = [int.from_bytes(table[:2]) for table in view.tables((apart * i for i in range(64)), 2048)]
    assert found == list(range(64))
    assert len(read) == requests
    assert sum(read) <= most
