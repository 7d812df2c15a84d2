"""The routing table: every row is one decision and the words that explain it."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest

from cdi_worker import errors, plan, request
from cdi_worker.plan import Content, Offer, Route, Space
from cdi_worker.request import Request
from cdi_worker.sources import base, staged

GIB = 1 << 30
WANTED = Request(source="http", location=base.Location("http://x/"), target="disk.img")
RANGES = Offer(size=GIB, identity="etag x", ranges=True)
STREAM = Offer(size=GIB)
EXTENTS = Offer(size=GIB, ranges=True, extents=True)
RUNS = Offer(runs=True, once=True)
FILE = Space(block=False, available=10 * GIB, usable=9 * GIB)
BLOCK = Space(block=True, available=10 * GIB, usable=10 * GIB)
DELTA = {"location": staged.Staged("https://v/", previous="one", current="two")}
CHECKED = {"checksum": "md5:" + "0" * 32}
GZ = ("gz",)


class Laid(NamedTuple):
    """What the planner asks of a layout."""

    unit: str
    crowded: bool = False


LAYOUTS: dict[str, Any] = {"qcow2": Laid("clusters"), "vmdk": Laid("grains")}


def disk(form: str, *compressions: str, size: int | None = GIB, unplaceable: str = "") -> Content:
    return Content(form, compressions, size, None if unplaceable else LAYOUTS.get(form), unplaceable)


ROWS: list[tuple[Offer, Content, dict[str, Any], Route, bool, str]] = [
    (RANGES, disk("raw"), {}, Route.STREAM, True, "parallel ranges"),
    (RANGES, disk("iso"), {}, Route.STREAM, True, "parallel ranges"),
    (RANGES, disk("raw"), CHECKED, Route.STREAM, False, "checksum"),
    (RANGES, disk("raw", "gz", size=None), {}, Route.STREAM, False, "compressed with gz"),
    (STREAM, disk("raw"), {}, Route.STREAM, False, "no byte ranges"),
    (EXTENTS, disk("raw"), {}, Route.EXTENTS, True, "only data is copied"),
    (EXTENTS, disk("raw"), CHECKED, Route.STREAM, False, "checksum"),
    (EXTENTS, disk("raw", "xz", size=None), {}, Route.STREAM, False, "compressed with xz"),
    (RUNS, disk("raw", size=None), {}, Route.EXTENTS, False, "only data is written"),
    (RUNS, disk("raw", size=None), CHECKED, Route.EXTENTS, False, "only data is written"),
    (RANGES, disk("qcow2"), {}, Route.PLACE, True, "fetched by range"),
    (RANGES, disk("qcow2"), CHECKED, Route.PLACE, False, "checksum"),
    (RANGES, disk("qcow2", "gz"), {}, Route.PLACE, False, "compressed with gz"),
    (STREAM, disk("qcow2"), {}, Route.PLACE, False, "no byte ranges"),
    (RANGES, disk("vmdk"), {}, Route.PLACE, True, "vmdk grains fetched by range"),
    (RANGES, disk("vmdk"), CHECKED, Route.PLACE, False, "checksum"),
    (STREAM, disk("vmdk", "gz"), {}, Route.PLACE, False, "vmdk grains written to their offsets"),
    (RANGES, disk("vmdk", unplaceable="long grains"), {}, Route.CONVERT, True, "long grains"),
    (RANGES, disk("qcow2", unplaceable="extended L2"), {}, Route.CONVERT, True, "extended L2"),
    (STREAM, disk("qcow2", unplaceable="extended L2"), {}, Route.SPOOL, False, "extended L2"),
    *[(RANGES, disk(form), {}, Route.CONVERT, True, form) for form in ("vdi", "vhd", "vhdx")],
    (RANGES, disk("vdi"), CHECKED, Route.SPOOL, False, "checksum"),
    (RANGES, disk("vdi", "gz", "xz"), {}, Route.SPOOL, False, "gz, then xz"),
    (STREAM, disk("vhdx"), {}, Route.SPOOL, False, "no byte ranges"),
    (EXTENTS, disk("raw"), DELTA, Route.UPDATE, True, "in place"),
]


@pytest.mark.parametrize(("offer", "content", "changes", "route", "random", "words"), ROWS)
def test_route(
    offer: Offer, content: Content, changes: dict[str, Any], route: Route, random: bool, words: str
) -> None:
    wanted = dataclasses.replace(WANTED, **changes)
    made = plan.plan(wanted, offer, content, FILE, 20 * GIB)
    assert (made.route, made.random) == (route, random)
    assert words in made.reason
    assert made.describe().startswith(f"{route}: ")


def test_scratch_is_asked_for_only_by_what_needs_it() -> None:
    for offer, content, changes, route, _, _ in ROWS:
        wanted = dataclasses.replace(WANTED, **changes)
        if route is Route.SPOOL:
            with pytest.raises(errors.ScratchRequired):
                plan.plan(wanted, offer, content, FILE, None)
        else:
            assert not plan.plan(wanted, offer, content, FILE, None).scratch


def test_crowded_disk_that_is_read_once_goes_through_scratch() -> None:
    """What may be too much to be placed as it passes cannot be read again."""
    once = dataclasses.replace(STREAM, once=True)
    crowded: Any = Laid("grains", crowded=True)
    content = dataclasses.replace(disk("vmdk"), layout=crowded)
    for offer, scratch, route in (
        (once, GIB, Route.SPOOL),
        (once, GIB - 1, Route.PLACE),
        (once, None, Route.PLACE),
        (STREAM, GIB, Route.PLACE),
    ):
        assert plan.plan(WANTED, offer, content, FILE, scratch).route is route
    assert plan.plan(WANTED, once, disk("vmdk"), FILE, GIB).route is Route.PLACE


def test_scratch_too_small_is_found_before_the_transfer() -> None:
    with pytest.raises(errors.ScratchTooSmall, match="no space left on device"):
        plan.plan(WANTED, STREAM, disk("vdi"), FILE, GIB - 1)


@pytest.mark.parametrize("space", [FILE, BLOCK])
def test_image_larger_than_the_volume(space: Space) -> None:
    plan.plan(WANTED, RANGES, disk("qcow2", size=10 * GIB), space, None)
    with pytest.raises(
        errors.TooLarge,
        match=(
            f"virtual image size {10 * GIB + 1} is larger than the reported available storage {10 * GIB}. "
            "A larger PVC is required"
        ),
    ):
        plan.plan(WANTED, RANGES, disk("qcow2", size=10 * GIB + 1), space, None)


@pytest.mark.parametrize(
    ("space", "wanted", "grown"),
    [(FILE, None, 0), (FILE, 2 * GIB, 2 * GIB), (FILE, 20 * GIB, 9 * GIB), (BLOCK, 2 * GIB, 0)],
)
def test_growth(space: Space, wanted: int | None, grown: int) -> None:
    made = plan.plan(dataclasses.replace(WANTED, image_size=wanted), RANGES, disk("raw"), space, None)
    assert made.grow_to == grown


@pytest.mark.parametrize(
    ("space", "wanted", "size"),
    [(FILE, None, 9 * GIB), (FILE, GIB, 9 * GIB), (BLOCK, GIB, GIB), (BLOCK, None, 10 * GIB)],
)
def test_blank(space: Space, wanted: int | None, size: int) -> None:
    blank = dataclasses.replace(WANTED, image_size=wanted)
    made = plan.plan(blank, Offer(blank=True), Content(), space, None)
    assert (made.route, made.virtual_size) == (Route.BLANK, size)


def test_blank_larger_than_the_device() -> None:
    blank = dataclasses.replace(WANTED, image_size=11 * GIB)
    with pytest.raises(errors.TooLarge):
        plan.plan(blank, Offer(blank=True), Content(), BLOCK, None)


def test_a_delta_is_merged_and_grows_nothing() -> None:
    location = staged.Staged("https://x/", current="two", previous="one")
    wanted = dataclasses.replace(WANTED, source="imageio", location=location, image_size=5 * GIB)
    made = plan.plan(wanted, RANGES, disk("qcow2"), FILE, 20 * GIB)
    assert (made.route, made.scratch, made.grow_to) == (Route.MERGE, True, 0)
    assert "since checkpoint one" in made.reason
    with pytest.raises(errors.ScratchRequired):
        plan.plan(wanted, RANGES, disk("qcow2"), FILE, None)
    with pytest.raises(errors.ScratchTooSmall):
        plan.plan(wanted, RANGES, disk("qcow2"), FILE, GIB - 1)


@pytest.mark.parametrize("form", ["html", "empty", "luks", "zip"])
def test_what_is_no_disk(form: str) -> None:
    with pytest.raises(errors.Unsupported):
        plan.plan(WANTED, RANGES, disk(form), FILE, 20 * GIB)


def test_archives() -> None:
    archive = dataclasses.replace(WANTED, content_type="archive")
    assert plan.plan(archive, STREAM, disk("tar", "gz", size=None), FILE, None).route is Route.UNPACK
    with pytest.raises(errors.Unsupported, match="content type archive"):
        plan.plan(WANTED, STREAM, disk("tar", size=None), FILE, None)
    with pytest.raises(errors.Unsupported, match="this is qcow2"):
        plan.plan(archive, STREAM, disk("qcow2"), FILE, None)
    with pytest.raises(errors.RequestError, match="file system"):
        plan.plan(archive, STREAM, disk("tar", size=None), BLOCK, None)


def test_cloned_file_system_is_unpacked_or_its_disk_is_taken() -> None:
    clone = dataclasses.replace(WANTED, content_type=request.CLONE)
    tar = disk("tar", size=None)
    assert plan.plan(clone, RUNS, tar, FILE, None).route is Route.UNPACK
    assert plan.plan(clone, RUNS, tar, BLOCK, None).route is Route.EXTRACT


@pytest.mark.parametrize("offer", [RANGES, STREAM, dataclasses.replace(EXTENTS, ranges=False)])
@pytest.mark.parametrize("form", ["raw", "vmdk"])
def test_a_delta_is_never_taken_for_a_disk(offer: Offer, form: str) -> None:
    with pytest.raises(errors.Unsupported, match="does not support checkpoints"):
        plan.plan(dataclasses.replace(WANTED, **DELTA), offer, disk(form), FILE, GIB)


def test_a_delta_does_not_grow_the_disk_and_has_no_checksum() -> None:
    wanted = dataclasses.replace(WANTED, **DELTA, image_size=2 * GIB)
    assert plan.plan(wanted, EXTENTS, disk("raw"), FILE, None).grow_to == 0
    with pytest.raises(errors.Unsupported, match="does not support checkpoints"):
        plan.plan(dataclasses.replace(wanted, **CHECKED), EXTENTS, disk("raw"), FILE, None)
