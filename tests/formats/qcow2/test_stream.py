"""Reading a qcow2 image from a stream keeps enough of it, wherever the stream is split."""

from __future__ import annotations

import hypothesis
import pytest
from hypothesis import strategies

from cdi_worker.formats.qcow2 import header
from tests.support import placing, processes, qcow2_images


@pytest.mark.slow
@qcow2_images.SETTINGS
@hypothesis.given(qcow2_images.recipes(), strategies.integers(1, 40), strategies.booleans())
def test_stream_reader_keeps_enough_bytes(recipe: qcow2_images.Recipe, clusters: int, last: bool) -> None:
    processes.need("qemu-img", "qemu-io")
    data, disk = qcow2_images.made(recipe)
    cluster = header.parse(data).cluster_size
    if last:
        data = qcow2_images.tables_last(data)
    assert placing.passed(data, clusters * cluster, recent=2) == disk
