"""The disk of a chain of qcow2 files: each cluster comes from the newest file that contains it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cdi_worker.formats import views
from cdi_worker.formats.qcow2 import chain, layers
from cdi_worker.images.disks import base, raw, tables


class ChainDisk(tables.MappedDisk):
    """The disk of a chain of qcow2 ``files``, which ``qcow2.chain.check`` accepted; ``ranges`` opens each.

    ``shown`` is called at the end with the bytes of the disk that come from each file.
    """

    def __init__(
        self,
        ranges: Sequence[raw.OpenRanges],
        files: Sequence[chain.ChainFile],
        shown: Callable[[list[int]], object],
        *,
        covers_all: bool = True,
        direct: bool = False,
    ) -> None:
        size = files[-1].virtual_size
        super().__init__(ranges, self._open, size, covers_all=covers_all, direct=direct)
        self._chain = files
        self._shown = shown
        self._opened: layers.ChainTables | None = None

    def deliver(self, sink: base.Sink, missing: base.Missing, meter: base.DeliveryMeter) -> int:
        size = super().deliver(sink, missing, meter)
        if self._opened is not None:
            self._shown(self._opened.shown)
        return size

    def _open(self, reads: Sequence[views.Read]) -> tables.DiskTables:
        self._opened = layers.ChainTables(self._chain, reads, is_base=self.covers_all)
        return self._opened
