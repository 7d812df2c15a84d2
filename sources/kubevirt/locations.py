"""The location of a volume that KubeVirt exports, or of a disk in a backup."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import posixpath
import urllib.parse
from collections.abc import Iterator
from typing import Final

from cdi_worker.sources import fields, staged

#: The header, and query parameter, with the token of an export (its documentation, and ``tokenChecker`` of
#: virt-exportserver).
TOKEN: Final = "x-kubevirt-export-token"  # noqa: S105  (the name of a header)


class Form(enum.StrEnum):
    """What is at a URL. KubeVirt's controller derives the ends of the paths from the format.

    kubevirt, pkg/storage/export/export: ``pvc-source.go`` and ``backup-source.go``.
    """

    RAW = "raw"
    GZIP = "gzip"
    ARCHIVE = "tar.gz"
    BACKUP = "backup"


#: The ends of the paths. A folder of files (``/dir``) is not a disk.
ENDS: Final = {
    "/disk.img": Form.RAW,
    "/disk.img.gz": Form.GZIP,
    "/disk.tar.gz": Form.ARCHIVE,
    "/map": Form.BACKUP,
    "/data": Form.BACKUP,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class KubeVirt(staged.Staged):
    """A URL in the status of a VirtualMachineExport, and the export's token.

    The token may also be in ``token_file``, which is read again when the token is refused, in the query of
    the URL, or in an extra header. Checkpoints: the names in the status of a VirtualMachineBackup.
    """

    token: str = fields.field(
        env="IMPORTER_EXPORT_TOKEN",
        ambient=True,
        help="Token of the export.",
        secret=True,
        parse=fields.token,
    )
    token_file: str = fields.field(
        option="--export-token-file",
        help="File with the token of a KubeVirt export; without it, IMPORTER_EXPORT_TOKEN is used.",
        mount="/export-token/token",
        file=True,
        selects=False,
    )

    def __post_init__(self) -> None:
        url = self.endpoint
        if url.startswith("kubevirt:"):
            url = "https:" + url.removeprefix("kubevirt:")
        with contextlib.suppress(ValueError):
            parts = urllib.parse.urlsplit(url)
            pairs = urllib.parse.parse_qsl(parts.query, keep_blank_values=True)
            if tokens := [value for name, value in pairs if name == TOKEN]:
                query = urllib.parse.urlencode([pair for pair in pairs if pair[0] != TOKEN])
                url = urllib.parse.urlunsplit(parts._replace(query=query))
                object.__setattr__(self, "token", self.token or tokens[0])
        object.__setattr__(self, "endpoint", url)

    @property
    def form(self) -> Form | None:
        """What is at the URL; None if KubeVirt has no such path."""
        path = _path(self.endpoint)
        return next((form for end, form in ENDS.items() if path.endswith(end)), None)

    def names(self, checkpoint: str) -> frozenset[str]:
        """Return the name of a checkpoint on a target, with the disk: all disks of a machine share it."""
        disk = posixpath.basename(posixpath.dirname(_path(self.endpoint)))
        return frozenset({f"{checkpoint} of {disk}" if checkpoint else ""})

    def beside(self, name: str) -> str:
        """Return the URL of the endpoint ``name`` of the same disk in a backup: ``map`` or ``data``."""
        parts = urllib.parse.urlsplit(self.endpoint)
        return urllib.parse.urlunsplit(parts._replace(path=f"{parts.path.rpartition('/')[0]}/{name}"))

    def faults(self) -> Iterator[str]:
        yield from staged.Staged.faults(self)
        if not self.endpoint:
            return
        if not self.endpoint.startswith("https://"):
            yield "the URL of a KubeVirt export begins with kubevirt:// or https://"
        elif self.form is None:
            yield f"the path of a KubeVirt export ends in one of {', '.join(ENDS)}; this one does not"
        elif self.previous and self.form is not Form.BACKUP:
            yield "a previous checkpoint needs the URL of a backup (…/map or …/data), which knows the changes"
        given = {name.lower() for name, _ in self.access.headers}
        if not (self.token or self.token_file or TOKEN in given):
            text = "the token of the export is missing ({})"
            yield fields.Fault(text, "IMPORTER_EXPORT_TOKEN", "IMPORTER_EXPORT_TOKEN, --export-token-file")


def _path(url: str) -> str:
    try:
        return urllib.parse.urlsplit(url).path
    except ValueError:
        return ""
