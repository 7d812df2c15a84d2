"""What all commands of one process share: cancelling, logging, the form of the output, the configuration."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from cdi_worker import errors
from cdi_worker.formats import signature
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract
from cdi_worker.importer.commands import config_file


@dataclasses.dataclass
class Context:
    """The object that ``cli`` passes to every command.

    ``quiet``: only errors are printed. ``as_json``: results and errors are JSON objects. ``to_stdout``:
    standard output is the disk. ``config``: None until the top-level command has read it; ``unreadable``:
    why it could not. ``faults``: of options that only a pod's role reads. ``demand``: the signatures that a
    pod demands, and ``tuning``: what an administrator has set, for its roles and for the programs that
    controllers start by name.
    """

    cancel: cancelling.Cancel
    set_up_logging: Callable[[int], None]
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    verbosity: int = 0
    quiet: bool = False
    as_json: bool = False
    to_stdout: bool = False
    config: config_file.Config | None = None
    unreadable: errors.RequestError | None = None
    faults: list[str] = dataclasses.field(default_factory=list)
    demand: signature.Demand = signature.NOTHING
    tuning: contract.Tuning = contract.DEFAULT

    def log(self, verbosity: int = 0) -> None:
        """Set up logging for the largest ``verbosity`` so far."""
        self.verbosity = max(self.verbosity, verbosity)
        self.set_up_logging(self.verbosity or (-1 if self.quiet else 0))
