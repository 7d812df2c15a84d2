"""Which of several disks is wanted."""

from __future__ import annotations

from collections.abc import Sequence

from cdi_worker import errors
from cdi_worker.formats import facts
from cdi_worker.sources import base


def choose(name: str, kind: str, disks: Sequence[base.Held], choice: str) -> tuple[int, errors.Error | None]:
    """Return the index of the disk ``choice`` (empty: the only one), and why none is chosen, if that is so.

    ``name``: of the source, ``kind``: what it is. If none is chosen, it is the first that can be examined.
    Raises ``errors.Unsupported`` if the chosen one cannot be imported.
    """
    named = [index for index, disk in enumerate(disks) if choice in disk.names[:1]]
    if len({disks[index].file for index in named}) == 1:
        # Two disks of an OVA may have the same file.
        named = named[:1]
    named = named or [
        index for index, disk in enumerate(disks) if not choice or choice in {*disk.names, str(index + 1)}
    ]
    if len(named) == 1:
        check(name, disks[named[0]])
        return named[0], None
    what = f"holds {len(named)} disks" if named else "has no disk"
    what += f" {choice!r}" if choice else ""
    listed = ", ".join(f"{number} {_shown(disk)}" for number, disk in enumerate(disks, 1))
    obstacle = facts.refuse(kind, "one disk", f"{name}: {what}: {listed}", ("choose one", "disk"))
    return next((index for index, disk in enumerate(disks) if not disk.obstacle), 0), obstacle


def check(name: str, *disks: base.Held) -> None:
    """Raise ``errors.Unsupported`` if one of ``disks`` of ``name`` cannot be imported."""
    for disk in disks:
        if disk.obstacle:
            raise errors.Unsupported(reason=f"{name}: disk {disk.names[0]!r} {disk.obstacle}")


def _shown(disk: base.Held) -> str:
    first, *others = disk.names
    more = ", ".join([*others, *([] if disk.size is None else [f"{disk.size} bytes"])])
    return f"{first} ({more})" if more else first
