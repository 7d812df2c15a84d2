"""gpgv's verdicts on packets in unusual order; tests/contract/test_checksum_files.py has the usual ones."""

from __future__ import annotations

import contextlib
import itertools
import zlib
from collections.abc import Iterator

import pytest

from cdi_worker import errors
from cdi_worker.formats.signature import openpgp
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import gpgv, process
from tests.support import signers

#: The header of a signature packet without content.
_PROOF = b"\x88\x00"
FORGED = b"forged sums\n"


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> Iterator[signers.OpenPGP]:
    with contextlib.closing(signers.openpgp(tmp_path_factory.mktemp("gpg") / "g")) as made:
        yield made


def verdict(people: signers.OpenPGP, proof: bytes, data: bytes = FORGED) -> str:
    """Return gpgv's signer of ``data``, of the one whose key is known."""
    keys = openpgp.keyring(people.export("good"), "keys")
    return gpgv.verify(keys, proof, data, "sums.gpg", cancelling.Cancel())


def packets(data: bytes) -> list[bytes]:
    """Split short packets of the older form."""
    found = []
    while data:
        size = (1, 2)[data[0] & 3]
        end = 1 + size + int.from_bytes(data[1 : 1 + size], "big")
        found.append(data[:end])
        data = data[end:]
    return found


def compressed(data: bytes) -> bytes:
    """Return a compressed packet (RFC 9580, 5.6) with ``data`` in it."""
    packer = zlib.compressobj(wbits=-15)
    content = b"\1" + packer.compress(data) + packer.flush()
    return b"\xc8\xff" + len(content).to_bytes(4, "big") + content


def test_no_arrangement_of_a_signed_message_signs_a_file(people: signers.OpenPGP) -> None:
    """A signer publishes messages, and a server could offer the parts of one as a file's signature."""
    message = packets(people.sign("good", b"x", "--sign", "--compress-algo=none", "--set-filename=x"))
    mine = packets(people.sign("other", FORGED, "--detach-sign"))
    assert (len(message), len(mine)) == (3, 1)
    parts = [*message, *mine]
    arrangements = [b"".join(some) for count in range(1, 5) for some in itertools.permutations(parts, count)]
    for proof in [*arrangements, *map(compressed, arrangements[-8:])]:
        with pytest.raises(errors.Untrusted):
            verdict(people, proof)
    assert "Good Signer" in verdict(people, people.sign("good", FORGED, "--detach-sign"))


def test_endless_list_of_signatures_is_refused(people: signers.OpenPGP) -> None:
    proof = people.sign("other", FORGED, "--detach-sign")
    with pytest.raises(errors.Untrusted, match="hundreds of signatures"):
        verdict(people, proof * 1000)


def test_missing_gpgv_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is accepted without it."""
    monkeypatch.setattr(process, "SEARCH_PATH", "/nonexistent")
    with pytest.raises(errors.MissingTool, match="gpgv is not installed: apt-get install gpgv"):
        gpgv.verify(b"\x99\x00\x00", _PROOF, b"sums", "sums.gpg", cancelling.Cancel())
