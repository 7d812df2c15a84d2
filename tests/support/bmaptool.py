"""bmaptool: the program whose format block maps are."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path


def create(image: Path, *options: str) -> bytes:
    """Return the map of an image, by bmaptool. Holes of the file are not in it."""
    path = image.with_suffix(".created")
    run("create", "--output", str(path), *options, str(image))
    return path.read_bytes()


def copy(image: Path, bmap: bytes, to: Path) -> None:
    """Copy the mapped ranges of an image to a new file or a device. bmaptool verifies their checksums."""
    path = image.with_suffix(".bmap")
    path.write_bytes(bmap)
    run("copy", "--bmap", str(path), str(image), str(to))


def run(*arguments: str) -> None:
    """Run bmaptool. Raises ``subprocess.CalledProcessError``, with what it printed as ``stderr``."""
    subprocess.run(["/usr/bin/bmaptool", *arguments], check=True, capture_output=True, text=True)


def message(err: subprocess.CalledProcessError) -> str:
    """Return bmaptool's message of an error, on one line."""
    return re.sub(r"\s+", " ", err.stderr)
