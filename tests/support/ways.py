"""Import a disk from an address, or a package in each way it may arrive: ranges, a stream, a file, a pipe."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import misbehave, oracle

#: How the bytes arrive.
WAYS = ("ranges", "stream", "local", "pipe")


def request(address: str, target: Path, **options: object) -> cdi_worker.Request:
    """Return a request for a URL or a path, which replaces ``target``.

    ``options``: fields of the request, and the ``access`` of its location.
    """
    source = "http" if address.startswith("http") else "local"
    location = cdi_worker.Location(address, options.pop("access", cdi_worker.Access()))
    if options.get("scratch") is not None:
        options["scratch"] = str(options["scratch"])
    values = {"existing": "replace", **options}
    return cdi_worker.Request(source=source, location=location, target=str(target), **values)


def import_disk(address: str, target: Path, **options: object) -> cdi_worker.Result:
    """Run ``request``."""
    return cdi_worker.run(request(address, target, **options))


class Importer:
    """Imports the package ``name`` in a given way, to ``target`` unless the options name another."""

    def __init__(self, server: misbehave.Server, directory: Path, name: str, framing: str = "length") -> None:
        self.server = server
        self.target = directory / "disk.img"
        self._directory = directory
        self._path = directory / name
        self._framing = framing

    def request(self, data: bytes, way: str, **options: object) -> cdi_worker.Request:
        """Return a request for ``data``, and serve or write them."""
        address = str(self._path)
        if way == "ranges":
            address = self.server.serve(f"/{self._path.name}", misbehave.Page(data))
        elif way == "stream":
            page = misbehave.Page(data, ranges=False, framing=self._framing)
            address = self.server.serve(f"/{self._path.name}", page)
        elif way == "local":
            self._path.write_bytes(data)
        target = Path(str(options.pop("target", self.target)))
        return request(address, target, **{"scratch": str(self._directory), **options})

    def run(self, data: bytes, way: str, **options: object) -> cdi_worker.Result:
        """Import ``data``."""
        wanted = self.request(data, way, **options)
        if way != "pipe":
            return cdi_worker.run(wanted)
        self._path.unlink(missing_ok=True)
        os.mkfifo(self._path)
        writing = threading.Thread(target=self._write, args=(data,))
        writing.start()
        try:
            return cdi_worker.run(wanted)
        finally:
            writing.join()

    def refused(self, data: bytes, way: str, **options: object) -> errors.Error:
        """Return the error with which ``data`` is refused; the target must not be usable."""
        with pytest.raises(errors.Error) as caught:
            self.run(data, way, **options)
        oracle.unusable(Path(str(options.get("target", self.target))))
        return caught.value

    def _write(self, data: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._path.write_bytes(data)
