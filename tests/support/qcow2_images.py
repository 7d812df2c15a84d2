"""qcow2 images for hypothesis, made by QEMU's own tools from a description."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hypothesis import settings, strategies

from tests.support import disks, processes

KiB = 1 << 10
MiB = 1 << 20
#: For tests that make images: each image takes about half a second.
SETTINGS = settings(max_examples=20, deadline=None, print_blob=True)


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How to make an image: ``steps`` are commands, each with the tool first (qemu-io or qemu-img)."""

    size: int
    options: str
    steps: tuple[str, ...]


def make(recipe: Recipe, path: Path) -> None:
    """Write the image to ``path``. Steps that QEMU refuses (a bitmap in version 2) are skipped."""
    noise_file = path.with_name("noise")
    if not noise_file.exists():
        noise_file.write_bytes(noise())
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-o", recipe.options, path, str(recipe.size))
    pending: list[str] = []
    for step in (*recipe.steps, "end"):
        tool, _, arguments = step.partition(" ")
        if tool == "qemu-io":
            pending += ["-c", arguments.format(folder=path.parent)]
            continue
        if pending:
            _try("qemu-io", "-f", "qcow2", *pending, path)
            pending = []
        if tool == "qemu-img":
            _try("qemu-img", *arguments.format(path=path).split())


def _try(*argv: str | Path) -> None:
    with contextlib.suppress(AssertionError):
        processes.run(*argv)


def is_sound(image: Path) -> bool:
    """Report whether QEMU finds no error in an image that it made.

    QEMU 7.2 assigns a host cluster to both compressed and other data when compressed clusters are
    overwritten, and may mark the image as corrupt when it notices.
    """
    version, features = struct.unpack_from(">4xI64xQ", image.read_bytes())
    if version == 3 and features & 2:
        return False
    try:
        processes.run("qemu-img", "check", "-q", "-f", "qcow2", image)
    except AssertionError as err:
        return "ended with 3" in str(err)  # leaks only
    return True


def check(found: set[bytes], data: bytes, form: str) -> None:
    """Check that qemu-img reads the same disk as ``found``, the set of disks that our readers returned.

    An error of qemu-img about snapshots or bitmaps is accepted: they are not part of the disk, and our
    readers do not read them.
    """
    if not found:
        return
    with tempfile.TemporaryDirectory() as folder:
        image, raw = Path(folder, "image"), Path(folder, "raw")
        image.write_bytes(data)
        try:
            disks.to_raw(image, form, raw)
        except AssertionError as err:
            if any(word in str(err).lower() for word in ("snapshot", "bitmap")):
                return
            raise
        assert found == {raw.read_bytes()}


def noise() -> bytes:
    """Return bytes that alternate between compressing well, badly and not at all."""
    dice = random.Random(11)
    blocks = [dice.randbytes(part) + bytes([part % 251]) * (1024 - part) for part in (7, 300, 900, 1024)]
    return b"".join(blocks * 61) + bytes(5000)


@strategies.composite
def recipes(draw: strategies.DrawFn) -> Recipe:
    """Describe an image of at most 32 MiB, with any options we can read."""
    cluster = draw(strategies.sampled_from([512, 1024, 4 * KiB, 16 * KiB, 64 * KiB, 2 * MiB]))
    size = 512 * draw(strategies.integers(1, min(32 * MiB, 4096 * cluster) // 512))
    return Recipe(
        size, draw(_options(cluster)), tuple(draw(strategies.lists(_step(cluster, size), max_size=12)))
    )


@strategies.composite
def _options(draw: strategies.DrawFn, cluster: int) -> str:
    options = [f"cluster_size={cluster}"]
    if draw(strategies.booleans()):
        return ",".join([*options, "compat=0.10"])
    options.append(f"refcount_bits={draw(strategies.sampled_from([1, 2, 8, 16, 64]))}")
    options.append(f"compression_type={draw(strategies.sampled_from(['zlib', 'zstd']))}")
    options.append(f"lazy_refcounts={draw(strategies.sampled_from(['on', 'off']))}")
    options.append(f"preallocation={draw(strategies.sampled_from(['off', 'off', 'metadata', 'full']))}")
    if cluster >= 16 * KiB and draw(strategies.booleans()):
        options.append("extended_l2=on")
    return ",".join(options)


@strategies.composite
def _step(draw: strategies.DrawFn, cluster: int, size: int) -> str:
    kind = draw(strategies.sampled_from(["data", "data", "packed", "packed", "zero", "discard", "other"]))
    if kind == "other":
        return draw(
            strategies.sampled_from(
                [
                    "qemu-img snapshot -q -c s {path}",
                    "qemu-img snapshot -q -a s {path}",
                    "qemu-img snapshot -q -d s {path}",
                    "qemu-img bitmap --add --enable {path} b",
                    "qemu-img resize -q -f qcow2 {path} +70k",
                    "qemu-img resize -q -f qcow2 --shrink {path} -70k",
                ]
            )
        )
    unit = cluster if kind == "packed" else draw(strategies.sampled_from([512, cluster]))
    count = -(-size // unit)
    first = draw(strategies.integers(0, count - 1))
    length = min(size, unit * draw(strategies.integers(first + 1, count))) - first * unit
    pattern = draw(strategies.integers(0, 255))
    if kind == "zero":
        return f"qemu-io write -q {draw(strategies.sampled_from(['-z', '-z -u']))} {first * unit} {length}"
    if kind == "discard":
        return f"qemu-io discard -q {first * unit} {length}"
    flag = "-c" if kind == "packed" else ""
    content = draw(strategies.sampled_from(["-s {folder}/noise", f"-P {pattern}"]))
    return f"qemu-io write -q {flag} {content} {first * unit} {length}"


def words(data: bytes) -> list[int]:
    """Return the offsets of the header's fields and of the tables' entries."""
    bits, l1_entries, l1 = struct.unpack_from(">20xI12xIQ", data)
    end = len(data) - 7
    found = [*range(0, 112, 4), *range(l1, min(end, l1 + 8 * l1_entries), 8)]
    for at in range(l1, min(end, l1 + 8 * l1_entries), 8):
        (entry,) = struct.unpack_from(">Q", data, at)
        table = entry & 0x00FFFFFFFFFFFE00
        if table:
            found += range(table, min(end, table + (1 << min(bits, 21))), 8)
    return found


def damaged(data: bytes, dice: random.Random, form: str = "qcow2") -> bytes:
    """Return an image with a few words of its header and tables changed."""
    return changed_words(data, [(at, ">Q") for at in words(data)], dice)


def changed_words(data: bytes, places: Sequence[tuple[int, str]], dice: random.Random) -> bytes:
    """Change a bit of a word, or make it another word, a near one, or any; each place has its layout."""
    changed = bytearray(data)
    for _ in range(dice.randint(1, 3) if places else 0):
        at, layout = dice.choice(places)
        (word,) = struct.unpack_from(layout, changed, at)
        bits = 8 * struct.calcsize(layout)
        kind = dice.choice(["bit", "other", "near", "any"])
        if kind == "bit":
            word ^= 1 << dice.randrange(bits)
        elif kind == "other":
            (word,) = struct.unpack_from(layout, changed, dice.choice(places)[0])
        elif kind == "near":
            word += dice.randint(-8, 8) << dice.randrange(22)
        else:
            word = dice.getrandbits(bits)
        struct.pack_into(layout, changed, at, word & (1 << bits) - 1)
    return bytes(changed)


def tables_last(data: bytes) -> bytes:
    """Move the L2 tables and then the L1 table to the end of the image."""
    bits, entries, l1 = struct.unpack_from(">20xI12xIQ", data)
    cluster = 1 << bits
    moved = bytearray(data.ljust(-(-len(data) // cluster) * cluster, b"\0"))
    table = list(struct.unpack_from(f">{entries}Q", data, l1))
    for index, entry in enumerate(table):
        offset = entry & 0x00FFFFFFFFFFFE00
        if offset:
            table[index] = len(moved)
            moved += moved[offset : offset + cluster]
            moved[offset : offset + cluster] = b"\xee" * cluster
    moved[l1 : l1 + 8 * entries] = b"\xee" * 8 * entries
    struct.pack_into(">Q", moved, 40, len(moved))
    return bytes(moved + struct.pack(f">{entries}Q", *table))
