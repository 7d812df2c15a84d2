"""VDI, VHD and VHDX images for hypothesis, made by QEMU's own tools from a description."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from hypothesis import strategies

from cdi_worker.formats import views
from cdi_worker.formats.vhd import check as vhd
from cdi_worker.images.tools import qemu_img
from tests.support import processes, qcow2_images, vhd_images, vhdx_images

MiB = 1 << 20
#: Entries of a table that are changed: a damaged count would make it as long as the file.
_ENTRIES = 256

#: By qemu-img's name of the format: the options of the images.
OPTIONS = {
    "vdi": ("static=off", "static=on"),
    "vpc": ("subformat=dynamic", "subformat=dynamic,force_size=on"),
    "vhdx": (
        "block_size=1M",
        "block_size=2M,log_size=2M",
        "block_size=8M,block_state_zero=off",
        "block_size=1M,subformat=fixed",
    ),
}


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make an image: ``steps`` are qemu-io commands."""

    form: str
    size: int
    options: str
    steps: tuple[str, ...]


def make(recipe: Recipe, path: Path) -> None:
    """Write the image to ``path``. A step that the format does not know (discard) is skipped."""
    noise = path.with_name("noise")
    if not noise.exists():
        noise.write_bytes(qcow2_images.noise())
    create = ("qemu-img", "create", "-q", "-f", recipe.form, "-o", recipe.options)
    processes.run(*create, path, str(recipe.size))
    commands = [word for step in recipe.steps for word in ("-c", step.format(folder=path.parent))]
    if commands:
        with contextlib.suppress(AssertionError):
            processes.run("qemu-io", "-f", recipe.form, *commands, path)


@strategies.composite
def recipes(draw: strategies.DrawFn) -> Recipe:
    """Describe an image of at most 40 MiB."""
    form = draw(strategies.sampled_from(sorted(OPTIONS)))
    size = 512 * draw(strategies.integers(1, (draw(strategies.sampled_from([1, 9, 40])) * MiB) // 512))
    steps = tuple(draw(strategies.lists(_step(size), max_size=8)))
    return Recipe(form, size, draw(strategies.sampled_from(OPTIONS[form])), steps)


@strategies.composite
def _step(draw: strategies.DrawFn, size: int) -> str:
    unit = draw(strategies.sampled_from([512, 64 << 10, MiB]))
    first = unit * draw(strategies.integers(0, (size - 1) // unit))
    length = min(size - first, unit * draw(strategies.integers(1, 8)))
    pattern = f"-P {draw(strategies.integers(0, 255))}"
    content = draw(
        strategies.sampled_from(["write -q -s {folder}/noise", f"write -q {pattern}", "write -q -z"])
    )
    if draw(strategies.integers(0, 7)) == 0:
        content = "discard -q"
    return f"{content} {first} {length}"


@dataclasses.dataclass(frozen=True)
class Form:
    """``words``: offsets and layout of header fields and table entries; ``sound``: corrects checksums."""

    words: Callable[[bytes], Iterator[tuple[int, str]]]
    sound: Callable[[bytes], bytes] = bytes


def _vdi_words(data: bytes) -> Iterator[tuple[int, str]]:
    fields = (68, 76, 340, 344, 360, 368, 372, 376, 380, 384)
    yield from ((at, "<I") for at in fields)
    (table,) = struct.unpack_from("<I", data, 340)
    (count,) = struct.unpack_from("<I", data, 384)
    yield from ((at, "<I") for at in range(table, min(len(data) - 3, table + 4 * min(count, _ENTRIES)), 4))


def _vpc_words(data: bytes) -> Iterator[tuple[int, str]]:
    fields = (20, 28, 48, 52, 56, 512 + 20, 512 + 28, 512 + 32)
    yield from ((at, ">I") for at in fields)
    (count,) = struct.unpack_from(">I", data, 512 + 28)
    yield from ((at, ">I") for at in range(1536, min(len(data) - 3, 1536 + 4 * min(count, _ENTRIES)), 4))


def _vhdx_words(data: bytes) -> Iterator[tuple[int, str]]:
    for header in vhdx_images.HEADERS:
        yield from ((header + at, layout) for at, layout in ((8, "<Q"), (64, "<I"), (68, "<I"), (72, "<Q")))
    yield from ((vhdx_images.REGIONS + at, "<I") for at in range(8, 80, 4))
    bat, metadata = vhdx_images.regions(data)
    yield from ((metadata + at, "<I") for at in range(8, 32 + 5 * 32, 4))
    yield from ((metadata + (64 << 10) + at, "<I") for at in range(0, 40, 4))
    yield from ((at, "<Q") for at in range(bat, bat + 64 * 8, 8))


FORMS = {
    # The signature is checked by detection, in a VHD the readers check it, too.
    "vdi": Form(_vdi_words, lambda data: data[:64] + b"\x7f\x10\xda\xbe" + data[68:]),
    "vpc": Form(_vpc_words, vhd_images.with_sums),
    "vhdx": Form(_vhdx_words, lambda data: vhdx_images.with_sums(b"vhdxfile" + data[8:])),
}


def damaged(data: bytes, dice: random.Random, form: str) -> bytes:
    """Return an image with a few words changed: a bit, to another word, by a little, or to any value."""
    if len(data) < 256 << 10:
        return data
    places = [place for place in FORMS[form].words(data) if place[0] + 8 <= len(data)]
    return FORMS[form].sound(qcow2_images.changed_words(data, places, dice))


def check(found: set[bytes], data: bytes, form: str) -> None:
    """Check that qemu-img reads the same disk as ``found``, the set of disks that our readers returned.

    Of a VHD with the size that our check selects. QEMU refuses it for entries beyond the disk, too.
    """
    if not found:
        return
    if form != "vpc":
        try:
            qcow2_images.check(found, data, form)
        except AssertionError as err:
            # Sectors of 4096 bytes in a VHDX.
            if "Operation not supported" not in str(err):
                raise
        return
    with tempfile.TemporaryDirectory() as folder:
        path, raw = Path(folder, "image"), Path(folder, "raw")
        path.write_bytes(data)
        node = qemu_img.exported("", "vhd", geometry=vhd.check(views.View(data)).geometry)
        node["file"] = {"driver": "file", "filename": str(path)}
        try:
            processes.run("qemu-img", "convert", "-O", "raw", f"json:{json.dumps(node)}", raw)
        except AssertionError as err:
            if "has been truncated" in str(err) or "Invalid argument" in str(err):
                return
            raise
        assert found == {raw.read_bytes()}
