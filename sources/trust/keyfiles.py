"""Files of public keys: one file, or a folder of them such as a mounted ConfigMap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from cdi_worker import errors

#: Of a file of keys, in bytes. The largest keyrings of distributions have some 100 KiB.
LARGEST: Final = 1 << 20


def read(path: str) -> Iterator[tuple[str, bytes]]:
    """Yield name and content of the file at ``path``, or of each in the folder. Raises ``RequestError``."""
    place = Path(path)
    try:
        # Kubernetes mounts a ConfigMap as links into ..data.
        inside = [each for each in sorted(place.iterdir()) if not each.name.startswith(".")]
    except NotADirectoryError:
        inside = [place]
    except OSError as err:
        raise errors.RequestError(f"{path}: {errors.words(err)}") from err
    for each in inside:
        yield str(each), content(each, LARGEST)


def content(path: str | Path, largest: int) -> bytes:
    """Return a file of at most ``largest`` bytes, which are MiB. Raises ``RequestError``."""
    try:
        with open(path, "rb") as stream:
            data = stream.read(largest + 1)
    except OSError as err:
        raise errors.RequestError(f"{path}: {errors.words(err)}") from err
    if len(data) > largest:
        raise errors.RequestError(f"{path}: is larger than {largest >> 20} MiB; is this the right file?")
    return data
