"""The command doctor: what works on this machine, and the command that adds what is missing."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import NamedTuple

import click

from cdi_worker import errors, version
from cdi_worker.images.tools import process
from cdi_worker.importer import contract
from cdi_worker.importer.commands import command, options, output, parameters
from cdi_worker.sources import certificates, smallfile

#: Programs, the Debian packages with them, and what needs them.
PROGRAMS = (
    ("qemu-img", "qemu-utils", "qcow2 files as targets, and rare features of disk images"),
    ("gpgv", "gpgv", "signatures of OpenPGP"),
    ("tar", "tar", "clones of file systems"),
    ("wipefs", "util-linux", "block devices as targets"),
    ("nbdkit", "nbdkit", "vddk, with nbdkit-plugin-vddk and VMware's library; without, a lease"),
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
    "kubernetes": "cdi-worker manifest",
}


class Finding(NamedTuple):
    """One ability: ``need``, a program, package or file, ``what`` needs it, and the command that adds it."""

    need: str
    what: str
    works: bool
    add: str


def findings() -> Iterator[Finding]:
    """Yield what may be missing on a machine."""
    for program, package, what in PROGRAMS:
        works = shutil.which(program, path=process.SEARCH_PATH) is not None
        yield Finding(program, what, works, f"apt-get install {package}")
    works = importlib.util.find_spec("nbd") is not None
    yield Finding(
        "libnbd for Python",
        "nbd://, VDDK, verification of qcow2 files, and rare features of disk images",
        works,
        version.install_libnbd(),
    )
    # As the distribution declares them.
    declared = (metadata.requires("cdi-worker") or []) if _is_installed("cdi-worker") else []
    for extra, what in EXTRAS.items():
        mark = re.compile(rf"""extra == ['"]{extra}['"]""")
        packages = [re.split(r"[^\w.-]", each)[0] for each in declared if mark.search(each)]
        yield Finding(f"[{extra}]", what, all(map(_is_installed, packages)), version.install(extra))


def trusted(files: Iterable[str]) -> Iterator[Finding]:
    """Yield the certificates that TLS trusts: the number of the system's, and each one of ``files``."""
    system = certificates.system_files()
    texts = (path.read_bytes() for path in system)
    name = str(system[0] if len(system) == 1 else system[0].parent) if system else "CAs of the system"
    count = len(certificates.bundle(b"\n".join(texts), name).certificates) if system else 0
    install = "apt-get install ca-certificates"
    yield Finding(name, f"https with certificates of {count} public CAs", count > 0, install)
    for path in files:
        try:
            found = certificates.bundle(smallfile.read(path, certificates.LARGEST), path)
        except errors.RequestError as err:
            yield Finding(path, "certificates to trust", False, str(err))
            continue
        for each in found.certificates:
            what = f"trust in {each.subject} until {certificates.day(each.until)}"
            yield Finding(path, what, not each.has_expired, "get the new certificate of this CA")
        for number in found.damaged:
            yield Finding(path, f"certificate {number} of the file", False, "it is damaged; get it again")


def _is_installed(name: str) -> bool:
    return any(metadata.distributions(name=name))


@click.command(cls=command.Command, params=options.of("doctor"))
@click.pass_obj
def doctor(obj: parameters.Context, /, ca_file: tuple[str, ...], ca_dir: str | None) -> int:
    """Show which programs and packages are installed, what needs them, and the commands that add the others.

    Most images from files, http(s) and container registries need none of them, and nothing needs KVM. Also
    shows which certificates are trusted.
    """
    found = [*findings(), *trusted(ca_file + contract.certificate_files(ca_dir or ""))]
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
