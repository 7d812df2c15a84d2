"""The location of a disk on a web server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.sources import base, fields, staged

METHODS: Final = ("pod", "node")


def _method(text: str) -> str:
    if text not in METHODS:
        hint = errors.supported(text, METHODS)
        raise ValueError(f"{text!r}; {hint}")
    return text


@dataclasses.dataclass(frozen=True, kw_only=True)
class Http(staged.Files):
    """A URL. ``pull_method`` ``node``: another container of the pod serves the disk.

    ``ready_file``, ``done_file``: handshake with that container (contract, Node pull).
    """

    pull_method: str = fields.field(
        "pod",
        env="IMPORTER_PULL_METHOD",
        help="Who downloads a container image: pod, or node (node pull).",
        parse=_method,
    )
    ready_file: str = fields.field(
        env="IMPORTER_READY_FILE",
        help="File that says that the disk is served (node pull).",
        selects=False,
    )
    done_file: str = fields.field(
        env="IMPORTER_DONE_FILE",
        help="File to create when the disk is imported (node pull).",
        selects=False,
    )

    @property
    def file_name(self) -> str:
        # In a node pull the URL is that of the container beside us.
        return "" if self.pull_method == "node" else self.current or base.file_name(self.endpoint)

    @property
    def unverifiable(self) -> str:
        if self.pull_method == "node":
            return "the node pulled the image, and nobody here sees its signature; use pullMethod pod"
        return base.UNVERIFIABLE

    def faults(self) -> Iterator[str]:
        yield from staged.Files.faults(self)
        if self.pull_method == "node":
            needed = {"IMPORTER_READY_FILE": self.ready_file, "IMPORTER_DONE_FILE": self.done_file}
            yield from (f"{name} is needed for a node pull" for name, value in needed.items() if not value)
