"""The command doctor: what works on this machine, and the command that adds what is missing."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterator
from typing import NamedTuple

import click

from cdi_worker.importer.commands import command, output, parameters

#: Programs, the Debian packages with them, and what needs them.
PROGRAMS = (
    ("qemu-img", "qemu-utils", "qcow2 files as targets, and rare features of disk images"),
    ("xz", "xz-utils", "images compressed with xz"),
    ("gpgv", "gpgv", "signatures of OpenPGP"),
    ("tar", "tar", "clones of file systems"),
    ("wipefs", "util-linux", "block devices as targets"),
    ("nbdkit", "nbdkit", "vddk, with nbdkit-plugin-vddk and VMware's library"),
)
#: What the extras of the distribution add.
EXTRAS = {
    "s3": "s3://",
    "gcs": "gs://",
    "glance": "glance://",
    "imageio": "oVirt",
    "vddk": "vSphere",
    "upload": "the upload server, and clones",
    "metrics": "/metrics of a pod",
    "trust": "signatures with a certificate of Fulcio",
    "kubernetes": "manifest and run",
}


class Finding(NamedTuple):
    """One ability: ``need``, a program or package, ``what`` needs it, and the command that adds it."""

    need: str
    what: str
    works: bool
    add: str


def findings() -> Iterator[Finding]:
    """Yield what may be missing on a machine."""
    from cdi_worker import version
    from cdi_worker.images.tools import process

    for program, package, what in PROGRAMS:
        works = shutil.which(program, path=process.SEARCH_PATH) is not None
        yield Finding(program, what, works, f"apt-get install {package}")
    works = importlib.util.find_spec("nbd") is not None
    yield Finding(
        "libnbd for Python", "nbd://, qcow2 files as targets, and vddk", works, version.install_libnbd()
    )
    for extra, what in EXTRAS.items():
        missing = [name for name in _packages(extra) if not _is_installed(name)]
        yield Finding(f"[{extra}]", what, not missing, version.install(extra))


def _packages(extra: str) -> list[str]:
    """Return the packages of an extra, as the distribution declares them."""
    from importlib import metadata

    try:
        declared = metadata.requires("cdi-worker") or []
    except metadata.PackageNotFoundError:
        return []
    mark = re.compile(rf"""extra == ['"]{extra}['"]""")
    return [re.split(r"[^\w.-]", each)[0] for each in declared if mark.search(each)]


def _is_installed(name: str) -> bool:
    from importlib import metadata

    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True


@click.command(cls=command.Command, short_help="Show what works on this machine.")
@click.pass_obj
def doctor(obj: parameters.Context, /) -> int:
    """Show which programs and packages are installed, what needs them, and the commands that add the others.

    Disk images from files, http(s) and container registries hardly need them, and nothing needs KVM.
    """
    found = list(findings())
    if obj.as_json:
        output.as_json([each._asdict() for each in found])
        return 0
    width = max(len(each.need) for each in found)
    for each in found:
        output.say(f"{'yes' if each.works else 'no':>3}  {each.need:<{width}}  {each.what}")
    missing = [each for each in found if not each.works]
    for each in missing:
        output.say(f"\nfor {each.what}:\n  {each.add}")
    return 0
