"""Sources that a program registers, without an installed entry point."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors, sources
from tests.sources.plugin.cdi_worker_pattern import location as pattern_location

SIZE = 3 << 20


class Pattern(cdi_worker.Source):
    """A disk of one repeated byte."""

    def __init__(self, where: pattern_location.Pattern, cancel: cdi_worker.Cancel) -> None:
        self._where = where

    def open(self, opening: cdi_worker.Opening) -> cdi_worker.Facts:
        where = self._where
        return cdi_worker.Facts(name=where.endpoint, size=int(where.size), format="raw")

    def read_range(self, offset: int, into: memoryview, /) -> int:
        into[:] = self._where.byte.to_bytes() * len(into)
        return len(into)


class Failing(Pattern):
    """One whose author did not expect what happens while it is read."""

    def read_range(self, offset: int, into: memoryview, /) -> int:
        raise KeyError("page")


class Gapped(Pattern):
    """One whose extents leave out a part of the disk."""

    def extents(self) -> Iterator[cdi_worker.Extent]:
        yield cdi_worker.Extent(0, 1 << 20, zero=False)
        yield cdi_worker.Extent(2 << 20, 1 << 20, zero=True)


def kind(name: str = "pattern", source: object = Pattern, **more: object) -> cdi_worker.Kind:
    """Return a kind of source with the class itself, and with that of its location."""
    return cdi_worker.Kind(name, source, location=pattern_location.Pattern, **more)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    """Remove what a test has registered."""
    before = {each.name for each in sources.third_party()}
    yield
    for each in {each.name for each in sources.third_party()} - before:
        cdi_worker.unregister(each)


def request(source: str, target: Path, *, byte: int = 0xA5) -> cdi_worker.Request:
    where = pattern_location.Pattern(f"pattern:{SIZE}", byte=byte)
    return cdi_worker.Request(source=source, location=where, target=str(target))


def test_registered_source_is_used_like_an_installed_one(tmp_path: Path) -> None:
    cdi_worker.register(kind(schemes=("pattern",)))
    assert sources.find("pattern") == sources.find_scheme("pattern")
    assert cdi_worker.inspect(request("pattern", tmp_path / "disk.img")).survey.virtual_size == SIZE
    cdi_worker.run(request("pattern", tmp_path / "disk.img"))
    assert (tmp_path / "disk.img").read_bytes() == b"\xa5" * SIZE
    with pytest.raises(errors.RequestError, match=r"unknown source 'patter'; did you mean 'pattern'"):
        sources.find("patter")


def test_plain_location_is_converted_to_that_of_the_source() -> None:
    cdi_worker.register(kind())
    made = sources.find("pattern").accept(cdi_worker.Location("pattern:1"))
    assert made == pattern_location.Pattern("pattern:1")


def test_references_are_as_good_as_the_objects(tmp_path: Path) -> None:
    cdi_worker.register(
        cdi_worker.Kind(
            "pattern", f"{__name__}:Pattern", f"{pattern_location.__name__}:Pattern", schemes=("pattern",)
        )
    )
    cdi_worker.run(request("pattern", tmp_path / "disk.img"))
    assert (tmp_path / "disk.img").read_bytes() == b"\xa5" * SIZE


@pytest.mark.parametrize("source", [Failing, f"{__name__}:Failing"])
def test_exception_in_a_registered_source_is_reported_with_its_name(source: object, tmp_path: Path) -> None:
    cdi_worker.register(kind("failing", source))
    with pytest.raises(
        errors.PluginFailed, match=r"^source 'failing' \(tests\): KeyError: 'page'; report this"
    ):
        cdi_worker.run(request("failing", tmp_path / "disk.img"))
    assert not [*tmp_path.iterdir()]


def test_disk_of_which_a_part_is_missing_is_not_usable(tmp_path: Path) -> None:
    cdi_worker.register(kind("gapped", Gapped))
    with pytest.raises(
        errors.SourceError, match=f"only {2 << 20} of {SIZE} bytes of the disk were delivered"
    ):
        cdi_worker.run(request("gapped", tmp_path / "disk.img"))
    assert not (tmp_path / "disk.img").exists()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (kind(), "source 'pattern': is registered already"),
        (kind("other", schemes=("pattern",)), "source 'other': URL scheme 'pattern' is that of 'pattern'"),
        (kind("http"), "source 'http': is registered already"),
        (kind("other", schemes=("https",)), "source 'other': URL scheme 'https' is that of 'http'"),
    ],
)
def test_name_and_scheme_are_registered_once(second: cdi_worker.Kind, message: str) -> None:
    cdi_worker.register(kind(schemes=("pattern",)))
    before = list(sources.third_party())
    with pytest.raises(errors.RequestError) as caught:
        cdi_worker.register(second)
    assert str(caught.value) == message
    assert list(sources.third_party()) == before


def test_unregistered_source_is_unknown() -> None:
    cdi_worker.register(kind())
    cdi_worker.unregister("pattern")
    for name in ("pattern", "http"):
        with pytest.raises(errors.RequestError, match=f"source '{name}': is not registered"):
            cdi_worker.unregister(name)
    with pytest.raises(errors.RequestError, match="unknown source"):
        sources.find("pattern")
    cdi_worker.register(kind())


def test_of_two_threads_one_registers_a_name() -> None:
    def register(_: int) -> bool:
        try:
            cdi_worker.register(kind())
        except errors.RequestError:
            return False
        return True

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(register, range(64))) == 1


def test_registered_source_comes_before_an_installed_one(tmp_path: Path) -> None:
    info = tmp_path / "pattern-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: pattern\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[cdi_worker.sources]\npattern = json:loads\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "import cdi_worker; from cdi_worker import sources\n"
        "print(sources.find('pattern').source)\n"
        "cdi_worker.register(cdi_worker.Kind('pattern', 'json:dumps'))\n"
        "print(sources.find('pattern').source)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout.split() == ["json:loads", "json:dumps"]
