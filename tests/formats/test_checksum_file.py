"""Files with checksums of other files, as GNU and BSD programs write them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from cdi_worker import errors
from cdi_worker.formats import checksum_file
from tests.support import processes

MD5, SHA1, SHA256, SHA512 = (
    hashlib.new(name, b"disk", usedforsecurity=False).hexdigest()
    for name in ("md5", "sha1", "sha256", "sha512")
)
OTHER = hashlib.sha256(b"other").hexdigest()
FEDORA = f"""\
-----BEGIN PGP SIGNED MESSAGE-----
Hash: SHA256

# disk.qcow2: 517799936 bytes
SHA256 (disk.qcow2) = {SHA256}
-----BEGIN PGP SIGNATURE-----

iQIzBAEBCAAdFiEE6VxQtTXYjH6T4BfGkOd4bRXfJzAFAmch
-----END PGP SIGNATURE-----
"""


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{SHA256}  disk.qcow2\n", f"sha256:{SHA256}"),
        (f"{OTHER} *other\n{SHA256} *disk.qcow2", f"sha256:{SHA256}"),
        (f"{SHA256.upper()}  disk.qcow2\r\n", f"sha256:{SHA256}"),
        (f"{SHA512}  ./disk.qcow2\n", f"sha512:{SHA512}"),
        (f"{SHA256}  images/disk.qcow2\n", f"sha256:{SHA256}"),
        (f"{OTHER}  old/disk.qcow2\n{SHA256}  disk.qcow2\n", f"sha256:{SHA256}"),
        (
            f"SHA512 (disk.qcow2) = {SHA512}\nSHA256 (disk.qcow2) = {SHA256}\n",
            f"sha512:{SHA512},sha256:{SHA256}",
        ),
        (f"MD5(disk.qcow2)= {MD5}\nSHA1(disk.qcow2)= {SHA1}\n", f"sha1:{SHA1},md5:{MD5}"),
        (f"{SHA256}\n", f"sha256:{SHA256}"),
        (f"{SHA256}  disk.qcow2\n{SHA256}  disk.qcow2\n", f"sha256:{SHA256}"),
        (FEDORA, f"sha256:{SHA256}"),
    ],
)
def test_line_of_a_name_is_found(text: str, expected: str) -> None:
    assert checksum_file.find(text.encode(), "disk.qcow2") == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no line with a checksum of 'disk.qcow2'"),
        (f"{SHA256}  disk.qcow2.old\n", "no line"),
        (f"{SHA256}\n{OTHER}\n", "no line"),
        (f"{SHA256[:-1]}  disk.qcow2\n", "no line"),
        (f"SHA256 (disk.qcow2) = {SHA1}\n", "no line"),
        (f"{SHA256[:-1]}g  disk.qcow2\n", "no line"),
        (f"{SHA256}  disk.qcow2\n{OTHER}  disk.qcow2\n", "different checksums"),
        (f"{SHA256}  a/disk.qcow2\n{OTHER}  b/disk.qcow2\n", "different checksums"),
        ("<html>not found</html>", "no line"),
    ],
)
def test_doubt_is_refused(text: str, message: str) -> None:
    with pytest.raises(errors.SourceError, match=message):
        checksum_file.find(text.encode(), "disk.qcow2")


@pytest.mark.parametrize(
    ("tool", "expected"),
    [
        (("sha256sum",), f"sha256:{SHA256}"),
        (("sha512sum", "--tag"), f"sha512:{SHA512}"),
        (("md5sum", "-b"), f"md5:{MD5}"),
    ],
)
def test_lines_of_coreutils_are_read(tmp_path: Path, tool: tuple[str, ...], expected: str) -> None:
    names = ["disk", "two words", "a\nb", "back\\slash", "c\rd", "(x) = y", "ü", " begins"]
    for name in names:
        (tmp_path / name).write_bytes(b"disk")
    done = processes.run("env", "-C", tmp_path, *tool, *names)
    assert list(checksum_file.parse(done.stdout.encode())) == [(name, expected) for name in names]


@hypothesis.given(
    st.binary() | st.from_regex(r"\\?[0-9a-f]{32,64} [ *]\S+\n", fullmatch=True).map(str.encode)
)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    for line in checksum_file.parse(data):
        assert line.checksum.partition(":")[0] in {"md5", "sha1", "sha256", "sha512"}
