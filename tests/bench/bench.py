"""What a row is made of: its declaration, its sides, and the bench that runs them.

A new row is a function in a module of ``rows``, found by itself::

    @benches.row("raw over NBD", rival="nbdcopy")
    def plain(bench: Bench) -> Iterator[Sides]:
        with nbd_exports.nbdkit(...) as port:
            url = f"nbd://127.0.0.1:{port}/"
            yield Sides(
                ours=bench.imports(url, bench.file),
                rival=bench.shell(f"nbdcopy {url} {bench.file}", bench.file),
            )
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.bench import inputs, measure
from tests.bench.measure import Cost
from tests.bench.settings import MACHINE, Setting
from tests.support import devices, limits, servers, worker

#: Run one side once.
Side = Callable[[], Cost]


@dataclasses.dataclass(frozen=True)
class Sides:
    """The sides of a row, measured in turns.

    ``cdi``: CDI's own worker, where ``go.PROGRAMS`` names one. ``bound``: the seconds below which nobody can
    be, such as those of the bytes on the wire.
    """

    ours: Side
    rival: Side | None = None
    cdi: Side | None = None
    bound: float = 0


@dataclasses.dataclass(frozen=True)
class Row:
    """The declaration of a row. ``rival``: what it is compared with, as a command.

    ``target``: "file" or "block", as shown. ``is_least``: the rival does less than is needed, so that no
    program can be much faster. ``more``: of the second list, which is not in the mean; ``scale``: of the
    third, for docs/pods/scale.md.
    """

    name: str
    open: Callable[[Bench], contextlib.AbstractContextManager[Sides]]
    target: str = "file"
    rival: str = ""
    is_least: bool = False
    more: bool = False
    scale: bool = False

    @property
    def key(self) -> str:
        """Return what identifies the row."""
        return f"{self.name}, {self.target}"


#: A function that starts the servers of a row and yields its sides.
Opening = Callable[["Bench"], Iterator[Sides]]
#: All rows, in the order of the table.
ROWS: list[Row] = []


def row(
    name: str,
    *,
    target: str = "file",
    rival: str = "",
    is_least: bool = False,
    more: bool = False,
    scale: bool = False,
) -> Callable[[Opening], Opening]:
    """Declare the decorated function as a row; it yields its sides once, while its servers run."""

    def declare(opening: Opening) -> Opening:
        opened = contextlib.contextmanager(opening)
        ROWS.append(Row(name, opened, target, rival, is_least, more, scale))
        return opening

    return declare


@dataclasses.dataclass(frozen=True)
class Bench:
    """What the rows measure with, in one setting.

    ``directory``: for inputs and servers; ``file`` and ``block``: the targets. ``group``: the control group
    of every side, if the setting has limits. ``rounds``: of each row; ``enough``: of one whose
    times differ little, 0: as many.
    ``before``: the checkout of another version of the worker, or where pip has installed it. ``is_alone``:
    without the rivals.
    """

    directory: Path
    web: servers.Web
    file: Path
    block: Path
    setting: Setting = MACHINE
    group: limits.Cgroup | None = None
    rounds: int = 1
    enough: int = 0
    before: Path | None = None
    is_alone: bool = False

    @functools.cached_property
    def raw(self) -> Path:
        """Return the disk of most rows."""
        return inputs.disk(self.directory, self.setting.size, self.setting.data)

    @property
    def temporary(self) -> Path:
        """Return a file for a rival's download, on the storage of the targets; removed before each run."""
        return self.file.with_name("temporary")

    def form(self, name: str) -> Path:
        """Return the disk in a form of ``inputs.FORMS``, or as it is: ``raw``."""
        return self.raw if name == "raw" else inputs.form(self.raw, name)

    def target(self, kind: str) -> Path:
        """Return the target of a kind: "file" or "block"."""
        return self.block if kind == "block" else self.file

    def run(self, argv: Sequence[str | Path], *, timeout: float = 900) -> Cost:
        """Measure a command in the setting."""
        return measure.run([*(self.group.prefix if self.group else ()), *argv], timeout=timeout)

    def command(self, argv: Sequence[str | Path], target: Path) -> Side:
        """Return a side that runs a command which writes ``target``, removed before if it is a file."""

        def run() -> Cost:
            self.fresh(target)
            return self.run(argv)

        return run

    def earlier(self, ours: Side) -> Side | None:
        """Return our side with the worker in ``before``."""
        path = self.before
        if path is None:
            return None

        def run() -> Cost:
            # Without the second one, "python -m" would find our package in the current directory.
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("PYTHONPATH", str(path))
                patch.setenv("PYTHONSAFEPATH", "1")
                return ours()

        return run

    def shell(self, command: str, target: Path) -> Side:
        """Return a side that runs a pipeline of the shell."""
        return self.command(["bash", "-o", "pipefail", "-c", command], target)

    def imports(self, url: str, target: Path, *options: str | Path) -> Side:
        """Return a side that runs ``cdi-worker import``."""
        return self.command(importing(url, target, *options), target)

    def fresh(self, target: Path) -> None:
        """Remove what an earlier run has left."""
        self.temporary.unlink(missing_ok=True)
        if not target.is_block_device():
            target.unlink(missing_ok=True)


def importing(url: str, target: Path, *options: str | Path) -> list[str | Path]:
    """Return the command of an import."""
    return [*worker.COMMAND, "import", "--force", "--json", *options, url, target]


@contextlib.contextmanager
def opened(directory: Path, setting: Setting, **given: Any) -> Iterator[Bench]:
    """Prepare the servers, the targets and the limits of a setting; ``given``: other fields of the bench."""
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(inputs.folder(directory, "nginx"))
        web = stack.enter_context(servers.nginx(own, directory))
        block = stack.enter_context(devices.loop(directory, setting.size))
        group = stack.enter_context(setting.limited())
        bench = Bench(directory, web, directory / "target", block, setting, group, **given)
        stack.callback(bench.fresh, bench.file)
        yield bench
