"""Find the disk in a package that holds disks. The bytes show that a source is one, not its name."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Mapping

from cdi_worker import errors, masking
from cdi_worker.formats import checksum, detect
from cdi_worker.images.engine import cancelling, retry
from cdi_worker.importer.request import Request
from cdi_worker.importer.survey import Survey
from cdi_worker.sources import base
from cdi_worker.sources.trust import Demanded


@contextlib.contextmanager
def open_disk(
    whole: base.Image, request: Request, demanded: Demanded, cancel: cancelling.Cancel
) -> Iterator[tuple[base.Image, Demanded]]:
    """Yield the disk in ``whole``, and what is demanded of it; of any other image, both as they are.

    The source of a package verifies what is demanded of the whole: of the disk in it, nothing is. A source
    that holds several disks has no bytes of its own.
    """
    obstacle = None
    if disks := whole.source.disks:
        # Imported when used, like the packages below.
        from cdi_worker.sources.packages import choice

        index, obstacle = choice.choose(whole.facts.name, request.source, disks, request.disk)
        source: base.Source | None = disks[index].make(False, cancel)
    else:
        # A delta may be packaged; the files of a chain may not.
        source = _disk(whole.files[0], request, demanded, cancel) if len(whole.files) == 1 else None
        demanded = demanded if source is None else Demanded()
    if source is None:
        if request.disk:
            reason = f"neither an OVA nor an OCI archive: it has no disk {request.disk!r} to choose"
            raise errors.RequestError(f"{whole.facts.name}: {reason}")
        yield whole, demanded
        return
    engine = whole.engine
    opening = functools.partial(source.open, base.Opening(engine))
    with contextlib.closing(source):
        facts = retry.patiently(opening, request.connect_patience, cancel, engine.retried)
        facts = dataclasses.replace(facts, obstacle=facts.obstacle or obstacle)
        yield base.Image(source, facts, engine), demanded


def listed(whole: base.Image) -> Mapping[str, object]:
    """Return the disks of a source that holds several, for ``inspect``."""
    disks = [
        {"index": number, "file": disk.file, "names": disk.names, "capacity": disk.size}
        for number, disk in enumerate(whole.source.disks, 1)
    ]
    return {"disks": disks} if disks else {}


def expected(demanded: Demanded) -> checksum.Checksum | None:
    """Return the checksum of the whole package, None without one."""
    return None if demanded.checksum is None else checksum.parse(demanded.checksum)


def _disk(
    whole: base.Image, request: Request, demanded: Demanded, cancel: cancelling.Cancel
) -> base.Source | None:
    """Return the disk in ``whole``, None if it is not a package."""
    head = whole.facts.head
    if not is_tar(whole.facts, request):
        return None
    # Imported when used: few sources are packages (start-up time).
    from cdi_worker.formats.ova import package

    if package.is_ova(head):
        from cdi_worker.sources.packages import ova

        return ova.OvaSource(whole, request.disk, expected(demanded), cancel)
    from cdi_worker.sources.packages import oci

    if oci.is_archive(head):
        return oci.PackedSource(whole, request.disk, expected(demanded), cancel)
    return None


def is_tar(facts: base.Facts, request: Request) -> bool:
    """Return whether the bytes are a tar archive, and not asked for as one."""
    if facts.blank or facts.format is not None or request.is_archive:
        return False
    return detect.detect(facts.head) == "tar"


def not_a_disk(request: Request, survey: Survey) -> errors.Unsupported:
    """Return the error for a tar archive that is not a package; at a terminal it unpacks the largest file."""
    # Imported when used, like the packages above.
    import shlex

    from cdi_worker.formats.tar import walk

    files = list(walk.files(survey.head))
    endpoint = request.location.endpoint
    name = endpoint if request.source == "local" else base.file_name(endpoint)
    # Behind a disk the descriptor is not among the first bytes.
    if any(each.lower().endswith((".ovf", ".ova")) for each in (name, *(each.name for each in files))):
        reason = (
            "an OVA is read uncompressed; decompress it first"
            if survey.compressions
            else "in an OVA the OVF descriptor is the first file; pack the archive again"
        )
        return errors.Unsupported(reason=reason)
    largest = max(files, key=lambda each: each.size, default=None)
    # A name may look like an option.
    unpack = ["tar", "-xOf", name or "ARCHIVE", "--", largest.name if largest else "DISK"]
    write = ["cdi-worker", "import", "-", request.target or "disk.img"]
    shown = masking.quoted(f"{shlex.join(unpack)} | {shlex.join(write)}", 1000)
    return errors.Unsupported(
        reason="a tar archive is not a disk; unpack the disk, or import all files (content type archive)",
        remedy=errors.Remedy([(f"for example {shown}", "command")]),
    )
