"""A volume in a VirtualMachineExport: its raw disk, the same in gzip, or an archive of its files."""

from __future__ import annotations

from collections.abc import Mapping

from cdi_worker import errors
from cdi_worker.formats.compressed import decompress
from cdi_worker.images.engine import ahead
from cdi_worker.sources import base
from cdi_worker.sources.kubevirt import locations, server
from cdi_worker.sources.web import http


class ArchiveSource(http.HttpSource):
    """The files of a volume, in a tar archive with gzip. Each request makes it anew, without a length."""

    def __init__(self, location: locations.KubeVirt, cancel: base.Cancel) -> None:
        self._location = location
        self._cancel = cancel
        resource = server.Resource(location.endpoint, location.access, server.Token(location), cancel=cancel)
        super().__init__(resource)

    def describe(self) -> Mapping[str, object]:
        return {"form": str(self._location.form)}


class RawSource(ArchiveSource):
    """A raw disk, by ranges of a file without ETag and date (``fileHandler`` of virt-exportserver).

    KubeVirt's disks are raw (VEP 25, "Restore"), and a guest can write any header to its disk. Only a name
    that the user gives to the disk's state is an identity: another export may have the same URL.
    """

    format = "raw"

    def open(self, opening: base.Opening) -> None:
        super().open(opening)
        if self.identity is None and self._location.current:
            self.identity = f"checkpoint {self._location.current} size {self.size}"
            self.weak = True


class GzipSource(ArchiveSource):
    """A raw disk that the server compresses while it sends it (``gzipHandler``): one ordered stream."""

    format = "raw"

    def open(self, opening: base.Opening) -> None:
        super().open(opening)
        if self.head and not self.head.startswith(b"\x1f\x8b\x08"):
            raise errors.Corrupt(format="gz", reason=f"{self.name} does not begin like gzip")
        # The bytes as served have no relation to the size of the disk.
        self._served, self.size = self.size, None

    @property
    def transferred(self) -> int | None:
        return self._served

    def ranges(self) -> base.RandomReader | None:
        return None

    def unwrapped(self, served: base.Reader) -> base.Reader:
        return decompress.open("gz", ahead.Reader(served, self._cancel))
