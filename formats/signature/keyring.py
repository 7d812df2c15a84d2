"""The keys of who may sign checksum files: OpenPGP, minisign and SSH, told apart by their content."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from cdi_worker import errors
from cdi_worker.formats.signature import minisign, openpgp, ssh

_PEM: Final = re.compile(rb"^-----BEGIN (PUBLIC KEY|CERTIFICATE)-----", re.MULTILINE)
_ARMOR: Final = re.compile(rb"^-----BEGIN PGP ", re.MULTILINE)


class Keyring(NamedTuple):
    """Keys by form. ``openpgp``: packets, empty without such keys."""

    openpgp: bytes = b""
    minisign: tuple[minisign.Key, ...] = ()
    ssh: tuple[ssh.Signer, ...] = ()

    @property
    def endings(self) -> tuple[str, ...]:
        """How the names of signatures beside a file end."""
        found = [".gpg", ".sign", ".asc", ".sig"] if self.openpgp else []
        found += [".minisig"] if self.minisign else []
        found += [".sig"] if self.ssh and ".sig" not in found else []
        return tuple(found)


def read(files: Iterable[tuple[str, bytes]], where: str) -> Keyring:
    """Return the keys in files, given with their names. Raises ``errors.RequestError``."""
    found, other = Keyring(), False
    for name, data in files:
        if (data[:1] and data[0] & 0x80) or _ARMOR.search(data):
            found = found._replace(openpgp=found.openpgp + openpgp.keyring(data, name))
        elif data[8:12] == b"KBXf":
            raise errors.RequestError(f"{name}: a keybox; write its keys to a file with gpg --export")
        elif _PEM.search(data):
            # For images in a registry; a folder may have keys for both.
            other = True
        else:
            keys, signers = (*minisign.read(data),), (*ssh.read(data, name),)
            found = found._replace(minisign=found.minisign + keys, ssh=found.ssh + signers)
    if not any(found):
        hint = "; keys in PEM form verify images in a registry" if other else ""
        raise errors.RequestError(f"{where}: no OpenPGP, minisign or SSH keys for a checksum file{hint}")
    return found
