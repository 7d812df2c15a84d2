"""Checksum files and their signatures: the disk is usable only if both are right."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import disks as disks_module
from tests.support import misbehave, oracle, processes, signers, signing, worker
from tests.support.pages import Page

STRICT = "--strict-exit-status"
MiB = 1 << 20


@pytest.fixture(scope="module")
def people() -> Iterator[signers.OpenPGP]:
    with signers.people() as made:
        yield made


@pytest.fixture
def key(people: signers.OpenPGP, tmp_path: Path) -> str:
    return people.exported("good", tmp_path)


@dataclasses.dataclass
class Site:
    """A web server with a disk and what is beside it, and a pod that imports the disk."""

    server: misbehave.Server
    pod: worker.Pod
    disk: Path

    @property
    def data(self) -> bytes:
        return self.disk.read_bytes()

    @property
    def line(self) -> bytes:
        """Return the line of the disk in the form of sha256sum."""
        return f"{hashlib.sha256(self.data).hexdigest()}  disk.img\n".encode()

    def serve(self, path: str, data: bytes | Page) -> str:
        return self.server.serve(path, data if isinstance(data, Page) else Page(data))

    def run(self, **more: str) -> worker.Completed:
        """Run the pod. Return its status, 7 for a signature."""
        url = self.serve("/d/disk.img", self.data)
        env = {"IMPORTER_ENDPOINT": url, "CDI_WORKER_CHECKSUM_FILE": self.server.url("/d/SHA256SUMS"), **more}
        return worker.call(*self.pod.arguments, STRICT, env={**self.pod.env, **env})

    def accept(self, **more: str) -> worker.Completed:
        """Run the pod, which imports the disk and fetches each file once."""
        self.server.requests.clear()
        done = self.run(**more)
        assert done.status == 0, done.errors
        oracle.same(self.pod.disk, self.disk)
        for each in ("/d/SHA256SUMS", "/d/SHA256SUMS.gpg", "/d/SHA256SUMS.sig"):
            assert len(self.server.gets(each)) <= 1
        return done

    def refuse(self, status: int, reason: str, **more: str) -> None:
        """Run the pod, which refuses the disk without fetching a byte of it."""
        done = self.run(**more)
        assert (done.status, reason in self.pod.message) == (status, True), self.pod.message + done.errors
        assert not self.server.gets("/d/disk.img")
        assert not [*self.pod.data.iterdir()]


@pytest.fixture
def site(server: misbehave.Server, pod: worker.Pod, disks: disks_module.Disks) -> Site:
    return Site(server, pod, disks.raw())


# -- the line ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "form",
    [
        "{sha256}  disk.img\n",
        "# a comment\r\n{sha256} *disk.img\r\n",
        "SHA256 (disk.img) = {sha256}\n",
        "{other}  another.img\n{sha512}  ./disk.img\n",
        "{sha256}  images/disk.img\n{other}  images/disk.img.xz\n",
    ],
    ids=["gnu", "binary-crlf", "bsd", "sha512", "folder"],
)
def test_disk_with_its_line_is_imported(site: Site, form: str) -> None:
    digests = {
        name: hashlib.new(name, site.data, usedforsecurity=False).hexdigest() for name in ("sha256", "sha512")
    }
    site.serve("/d/SHA256SUMS", form.format(other="0" * 64, **digests).encode())
    site.accept()


@pytest.mark.parametrize(
    ("is_alone", "digits", "is_signed"),
    [(True, 64, False), (True, 64, True), (False, 40, False), (False, 32, True), (False, 128, False)],
)
def test_disk_with_another_checksum_is_not_usable(
    site: Site, people: signers.OpenPGP, key: str, is_alone: bool, digits: int, is_signed: bool
) -> None:
    """All that the file states of the disk counts, not only the strongest."""
    sums = (b"" if is_alone else site.line) + b"0" * digits + b"  disk.img\n"
    site.serve("/d/SHA256SUMS", sums)
    site.serve("/d/SHA256SUMS.gpg", people.sign("good", sums))
    done = site.run(**({"CDI_WORKER_SIGNED_BY": key} if is_signed else {}))
    assert (done.status, "checksum mismatch" in site.pod.message) == (5, True), done.errors
    assert not site.pod.disk.exists()


@pytest.mark.parametrize(
    ("sums", "reason"),
    [
        (b"0" * 64 + b"  other.img\n", "no line with a checksum of 'disk.img'"),
        (b"0" * 64 + b"  disk.img\n" + b"1" * 64 + b"  disk.img\n", "several lines with different checksums"),
        (
            b"0" * 64 + b"  disk.img\n" + b"".join(each * 32 + b"  disk.img\n" for each in (b"0", b"1")),
            "several lines with different checksums",
        ),
        (b"0" * 64 + b"  a/disk.img\n" + b"1" * 64 + b"  b/disk.img\n", "several lines with different"),
        (b"", "no line with a checksum"),
        (b"\x00\xff" * 1000, "no line with a checksum"),
    ],
    ids=["other-name", "ambiguous", "ambiguous-weak", "ambiguous-folder", "empty", "binary"],
)
def test_disk_without_its_line_is_refused(
    site: Site, people: signers.OpenPGP, key: str, sums: bytes, reason: str
) -> None:
    site.serve("/d/SHA256SUMS", sums)
    site.serve("/d/SHA256SUMS.gpg", people.sign("good", sums))
    site.refuse(3, reason)
    site.refuse(7, f"signature of another reference: {reason}", CDI_WORKER_SIGNED_BY=key)


def test_signed_checksum_without_a_name_is_refused(site: Site, people: signers.OpenPGP, key: str) -> None:
    """It may be the signed checksum of another file."""
    sums = site.line.split()[0] + b"\n"
    site.serve("/d/SHA256SUMS", sums)
    site.serve("/d/SHA256SUMS.gpg", people.sign("good", sums))
    site.refuse(7, "of another reference: the signed checksum is without a name", CDI_WORKER_SIGNED_BY=key)
    site.accept()


@pytest.mark.parametrize("algorithm", ["md5", "sha1"])
def test_signed_checksum_that_can_be_forged_is_refused(
    site: Site, people: signers.OpenPGP, key: str, algorithm: str
) -> None:
    sums = f"{hashlib.new(algorithm, site.data, usedforsecurity=False).hexdigest()}  disk.img\n".encode()
    site.serve("/d/SHA256SUMS", sums)
    site.serve("/d/SHA256SUMS.gpg", people.sign("good", sums))
    site.refuse(7, f"not verifiable: only an {algorithm} checksum", CDI_WORKER_SIGNED_BY=key)
    site.accept()


@pytest.mark.parametrize(
    "page",
    [
        Page(b"x", tail=(b"0" * MiB, None), framing="close", ranges=False),
        Page(b"0" * (9 * MiB)),
    ],
    ids=["endless", "huge"],
)
def test_checksum_file_without_end_is_refused(site: Site, page: Page) -> None:
    site.serve("/d/SHA256SUMS", page)
    site.refuse(3, "is larger than 8 MiB")


def test_long_checksum_file_is_read_to_its_end(site: Site) -> None:
    lines = b"".join(b"%064d  disk%d.img\n" % (number, number) for number in range(10_000))
    for ranges in (True, False):
        site.serve("/d/SHA256SUMS", Page(lines + site.line, ranges=ranges))
        done = site.run()
        assert done.status == 0, done.errors


def test_contradictory_demand_is_refused(site: Site) -> None:
    site.serve("/d/SHA256SUMS", site.line)
    for env, reason in (
        ({"IMPORTER_CHECKSUM": "md5:" + "0" * 32}, "exclude each other"),
        ({"CDI_WORKER_CHECKSUM_FILE": "docker://h/r"}, "has an http, https, s3, gs or file URL"),
        ({"CDI_WORKER_CHECKSUM_FILE": "http://["}, "malformed URL"),
        (
            {"IMPORTER_CURRENT_CHECKPOINT": "b", "IMPORTER_PREVIOUS_CHECKPOINT": "a"},
            "of a whole disk, not of",
        ),
        ({"CDI_WORKER_SIGNED_BY": "/nothing"}, "/nothing: no such file or directory"),
        ({"IMPORTER_SOURCE": "registry"}, "the disk has no file name to look up in the checksum file"),
    ):
        site.refuse(2, reason, **env)


def test_line_of_a_stage_is_that_of_its_file(site: Site) -> None:
    """The disk of a first stage is the file with the checkpoint's name, not that in the URL."""
    site.serve("/d/SHA256SUMS", site.line)
    site.refuse(3, "no line with a checksum of 'first.qcow2'", IMPORTER_CURRENT_CHECKPOINT="first.qcow2")


def test_credentials_are_not_sent_to_another_server(site: Site) -> None:
    with misbehave.Server() as other:
        url = other.serve("/SHA256SUMS", Page(site.line))
        login = {"IMPORTER_ACCESS_KEY_ID": "user", "IMPORTER_SECRET_KEY": "secret"}
        site.accept(CDI_WORKER_CHECKSUM_FILE=url, IMPORTER_EXTRA_HEADER_0="X-Token: secret", **login)
        (request,) = other.requests
        assert "secret" not in str(request.headers)
        assert "authorization" not in request.headers
    (first, *_) = site.server.gets("/d/disk.img")
    assert first.headers["x-token"] == "secret"


# -- OpenPGP -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "armor"), [(".gpg", False), (".sign", False), (".asc", True), (".sig", True)]
)
def test_detached_signature_is_accepted(
    site: Site, people: signers.OpenPGP, tmp_path: Path, ending: str, armor: bool
) -> None:
    keyring = tmp_path / "keys"
    keyring.write_bytes(people.export("other", armor=armor) + people.export("good", armor=armor))
    site.serve("/d/SHA256SUMS", site.line)
    proof = people.sign("good", site.line, "--detach-sign", *(["--armor"] if armor else []))
    site.serve(f"/d/SHA256SUMS{ending}", proof)
    done = site.accept(CDI_WORKER_SIGNED_BY=str(keyring))
    assert "(Good Signer <good@example.org>)" in done.errors


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_clear_signed_file_is_accepted(site: Site, people: signers.OpenPGP, key: str, newline: bytes) -> None:
    sums = b"# Fedora\n- a line with a dash  \n" + site.line
    signed = people.sign("good", sums, "--clear-sign")
    site.serve("/d/SHA256SUMS", signed.replace(b"\n", newline))
    done = site.accept(CDI_WORKER_SIGNED_BY=key)
    assert "(Good Signer <good@example.org>)" in done.errors


def test_key_in_a_folder_is_accepted(site: Site, people: signers.OpenPGP, tmp_path: Path) -> None:
    """Such as a mounted ConfigMap; keys of other forms may be beside it."""
    folder = tmp_path / "keys"
    folder.mkdir()
    (folder / "good.asc").write_bytes(people.export("good", armor=True))
    (folder / "image.pem").write_bytes(signing.Signer().pem)
    site.serve("/d/SHA256SUMS", people.sign("good", site.line, "--clear-sign"))
    site.accept(CDI_WORKER_SIGNED_BY=str(folder))


def test_several_files_of_openpgp_keys_are_refused(
    site: Site, people: signers.OpenPGP, tmp_path: Path
) -> None:
    folder = tmp_path / "keys"
    folder.mkdir()
    for name in ("good", "other"):
        (folder / f"{name}.asc").write_bytes(people.export(name, armor=True))
    site.serve("/d/SHA256SUMS", people.sign("good", site.line, "--clear-sign"))
    reason = "other.asc: a second file of OpenPGP keys; write all of them to one file with gpg --export"
    site.refuse(2, reason, CDI_WORKER_SIGNED_BY=str(folder))


def test_one_valid_signature_of_several_is_enough(site: Site, people: signers.OpenPGP, key: str) -> None:
    site.serve("/d/SHA256SUMS", site.line)
    site.serve("/d/SHA256SUMS.gpg", people.sign("other", site.line) + people.sign("good", site.line))
    site.accept(CDI_WORKER_SIGNED_BY=key)


def test_second_signature_is_tried(site: Site, people: signers.OpenPGP, key: str) -> None:
    site.serve("/d/SHA256SUMS", site.line)
    site.serve("/d/SHA256SUMS.gpg", b"<html>not found</html>")
    site.serve("/d/SHA256SUMS.asc", people.sign("good", site.line))
    site.accept(CDI_WORKER_SIGNED_BY=key)


@pytest.mark.parametrize(
    ("name", "how", "reason"),
    [
        ("other", "--detach-sign", "signature of another key: it is by key "),
        ("other", "--clear-sign", "signature of another key: it is by key "),
        ("expired", "--detach-sign", "signature expired: key "),
        ("revoked", "--clear-sign", "signature of a revoked key: key "),
    ],
)
def test_invalid_key_is_refused(
    site: Site, people: signers.OpenPGP, tmp_path: Path, name: str, how: str, reason: str
) -> None:
    keyring = tmp_path / "keys"
    keyring.write_bytes(people.export("good") + (people.export(name) if name != "other" else b""))
    signed = people.sign(name, site.line, how)
    site.serve("/d/SHA256SUMS", signed if how == "--clear-sign" else site.line)
    site.serve("/d/SHA256SUMS.gpg", signed)
    site.refuse(7, reason, CDI_WORKER_SIGNED_BY=str(keyring))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda people, data: people.sign("good", data + b"\n"), "signature of other data: key "),
        (lambda people, data: b"", "malformed"),
        (lambda people, data: people.sign("good", data)[:-10], "malformed"),
        (lambda people, data: b"\xff" * 1000, "malformed"),
        # Signed is the message in it, not the checksum file.
        (lambda people, data: people.sign("good", b"x", "--sign"), "malformed: no OpenPGP signature"),
        (lambda people, data: people.sign("good", b"x", "--clear-sign"), "malformed: no OpenPGP signature"),
        (lambda people, data: people.sign("good", data, "--detach-sign", "--digest-algo=SHA1"), "SHA-1 hash"),
        (lambda people, data: people.export("good"), "malformed: no OpenPGP signature"),
    ],
    ids=[
        "other-file",
        "empty",
        "cut",
        "noise",
        "message",
        "clear",
        "sha1",
        "key",
    ],
)
def test_invalid_signature_is_refused(
    site: Site,
    people: signers.OpenPGP,
    key: str,
    make: Callable[[signers.OpenPGP, bytes], bytes],
    reason: str,
) -> None:
    site.serve("/d/SHA256SUMS", site.line)
    site.serve("/d/SHA256SUMS.gpg", make(people, site.line))
    site.refuse(7, reason, CDI_WORKER_SIGNED_BY=key)


def test_missing_signature_is_refused(site: Site, key: str) -> None:
    site.serve("/d/SHA256SUMS", site.line)
    site.refuse(
        7, "signature missing: not clear-signed, and no signature beside it", CDI_WORKER_SIGNED_BY=key
    )


def test_huge_signature_is_not_one(site: Site, key: str) -> None:
    site.serve("/d/SHA256SUMS", site.line)
    site.serve("/d/SHA256SUMS.gpg", Page(b"\x88", tail=(b"0" * MiB, None), framing="close", ranges=False))
    site.refuse(7, "signature missing", CDI_WORKER_SIGNED_BY=key)


@pytest.mark.parametrize("where", ["before", "after"])
def test_text_outside_of_the_signature_does_not_count(
    site: Site, people: signers.OpenPGP, key: str, where: str
) -> None:
    signed = people.sign("good", b"0" * 64 + b"  other.img\n", "--clear-sign")
    site.serve("/d/SHA256SUMS", site.line + signed if where == "before" else signed + site.line)
    site.refuse(7, "no line with a checksum of 'disk.img'", CDI_WORKER_SIGNED_BY=key)
    site.refuse(3, "no line with a checksum of 'disk.img'")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"\n\n", b"\nComment: x\n\n"),
        (b"-----BEGIN PGP SIGNED MESSAGE-----", b"-----BEGIN PGP SIGNED MESSAGE-----\n" * 2),
        (b"  disk.img\n", b"  disk.img\n-----BEGIN\n"),
        (b"-----BEGIN PGP SIGNATURE-----", b"-----BEGIN PGP SIGNATURE----"),
        (b"-----BEGIN PGP SIGNATURE-----", b"-----BEGIN PGP SIGNATURE-----\nx"),
    ],
)
def test_malformed_clear_signed_file_is_refused(
    site: Site, people: signers.OpenPGP, key: str, old: bytes, new: bytes
) -> None:
    signed = people.sign("good", site.line, "--clear-sign")
    assert old in signed
    site.serve("/d/SHA256SUMS", signed.replace(old, new, 1))
    site.refuse(7, "signature malformed", CDI_WORKER_SIGNED_BY=key)


def test_hostile_keyring_is_refused(site: Site, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    site.serve("/d/SHA256SUMS", site.line)
    for keyring, reason in (
        (b"", "no OpenPGP keys"),
        (b"\xff" * 1000, "no OpenPGP public keys"),
        (b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\n", "no OpenPGP public keys"),
        (b"-----BEGIN PUBLIC KEY-----\n", "keys in PEM form verify images in a registry"),
        (b"\0" * 8 + b"KBXf", "a keybox"),
        (b"\x99" * (2 << 20), "is larger than 1 MiB"),
    ):
        path.write_bytes(keyring)
        site.refuse(2, reason, CDI_WORKER_SIGNED_BY=str(path))


def test_private_key_is_refused(site: Site, people: signers.OpenPGP, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_bytes(people.gpg("--export-secret-keys", "good@example.org"))
    site.refuse(2, "a private key; name the file with the public key", CDI_WORKER_SIGNED_BY=str(path))


def test_damaged_keyring_accepts_nothing(site: Site, people: signers.OpenPGP, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    good = people.export("good")
    site.serve("/d/SHA256SUMS", people.sign("good", site.line, "--clear-sign"))
    for at in range(4, 50, 7):
        path.write_bytes(good[:at] + bytes([good[at] ^ 0xFF]) + good[at + 1 :])
        assert site.run(CDI_WORKER_SIGNED_BY=str(path)).status != 0, at


def test_sqv_agrees(people: signers.OpenPGP, site: Site, tmp_path: Path, key: str) -> None:
    """What we accept, another implementation accepts: the form of the text is the signed one."""
    from cdi_worker.formats.signature import openpgp

    sums = b"- dash  \n\t\n" + site.line + b"\n\n"
    clear = openpgp.clear(people.sign("good", sums, "--clear-sign"), "x")
    assert clear
    (tmp_path / "text").write_bytes(clear.text)
    (tmp_path / "sig").write_bytes(clear.signature)
    done = processes.run("sqv", f"--keyring={key}", tmp_path / "sig", tmp_path / "text")
    assert done.stdout.strip()


# -- SSH is refused ------------------------------------------------------------------------------


def test_ssh_keys_are_refused(site: Site, people: signers.OpenPGP, tmp_path: Path) -> None:
    """Also beside a key that has signed: who trusts both must know that one does not count."""
    keys, good = tmp_path / "keys", people.export("good", armor=True)
    site.serve("/d/SHA256SUMS", people.sign("good", site.line, "--clear-sign"))
    for kind, principals, more in (
        (b"ssh-ed25519", b"", b""),
        (b"ecdsa-sha2-nistp256", b'release@example.org namespaces="file" ', good),
        (b"sk-ssh-ed25519@openssh.com", b"", good),
    ):
        keys.write_bytes(b"# who may sign\n" + principals + kind + b" AAAAC3NzaC1lZDI1NTE5 a\n" + more)
        reason = f"{keys}: SSH keys are not supported; sign with OpenPGP"
        site.refuse(2, reason, CDI_WORKER_SIGNED_BY=str(keys))


def test_ssh_signature_is_refused(site: Site, key: str) -> None:
    site.serve("/d/SHA256SUMS", site.line)
    proof = b"-----BEGIN SSH SIGNATURE-----\nAAAA\n-----END SSH SIGNATURE-----\n"
    site.serve("/d/SHA256SUMS.sig", proof)
    site.refuse(7, "signature malformed: no OpenPGP signature", CDI_WORKER_SIGNED_BY=key)


# -- commands ----------------------------------------------------------------------------------------


def test_inspect_says_what_is_signed_and_by_whom(
    disks: disks_module.Disks, people: signers.OpenPGP, key: str, tmp_path: Path
) -> None:
    sums = tmp_path / "CHECKSUM"
    digest = hashlib.sha256(disks.raw().read_bytes()).hexdigest()
    line = f"SHA256 ({disks.raw().name}) = {digest}\n".encode()
    sums.write_bytes(people.sign("good", line, "--clear-sign"))
    options = [f"--checksum-file={sums}", f"--signed-by={key}"]
    found = json.loads(worker.call("inspect", disks.raw(), *options, "--json").output)
    assert (found["checksum"], found["checksumFile"]) == (f"sha256:{digest}", str(sums))
    (claims,) = found["signatures"]
    assert claims["signer"].endswith("(Good Signer <good@example.org>)")
    assert claims["digest"] == f"sha256:{digest}"
    assert worker.call("import", disks.raw(), tmp_path / "disk.img", *options).status == 0
    oracle.same(tmp_path / "disk.img", disks.raw())
    assert worker.call("inspect", disks.raw(), f"--checksum-file={sums}").status == 0
    stranger = tmp_path / "other"
    stranger.write_bytes(people.export("other"))
    done = worker.call("inspect", disks.raw(), options[0], f"--signed-by={stranger}")
    assert (done.status, "signature of another key" in done.error_message) == (7, True)
