"""GNU tar reads a directory as an archive."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import tarfile
from pathlib import Path

import pytest

from cdi_worker.images.tools import gnu_tar
from tests.support import reading


def test_any_number_of_warnings_does_not_block_the_archive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tar reports each socket that it leaves out, more than a pipe holds."""
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as bound:
        bound.bind("first")
    for number in range(2000):
        os.link("first", f"{number:04}{'x' * 60}")
    (tmp_path / "zfile").write_bytes(b"content")
    with contextlib.closing(gnu_tar.TarReader(tmp_path, gnu_tar.names(tmp_path), sparse=True)) as tar:
        content = reading.read_all(tar)
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        assert archive.getnames() == ["zfile"]
