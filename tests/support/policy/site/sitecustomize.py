"""Refuse MD5 and SHA-1 for security in Python, as distributions with such a policy do."""

import hashlib
import hmac
import sys

# Python's own code, to which ``hashlib`` falls back.
sys.modules["_md5"] = sys.modules["_sha1"] = None  # type: ignore[assignment]
_new, _sha1 = hashlib.new, hashlib.sha1


def sha1(*data, usedforsecurity=True, **options):
    """Refuse SHA-1 for security: OpenSSL needs it itself, and does not know for what."""
    if usedforsecurity:
        raise ValueError("SHA-1 is not allowed for security")
    return _sha1(*data, usedforsecurity=False, **options)


def new(name, *data, **options):
    """Refuse SHA-1 by its name too."""
    return sha1(*data, **options) if name.lower() == "sha1" else _new(name, *data, **options)


hashlib.new, hashlib.sha1 = new, sha1
# HMAC then takes its digests from ``hashlib``.
hmac._hashopenssl = None
