"""Bytes that were checked are returned again as they were, whatever the source returns later."""

from __future__ import annotations

import hypothesis
from hypothesis import strategies as st

from cdi_worker.formats import remembered

spans = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 20)), max_size=5)


@hypothesis.given(spans, spans)
def test_first_read_is_remembered(checked, again):
    stamp = 0

    def read(offset, length):
        return bytes([stamp]) * length

    memory, expected = remembered.Remembered(), bytearray(b"\xff" * 60)
    reading = memory.remembering(read)
    for offset, length in checked:
        stamp += 1
        assert reading(offset, length) == bytes([stamp]) * length
        for at in range(offset, offset + length):
            if expected[at] == 0xFF:
                expected[at] = stamp
    for offset, length in again:
        view = memoryview(bytearray(b"\xff" * length))
        memory.restore(offset, view)
        assert view == expected[offset : offset + length]
        known = expected[offset : offset + length]
        assert memory.known_length(offset, length) == len(known.partition(b"\xff")[0])
