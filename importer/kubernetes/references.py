"""The Secrets and ConfigMaps that a DataVolume refers to, from the same manifest and from a folder."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cdi_worker import errors
from cdi_worker.importer.kubernetes import documents
from cdi_worker.sources import smallfile

#: Largest Secret or ConfigMap, in bytes (Kubernetes, MaxSecretSize).
LIMIT = 1 << 20


class References:
    """The values of the Secrets and ConfigMaps that a DataVolume refers to, by name and key.

    ``directory`` has a folder for each object, with a file for each key.

    Raises ``RequestError`` for objects that are malformed.
    """

    def __init__(self, found: list[documents.Document], directory: str | None = None) -> None:
        self._directory = directory
        self._held: dict[tuple[str, str], dict[str, bytes]] = {}
        faults: list[str] = []
        for document in found:
            if document.kind in {"Secret", "ConfigMap"}:
                where = f"{document.kind} {document.name}" if document.name else document.where
                self._held[document.kind, document.name] = _content(document, where, faults)
        if faults:
            raise errors.RequestError(*faults)

    def find(self, kind: str, name: str) -> Mapping[str, bytes] | None:
        """Return the values of a Secret or ConfigMap (``kind``), or None if there is no such object."""
        if (kind, name) in self._held:
            return self._held[kind, name]
        folder = None if self._directory is None else Path(self._directory, name)
        if folder is None or not folder.is_dir():
            return None
        # Kubernetes mounts secrets as links into ..data.
        keys = (path for path in sorted(folder.iterdir()) if path.is_file() and path.name[0] != ".")
        return {path.name: smallfile.read(path, LIMIT) for path in keys}


def _content(document: documents.Document, where: str, faults: list[str]) -> dict[str, bytes]:
    """Return an object's values by key. Messages name keys but never show values."""
    found: dict[str, bytes] = {}
    encoded, plain = ("data", "stringData") if document.kind == "Secret" else ("binaryData", "data")
    for key, value in _mapping(document, encoded, where, faults):
        try:
            found[key] = base64.b64decode("".join(value.split()), validate=True)
        except (binascii.Error, ValueError):
            faults.append(f"{where}: {encoded}.{key}: is not base64")
    for key, value in _mapping(document, plain, where, faults):
        found[key] = value.encode()
    return found


def _mapping(
    document: documents.Document, field: str, where: str, faults: list[str]
) -> list[tuple[str, str]]:
    value: Any = document.content.get(field)
    if value is None:
        return []
    if not isinstance(value, dict):
        faults.append(f"{where}: {field}: is not a mapping")
        return []
    good = []
    for key, item in value.items():
        if isinstance(key, str) and isinstance(item, str):
            good.append((key, item))
        elif item is not None:
            faults.append(f"{where}: {field}.{key}: is not a string; put it in quotes")
    return good
