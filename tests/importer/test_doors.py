"""No door shows a secret that a server repeats: every source, every kind of credential, every place.

The doors: the log at each verbosity, the termination message, the report, the message and the JSON of the
commands, the dry run, the exceptions of the library, and the files that stay. The table is in
``tests.support.logins``.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdi_worker import sources
from cdi_worker.sources import base, fields
from tests.support import echo, forked, logins, tls, uploads, worker

KINDS = {each.name: each for each in sources.own()}
#: What has no address with credentials: a blank disk, and another volume of the pod.
WITHOUT = {"none", "volume"}
ROWS = {row.name: row for row in logins.ROWS}


@pytest.fixture(scope="module")
def pair(certificates: uploads.Certificates) -> tls.KeyPair:
    return certificates.authority.issue()


class Doors:
    """What one run of a row may show secrets through. ``check`` fails if one does."""

    def __init__(self, row: logins.Row, server: echo.Echo, folder: Path) -> None:
        self.given = folder / "given"
        self.given.mkdir()
        self.server = server
        self.run = row.build(server, self.given)
        self.env = {"HOME": str(self.given), **self.run.variables}  # no login of this machine
        server.secrets = self.run.secrets
        server.words = row.words
        self.pod = worker.Pod(folder)
        for name, value in self.run.headers.items():
            (self.pod.headers / name).write_text(f"{name}: {value}")
        self.folder = folder

    def check(self, *texts: str) -> None:
        texts += (self.pod.message if self.pod.log.exists() else "",)
        texts += tuple(
            path.read_bytes().decode("utf-8", "replace")
            for path in self.folder.rglob("*")
            if path.is_file() and self.given not in path.parents and path.parent != self.pod.headers
        )
        for text in texts:
            plain = echo.plain(text)
            for secret in self.run.secrets:
                for form in echo.forms(secret):
                    assert echo.plain(form) not in plain, text
            assert logins.MARK not in text, text


def pod_arguments(doors: Doors, verbosity: str) -> list[str]:
    verbose = [verbosity] if verbosity else []
    arguments = [each for each in doors.pod.arguments if each != "-v=1"]
    options = list(doors.run.options)
    return [*verbose, "--stall-timeout=1", *arguments, *options]


@pytest.fixture
def where() -> str:
    """Return where the server repeats the secret."""
    return "failure"


@pytest.fixture
def doors(row: logins.Row, where: str, pair: tls.KeyPair, tmp_path: Path) -> Iterator[Doors]:
    with echo.Echo(where, pair if row.is_tls else None) as server:
        yield Doors(row, server, tmp_path)


def rows(source: str = "", *, are_slow: bool = False) -> list[object]:
    """Return the rows of a source. ``are_slow``: those that wait, and so have one place only."""
    return [
        pytest.param(row, id=row.name)
        for row in logins.ROWS
        if source in {"", row.source} and are_slow == (row.places != echo.WHERE)
    ]


@pytest.mark.parametrize("row", rows(are_slow=True))
def test_no_door_shows_what_a_slow_server_repeats(doors: Doors) -> None:
    check_doors(doors)


@pytest.mark.parametrize("where", echo.WHERE)
@pytest.mark.parametrize("row", rows())
def test_no_door_shows_what_a_server_repeats(doors: Doors) -> None:
    check_doors(doors)


def check_doors(doors: Doors) -> None:
    run, server = doors.run, doors.server
    if run.has_pod:
        done = worker.run(*pod_arguments(doors, "-v=5"), env=doors.env)
        doors.check(done.errors, done.output)
        assert "internal error" not in done.errors
    if run.command != ():
        headers = ["--header-dir", str(doors.pod.headers)] if run.headers else []
        target = "" if run.command else str(doors.folder / "out.img")
        found = run.arguments(KINDS, target)
        if run.command is None:
            found = ["import", "--json", *headers, "--stall-timeout=1", *found]
        done = worker.run("-v=5", *found, env=doors.env)
        doors.check(done.errors, done.output)
        assert "internal error" not in done.errors
    if run.contacts:
        assert server.repeated, [each[:2] for each in server.requests]
        assert server.has_received() or not run.is_sent


@pytest.mark.parametrize("row", rows())
def test_neither_a_dry_run_nor_the_library_shows_it(doors: Doors) -> None:
    run = doors.run
    if run.command is None:
        headers = ["--header-dir", str(doors.pod.headers)] if run.headers else []
        found = run.arguments(KINDS, "")
        done = worker.run("-v=5", "inspect", "--stall-timeout=1", *headers, *found, env=doors.env)
        doors.check(done.errors, done.output)
    if run.has_library:
        argv = [sys.executable, "-m", "tests.support.program", doors.pod.data, doors.pod.headers]
        done = forked.run(argv, env={**worker.ENVIRONMENT, **doors.env})
        assert "Traceback" in done.stderr
        doors.check(done.stderr, done.stdout)


@pytest.mark.parametrize("verbosity", ["", "-v=2", "-v=3", "-v=4"])
@pytest.mark.parametrize("row", rows("http"))
def test_no_verbosity_shows_it(doors: Doors, verbosity: str) -> None:
    done = worker.run(*pod_arguments(doors, verbosity), env=doors.env)
    doors.check(done.errors, done.output)


@pytest.mark.parametrize("row", rows())
def test_no_source_shows_it_at_a_lower_verbosity(doors: Doors) -> None:
    """The log has three levels: warnings, info and debug. The tests above run all sources with the last.

    Info has all lines of warnings.
    """
    if doors.run.has_pod:
        done = worker.run(*pod_arguments(doors, "-v=1"), env=doors.env)
        doors.check(done.errors, done.output)


# -- the table is complete --------------------------------------------------------------------------


def test_every_source_has_a_row() -> None:
    assert set(KINDS) - {row.source for row in logins.ROWS} == WITHOUT


def secret_settings() -> list[str]:
    """Return the settings that are secret, or name a file with secrets."""
    found = [f"access.{each.name}" for each in dataclasses.fields(base.Access) if not each.repr]
    for each in {kind.location_type for kind in sources.own()}:
        table: dict[str, tuple[fields.Field, object]] = dict(fields.table(each))
        found += [f"{each.__name__}.{name}" for name, (field, _) in table.items() if field.secret]
    return sorted(found)


@pytest.mark.parametrize("setting", secret_settings())
def test_every_secret_setting_has_a_row(setting: str) -> None:
    assert any(setting in row.covers for row in logins.ROWS)
