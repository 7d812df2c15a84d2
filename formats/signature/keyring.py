"""The keys of who may sign checksum files: OpenPGP and minisign, told apart by their content."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from cdi_worker import errors
from cdi_worker.formats.signature import minisign, openpgp

_PEM: Final = re.compile(rb"^-----BEGIN (PUBLIC KEY|CERTIFICATE)-----", re.MULTILINE)
_ARMOR: Final = re.compile(rb"^-----BEGIN PGP ", re.MULTILINE)
#: A public key of SSH, also behind the names and options of ssh-keygen's allowed signers.
_SSH: Final = re.compile(rb"^(?!#)(?:.*[ \t])?(?:sk-)?(?:ssh|ecdsa)-[\w@.-]+[ \t]+AAAA", re.MULTILINE)


class Keyring(NamedTuple):
    """Keys by form. ``openpgp``: packets, empty without such keys."""

    openpgp: bytes = b""
    minisign: tuple[minisign.Key, ...] = ()

    @property
    def endings(self) -> tuple[str, ...]:
        """How the names of signatures beside a file end."""
        openpgp_endings = (".gpg", ".sign", ".asc", ".sig") if self.openpgp else ()
        return openpgp_endings + ((".minisig",) if self.minisign else ())


def read(files: Iterable[tuple[str, bytes]], where: str) -> Keyring:
    """Return the keys in files, given with their names. Raises ``errors.RequestError``."""
    keys, other = Keyring(), False
    for name, data in files:
        if (data[:1] and data[0] & 0x80) or _ARMOR.search(data):
            if keys.openpgp:
                reason = "a second file of OpenPGP keys; write all of them to one file with gpg --export"
                raise errors.RequestError(f"{name}: {reason}")
            keys = keys._replace(openpgp=openpgp.keyring(data, name))
        elif data[8:12] == b"KBXf":
            raise errors.RequestError(f"{name}: a keybox; write its keys to a file with gpg --export")
        elif _SSH.search(data):
            raise errors.RequestError(f"{name}: SSH keys are not supported; sign with OpenPGP or minisign")
        elif _PEM.search(data):
            # For images in a registry; a folder may have keys for both.
            other = True
        else:
            keys = keys._replace(minisign=keys.minisign + tuple(minisign.read(data)))
    if not any(keys):
        hint = "; keys in PEM form verify images in a registry" if other else ""
        raise errors.RequestError(f"{where}: no OpenPGP or minisign keys for a checksum file{hint}")
    return keys
