"""What a finished import says of its source: where it is, which version, what was verified, who signed it."""

from __future__ import annotations

import hashlib
import json
import random
import threading
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import containers, misbehave, ovas, registries, signers, signing, worker
from tests.support import disks as disks_module

MIB = 1 << 20
DATA = random.Random(3).randbytes(3 * MIB)
SHA256 = hashlib.sha256(DATA).hexdigest()
STRONG = {"file": f"sha256:{SHA256}"}


def imported(*arguments: str | Path, lines: int = 1) -> list[dict[str, Any]]:
    """Import with ``--json``; return the objects that are printed."""
    done = worker.call("import", "--json", *arguments)
    assert done.status == 0, done.errors
    found = [json.loads(line) for line in done.output.splitlines()]
    assert len(found) == lines
    return found


def test_json_has_etag_and_checksum(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA, etag='"v1"'))
    (found,) = imported(url, tmp_path / "disk.img", f"--checksum=SHA256:{SHA256}")
    assert (found["origin"], found["identity"]) == (url, f'etag "v1" size {len(DATA)}')
    assert (found["verified"], found["signatures"]) == (STRONG, [])


def test_json_says_that_nothing_was_verified(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA, etag="", modified=""))
    (found,) = imported(url, tmp_path / "disk.img")
    assert (found["identity"], found["verified"], found["signatures"]) == (None, {}, [])
    done = worker.call("blank", "--json", tmp_path / "blank.img", "1Mi")
    assert (json.loads(done.output)["verified"], json.loads(done.output)["signatures"]) == ({}, [])


def test_json_has_the_signer_of_the_checksum_file(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/d/disk.raw", misbehave.Page(DATA, etag='"v1"'))
    sums = f"{SHA256}  disk.raw\n".encode()
    listed = server.serve("/d/SHA256SUMS", misbehave.Page(sums))
    with signers.people() as people:
        server.serve("/d/SHA256SUMS.gpg", misbehave.Page(people.sign("good", sums)))
        options = (f"--checksum-file={listed}", "--signed-by", people.exported("good", tmp_path))
        (found,) = imported(url, tmp_path / "disk.img", *options)
    assert found["verified"] == STRONG
    (claim,) = found["signatures"]
    assert (claim["digest"], claim["reference"]) == (f"sha256:{SHA256}", listed)
    assert claim["signer"]


def test_json_has_the_digests_and_the_signer_of_a_container_image(
    guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path
) -> None:
    signer = signing.Signer()
    digest = guarded.push("audited", containers.image_of(disks.raw()))
    signing.attach(guarded, "audited", digest, signer.simple(digest, guarded.name("audited")))
    assert guarded.authority
    password = tmp_path / "password"
    password.write_text(registries.PASSWORD)
    url = guarded.reference("audited")
    (found,) = imported(
        url,
        tmp_path / "disk.img",
        f"--user={registries.USER}",
        f"--password-file={password}",
        f"--ca-file={guarded.authority.certificate}",
        "--signed-by",
        signer.write(tmp_path / "key.pem"),
    )
    assert set(found["verified"]) == {"manifest", "layer"}
    assert found["verified"]["manifest"] == digest
    (claim,) = found["signatures"]
    assert claim["signer"].startswith("key SHA256:")
    assert claim["digest"] == digest


def test_json_has_no_secrets(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    password = tmp_path / "password"
    password.write_text("hidden-password")
    server.serve("/disk.raw?X-Amz-Signature=hidden-signature", misbehave.Page(DATA))
    address = url.replace("://", "://me:hidden-in-url@") + "?X-Amz-Signature=hidden-signature"
    options = ("--user=me", "--header=X-Token: hidden-x", "--password-file", password)
    (found,) = imported(address, tmp_path / "disk.img", *options)
    assert found["origin"] == f"{url}?…"
    assert "hidden" not in json.dumps(found)


@pytest.mark.parametrize("ranges", [True, False])
def test_json_of_each_disk_of_an_ova_has_the_checksum_of_the_ova(
    server: misbehave.Server, tmp_path: Path, *, ranges: bool
) -> None:
    packed = ovas.ova(ovas.Disk(DATA, "a.bin"), ovas.Disk(DATA[::-1], "b.bin"))
    url = server.serve("/vm.ova", misbehave.Page(packed, ranges=ranges))
    digest = hashlib.sha256(packed).hexdigest()
    (tmp_path / "disks").mkdir()
    found = imported("--all", url, tmp_path / "disks", f"--checksum=sha256:{digest}", "--verify", lines=2)
    expected = [hashlib.sha256(data).hexdigest() for data in (DATA, DATA[::-1])]
    assert [each["sha256"] for each in found] == expected
    assert [(each["origin"], each["verified"]) for each in found] == [(url, {"file": f"sha256:{digest}"})] * 2


# -- the digest of the disk ------------------------------------------------------------------------------


def request(url: str, target: Path, **options: Any) -> cdi_worker.Request:
    return cdi_worker.Request(
        source="http", location=cdi_worker.Location(url), target=str(target), existing="replace", **options
    )


def test_digest_of_a_raw_source_is_that_of_the_disk(server: misbehave.Server, tmp_path: Path) -> None:
    """All bytes that were hashed are those of the disk: nothing is read again."""
    url = server.serve("/disk.raw", misbehave.Page(DATA))
    checksum = f"sha256:{SHA256}"
    assert cdi_worker.run(request(url, tmp_path / "disk.img", checksum=checksum)).sha256 == SHA256
    grown = cdi_worker.run(request(url, tmp_path / "disk.img", checksum=checksum, image_size=4 * MIB))
    assert (grown.sha256, grown.verified) == ("", STRONG)


def test_digest_of_another_source_is_not_that_of_the_disk(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    for data in (disks.image("qcow2").read_bytes(), ovas.ova(ovas.Disk(DATA, "a.bin"))):
        url = server.serve("/image", misbehave.Page(data))
        checksum = f"sha256:{hashlib.sha256(data).hexdigest()}"
        done = cdi_worker.run(request(url, target, checksum=checksum))
        assert (done.sha256, done.verified) == ("", {"file": checksum})
        done = cdi_worker.run(request(url, target, checksum=checksum, read_back=True))
        assert done.sha256 == hashlib.sha256(target.read_bytes()).hexdigest()


class Midway(cdi_worker.NullProgress):
    """Cancels an import when half of the disk has arrived."""

    def __init__(self) -> None:
        self.cancel = threading.Event()
        self.count = 0

    def read(self, count: int) -> None:
        self.count += count
        if self.count > len(DATA) // 2:
            self.cancel.set()


@pytest.mark.parametrize("checksum", [None, f"sha256:{SHA256}"])
def test_digest_of_a_resumed_disk_is_not_known(
    server: misbehave.Server, tmp_path: Path, checksum: str | None
) -> None:
    """What an earlier attempt wrote was not hashed in this one."""
    url = server.serve("/disk.raw", misbehave.Page(DATA, drip=(64 << 10, 0.05)))
    few = cdi_worker.FetchOptions(connections=2, chunk=MIB)
    wanted = request(url, tmp_path / "disk.img", checksum=checksum, journal_interval=0.05, fetch=few)
    half = Midway()
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(wanted, half, half.cancel)
    server.serve("/disk.raw", misbehave.Page(DATA))
    result = cdi_worker.run(wanted)
    assert (tmp_path / "disk.img").read_bytes() == DATA
    assert result.identity
    assert bool(result.sha256) == bool(checksum and not result.resumed)
    assert checksum or result.resumed
