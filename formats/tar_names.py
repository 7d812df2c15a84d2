"""Names in a tar that stay below the directory where it is unpacked.

Whoever unpacks follows no symlink on the way to an entry; then these rules keep every link inside.
"""

from __future__ import annotations

from importer import errors

_MAX_NAME, _MAX_PATH = 255, 4095  # NAME_MAX, PATH_MAX with its NUL


def path(name: bytes) -> tuple[str, ...]:
    """Split a name; empty for the directory itself. Raises ``errors.Refused``."""
    parts = tuple(part for part in _decode(name).split("/") if part not in {"", "."})
    if name.startswith(b"/"):
        raise refused("absolute", parts, "has an absolute path")
    if ".." in parts:
        raise refused("dotdot", parts, "leads outside")
    if len(name) > _MAX_PATH or any(len(part.encode(errors="surrogateescape")) > _MAX_NAME for part in parts):
        raise refused("name", parts, "has too long a name")
    return parts


def symlink(target: bytes, place: tuple[str, ...]) -> str:
    """Return what the symlink at ``place`` says, if that leads nowhere outside. Raises ``errors.Refused``.

    Only its beginning may go up, through the real directories that it is in: after a name, which may
    be another symlink, ``..`` can be anywhere.
    """
    text = _decode(target)
    parts = [part for part in text.split("/") if part not in {"", "."}]
    ups = next((index for index, part in enumerate(parts) if part != ".."), len(parts))
    if not text or text.startswith("/") or len(target) > _MAX_PATH:
        raise refused("link", place, f"is a symlink to {text[:200]!r}")
    if ups > len(place) - 1 or ".." in parts[ups:]:
        raise refused("link", place, f"is a symlink to {text[:200]!r}, which may lead outside")
    return text


def refused(rule: str, place: tuple[str, ...], reason: str) -> errors.Refused:
    """Make the error of a rule about an entry."""
    return errors.Refused(format="tar", rule=rule, reason=f"{'/'.join(place)[:200]!r} {reason}")


def _decode(name: bytes) -> str:
    if b"\0" in name:
        raise errors.Corrupt(format="tar", reason=f"a name contains a zero byte: {name[:200]!r}")
    return name.decode(errors="surrogateescape")
