"""VMDK images for hypothesis: QEMU's, from a description, and streams like VMware's."""

from __future__ import annotations

import dataclasses
import random
import struct
from pathlib import Path

from hypothesis import strategies

from tests.support import processes, qcow2_images, vmdk_stream

KiB = 1 << 10
MiB = 1 << 20
GRAIN = vmdk_stream.GRAIN

_AT_END = (1 << 64) - 1


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make an image: ``steps`` are qemu-io commands for a monolithicSparse image.

    A stream is made from the resulting disk.
    """

    size: int
    options: str
    steps: tuple[str, ...]
    form: str


#: Who writes the image: qemu-io, ``qemu-img convert``, or ``vmdk_stream``, as VMware's programs do.
FORMS = ("monolithicSparse", "streamOptimized", "streamed")


def make(recipe: Recipe, path: Path) -> None:
    """Write the image to ``path``."""
    noise = path.with_name("noise")
    if not noise.exists():
        noise.write_bytes(qcow2_images.noise())
    grown = path if recipe.form == "monolithicSparse" else path.with_name("grown")
    options = f"{recipe.options},subformat=monolithicSparse"
    processes.run("qemu-img", "create", "-q", "-f", "vmdk", "-o", options, grown, str(recipe.size))
    commands = [word for step in recipe.steps for word in ("-c", step.format(folder=path.parent))]
    if commands:
        processes.run("qemu-io", "-f", "vmdk", *commands, grown)
    if recipe.form == "streamOptimized":
        options = f"{recipe.options},subformat=streamOptimized"
        processes.run("qemu-img", "convert", "-f", "vmdk", "-O", "vmdk", "-o", options, grown, path)
    elif recipe.form == "streamed":
        raw = path.with_name("raw")
        processes.run("qemu-img", "convert", "-f", "vmdk", "-O", "raw", grown, raw)
        path.write_bytes(vmdk_stream.streamed(raw.read_bytes()))


@strategies.composite
def recipes(draw: strategies.DrawFn) -> Recipe:
    """Describe an image with a few grain tables, of any kind we can read."""
    size = 512 * draw(strategies.integers(1, (draw(strategies.sampled_from([1, 40, 80])) * MiB) // 512))
    options = [f"zeroed_grain={draw(strategies.sampled_from(['on', 'off']))}"]
    if draw(strategies.booleans()):
        options.append("compat6=on")
    steps = tuple(draw(strategies.lists(_step(size), max_size=8)))
    return Recipe(size, ",".join(options), steps, draw(strategies.sampled_from(FORMS)))


@strategies.composite
def _step(draw: strategies.DrawFn, size: int) -> str:
    unit = draw(strategies.sampled_from([512, GRAIN]))
    first = unit * draw(strategies.integers(0, (size - 1) // unit))
    length = min(size - first, unit * draw(strategies.integers(1, 40)))
    content = draw(
        strategies.sampled_from(["-s {folder}/noise", f"-P {draw(strategies.integers(0, 255))}", "-z"])
    )
    return f"write -q {content} {first} {length}"


def words(data: bytes) -> list[int]:
    """Return the offsets of the header's fields, of the tables' entries and of the grain markers.

    The descriptor (only QEMU reads it, for numbers without meaning) and the redundant directory are excluded.
    """
    capacity, grain, entries, directory = struct.unpack_from("<12xQQ16xI8xQ", data)
    found = [*range(0, 28, 4), 44, *range(56, 80, 4)]
    if directory == _AT_END:
        found += range(len(data) - 1536, len(data) - 512, 4)
        (directory,) = struct.unpack_from("<Q", data, len(data) - 1024 + 56)
    start, end = directory * 512, len(data) - 3
    tables = range(start, min(end, start + 4 * -(-capacity // max(1, grain * entries))), 4)
    found += tables
    for at in tables:
        (table,) = struct.unpack_from("<I", data, at)
        found += range(table * 512, min(end, table * 512 + 4 * min(entries, 512)), 4) if table else ()
    for at in range(128 * 512, len(data) - 512, 512):
        if data[at + 12 : at + 14] == b"\x78\x01":
            found += [at, at + 8]
    return [at for at in found if 0 <= at <= len(data) - 4]


def damaged(data: bytes, dice: random.Random, form: str = "vmdk") -> bytes:
    """Return an image with a few words of its header and tables changed."""
    return qcow2_images.changed_words(data, [(at, "<I") for at in words(data)], dice)


check = qcow2_images.check
