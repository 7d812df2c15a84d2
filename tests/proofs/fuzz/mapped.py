"""Fuzz the readers of disk images: any file is read as qemu-img reads it, or is a clean error.

    make fuzz TARGET=qcow2 SECONDS=600

The corpus is kept in build/fuzz; an empty one is first filled with small images of many kinds. A disk that
both readers accept must be the same, and the same as QEMU's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import atheris

with atheris.instrument_imports(include=["cdi_worker.formats"]):
    from cdi_worker import errors
    from cdi_worker.formats import safety
    from cdi_worker.formats.vmdk import header
    from cdi_worker.images import directio
    from tests.support import block_images, placing, qcow2_images, vmdk_images, vmdk_stream

    for _name in ("vdi", "vhd", "vhdx"):
        safety.checks(_name)

LARGEST = 4 << 20
#: Bytes of an input.
LONGEST = 400_000
#: Bytes of an image that is packed: a VHDX has its tables at 2 and 3 MiB.
LONGEST_IMAGE = 10 << 20
PAGE = 4096
#: Of mallopt(3), with bytes: memory of an image is reused; mapping it anew took three quarters of a run.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = (-1, 1 << 30), (-3, 64 << 20)
QCOW2 = [
    "cluster_size=512,compat=0.10",
    "cluster_size=512,compression_type=zlib,refcount_bits=1",
    "cluster_size=512,compression_type=zstd,lazy_refcounts=on",
    "cluster_size=512,preallocation=metadata",
    "cluster_size=16k,extended_l2=on",
]
QCOW2_STEPS = [
    "qemu-io write -q -s {folder}/noise 0 3k",
    "qemu-io write -q -c -s {folder}/noise 8k 2k",
    "qemu-io write -q -z 1k 1k",
    "qemu-io write -q -z -u 8k 512",
    "qemu-img snapshot -q -c s {path}",
    "qemu-io write -q -P 3 2k 9k",
]
VMDK_STEPS = [
    "write -q -s {folder}/noise 10k 3k",
    "write -q -P 7 256k 1k",
    "write -q -z 256k 64k",
    "write -q -s {folder}/noise 190k 20k",
]


BLOCK_STEPS = [
    "write -q -s {folder}/noise 1536k 3k",
    "write -q -P 7 2M 1k",
    "write -q -z 0 64k",
    "write -q -s {folder}/noise 190k 20k",
]


class Form(NamedTuple):
    """``seeds``: writes images to a path, one after the other; ``sound``: repairs what only QEMU checks.

    ``damaged``: changes words of header and tables. ``unpacked``, ``packed``: an input as an image, and back.
    """

    seeds: Callable[[Path], Iterator[None]]
    damaged: Callable[[bytes, random.Random], bytes]
    sound: Callable[[bytes], bytes] = bytes
    check: Callable[[set[bytes], bytes, str], None] = qcow2_images.check
    unpacked: Callable[[bytes], bytes] = bytes
    packed: Callable[[bytes], bytes] = bytes


def _qcow2(path: Path) -> Iterator[None]:
    for options in QCOW2:
        for length in range(len(QCOW2_STEPS) + 1):
            path.unlink(missing_ok=True)
            yield qcow2_images.make(qcow2_images.Recipe(20_480, options, tuple(QCOW2_STEPS[:length])), path)


def _vmdk(path: Path) -> Iterator[None]:
    for form in vmdk_images.FORMS:
        for length in range(len(VMDK_STEPS) + 1):
            path.unlink(missing_ok=True)
            steps = tuple(VMDK_STEPS[:length])
            yield vmdk_images.make(vmdk_images.Recipe(330 << 10, "zeroed_grain=on", steps, form), path)


def _sound(data: bytes) -> bytes:
    """Give an image a descriptor with a CID for QEMU, and no redundant directory."""
    if len(data) < header.DESCRIPTOR.stop:
        return data
    changed = bytearray(data)
    changed[8] &= ~header.REDUNDANT
    changed[header.DESCRIPTOR] = vmdk_stream.descriptor(660)
    return bytes(changed)


def _blocks(form: str) -> Form:
    def seeds(path: Path) -> Iterator[None]:
        # With larger blocks a run takes seconds.
        for options in block_images.OPTIONS[form][:1]:
            for length in range(len(BLOCK_STEPS) + 1):
                path.unlink(missing_ok=True)
                steps = tuple(BLOCK_STEPS[:length])
                yield block_images.make(block_images.Recipe(form, (3 << 20) + 512, options, steps), path)

    damaged = functools.partial(block_images.damaged, form=form)
    return Form(seeds, damaged, block_images.FORMS[form].sound, block_images.check, unpacked, packed)


def packed(image: bytes) -> bytes:
    """Return the size of an image and its pages that are not zero, each behind its number.

    The fuzzer copies each input several times.
    """
    pages = [
        (at // PAGE).to_bytes(4, "little") + image[at : at + PAGE].ljust(PAGE, b"\0")
        for start, end, is_zero in directio.extents(memoryview(image), PAGE)
        for at in range(start, 0 if is_zero else end, PAGE)
    ]
    return len(image).to_bytes(4, "little") + b"".join(pages)


def unpacked(data: bytes) -> bytes:
    """Return the image of any input."""
    size = min(int.from_bytes(data[:4], "little"), LONGEST_IMAGE)
    image = bytearray(size)
    for at in range(4, len(data), 4 + PAGE):
        start = int.from_bytes(data[at : at + 4], "little") % (size // PAGE + 1) * PAGE
        page = data[at + 4 : at + 4 + PAGE]
        image[start : start + len(page)] = page
    del image[size:]
    return bytes(image)


#: By qemu-img's name of the format.
FORMS = {
    "qcow2": Form(_qcow2, qcow2_images.damaged),
    "vmdk": Form(_vmdk, vmdk_images.damaged, _sound),
    **{form: _blocks(form) for form in block_images.OPTIONS},
}


def one_input(data: bytes, form: str) -> None:
    """Read one file by both readers and by QEMU."""
    found = set()
    try:
        if placing.follower(data, form).virtual_size > LARGEST:
            return
    except errors.ImageError:
        return
    with contextlib.suppress(errors.ImageError):
        found.add(placing.read_disk(data, form))
    by_ranges = bool(found)
    with contextlib.suppress(errors.ImageError, errors.ScratchRequired):
        found.add(placing.passed(data, 2 << 20, recent=2, form=form))
    if found and not by_ranges and form == "vmdk":
        # A stream is read to the end of the image, behind its last header, and not to its own.
        data = data[: data.rfind(b"KDMV") + 2 * header.SECTOR]
    FORMS[form].check(found, data, form)


def mutated(data: bytes, size: int, seed: int, form: Form) -> bytes:
    """Change words of the header and the tables, and sometimes any byte."""
    dice = random.Random(seed)
    if len(data) < 1024 or dice.random() < 0.2:
        image = form.unpacked(atheris.Mutate(data, size))
    else:
        image = form.damaged(form.unpacked(bytes(data)), dice)
    return form.packed(form.sound(image))[:size]


def main() -> None:
    name, folder = sys.argv[1], Path(sys.argv[2])
    form = FORMS[name]
    folder.mkdir(parents=True, exist_ok=True)
    if not any(folder.iterdir()):
        with tempfile.TemporaryDirectory() as made:
            path = Path(made, "image")
            for number, _ in enumerate(form.seeds(path)):
                (folder / f"seed-{number}").write_bytes(form.packed(form.sound(path.read_bytes())))
    for setting in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        ctypes.CDLL(None).mallopt(*setting)
    options = [sys.argv[0], *sys.argv[2:], f"-max_len={LONGEST}", "-timeout=60"]
    atheris.Setup(
        options,
        lambda data: one_input(form.unpacked(data), name),
        custom_mutator=lambda data, size, seed: mutated(data, size, seed, form),
    )
    atheris.Fuzz()


if __name__ == "__main__":
    main()
