"""Verify OpenPGP signatures with gpgv."""

from __future__ import annotations

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.formats.signature import openpgp
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process

# A checksum file takes milliseconds. A hostile key or signature may take longer.
_PATIENCE = 30.0
_ADDRESS_SPACE = 512 << 20
#: Longest status output, in bytes: a signature has some hundred. A small hostile file may hold millions.
_LONGEST = 64 << 10


def verify(keyring: bytes, proof: bytes, message: bytes, name: str, cancel: cancelling.Cancel) -> str:
    """Return who made the detached signature ``proof`` of ``message``, with a key in ``keyring``.

    Raises ``errors.Untrusted``, which calls the signature ``name``.
    """
    status = bytearray()

    def take(chunk: bytes) -> None:
        status.extend(chunk)
        if len(status) > _LONGEST:
            raise errors.Untrusted(url=name, fault=signature.MALFORMED, reason="hundreds of signatures")

    with (
        process.memory_file(keyring) as keys,
        process.memory_file(proof) as detached,
        process.memory_file(message) as text,
    ):
        files = [f"/proc/self/fd/{each}" for each in (keys, detached, text)]
        # The status on standard output: the log on standard error repeats names of keys as they are.
        argv = ("gpgv", "--status-fd=1", "--keyring", *files[:1], "--", *files[1:])
        command = process.Command(
            argv, package="gpgv", address_space=_ADDRESS_SPACE, pass_fds=(keys, detached, text)
        )
        try:
            process.run(command, take, cancel=cancel, watch=process.Watch("gpgv", _PATIENCE))
        except errors.ToolFailed as err:
            # It fails for any invalid signature; the status says which. A crash says nothing.
            if int(str(err.fields["exit_status"])) < 0:
                raise
    return openpgp.signer(status.decode("utf-8", "replace"), name)
