"""The routing table: every row is one decision and its reason."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest

from cdi_worker import errors
from cdi_worker.formats import facts
from cdi_worker.formats.qcow2 import chain
from cdi_worker.importer import plan, request
from cdi_worker.importer.plan import Content, Offer, Route, Space
from cdi_worker.importer.request import Request
from cdi_worker.importer.settings import Room
from cdi_worker.sources import base, staged

GIB = 1 << 30
REQUEST = Request(source="http", location=base.Location("http://x/"), target="disk.img")
RANGES = Offer(size=GIB, identity="etag x", ranges=True)
STREAM = Offer(size=GIB)
EXTENTS = Offer(size=GIB, ranges=True, extents=True)
RUNS = Offer(runs=True, once=True)
FILE = Space(block=False, available=10 * GIB, usable=9 * GIB)
BLOCK = Space(block=True, available=10 * GIB, usable=10 * GIB)
DELTA = {"location": staged.Staged("https://v/", previous="one", current="two")}
CHECKED = {"checksum": "md5:" + "0" * 32}


class Laid(NamedTuple):
    """The properties of a layout that the planner uses."""

    unit: str
    crowded: bool = False
    map_length: int = 0


LAYOUTS: dict[str, Any] = {
    "qcow2": Laid("clusters"),
    "vmdk": Laid("grains"),
    "vdi": Laid("blocks"),
    "vhd": Laid("blocks"),
    "vhdx": Laid("blocks"),
}


def disk(form: str, *compressions: str, size: int | None = GIB, unplaceable: str = "") -> Content:
    return Content(form, compressions, size, None if unplaceable else LAYOUTS.get(form), unplaceable)


FILES = tuple(
    chain.File(f"{number}.qcow2", f"{number}.qcow2", 1, facts.Facts("qcow2", GIB)) for number in range(3)
)
CHAIN = Content("qcow2", (), GIB, chain=FILES)


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
    (RANGES, disk("vdi"), {}, Route.PLACE, True, "vdi blocks fetched by range"),
    (STREAM, disk("vdi", "gz"), {}, Route.PLACE, False, "vdi blocks written to their offsets"),
    (RANGES, disk("vhdx", unplaceable="a log"), {}, Route.CONVERT, True, "vhdx: a log"),
    (RANGES, disk("vhdx", unplaceable="a log"), CHECKED, Route.SPOOL, False, "checksum"),
    (RANGES, disk("vhdx", "gz", "xz", unplaceable="a log"), {}, Route.SPOOL, False, "gz, then xz"),
    (STREAM, disk("vhdx", unplaceable="a log"), {}, Route.SPOOL, False, "no byte ranges"),
    (EXTENTS, disk("raw"), DELTA, Route.UPDATE, True, "in place"),
    (RANGES, CHAIN, {}, Route.PLACE, True, "clusters of 3 files"),
    (RANGES, CHAIN, DELTA, Route.UPDATE, True, "qcow2 clusters fetched by range, written in place"),
]


@pytest.mark.parametrize(("offer", "content", "changes", "route", "random", "words"), ROWS)
def test_route_is_chosen_with_its_reason(
    offer: Offer, content: Content, changes: dict[str, Any], route: Route, random: bool, words: str
) -> None:
    requested = dataclasses.replace(REQUEST, **changes)
    made = plan.plan(requested, offer, content, FILE, 20 * GIB)
    assert (made.route, made.random) == (route, random)
    assert words in made.reason
    assert made.describe().startswith(f"{route}: ")


@pytest.mark.parametrize(
    ("offer", "content"),
    [
        (RANGES, disk("raw")),
        (EXTENTS, disk("raw")),
        (RANGES, disk("raw", "gz", size=None)),
        (RANGES, Content("vhd", (), GIB, raw=GIB)),
    ],
)
def test_target_that_is_a_stream_is_written_in_order(offer: Offer, content: Content) -> None:
    made = plan.plan(REQUEST, offer, content, FILE._replace(ordered=True), 20 * GIB)
    assert (made.route, made.random, made.scratch) == (Route.STREAM, False, False)


@pytest.mark.parametrize("form", ["qcow2", "vmdk", "vhdx"])
def test_other_formats_are_refused_for_a_target_that_is_a_stream(form: str) -> None:
    with pytest.raises(errors.Unsupported, match=f"{form} is not in the order of the disk"):
        plan.plan(REQUEST, RANGES, disk(form), FILE._replace(ordered=True), 20 * GIB)


TWICE = "more than 64 MiB of the image precede the tables that map them"


@pytest.mark.parametrize(
    ("offer", "scratch", "expected"),
    [
        (STREAM._replace(two_passes=TWICE), 20 * GIB, Route.SPOOL),
        (STREAM._replace(two_passes=TWICE), None, errors.ScratchRequired),
        (STREAM._replace(two_passes=TWICE, once=True), 20 * GIB, errors.Unsupported),
        (RANGES._replace(two_passes=TWICE, checksum=True), None, Route.PLACE),
    ],
)
def test_image_that_must_be_read_twice(offer: Offer, scratch: int | None, expected: Any) -> None:
    if isinstance(expected, Route):
        made = plan.plan(REQUEST, offer, disk("qcow2"), FILE, scratch)
        assert (made.route, TWICE in made.reason) == (expected, True)
    else:
        with pytest.raises(expected, match=TWICE):
            plan.plan(REQUEST, offer, disk("qcow2"), FILE, scratch)


@pytest.mark.parametrize("changes", [{}, DELTA])
def test_layers_need_byte_ranges(changes: dict[str, Any]) -> None:
    with pytest.raises(errors.Unsupported, match="no byte ranges, which the layers of a disk need"):
        plan.plan(dataclasses.replace(REQUEST, **changes), STREAM, CHAIN, FILE, None)


def test_scratch_is_required_only_if_needed() -> None:
    for offer, content, changes, route, _, _ in ROWS:
        requested = dataclasses.replace(REQUEST, **changes)
        if route is Route.SPOOL:
            with pytest.raises(errors.ScratchRequired):
                plan.plan(requested, offer, content, FILE, None)
        else:
            assert not plan.plan(requested, offer, content, FILE, None).scratch


def test_crowded_stream_needs_scratch() -> None:
    """A disk with possibly too many parts for memory needs scratch, as a stream cannot be read twice."""
    once = STREAM._replace(once=True)
    crowded: Any = Laid("grains", crowded=True)
    content = dataclasses.replace(disk("vmdk"), layout=crowded)
    for offer, scratch, route in (
        (once, GIB, Route.SPOOL),
        (once, GIB - 1, Route.PLACE),
        (once, None, Route.PLACE),
        (STREAM, GIB, Route.PLACE),
    ):
        assert plan.plan(REQUEST, offer, content, FILE, scratch).route is route
    assert plan.plan(REQUEST, once, disk("vmdk"), FILE, GIB).route is Route.PLACE


def test_huge_block_map_is_not_planned_for_qemu_img() -> None:
    """It would keep all of it in memory: our own reader tries the stream, and nothing is downloaded."""
    huge: Any = Laid("blocks", crowded=True, map_length=facts.MAX_TABLE + 1)
    content = dataclasses.replace(disk("vhdx"), layout=huge)
    once = STREAM._replace(once=True)
    assert plan.plan(REQUEST, once, content, FILE, GIB).route is Route.PLACE
    twice = STREAM._replace(two_passes="too many pieces")
    with pytest.raises(errors.Refused, match="the block map has"):
        plan.plan(REQUEST, twice, content, FILE, GIB)
    largest: Any = huge._replace(map_length=facts.MAX_TABLE)
    content = dataclasses.replace(content, layout=largest)
    assert plan.plan(REQUEST, twice, content, FILE, GIB).route is Route.SPOOL


def test_too_small_scratch_is_found_before_the_transfer() -> None:
    with pytest.raises(errors.ScratchTooSmall, match="no space left on device"):
        plan.plan(REQUEST, STREAM, disk("vhdx", unplaceable="a log"), FILE, GIB - 1)


@pytest.mark.parametrize("space", [FILE, BLOCK])
def test_image_larger_than_the_volume_is_refused(space: Space) -> None:
    plan.plan(REQUEST, RANGES, disk("qcow2", size=10 * GIB), space, None)
    with pytest.raises(
        errors.TooLarge,
        match=(
            f"virtual image size {10 * GIB + 1} is larger than the reported available storage {10 * GIB}. "
            "A larger PVC is required"
        ),
    ):
        plan.plan(REQUEST, RANGES, disk("qcow2", size=10 * GIB + 1), space, None)


@pytest.mark.parametrize(
    ("space", "requested", "grown"),
    [(FILE, None, 0), (FILE, 2 * GIB, 2 * GIB), (FILE, 20 * GIB, 9 * GIB), (BLOCK, 2 * GIB, 0)],
)
def test_disk_grows_to_the_requested_size(space: Space, requested: int | None, grown: int) -> None:
    made = plan.plan(
        dataclasses.replace(REQUEST, room=Room(size=requested)), RANGES, disk("raw"), space, None
    )
    assert made.grow_to == grown


@pytest.mark.parametrize(
    ("space", "requested", "size"),
    [(FILE, None, 9 * GIB), (FILE, GIB, 9 * GIB), (BLOCK, GIB, GIB), (BLOCK, None, 10 * GIB)],
)
def test_blank_disk_has_the_requested_size(space: Space, requested: int | None, size: int) -> None:
    blank = dataclasses.replace(REQUEST, room=Room(size=requested))
    made = plan.plan(blank, Offer(blank=True), Content(), space, None)
    assert (made.route, made.virtual_size) == (Route.BLANK, size)


def test_blank_disk_larger_than_the_device_is_refused() -> None:
    blank = dataclasses.replace(REQUEST, room=Room(size=11 * GIB))
    with pytest.raises(errors.TooLarge):
        plan.plan(blank, Offer(blank=True), Content(), BLOCK, None)


def test_delta_is_merged_without_growing_the_disk() -> None:
    location = staged.Staged("https://x/", current="two", previous="one")
    requested = dataclasses.replace(REQUEST, source="imageio", location=location, image_size=5 * GIB)
    made = plan.plan(requested, RANGES, disk("qcow2"), FILE, 20 * GIB)
    assert (made.route, made.scratch, made.grow_to) == (Route.MERGE, True, 0)
    assert "since checkpoint one" in made.reason
    with pytest.raises(errors.ScratchRequired):
        plan.plan(requested, RANGES, disk("qcow2"), FILE, None)
    with pytest.raises(errors.ScratchTooSmall):
        plan.plan(requested, RANGES, disk("qcow2"), FILE, GIB - 1)


@pytest.mark.parametrize("form", ["html", "empty", "lfs", "zip"])
def test_format_that_is_not_a_disk_is_refused(form: str) -> None:
    with pytest.raises(errors.Unsupported):
        plan.plan(REQUEST, RANGES, disk(form), FILE, 20 * GIB)


def test_obstacle_of_a_source_ends_the_plan() -> None:
    """It can be examined, as the disks of an OVA of which one is to be chosen."""
    obstacle = errors.Unsupported(reason="it has two disks")
    with pytest.raises(errors.Unsupported, match="it has two disks"):
        plan.plan(REQUEST, RANGES._replace(obstacle=obstacle), disk("raw"), FILE, None)


def test_archive_is_unpacked() -> None:
    archive = dataclasses.replace(REQUEST, content_type="archive")
    assert plan.plan(archive, STREAM, disk("tar", "gz", size=None), FILE, None).route is Route.UNPACK
    with pytest.raises(errors.Unsupported, match="content type archive"):
        plan.plan(REQUEST, STREAM, disk("tar", size=None), FILE, None)
    with pytest.raises(errors.Unsupported, match="this is qcow2"):
        plan.plan(archive, STREAM, disk("qcow2"), FILE, None)
    with pytest.raises(errors.RequestError, match="file system"):
        plan.plan(archive, STREAM, disk("tar", size=None), BLOCK, None)


def test_cloned_file_system_is_unpacked_or_its_disk_is_taken() -> None:
    clone = dataclasses.replace(REQUEST, content_type=request.CLONE)
    tar = disk("tar", size=None)
    assert plan.plan(clone, RUNS, tar, FILE, None).route is Route.UNPACK
    assert plan.plan(clone, RUNS, tar, BLOCK, None).route is Route.EXTRACT


@pytest.mark.parametrize("offer", [RANGES, STREAM, EXTENTS._replace(ranges=False)])
@pytest.mark.parametrize("form", ["raw", "vmdk"])
def test_delta_is_never_imported_as_a_disk(offer: Offer, form: str) -> None:
    with pytest.raises(errors.Unsupported, match="does not support checkpoints"):
        plan.plan(dataclasses.replace(REQUEST, **DELTA), offer, disk(form), FILE, GIB)


def test_delta_has_no_size_and_no_checksum() -> None:
    requested = dataclasses.replace(REQUEST, **DELTA, image_size=2 * GIB)
    assert plan.plan(requested, EXTENTS, disk("raw"), FILE, None).grow_to == 0
    with pytest.raises(errors.Unsupported, match="does not support checkpoints"):
        plan.plan(dataclasses.replace(requested, **CHECKED), EXTENTS, disk("raw"), FILE, None)
