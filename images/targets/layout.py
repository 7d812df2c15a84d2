"""The format of a disk's file: raw, or qcow2 with options."""

from __future__ import annotations

import dataclasses
from typing import Final

from cdi_worker import errors, units

#: The options of qcow2 and their values; empty: a size.
OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "cluster_size": (),
    "compression_type": ("zlib", "zstd"),
    "preallocation": ("off", "metadata", "falloc", "full"),
}
_SMALLEST, _LARGEST = 512, 2 << 20
#: Entries of the first table, each for a table of one cluster (QCOW_MAX_L1_SIZE in block/qcow2.h).
_MOST_ENTRIES: Final = (32 << 20) // 8
#: A cluster is compressed in one request, whose unit may be at most so long (NBD's largest block).
_LARGEST_COMPRESSED: Final = 64 << 10


@dataclasses.dataclass(frozen=True, slots=True)
class Qcow2:
    """A qcow2 file.

    ``options``: those of ``qemu-img create``, as given. ``cluster_size`` in bytes. ``compress``: write
    compressed clusters. ``backing``: the path of the file that it is an overlay of; empty: none.
    """

    options: tuple[str, ...] = ()
    cluster_size: int = 64 << 10
    compress: bool = False
    backing: str = ""

    @property
    def preallocation(self) -> str:
        """How clusters are allocated when the file is created; ``off``: they are not."""
        return dict(each.split("=", 1) for each in self.options).get("preallocation", "off")

    @property
    def is_preallocated(self) -> bool:
        """Whether clusters are allocated when the file is created."""
        return self.preallocation != "off"

    @property
    def most(self) -> int:
        """Bytes of the largest disk."""
        return _MOST_ENTRIES * self.cluster_size * (self.cluster_size // 8)


def parse(text: str, *, compress: bool = False, backing: str = "") -> Qcow2 | None:
    """Return the file of ``FORMAT[,OPTION=VALUE…]``, None for a raw disk. Raises ``errors.RequestError``."""
    name, *options = text.split(",")
    if name in {"", "raw"}:
        if options:
            raise errors.RequestError(f"a raw disk has no options: --format {text}")
        if compress or backing:
            raise errors.RequestError("--compress and --backing need --format qcow2")
        return None
    if name != "qcow2":
        raise errors.RequestError(f"unknown format {name!r}; {errors.supported(name, ('raw', 'qcow2'))}")
    size = 64 << 10
    for option in options:
        key, _, value = option.partition("=")
        values = OPTIONS.get(key)
        if values is None:
            raise errors.RequestError(f"qcow2 has no option {key!r} here; {errors.supported(key, OPTIONS)}")
        if values and value not in values:
            raise errors.RequestError(f"{key}={value}: {errors.supported(value, values)}")
        if key == "cluster_size":
            size = _cluster_size(value)
    found = Qcow2(tuple(options), size, compress, backing)
    _check(found)
    return found


def _cluster_size(value: str) -> int:
    # As qemu-img writes sizes: 64k, 2M.
    try:
        size = units.parse_quantity(value.upper().replace("K", "Ki").replace("M", "Mi"))
    except errors.RequestError:
        size = 0
    if not _SMALLEST <= size <= _LARGEST or size & (size - 1):
        raise errors.RequestError(f"cluster_size={value}: not a power of two from 512 to 2M")
    return size


def _check(found: Qcow2) -> None:
    if found.is_preallocated and (found.compress or found.backing):
        raise errors.RequestError("preallocation excludes --compress and --backing: their clusters are new")
    if found.compress and found.cluster_size > _LARGEST_COMPRESSED:
        raise errors.RequestError("--compress needs a cluster_size of at most 64k")
