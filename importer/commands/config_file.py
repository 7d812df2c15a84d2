"""The configuration file: TOML, with the names of the options.

A key is an option without its dashes (``stall-timeout = 60``). A table with the name of a command holds
values for this command only.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from cdi_worker import errors
from cdi_worker.importer import contract

NAME = "cdi-worker/config.toml"
VARIABLES = (
    contract.Variable(
        "XDG_CONFIG_HOME", "directory of the configuration file; otherwise `.config` in `HOME`"
    ),
    contract.Variable("XDG_CONFIG_DIRS", "directories of the configuration file", "/etc/xdg"),
    contract.Variable("HOME", "see `XDG_CONFIG_HOME`"),
)


class Config(NamedTuple):
    """The content of a configuration file. ``path`` empty: there is none."""

    path: str = ""
    #: The file of the user's own that cannot be read; empty: none.
    skipped: str = ""
    table: Mapping[str, Any] = MappingProxyType({})

    def values(self, command: str) -> dict[str, Any]:
        """Return the values for ``command``, by key."""
        common = {key: value for key, value in self.table.items() if not isinstance(value, dict)}
        own = self.table.get(command, {})
        return {key.replace("_", "-"): _plain(value) for key, value in {**common, **own}.items()}

    @property
    def sections(self) -> Mapping[str, Mapping[str, Any]]:
        """The keys of each command; those for all commands under the empty name."""
        found = {name: value for name, value in self.table.items() if isinstance(value, dict)}
        return {"": {name: value for name, value in self.table.items() if name not in found}, **found}


def _plain(value: Any) -> Any:
    """Return a value as it would be given on the command line: options parse text."""
    if isinstance(value, bool):
        return value
    if isinstance(value, list):
        return tuple(str(each) for each in value)
    return str(value)


def places(env: Mapping[str, str]) -> Iterable[Path]:
    """Yield where the file may be, the first first (XDG Base Directory Specification)."""
    if own := _own(env):
        yield own
    for folder in contract.Reading(env, VARIABLES).text("XDG_CONFIG_DIRS").split(":"):
        if folder.startswith("/"):
            yield Path(folder, NAME)


def read(path: str, env: Mapping[str, str]) -> Config:
    """Return the configuration in ``path``; if that is empty, in the first file that exists.

    Raises ``errors.RequestError``.
    """
    skipped = ""
    for place in (Path(path),) if path else places(env):
        try:
            data = _content(path) if path else place.read_bytes()
        except OSError as err:
            if isinstance(err, PermissionError) and not path and place == _own(env):
                # The home of another user, as with ``sudo -u``. What an administrator sets is never skipped.
                skipped = str(place)
            elif path or not isinstance(err, FileNotFoundError | NotADirectoryError):
                raise errors.RequestError(f"{place}: {errors.words(err)}") from err
            continue
        import tomllib

        try:
            return Config(str(place), skipped, tomllib.loads(data.decode()))
        except ValueError as err:
            raise errors.RequestError(f"{place}: {err}") from err
        except RecursionError as err:
            raise errors.RequestError(f"{place}: arrays are nested too deeply") from err
    return Config(skipped=skipped)


def _own(env: Mapping[str, str]) -> Path | None:
    """Return the place of the user's own file."""
    text = contract.Reading(env, VARIABLES).text
    home = text("XDG_CONFIG_HOME") or (f"{text('HOME')}/.config" if text("HOME") else "")
    return Path(home, NAME) if home.startswith("/") else None


def _content(path: str) -> bytes:
    """Return the file that the user has named, which may be a pipe."""
    from cdi_worker.sources import smallfile

    return smallfile.read(path)
