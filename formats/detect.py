"""Detect the format of a file by content, never by name.

Every signature is checked, not only up to the first match: a file with two signatures could be read as
one format here and as the other by the next tool, so it is refused.
"""

from __future__ import annotations

import codecs
import re
import struct
from typing import Final

from cdi_worker import errors, masking

#: First bytes of a file that hold every signature, and the header tables that ``safety`` checks.
HEAD = 256 << 10

#: First bytes of a device while an import writes to it (``images.targets.claim``).
CLAIM = b"cdi-worker claim "

DISKS = frozenset({"raw", "iso", "qcow2", "vmdk", "vdi", "vhd", "vhdx"})
COMPRESSIONS = frozenset({"gz", "xz", "zst", "bz2"})

_CHECK = "check whether this is the right file"
_CONVERT = "convert it to qcow2 or raw first"
_DECOMPRESS = "use gz, xz, zst or bz2"
_MESSAGE = "check whether it is an error message of the server"
_DECRYPT = "decrypt it first"
_RESTORE = "restore it to a disk first, and import that"
_UNPACK = "unpack the image first"

#: Formats that are not disk images: name, what it is, what to do about it, and its first bytes, of which each
#: has at least four: a disk must not begin like one by chance. Those without are found otherwise.
_STRANGERS: tuple[tuple[str, str, str, tuple[bytes, ...]], ...] = (
    ("qed", "a QED image", _CONVERT, (b"QED\x00",)),
    ("parallels", "a Parallels image", _CONVERT, (b"WithoutFreeSpace", b"WithouFreSpacExt")),
    ("bochs", "a Bochs image", _CONVERT, (b"Bochs Virtual HD Image",)),
    ("cloop", "a cloop image", _CONVERT, (b"#!/bin/sh\n#V2.0 Format\n",)),
    ("dmg", "an Apple disk image", _CONVERT, (b"encrcdsa", b"sprs\0\0\0")),
    ("asif", "an Apple sparse image (ASIF)", _CONVERT, (b"shdw",)),
    ("simg", "an Android sparse image", "convert it with simg2img first", (b"\x3a\xff\x26\xed\1\0",)),
    ("cd", "a CD image with raw sectors", "convert it to ISO first", (b"\0" + b"\xff" * 10 + b"\0",)),
    ("ewf", "a forensic image (EWF)", _CONVERT, (b"EVF\t\r\n\xff\0", b"EVF2\r\n\x81\0", b"LVF\t\r\n\xff\0")),
    ("aff", "a forensic image (AFF)", _CONVERT, (b"AFF10\r\n\0",)),
    ("vma", "a backup of Proxmox (VMA)", "extract the disk first, with vma", (b"VMA\0",)),
    ("partclone", "a backup by partclone", _RESTORE, (b"partclone-image",)),
    ("partimage", "a backup by partimage", _RESTORE, (b"PaRtImAgE-VoLuMe",)),
    ("ntfsclone", "a backup by ntfsclone", _RESTORE, (b"\0ntfsclone-image",)),
    ("fsarchiver", "a backup by fsarchiver", _RESTORE, (b"FsA0",)),
    ("wim", "a Windows image (WIM) with files", _RESTORE, (b"MSWIM\0\0\0",)),
    ("save", "a saved state of a VM", "import its disk instead", (b"LibvirtQemudSave", b"QEVM\0\0\0\3")),
    ("zip", "a zip archive", _UNPACK, (b"PK\3\4", b"PK\5\6", b"PK\7\x08PK")),
    ("7z", "a 7z archive", _UNPACK, (b"7z\xbc\xaf\x27\x1c",)),
    ("rar", "a RAR archive", _UNPACK, (b"Rar!\x1a\x07",)),
    ("cab", "a cab archive", _UNPACK, (b"MSCF\0\0\0\0",)),
    ("cpio", "a cpio archive", _UNPACK, (b"070701", b"070702", b"070707")),
    ("xar", "a xar archive", _UNPACK, (b"xar!",)),
    ("rpm", "an RPM package", _UNPACK, (b"\xed\xab\xee\xdb",)),
    ("ar", "an ar archive or a Debian package", _UNPACK, (b"!<arch>\n",)),
    ("lz4", "compressed with lz4", _DECOMPRESS, (b"\x04\x22\x4d\x18", b"\x02\x21\x4c\x18")),
    ("lzip", "compressed with lzip", _DECOMPRESS, (b"LZIP\x01",)),
    ("lzo", "compressed with lzop", _DECOMPRESS, (b"\x89LZO\0\r\n\x1a\n",)),
    ("lrz", "compressed with lrzip", _DECOMPRESS, (b"LRZI",)),
    ("snappy", "compressed with snappy", _DECOMPRESS, (b"\xff\x06\0\0sNaPpY",)),
    ("lzma", "compressed with lzma", _DECOMPRESS, ()),
    ("Z", "compressed with compress", _DECOMPRESS, ()),
    ("openssl", "encrypted with OpenSSL", _DECRYPT, (b"Salted__",)),
    ("age", "encrypted with age", _DECRYPT, (b"age-encryption.org/v1\n",)),
    ("pdf", "a PDF document", _CHECK, (b"%PDF-",)),
    ("png", "a PNG picture", _CHECK, (b"\x89PNG\r\n\x1a\n",)),
    ("gif", "a GIF picture", _CHECK, (b"GIF87a", b"GIF89a")),
    ("jpeg", "a JPEG picture", _CHECK, ()),
    ("riff", "a picture, sound or video (RIFF)", _CHECK, ()),
    ("mp4", "a video (MP4, MOV)", _CHECK, ()),
    ("mkv", "a video (MKV, WebM)", _CHECK, (b"\x1a\x45\xdf\xa3",)),
    ("elf", "a program (ELF)", _CHECK, (b"\x7fELF",)),
    ("exe", "a program for Windows", _CHECK, ()),
    ("sqlite", "an SQLite database", _CHECK, (b"SQLite format 3\0",)),
    ("torrent", "a torrent file", "download the image with it first", (b"d8:announce",)),
    ("html", "an HTML page", "check whether the URL leads to a web page or a login", ()),
    ("xml", "an XML document", _MESSAGE, ()),
    ("json", "a JSON document", _MESSAGE, ()),
    ("lfs", "a Git LFS pointer, not the file", "run git lfs pull, or use the file's own URL", ()),
    ("text", "plain text", _CHECK, ()),
)

#: Known formats that are not disk images, and why each is refused. Unrecognised content is raw.
STRANGERS = {
    "empty": "the source is empty",
    "unfinished": "it holds no complete disk: an import to it is running or was interrupted; finish it first",
    **{name: f"the source is {what}; {cure}" for name, what, cure, _ in _STRANGERS},
}

#: Strangers with short signatures: any other one in the same file counts more.
_WEAK = frozenset({"lzma", "Z", "jpeg", "exe"})

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
    ("gz", 0, b"\x1f\x8b\x08"),
    ("xz", 0, b"\xfd7zXZ\x00"),
    ("zst", 0, b"\x28\xb5\x2f\xfd"),
    ("tar", 257, b"ustar"),
    ("iso", _ISO9660, b"CD001"),
    ("iso", _ISO9660, b"NSR02"),
    ("iso", _ISO9660, b"NSR03"),
    ("mbr", 510, b"\x55\xaa"),
    *((name, 0, magic) for name, _, _, magics in _STRANGERS for magic in magics),
)

_TEXT = rb"(?:\xef\xbb\xbf)?\s*+"
#: Signatures without fixed bytes; compiled when used, because every start loads this module. qemu accepts a
#: text as vmdk descriptor when its first line that is neither empty nor a comment gives the version.
#: Possessive quantifiers: no backtracking on hostile text.
_PATTERNS = (
    ("vmdk", rb"# Disk DescriptorFile|(?:#[^\n]*+\n|[ \t\r]*+\n)*+version=[123]\r?\n"),
    ("bz2", rb"BZh[1-9](?:\x31\x41\x59\x26\x53\x59|\x17\x72\x45\x38\x50\x90)"),
    ("zst", rb"[\x50-\x5f]\x2a\x4d\x18"),  # a skippable frame first
    ("lfs", rb"version https://(?:git-lfs|hawser)\.github\.com/spec/v1\n"),
    ("html", rb"(?is)" + _TEXT + rb"(?:(?><!--.*?-->)\s*+)*+<(?:!doctype\s+html|html|head|body)\b"),
    ("xml", _TEXT + rb"<(?:\?xml\s|Error>|ListBucketResult\b)"),
    ("json", _TEXT + rb"[{\[][^\x00-\x08\x0e-\x1f\x7f]*+\Z"),
    ("Z", rb"\x1f\x9d[\x89-\x90]"),
    ("jpeg", rb"\xff\xd8\xff[\xc0-\xfe]"),
    ("riff", rb"(?s)RIFF.{4}(?:WAVE|WEBP|AVI )"),
    ("mp4", rb"(?s)\0\0[\0-\x0f].ftyp[ -~]{4}"),
)
#: Shorter ones are not a disk either, whatever they hold.
_SHORTEST_TEXT = 512
_NOT_IN_TEXT = rb"[\0-\x08\x0e-\x1a\x1c-\x1f\x7f]"

#: Installer images are an ISO and a partitioned disk at once, so that they boot from a USB stick.
_HYBRIDS = ({"iso", "mbr"}, {"mbr"})


def detect(head: bytes) -> str:
    """Return the format that begins with ``head``: one of DISKS, COMPRESSIONS, STRANGERS, or ``tar``.

    ``head``: the first HEAD bytes, or the whole file if it is shorter. Unrecognised content is ``raw``.
    Raises ``errors.Refused`` when signatures contradict each other.
    """
    if not head:
        return "empty"
    found = {name for name, offset, magic in _MAGICS if head.startswith(magic, offset)}
    found |= {name for name, pattern in _PATTERNS if re.match(pattern, head)}
    found |= {name for name, matches in _STRUCTURES.items() if matches(head)}
    if len(found) > 1:
        # A tar archive begins with the name of a file, which may begin like anything.
        found -= {name for name, *_ in _STRANGERS} if "tar" in found else _WEAK
    if found & COMPRESSIONS:
        # The two bytes of the mbr signature often occur by chance in compressed data.
        found.discard("mbr")
    if not found:
        return "text" if _is_text(head) else "raw"
    if found in _HYBRIDS:
        return "iso" if "iso" in found else "raw"
    if len(found) > 1:
        names = sorted(found)
        reason = f"the image has the signatures of several formats: {', '.join(names)}"
        raise errors.Refused(format=names[0], rule="ambiguous", reason=reason)
    return found.pop()


def is_luks(head: bytes) -> bool:
    """Return whether a raw disk is encrypted as a whole; only the guest can decrypt it."""
    return head.startswith(_LUKS)


def is_dmg(end: bytes) -> bool:
    """Return whether ``end``, the last 512 bytes of a file, is the trailer of an Apple disk image."""
    return end.startswith(b"koly\0\0\0\4\0\0\2\0")


def refuse_stranger(name: str, head: bytes = b"") -> None:
    """Raise ``errors.Unsupported`` with the reason if ``name`` is one of STRANGERS; quote a text."""
    if name in STRANGERS:
        is_quoted = head and name in {"text", "json", "xml"}
        quote = f"; it begins {masking.quoted(head)!r}" if is_quoted else ""
        raise errors.Unsupported(reason=f"{STRANGERS[name]}{quote}")


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


def _is_lzma(head: bytes) -> bool:
    """Return whether ``head`` begins with the header of an lzma file, checked as liblzma does.

    The size of the dictionary is a power of 2, or 1.5 times one; that of the content is -1 or below 2**38.
    """
    if len(head) < 14 or head[:1] != b"\x5d":
        return False
    dictionary, size, first = struct.unpack_from("<IQB", head, 1)
    power = 1 << max(0, dictionary.bit_length() - 1)
    sizes = dictionary >= 4096 and dictionary in {power, power * 3 // 2}
    return sizes and not first and (size < 1 << 38 or size == 2**64 - 1)


def _is_exe(head: bytes) -> bool:
    """Return whether this is a program of Windows or for UEFI, whose second header has the format PE."""
    if head[:2] != b"MZ" or len(head) < 64:
        return False
    (at,) = struct.unpack_from("<I", head, 60)
    return head.startswith(b"PE\0\0", at)


#: Signatures that need more than a pattern.
_STRUCTURES: Final = {"tar": _is_old_tar, "lzma": _is_lzma, "exe": _is_exe}


def _is_text(head: bytes) -> bool:
    """Return whether all of ``head`` is ASCII or UTF-8, with a space or the end of a line."""
    if len(head) < _SHORTEST_TEXT or re.search(_NOT_IN_TEXT, head) or not re.search(rb"\s", head):
        return False
    try:
        # The last character may be cut.
        codecs.getincrementaldecoder("utf-8")().decode(head)
    except UnicodeDecodeError:
        return False
    return True
