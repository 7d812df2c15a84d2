"""Detect the format of a file by content, never by name.

Every signature is checked, not only up to the first match: a file with two signatures could be read as
one format here and as the other by the next tool, so it is refused.
"""

from __future__ import annotations

import functools
import re
import struct

from cdi_worker import errors

#: First bytes of a file that hold every signature, and the header tables that ``safety`` checks.
HEAD = 256 << 10

#: First bytes of a device while an import writes to it (``images.targets.claim``).
CLAIM = b"cdi-worker claim "

DISKS = frozenset({"raw", "iso", "qcow2", "vmdk", "vdi", "vhd", "vhdx"})
COMPRESSIONS = frozenset({"gz", "xz", "zst", "bz2"})

#: Known formats that are not disk images, and why each is refused. Unrecognised content is raw.
STRANGERS = {
    "empty": "the source is empty",
    "unfinished": "it holds no complete disk: an import to it is running or was interrupted; finish it first",
    "html": "the source is an HTML page; check whether the URL leads to a web page or a login",
    "xml": "the source is an XML document; check whether it is an error message of the server",
    "json": "the source is a JSON document; check whether it is an error message of the server",
    "lfs": "the source is a Git LFS pointer, not the file; run git lfs pull, or use the file's own URL",
    "qed": "the QED format is not supported",
    "parallels": "the Parallels format is not supported",
    "bochs": "the Bochs format is not supported",
    "zip": "zip archives are not supported; unpack the image first",
    "7z": "7z archives are not supported; unpack the image first",
    "rar": "RAR archives are not supported; unpack the image first",
    "lz4": "lz4 compression is not supported; use gz, xz, zst or bz2",
    "lzip": "lzip compression is not supported; use gz, xz, zst or bz2",
}

_ISO9660 = 32769
_LUKS = b"LUKS\xba\xbe"
_TAR_BLOCK = 512
_TAR_CHECKSUM = slice(148, 156)

#: (format, offset, bytes), as qemu, the kernel and the formats' own tools check them.
_MAGICS = (
    ("unfinished", 0, CLAIM),
    ("qcow2", 0, b"QFI\xfb"),
    ("vmdk", 0, b"KDMV"),
    ("vmdk", 0, b"COWD"),
    ("vmdk", 0, b"\xbe\xba\xfe\xca\x00\x00\x00\x00"),  # seSparse, of ESXi 6.5 and later
    ("vdi", 64, b"\x7f\x10\xda\xbe"),
    ("vhd", 0, b"conectix"),
    ("vhdx", 0, b"vhdxfile"),
    ("qed", 0, b"QED\x00"),
    ("parallels", 0, b"WithoutFreeSpace"),
    ("parallels", 0, b"WithouFreSpacExt"),
    ("bochs", 0, b"Bochs Virtual HD Image"),
    ("gz", 0, b"\x1f\x8b\x08"),
    ("xz", 0, b"\xfd7zXZ\x00"),
    ("zst", 0, b"\x28\xb5\x2f\xfd"),
    ("zip", 0, b"PK\x03\x04"),
    ("7z", 0, b"7z\xbc\xaf\x27\x1c"),
    ("rar", 0, b"Rar!\x1a\x07"),
    ("lz4", 0, b"\x04\x22\x4d\x18"),
    ("lzip", 0, b"LZIP\x01"),
    ("tar", 257, b"ustar"),
    ("iso", _ISO9660, b"CD001"),
    ("iso", _ISO9660, b"NSR02"),
    ("iso", _ISO9660, b"NSR03"),
    ("mbr", 510, b"\x55\xaa"),
)

_TEXT = rb"(?:\xef\xbb\xbf)?\s*+"
_LOOSE = re.IGNORECASE | re.DOTALL

#: Installer images are an ISO and a partitioned disk at once, so that they boot from a USB stick.
_HYBRIDS = ({"iso", "mbr"}, {"mbr"})


@functools.cache
def _patterns() -> tuple[tuple[str, re.Pattern[bytes]], ...]:
    """Return the signatures without fixed bytes; compiled when used, because every start loads this module.

    qemu accepts a text as vmdk descriptor when its first line that is neither empty nor a comment gives the
    version. Possessive quantifiers: no backtracking on hostile text.
    """
    return (
        ("vmdk", re.compile(rb"# Disk DescriptorFile|(?:#[^\n]*+\n|[ \t\r]*+\n)*+version=[123]\r?\n")),
        ("bz2", re.compile(rb"BZh[1-9](?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)")),
        ("zst", re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")),  # a skippable frame first
        ("lfs", re.compile(rb"version https://(?:git-lfs|hawser)\.github\.com/spec/v1\n")),
        (
            "html",
            re.compile(_TEXT + rb"(?:(?><!--.*?-->)\s*+)*+<(?:!doctype\s+html|html|head|body)\b", _LOOSE),
        ),
        ("xml", re.compile(_TEXT + rb"<(?:\?xml\s|Error>|ListBucketResult\b)")),
        ("json", re.compile(_TEXT + rb"[{\[][^\x00-\x08\x0e-\x1f\x7f]*+\Z")),
    )


def detect(head: bytes) -> str:
    """Return the format that begins with ``head``: one of DISKS, COMPRESSIONS, STRANGERS, or ``tar``.

    ``head``: the first HEAD bytes, or the whole file if it is shorter. Unrecognised content is ``raw``.
    Raises ``errors.Refused`` when signatures contradict each other.
    """
    if not head:
        return "empty"
    found = {name for name, offset, magic in _MAGICS if head.startswith(magic, offset)}
    found |= {name for name, pattern in _patterns() if pattern.match(head)}
    if _is_old_tar(head):
        found.add("tar")
    if found & COMPRESSIONS:
        # The two bytes of the mbr signature often occur by chance in compressed data.
        found.discard("mbr")
    if not found or found in _HYBRIDS:
        return "iso" if "iso" in found else "raw"
    if len(found) > 1:
        names = sorted(found)
        reason = f"the image has the signatures of several formats: {', '.join(names)}"
        raise errors.Refused(format=names[0], rule="ambiguous", reason=reason)
    return found.pop()


def is_luks(head: bytes) -> bool:
    """Return whether a raw disk is encrypted as a whole; only the guest can decrypt it."""
    return head.startswith(_LUKS)


def refuse_stranger(name: str) -> None:
    """Raise ``errors.Unsupported`` with the reason if ``name`` is one of STRANGERS."""
    if name in STRANGERS:
        raise errors.Unsupported(reason=STRANGERS[name])


def refuse_unfinished(head: bytes) -> None:
    """Raise ``errors.Unsupported`` for a device with an unfinished import; ``head``: its first bytes."""
    if head.startswith(CLAIM):
        refuse_stranger("unfinished")


def _is_old_tar(head: bytes) -> bool:
    """Return whether the header checksum matches: tar had no magic number before POSIX."""
    if len(head) < _TAR_BLOCK or not head[0]:
        return False
    stored = head[_TAR_CHECKSUM].strip(b" \0")
    if not re.fullmatch(rb"[0-7]{3,7}", stored):
        return False
    block = bytearray(head[:_TAR_BLOCK])
    block[_TAR_CHECKSUM] = b" " * 8
    signed = sum(struct.unpack("512b", block))
    return int(stored, 8) in (sum(block), signed)
