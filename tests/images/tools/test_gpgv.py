"""gpgv on a machine that does not have it; tests/contract/test_checksum_files.py has its verdicts."""

from __future__ import annotations

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import gpgv, process

#: The header of a signature packet without content.
_PROOF = b"\x88\x00"


def test_missing_gpgv_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is accepted without it."""
    monkeypatch.setattr(process, "SEARCH_PATH", "/nonexistent")
    with pytest.raises(errors.MissingTool, match="gpgv is not installed: apt-get install gpgv"):
        gpgv.verify(b"\x99\x00\x00", _PROOF, b"sums", "sums.gpg", cancelling.Cancel())
