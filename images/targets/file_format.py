"""The format of a disk's file: raw, or qcow2 with options."""

from __future__ import annotations

from typing import Final, NamedTuple

from cdi_worker import errors, units

#: The options of qcow2 and their values; empty: a size.
OPTIONS: Final[dict[str, tuple[str, ...]]] = {
    "cluster_size": (),
    "preallocation": ("off", "metadata", "falloc", "full"),
}


class Qcow2Format(NamedTuple):
    """A qcow2 file. ``options``: those of ``qemu-img create``, as given. ``cluster_size`` in bytes."""

    options: tuple[str, ...] = ()
    cluster_size: int = 64 << 10

    @property
    def preallocation(self) -> str:
        """How clusters are allocated when the file is created; ``off``: they are not."""
        return dict(each.split("=", 1) for each in self.options).get("preallocation", "off")

    @property
    def most(self) -> int:
        """Bytes of the largest disk."""
        # Entries of the first table, each for a table of one cluster (QCOW_MAX_L1_SIZE in block/qcow2.h).
        entries = (32 << 20) // 8
        return entries * self.cluster_size * (self.cluster_size // 8)


def parse(text: str) -> Qcow2Format | None:
    """Parse ``FORMAT[,OPTION=VALUE…]``; return None for a raw disk. Raises ``errors.RequestError``."""
    name, *options = text.split(",")
    if name in {"", "raw"}:
        if options:
            raise errors.RequestError(f"a raw disk has no options: --format {text}")
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
            try:
                # As qemu-img writes sizes: 64k, 2M.
                size = units.parse_quantity(value.upper().replace("K", "Ki").replace("M", "Mi"))
            except ValueError:
                size = 0
            if not 512 <= size <= 2 << 20 or size & (size - 1):
                raise errors.RequestError(f"cluster_size={value}: not a power of two from 512 to 2M")
    return Qcow2Format(tuple(options), size)
