"""Zeros are found exactly; buffers are aligned."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker.images import directio


def naive_extents(data: bytes, block: int) -> list[tuple[int, int, bool]]:
    found: list[tuple[int, int, bool]] = []
    for start in range(0, len(data), block):
        piece = data[start : start + block]
        zero = not any(piece)
        if found and found[-1][2] == zero:
            found[-1] = (found[-1][0], start + len(piece), zero)
        else:
            found.append((start, start + len(piece), zero))
    return found


@given(st.lists(st.sampled_from([b"\0" * 16, b"\0" * 15 + b"x", b"x" + b"\0" * 15, b"\0" * 5]), max_size=20))
def test_extents_match_a_naive_search(pieces: list[bytes]) -> None:
    data = b"".join(pieces)
    assert directio.extents(memoryview(data), 16) == naive_extents(data, 16)


@pytest.mark.parametrize("position", [0, 4095, (4 << 20) - 1, 4 << 20, (9 << 20) + 4])
def test_one_nonzero_byte_is_found_anywhere(position: int) -> None:
    data = bytearray((9 << 20) + 5)
    assert directio.is_zero(memoryview(data))
    data[position] = 1
    assert not directio.is_zero(memoryview(data))


def test_new_buffer_is_aligned_and_zero() -> None:
    buffer = directio.Buffer(1 << 20)
    assert ctypes.addressof(ctypes.c_char.from_buffer(buffer.view)) % directio.UNIT == 0
    assert directio.is_zero(buffer.view)
    buffer.view[5000:5002] = b"ab"
    found = [(0, 4096, True), (4096, 8192, False), (8192, 12289, True)]
    assert directio.extents(buffer.view[: 3 * 4096 + 1]) == found


@pytest.mark.parametrize("one", [bytes, bytearray], ids=["read-only", "writable"])
@pytest.mark.parametrize("other", [bytes, bytearray], ids=["read-only", "writable"])
def test_views_are_equal_only_if_all_their_bytes_are(
    one: type[bytes | bytearray], other: type[bytes | bytearray]
) -> None:
    data = bytes(range(1, 251)) * 40
    first = memoryview(one(b"before" + data + b"after"))[6:-5]
    for at in (None, 0, 5000, len(data) - 1):
        changed = bytearray(data)
        if at is not None:
            changed[at] = 0
        second = memoryview(other(b"x" + changed + b"yz"))[1:-2]
        assert directio.equal(first, second) is (at is None)
        assert directio.equal(data, second) is (at is None)
    assert not directio.equal(first, first[:-1])
    assert directio.equal(first[:0], second[:0])
