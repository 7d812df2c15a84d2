"""Who signs checksum files: GnuPG from Debian, with keys made in the test."""

from __future__ import annotations

import contextlib
import dataclasses
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import processes

#: When the expired key was made, and when it signs. The faked clock goes on while gpg runs: a signature at
#: the same time may be older than the key.
THEN, LATER = "20200101T000000", "20200101T120000"


def _run(*argv: str | Path, home: Path | None = None) -> bytes:
    env = {"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "HOME": str(home or "/nonexistent")}
    return subprocess.run(argv, env=env, check=True, stdin=subprocess.DEVNULL, capture_output=True).stdout


@dataclasses.dataclass(frozen=True)
class OpenPGP:
    """A GnuPG home with the keys of ``good``, ``other``, ``expired`` and ``revoked``."""

    home: Path

    def gpg(self, *arguments: str | Path) -> bytes:
        """Run gpg, and return its standard output."""
        common = ("--batch", "--quiet", "--no-tty", "--pinentry-mode=loopback", "--passphrase=")
        return _run("gpg", f"--homedir={self.home}", *common, *arguments, home=self.home)

    def export(self, name: str, *, armor: bool = False) -> bytes:
        """Return a public key. The key of ``revoked`` can sign, because gpg does not know here that it is."""
        if name == "revoked" and self.home.name != "r":
            with contextlib.closing(OpenPGP(self.home.with_name("r"))) as other:
                return other.export(name, armor=armor)
        return self.gpg(*(["--armor"] if armor else []), "--export", f"{name}@example.org")

    def exported(self, name: str, folder: Path) -> str:
        """Write a public key to a file in ``folder``; return its path."""
        path = folder / f"{name}.gpg"
        path.write_bytes(self.export(name))
        return str(path)

    def sign(self, name: str, data: bytes, how: str = "--detach-sign", *more: str) -> bytes:
        """Return a signature of ``data``, or the signed text."""
        given = self.home / "data"
        given.write_bytes(data)
        when = [f"--faked-system-time={LATER}"] if name == "expired" else []
        user = f"--local-user={name}@example.org"
        return self.gpg(*when, user, *more, "--output=-", how, given)

    def close(self) -> None:
        """End the agent."""
        _run("gpgconf", f"--homedir={self.home}", "--kill", "all", home=self.home)


@contextlib.contextmanager
def people() -> Iterator[OpenPGP]:
    """Make keys. The path of the folder is short: gpg's agent has a socket in it."""
    with (
        tempfile.TemporaryDirectory(prefix="gpg", dir="/tmp") as folder,
        contextlib.closing(openpgp(Path(folder, "h"))) as made,
    ):
        yield made


def openpgp(home: Path) -> OpenPGP:
    """Make the keys in the folder ``home``, whose path must be short."""
    processes.need("gpg", "gpgv", "sqv", "gpgconf")
    home.mkdir(mode=0o700)
    made = OpenPGP(home)
    for name in ("good", "other", "revoked", "expired"):
        when = [f"--faked-system-time={THEN}"] if name == "expired" else []
        until = "1d" if name == "expired" else "0"
        user = f"{name.title()} Signer <{name}@example.org>"
        made.gpg(*when, "--quick-gen-key", user, "ed25519", "sign", until)
    (certificate,) = (
        path for path in (home / "openpgp-revocs.d").iterdir() if b"Revoked Signer" in path.read_bytes()
    )
    revocation = home / "revocation"
    # gpg writes a colon before it, so that it is not imported by mistake.
    revocation.write_bytes(certificate.read_bytes().replace(b":-----BEGIN", b"-----BEGIN"))
    other = OpenPGP(home.with_name("r"))
    other.home.mkdir(mode=0o700)
    (home / "public").write_bytes(made.gpg("--export", "revoked@example.org"))
    with contextlib.closing(other):
        other.gpg("--import", home / "public")
        other.gpg("--import", revocation)
    return made
