"""Bytes that were checked are returned again as they were, whatever the source returns later."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies as st

from cdi_worker.formats import detect, remembered, safety
from tests.support import hostile

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


@pytest.mark.parametrize("name", ["qcow2-backing", "vmdk-extent", "vhdx-parent"])
def test_header_replaced_after_the_check_has_no_effect(disks, name):
    """A second read returns the checked header, not the malicious one that replaced it."""
    variant = name.partition("-")[0]
    good, bad = disks.image(variant).read_bytes(), hostile.image(disks, name).read_bytes()
    memory = remembered.Remembered(good[: detect.HEAD])
    reading = memory.remembering(lambda offset, length: good[offset : offset + length])
    safety.check(variant, good[: detect.HEAD], read=reading, size=len(good))

    def replaced(offset, length):
        view = memoryview(bytearray(bad[offset : offset + length]))
        memory.restore(offset, view)
        return bytes(view)

    safety.check(variant, replaced(0, detect.HEAD), read=replaced, size=len(bad))
