"""A machine with a policy: no MD5 and no SHA-1 for security.

Tests run under it in a ``pytest --policy FOLDER`` of their own, with the variables of ``environment``: the
worker, in that process and in others, but not the servers of the tests.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from pathlib import Path

from tests.support import forked, processes, repository

HERE = repository.ROOT / "tests/support/policy"
CONFIGURATION = """\
openssl_conf = start
[start]
providers = providers
alg_section = algorithms
[providers]
policy = policy
[policy]
module = {}
activate = 1
[algorithms]
default_properties = fips=yes
"""


def make(folder: Path, inside: str = "") -> dict[str, str]:
    """Build the provider in a folder; return the variables of a program under the policy.

    ``inside``: where a container has this folder.
    """
    processes.need("gcc")
    module, configuration = folder / "policy.so", folder / "openssl.cnf"
    folder.chmod(0o755)
    options = ("-O1", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC")
    processes.run("gcc", *options, "-o", module, HERE / "provider.c", "-lcrypto")
    configuration.write_text(CONFIGURATION.format(f"{inside or folder}/{module.name}"))
    return environment(Path(inside or folder))


def environment(folder: Path) -> dict[str, str]:
    """Return the variables of a program under the policy in this folder."""
    return {"OPENSSL_CONF": f"{folder}/openssl.cnf", "PYTHONPATH": f"{HERE}/site:{repository.ROOT}"}


def adopt(folder: Path) -> None:
    """Start every worker under the policy that this process has been started with, and no other program."""
    from cryptography.hazmat.backends.openssl import backend

    assert backend._fips_enabled, "the OpenSSL of cryptography has no policy"
    for name in ("md5", "sha1"):
        assert not is_offered(name), f"{name} is offered for security"
        hashlib.new(name, usedforsecurity=False)
    for name, value in environment(folder).items():
        forked.ENVIRONMENT[name] = value
        os.environ.pop(name, None)


def is_offered(name: str) -> bool:
    """Return whether Python offers a digest for security in any way."""
    ways = (lambda: hashlib.new(name), getattr(hashlib, name), lambda: hmac.new(b"", b"", name))
    for each in ways:
        with contextlib.suppress(ValueError):
            each()
            return True
    return False
