"""A chain of qcow2 files: each holds what changed since the one before it, the newest wins.

The names of backing files in the images are only compared with those of the other files; none is opened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import facts
from cdi_worker.formats.qcow2 import check as qcow2_check
from cdi_worker.formats.qcow2.layout import Qcow2Allocation, Qcow2Layout

#: The most files of a chain.
MOST: Final = 128


@dataclasses.dataclass(frozen=True)
class ChainFile:
    """One file of a chain, with the result of its check.

    ``name``: its address, without secrets; ``base_name``: the last part of that. ``size``: in bytes.
    """

    name: str
    base_name: str
    size: int
    facts: facts.ImageFacts

    @property
    def virtual_size(self) -> int:
        return self.facts.virtual_size or 0


def check(files: Sequence[ChainFile], previous: str | None = None) -> None:
    """Raise ``errors.Refused`` if the files are not one chain in this order, oldest first.

    ``previous``: the checkpoint that the disk on the target holds, to which the first file is applied; None:
    the first file is a complete disk.
    """
    for file in files:
        is_base = previous is None and file is files[0]
        if file.facts.format != "qcow2" and not (is_base and file.facts.format in {"raw", "iso"}):
            form = "the first file of a chain must be qcow2 or raw" if is_base else "a layer must be qcow2"
            raise errors.Unsupported(reason=f"{file.name}: {form}, this is {file.facts.format}")
        if is_base and file.facts.backing is not None:
            # Only the base name: the rest may be a URL with a password.
            name = qcow2_check.backing_base_name(file.facts.backing)
            reason = f"{file.name}: needs its backing file {name!r}, which is missing"
            layers = "name that file as SOURCE and this one with --layer"
            stage = "name the checkpoint that the target holds with --previous-checkpoint"
            ways: list[errors.Way] = [(layers, "command"), (stage, "command"), ("flatten it", "flatten")]
            raise facts.refuse("qcow2", "backing_file", reason, *ways)
        if not is_base and file.facts.backing is None and file.facts.bitmaps:
            bitmaps = ", ".join(map(repr, file.facts.bitmaps))
            reason = (
                f"{file.name}: names no backing file and has the dirty bitmaps {bitmaps}: it is a complete "
                "disk, not what changed"
            )
            alone = "name it as SOURCE, without the files before it"
            raise facts.refuse("qcow2", "backing_file", reason, (alone, "command"))
    names = [file.base_name for file in files]
    expected = previous
    for index, file in enumerate(files):
        if file.facts.backing is not None:
            name = qcow2_check.backing_base_name(file.facts.backing)
            if name != expected and name in names[index + 1 :]:
                reason = f"{file.name}: its backing file {name!r} is given after it"
                raise facts.refuse("qcow2", "backing_file", f"{reason}; give the oldest file first")
            if name != expected:
                reason = f"{file.name}: its backing file is {name!r}, but the file before it is {expected!r}"
                reason += "; name all files of the chain, the oldest first"
                raise facts.refuse("qcow2", "backing_file", reason)
            older = files[index - 1]
            form = "raw" if older.facts.format == "iso" else older.facts.format
            if index and file.facts.backing_format not in {"", form}:
                reason = f"{file.name}: its backing file is {file.facts.backing_format}, but {older.name} is "
                reason += f"{form}; check that it is the right file"
                raise facts.refuse("qcow2", "backing_format", reason)
        expected = file.base_name
    for below, file in pairwise(files):
        if file.facts.backing is None and file.virtual_size < below.virtual_size:
            reason = f"{file.name} has {file.virtual_size} bytes, less than {below.name} before it with "
            reason += f"{below.virtual_size}, and names no backing file; check the order"
            raise facts.refuse("qcow2", "chain_size", reason)
    layouts = (file.facts.layout for file in files)
    bits = [layout.header.cluster_bits if isinstance(layout, Qcow2Layout) else 63 for layout in layouts]
    clusters = sum(file.size >> bit for file, bit in zip(files, bits, strict=True))
    if len(files) > MOST or clusters > Qcow2Allocation.LIMIT:
        reason = f"chain of {len(files)} files with {clusters} clusters; at most {MOST} with "
        reason += f"{Qcow2Allocation.LIMIT}; commit some of them with qemu-img"
        raise errors.Unsupported(reason=reason)
