"""Names of the files of stages and chains."""

from __future__ import annotations

import pytest

from cdi_worker.sources import base


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("/disks/a%20b.qcow2", "a%20b.qcow2"),
        ("https://host/disks/a%20b.qcow2?…", "a b.qcow2"),
        ("file:///disks/a%20b.qcow2", "a b.qcow2"),
        # The key of an object is as it is, as its store's own tools have it.
        ("s3://bucket/disks/a%20b.qcow2", "a%20b.qcow2"),
        ("gs://bucket/what?.qcow2", "what?.qcow2"),
        ("http://[/a.qcow2", ""),
    ],
)
def test_name_of_a_file_is_that_of_its_address(address: str, name: str) -> None:
    assert base.file_name(address) == name
