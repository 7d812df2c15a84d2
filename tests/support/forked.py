"""The command in processes of its own that begin as copies of a prepared one.

The libraries are imported once, so that a run takes some tens of milliseconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support import processes, worker

#: Imported before the first run: the command, and the libraries of the sources.
PREPARED = (
    "cdi_worker.importer.cli",
    "cdi_worker.importer.commands.disk",
    "cdi_worker.importer.execute",
    "cdi_worker.importer.kubernetes.run",
    "cdi_worker.importer.roles.importer",
    "cdi_worker.importer.send.file",
    "cdi_worker.sources.ovirt.data",
    "cdi_worker.sources.web.http",
    "cdi_worker.importer.upload.server",
    "boto3",
    "botocore.auth",
    "google.oauth2.credentials",
    "google.oauth2.service_account",
    "keystoneauth1.identity.generic",
    "ovirtsdk4.types",
    "pyVmomi",
)


class Forks:
    """Runs the command, one at a time. ``folder``: for the output of the runs."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self._process = process
        self._folder = folder

    def run(self, *arguments: str | Path, env: Mapping[str, str], library: bool = False) -> worker.Completed:
        """Run the command to its end.

        ``library``: instead, import what a pod with ``env`` and these mounts would, as a program of its own
        that logs everything and prints the exception.
        """
        out, err = self._folder / "out", self._folder / "err"
        asked = {"argv": list(map(str, arguments)), "env": {**worker.ENVIRONMENT, **env}, "library": library}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({**asked, "out": str(out), "err": str(err)}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the prepared process has ended"
        status = os.waitstatus_to_exitcode(int(line))
        return worker.Completed(status, out.read_text(errors="replace"), err.read_text(errors="replace"))


@contextlib.contextmanager
def prepared(folder: Path) -> Iterator[Forks]:
    """Start the process that the runs are copies of."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.support.forked"],
        cwd=folder,
        env={**worker.ENVIRONMENT, "HOME": str(folder), "TMPDIR": os.environ.get("TMPDIR", "/tmp")},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield Forks(process, folder)
    finally:
        process.kill()
        process.communicate(timeout=processes.PATIENCE)


def _main() -> None:
    import importlib

    for name in PREPARED:
        importlib.import_module(name)
    home = {name: os.environ[name] for name in ("HOME", "TMPDIR")}
    for line in sys.stdin:
        asked = json.loads(line)
        number = os.fork()
        if not number:
            _become(asked, home)
        print(os.waitpid(number, 0)[1], flush=True)


def _become(asked: dict[str, object], home: dict[str, str]) -> None:
    """Run the command in this process, and end it."""
    from cdi_worker.importer import cli

    try:
        for name, descriptor in (("out", 1), ("err", 2)):
            opened = os.open(str(asked[name]), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(opened, descriptor)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.environ.clear()
        os.environ.update(home | asked["env"])  # type: ignore[operator]
        argv = [str(each) for each in asked["argv"]]  # type: ignore[attr-defined]
        sys.argv = ["cdi-worker", *argv]
        if asked["library"]:
            _import(argv)
        else:
            cli.main(argv)
    except SystemExit as err:
        os._exit(int(err.code or 0))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _import(argv: list[str]) -> None:
    """Import as a program that knows nothing of secrets: its log and its traceback are Python's own."""
    import logging
    import traceback

    import cdi_worker
    from cdi_worker.importer import contract
    from cdi_worker.importer.roles import importer

    logging.basicConfig(level=logging.DEBUG, stream=sys.stderr)
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    data, headers = argv
    settings = dataclasses.replace(contract.POD, stall=1)
    paths = contract.Paths(data=data, block=f"{data}/none", extra_headers=headers, settings=settings)
    try:
        wanted = importer.read(contract.environment(), paths)
        print(wanted, cdi_worker.inspect(wanted))
        print(cdi_worker.run(wanted))
    except cdi_worker.Error as err:
        print(err, repr(err), err.fields, err.as_fields())
        traceback.print_exc()
        logging.getLogger("program").exception("failed")


if __name__ == "__main__":
    _main()
