"""The installed distribution: its version, where it came from, and how an extra is added to it."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from typing import Any, Final

NAME: Final = "cdi-worker"
#: Extras with packages that pip compiles, and the Debian packages that this needs.
COMPILED: Final = {"imageio": "gcc libxml2-dev python3-dev"}


def _installed() -> str:
    """Return the version in the name of the metadata (PyPA, "Recording installed projects").

    ``importlib.metadata`` says the same, and takes 8 ms for it.
    """
    prefix, suffix = f"{NAME.replace('-', '_')}-", ".dist-info"
    for folder in sys.path:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder or "."):
                if name.startswith(prefix) and name.endswith(suffix):
                    return name[len(prefix) : -len(suffix)]
    # A checkout can be run without an installation.
    return "unknown (not installed)"


VERSION: Final = _installed()


def image() -> str | None:
    """Return the container image of this release, None for a version that was not released with one."""
    from importlib import metadata

    try:
        links = metadata.metadata(NAME).get_all("Project-URL") or []
    except metadata.PackageNotFoundError:
        return None
    named = dict(link.split(", ", 1) for link in links)
    return named["Image"].removeprefix("docker://") if "Image" in named else None


def install(extra: str) -> str:
    """Return the command that adds ``extra`` to this installation, from where it came.

    The name alone would ask the package index, where another project may have it.
    """
    from importlib import metadata

    pip = f"{shlex.quote(sys.executable)} -m pip install"
    tools = f"apt-get install {COMPILED[extra]} && " if extra in COMPILED else ""
    # A checkout on the path may have metadata of its own, without an origin.
    found = [each.read_text("direct_url.json") for each in metadata.distributions(name=NAME)]
    if not found:
        return f"{pip} '{NAME}[{extra}] @ file://DIRECTORY', where DIRECTORY is the checkout"
    text = next((origin for origin in found if origin), None)
    if text is None:
        return f"{tools}{pip} '{NAME}[{extra}]=={VERSION}'"
    origin: dict[str, Any] = json.loads(text)  # noqa: TID251 - the installer's own
    url = origin["url"]
    if origin.get("dir_info", {}).get("editable"):
        return f"{tools}{pip} --editable '{url.removeprefix('file://')}[{extra}]'"
    if source := origin.get("vcs_info"):
        url = f"{source['vcs']}+{url}@{source['commit_id']}"
    return f"{tools}{pip} '{NAME}[{extra}] @ {url}'"


def install_libnbd() -> str:
    """Return the command that makes libnbd's bindings available to this interpreter.

    They are a package of the distribution, for its own Python, and on no package index.
    """
    package, system = "apt-get install python3-libnbd", "/usr/bin/python3"
    if sys.base_prefix != "/usr":
        venv = f"{system} -m venv --system-site-packages DIRECTORY"
        return f"{package} && {venv}, and install {NAME} there: the bindings are for {system}"
    if sys.prefix == sys.base_prefix:
        return package
    # On an existing environment, this keeps its packages and only changes what it sees.
    return f"{package} && {system} -m venv --system-site-packages {shlex.quote(sys.prefix)}"
