"""Read the OpenPGP keys that may sign checksum files; other keys are recognised by their content."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from cdi_worker import errors
from cdi_worker.formats.signature import openpgp

_PEM: Final = re.compile(rb"^-----BEGIN (PUBLIC KEY|CERTIFICATE)-----", re.MULTILINE)
_ARMOR: Final = re.compile(rb"^-----BEGIN PGP ", re.MULTILINE)
#: A public key of SSH, also in a line of an allowed signers file (ssh-keygen(1)).
_SSH: Final = re.compile(rb"^(?!#)(?:.*[ \t])?(?:sk-)?(?:ssh|ecdsa)-[\w@.-]+[ \t]+AAAA", re.MULTILINE)


def read(files: Iterable[tuple[str, bytes]], where: str) -> bytes:
    """Return the OpenPGP keys in files, given with their names, as gpgv reads them.

    Raises ``errors.RequestError``.
    """
    keys, has_pem = b"", False
    for name, data in files:
        if _SSH.search(data):
            raise errors.RequestError(f"{name}: SSH keys are not supported; sign with OpenPGP")
        if (data[:1] and data[0] & 0x80) or _ARMOR.search(data):
            if keys:
                reason = "a second file of OpenPGP keys; write all of them to one file with gpg --export"
                raise errors.RequestError(f"{name}: {reason}")
            keys = openpgp.keyring(data, name)
        elif data[8:12] == b"KBXf":
            raise errors.RequestError(f"{name}: a keybox; write its keys to a file with gpg --export")
        elif _PEM.search(data):
            # For images in a registry; a folder may have keys for both.
            has_pem = True
    if not keys:
        hint = "; keys in PEM form verify images in a registry" if has_pem else ""
        raise errors.RequestError(f"{where}: no OpenPGP keys for a checksum file{hint}")
    return keys
