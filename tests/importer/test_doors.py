"""No door shows a secret that a server repeats: every source, every kind of credential, every place.

The doors: the log at each verbosity, the termination message, the report, the message and the JSON of the
commands, the dry run, the exceptions of the library, and the files that stay. The table is in
``tests.support.logins``.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from cdi_worker import sources
from cdi_worker.sources import base, fields
from cdi_worker.sources.ovirt import source as imageio
from tests.support import echo, forked, logins, ovirt_disks, tls, uploads, worker

KINDS = {each.name: each for each in sources.own()}
#: What has no address with credentials: a blank disk, and another volume of the pod.
WITHOUT = {"none", "volume"}


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
        #: An oVirt data server is waited for, by a limit that only the library has.
        self.is_patient = row.source == "imageio"
        self.env = {"HOME": str(self.given), **self.run.variables}  # no login of this machine
        server.secrets = self.run.secrets
        server.words = row.words
        self.pod = worker.Pod(folder)
        for name, value in self.run.headers.items():
            (self.pod.headers / name).write_text(f"{name}: {value}")
        self.folder = folder

    def check_worker(self, *arguments: str) -> None:
        """Run the worker; fail if one of its doors shows a secret, or it has an internal error."""
        if self.is_patient:
            quick = dataclasses.replace(ovirt_disks.QUICK, first=0.5, last=1.0)
            with mock.patch.object(imageio.ImageioSource.__init__, "__defaults__", (quick,)):
                done = worker.call(*arguments, env=self.env)
        else:
            done = worker.run(*arguments, env=self.env)
        self.check(done.errors, done.output)
        assert "internal error" not in done.errors

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


def placed() -> Iterator[tuple[logins.Row, str]]:
    """Yield each row with its first place, and with one of the others; together, a source has all places."""
    for source in dict.fromkeys(row.source for row in logins.ROWS):
        found = [row for row in logins.ROWS if row.source == source]
        others = itertools.cycle(echo.WHERE[1:])
        for row in found:
            yield row, row.places[0]
            for _ in row.places[1 : 3 if len(found) == 1 else 2]:
                yield row, next(others)


def name(value: object) -> str:
    return value.name if isinstance(value, logins.Row) else str(value)


@pytest.mark.parametrize(("row", "where"), list(placed()), ids=name)
def test_no_door_shows_what_a_server_repeats(doors: Doors) -> None:
    run, server = doors.run, doors.server
    if run.has_pod:
        doors.check_worker(*pod_arguments(doors, "-v=5"))
    if run.command != ():
        headers = ["--header-dir", str(doors.pod.headers)] if run.headers else []
        target = "" if run.command else str(doors.folder / "out.img")
        found = run.arguments(KINDS, target)
        if run.command is None:
            found = ["import", "--json", *headers, "--stall-timeout=1", *found]
        doors.check_worker("-v=5", *found)
    if run.contacts:
        assert server.repeated, [each[:2] for each in server.requests]
        assert server.has_received() or not run.is_sent


#: One credential of each source.
FIRST = {row.source: row for row in reversed(logins.ROWS) if row.source in KINDS}


@pytest.mark.parametrize("row", FIRST.values(), ids=name)
def test_neither_a_dry_run_nor_the_library_shows_it(doors: Doors) -> None:
    """They differ from an import in nothing that a source does."""
    run = doors.run
    headers = ["--header-dir", str(doors.pod.headers)] if run.headers else []
    doors.check_worker("-v=5", "inspect", "--stall-timeout=1", *headers, *run.arguments(KINDS, ""))
    if run.has_library:
        argv = [sys.executable, "-m", "tests.support.program", doors.pod.data, doors.pod.headers]
        done = forked.run(argv, env={**worker.ENVIRONMENT, **doors.env})
        assert "Traceback" in done.stderr
        doors.check(done.stderr, done.stdout)


@pytest.mark.parametrize("row", [row for row in logins.ROWS if row.source == "http"], ids=name)
def test_no_verbosity_shows_it(doors: Doors) -> None:
    """The log has three levels: warnings, info and debug. The tests above run all sources with the last."""
    for verbosity in ("", "-v=1", "-v=4"):
        doors.check_worker(*pod_arguments(doors, verbosity))


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


def test_every_secret_setting_has_a_row() -> None:
    covered = {setting for row in logins.ROWS for setting in row.covers}
    assert not [setting for setting in secret_settings() if setting not in covered]
