"""Files of public keys: one file, or a folder of them such as a mounted ConfigMap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from cdi_worker import errors
from cdi_worker.sources import smallfile


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
        yield str(each), smallfile.read(each)
