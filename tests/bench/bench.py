"""What a row is made of: its declaration, its two sides, and the bench that runs them.

A new row is a function in a module of ``rows``, found by itself::

    @row("nbd", rival="`nbdcopy`", aim=0.9)
    def plain(bench: Bench) -> Iterator[Sides]:
        with nbd_servers.served(bench.raw) as url:
            yield Sides(
                ours=bench.imports(url, bench.file),
                rival=bench.shell(f"nbdcopy {url} {bench.file}", bench.file),
                work=Work(fetched=inputs.DATA, written=inputs.DATA),
            )

``make bench`` then measures it as it is and in each setting of ``settings``, and shows it in the table.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.bench import inputs, measure
from tests.bench.measure import Cost
from tests.bench.settings import Setting
from tests.support import limits, servers, worker

#: Run one side once.
Side = Callable[[], Cost]
#: The number that the aim bounds, and what it is if not the time by that of the rival.
Verdict = tuple[float | None, str]


@dataclasses.dataclass(frozen=True)
class Work:
    """What a row cannot do without: bytes from the network and to the disk, a form to unpack.

    The machine's limit is made of it (``machine``). ``unpack``: a name of ``inputs.FORMS``.
    """

    fetched: int = 0
    written: int = 0
    unpack: str = ""


@dataclasses.dataclass(frozen=True)
class Sides:
    """The sides of a row, measured in turns. ``others``: more of them, for ``verdict`` and notes.

    ``go``: CDI's Go worker, measured where ``settings.GO`` names one. ``verdict`` gets the medians of our
    side, the rival and the others, and returns what the aim bounds, with a note; by default the time by the
    rival's.
    """

    ours: Side
    rival: Side | None = None
    others: Sequence[Side] = ()
    go: Side | None = None
    work: Work = Work()
    verdict: Callable[[Sequence[Cost]], Verdict] | None = None

    def judge(self, costs: Sequence[Cost]) -> Verdict:
        """Return what the aim bounds, with a note."""
        if self.verdict:
            return self.verdict(costs)
        return (costs[0].wall / costs[1].wall if self.rival else None), ""


@dataclasses.dataclass(frozen=True)
class Row:
    """The declaration of a row. ``rival``: what it is compared with, for the reader.

    ``target``: "file" or "block", as shown. ``pod``: whether it is measured as a pod, too. ``curve``: of the
    plots by size, and the size in bytes; without an aim, the row is only a point of that plot. ``only``:
    the setting of a row that is measured in no other.
    """

    name: str
    open: Callable[[Bench], contextlib.AbstractContextManager[Sides]]
    target: str = "file"
    rival: str = ""
    aim: float | None = None
    pod: bool = True
    curve: tuple[str, int] | None = None
    only: str = ""

    def is_for(self, setting: Setting) -> bool:
        """Return whether the row is measured in a setting."""
        if self.only or setting.is_special:
            return self.only == setting.name
        return self.pod or not setting.is_pod

    @property
    def key(self) -> str:
        """Return what identifies the row between reports."""
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
    aim: float | None = None,
    pod: bool = True,
    curve: tuple[str, int] | None = None,
    only: str = "",
) -> Callable[[Opening], Opening]:
    """Declare the decorated function as a row; it yields its sides once, while its servers run."""

    def declare(opening: Opening) -> Opening:
        ROWS.append(Row(name, contextlib.contextmanager(opening), target, rival, aim, pod, curve, only))
        return opening

    return declare


@dataclasses.dataclass(frozen=True)
class Scale:
    """Sizes in ``rows.scale``: imports at once, bytes of each, and extents of the largest disk."""

    imports: int = 50
    size: int = 128 << 20
    extents: int = 1 << 20


@dataclasses.dataclass(frozen=True)
class Bench:
    """What the rows measure with, in one setting.

    ``directory``: for inputs and servers; ``file`` and ``block``: the targets, on storage of the setting.
    ``group``: the control group of every side, if the setting has limits. ``before``: where another version
    of the worker is installed. ``is_alone``: without the rivals. ``recorder``: the command, with its options,
    that runs and records each command.
    """

    directory: Path
    web: servers.Web
    file: Path
    block: Path
    setting: Setting
    group: limits.Cgroup | None
    rounds: int
    scale: Scale = Scale()
    before: Path | None = None
    is_alone: bool = False
    recorder: Sequence[str | Path] = ()

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
        return measure.run([*self.prefix, *argv], timeout=timeout)

    @property
    def prefix(self) -> tuple[str | Path, ...]:
        """Return the prefix of a command that must run in the setting's control group."""
        return (*(self.group.prefix if self.group else ()), *self.recorder)

    def command(self, argv: Sequence[str | Path], target: Path) -> Side:
        """Return a side that runs a command which writes ``target``, removed before if it is a file."""

        def run() -> Cost:
            self.fresh(target)
            return self.run(argv)

        return run

    def earlier(self, ours: Side) -> Side | None:
        """Return our side with the worker that is installed in ``before``."""
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

    @contextlib.contextmanager
    def nginx(self, name: str, settings: servers.Settings) -> Iterator[servers.Web]:
        """Serve the inputs by one more nginx."""
        with nginx(self.directory, name, settings) as web:
            yield web


def importing(url: str, target: Path, *options: str | Path) -> list[str | Path]:
    """Return the command of an import."""
    return [*worker.COMMAND, "import", "--force", "--progress", "none", *options, url, target]


@contextlib.contextmanager
def nginx(directory: Path, name: str, settings: servers.Settings) -> Iterator[servers.Web]:
    """Serve the files of ``directory``."""
    with inputs.folder(directory, f"nginx-{name}") as own, servers.nginx(own, directory, settings) as web:
        yield web


@contextlib.contextmanager
def opened(
    directory: Path,
    setting: Setting,
    rounds: int,
    scale: Scale,
    before: Path | None = None,
    is_alone: bool = False,
) -> Iterator[Bench]:
    """Prepare the servers, the targets and the limits of a setting."""
    with contextlib.ExitStack() as stack:
        web = stack.enter_context(nginx(directory, "plain", servers.Settings()))
        folder, block = stack.enter_context(setting.storage(directory))
        group = stack.enter_context(setting.limited())
        bench = Bench(
            directory, web, folder / "target", block, setting, group, rounds, scale, before, is_alone
        )
        stack.callback(bench.fresh, bench.file)
        yield bench
