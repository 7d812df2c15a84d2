"""A chain of qcow2 files: each holds what changed since the one before it, the newest wins.

Names of backing files come from the images. They are compared with the names of the other files, and nothing
is opened by them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

from cdi_worker import errors
from cdi_worker.formats import facts
from cdi_worker.formats.qcow2 import check as qcow2_check
from cdi_worker.formats.qcow2 import layout as qcow2_layout

#: The most files of a chain.
MOST: Final = 128


@dataclasses.dataclass(frozen=True, slots=True)
class File:
    """One file of a chain, and the facts that its check found.

    ``name``: its address, without secrets, and ``base_name`` the last part of it. ``size``: its bytes.
    """

    name: str
    base_name: str
    size: int
    facts: facts.Facts

    @property
    def virtual_size(self) -> int:
        return self.facts.virtual_size or 0


def check(files: Sequence[File], previous: str | None = None) -> None:
    """Raise ``errors.Refused`` if the files are not one chain in this order, oldest first.

    ``previous``: the checkpoint that the disk on the target holds, to which the first file is applied; None:
    the first file is a complete disk.
    """
    for file in files:
        _check_form(file, is_base=previous is None and file is files[0])
    _check_names(files, previous)
    for below, file in pairwise(files):
        if file.facts.backing is None and file.virtual_size < below.virtual_size:
            reason = (
                f"{file.name} has {file.virtual_size} bytes, less than {below.name} before it with "
                f"{below.virtual_size}, and names no backing file; check the order"
            )
            raise _refused("chain_size", reason)
    clusters = sum(file.size >> _bits(file) for file in files)
    if len(files) > MOST or clusters > qcow2_layout.Allocation.LIMIT:
        most = f"at most {MOST} with {qcow2_layout.Allocation.LIMIT}"
        reason = f"{len(files)} files with {clusters} clusters; {most}"
        raise errors.Unsupported(reason=f"chain of {reason}; commit some of them: qemu-img commit")


def _bits(file: File) -> int:
    layout = file.facts.layout
    return layout.header.cluster_bits if isinstance(layout, qcow2_layout.Layout) else 63


def _check_form(file: File, *, is_base: bool) -> None:
    if file.facts.format != "qcow2" and not (is_base and file.facts.format in {"raw", "iso"}):
        what = "a layer must be qcow2" if not is_base else "the first file of a chain must be qcow2 or raw"
        raise errors.Unsupported(reason=f"{file.name}: {what}, this is {file.facts.format}")
    if is_base and file.facts.backing is not None:
        # Without the rest, which may be a URL with a password.
        name = qcow2_check.backing_base_name(file.facts.backing)
        reason = (
            f"{file.name}: needs its backing file {name!r}, which is missing; name that file "
            "as SOURCE and this one with --layer, or the checkpoint that the target holds with "
            "--previous-checkpoint"
        )
        raise _refused("backing_file", reason)
    if not is_base and file.facts.backing is None and file.facts.bitmaps:
        bitmaps = ", ".join(map(repr, file.facts.bitmaps))
        reason = (
            f"{file.name}: names no backing file and has the dirty bitmaps {bitmaps}: it is a complete disk, "
            "not what changed; name it as SOURCE, without the files before it"
        )
        raise _refused("backing_file", reason)


def _check_names(files: Sequence[File], previous: str | None) -> None:
    """Compare the name of each backing file with the file before it."""
    names = [file.base_name for file in files]
    below = previous
    for index, file in enumerate(files):
        if file.facts.backing is not None:
            name = qcow2_check.backing_base_name(file.facts.backing)
            if name != below and name in names[index + 1 :]:
                reason = (
                    f"{file.name}: its backing file {name!r} is given after it; give the oldest file first"
                )
                raise _refused("backing_file", reason)
            if name != below:
                reason = f"{file.name}: its backing file is {name!r}, but the file before it is {below!r}"
                raise _refused("backing_file", f"{reason}; name all files of the chain, the oldest first")
            if index:
                _check_backing_format(file, files[index - 1])
        below = file.base_name


def _check_backing_format(file: File, below: File) -> None:
    """Compare the format that a header gives its backing file with that of the file before it."""
    name, other = file.facts.backing_format, "raw" if below.facts.format == "iso" else below.facts.format
    if name and name != other:
        reason = f"{file.name}: its backing file is {name}, but {below.name} is {other}"
        raise _refused("backing_format", f"{reason}; check that it is the right file")


def _refused(rule: str, reason: str) -> errors.Refused:
    return errors.Refused(format="qcow2", rule=rule, reason=reason)
