"""Checksums from several places, such as a request and a server: the disk must have all of them."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import execute, progress
from cdi_worker.sources import base
from cdi_worker.sources.local import file

DATA = bytes(range(256)) * 4096
RIGHT = {
    name: f"{name}:{hashlib.new(name, DATA, usedforsecurity=False).hexdigest()}" for name in ("md5", "sha256")
}
WRONG = {name: f"{name}:{'0' * (len(text) - len(name) - 1)}" for name, text in RIGHT.items()}


class Stating(file.LocalSource):
    """A file of which a checksum is stated."""

    def __init__(self, path: str, checksum: str, cancel: base.Cancel) -> None:
        super().__init__(path, cancel, base.Access())
        self._checksum = checksum

    def open(self, opening: base.Opening) -> base.Facts:
        return dataclasses.replace(super().open(opening), checksum=self._checksum)


@pytest.mark.parametrize(
    ("asked", "stated", "wrong"),
    [
        (RIGHT["sha256"], RIGHT["md5"], ""),
        (RIGHT["sha256"], RIGHT["sha256"], ""),
        (RIGHT["sha256"], WRONG["md5"], "md5"),
        (RIGHT["sha256"], WRONG["sha256"], "sha256"),
        (WRONG["md5"], RIGHT["sha256"], "md5"),
    ],
)
def test_checksums_of_request_and_server_are_both_verified(
    tmp_path: Path, asked: str, stated: str, wrong: str
) -> None:
    path, target = tmp_path / "source.raw", tmp_path / "disk.img"
    path.write_bytes(DATA)
    location = cdi_worker.Location(str(path))
    wanted = cdi_worker.Request(source="local", location=location, target=str(target), checksum=asked)
    with cancelling.adapt(None) as stop, cancelling.Reads(stop) as reads:
        source = Stating(str(path), stated, reads)
        if wrong:
            with pytest.raises(errors.ChecksumMismatch, match=f"expected {wrong}:0"):
                execute.run_source(source, wanted, progress.NullProgress(), reads)
            assert not target.exists()
        else:
            done = execute.run_source(source, wanted, progress.NullProgress(), reads)
            assert {*done.verified["file"].split(",")} == {asked, stated}
            assert target.read_bytes() == DATA
