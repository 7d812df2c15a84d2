"""The routing table: every row is one decision and its reason."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest

from cdi_worker import errors
from cdi_worker.formats import facts
from cdi_worker.formats.qcow2 import chain
from cdi_worker.importer import plan, request
from cdi_worker.importer.plan import Plan, Route
from cdi_worker.importer.request import Request, Room
from cdi_worker.importer.survey import Survey
from cdi_worker.sources import base, staged, trust

GIB = 1 << 30
REQUEST = Request(source="http", location=base.Location("http://x/"), target="disk.img")
FILE = {"available": 10 * GIB, "usable": 9 * GIB}
BLOCK = {"block": True, "available": 10 * GIB, "usable": 10 * GIB}
DELTA = {"location": staged.Staged("https://v/", previous="one", current="two")}
CHECKED = {"checksum": "md5:" + "0" * 32}


class Source(NamedTuple):
    """What a source states, and how it can be read (fields of ``Survey``)."""

    facts: base.Facts
    ways: dict[str, bool]

    def stating(self, **stated: Any) -> Source:
        return self._replace(facts=dataclasses.replace(self.facts, **stated))


def source(*ways: str, **stated: Any) -> Source:
    return Source(base.Facts(name="disk", **stated), dict.fromkeys(ways, True))


RANGES = source("ranges", size=GIB, identity="etag x")
STREAM = source(size=GIB)
EXTENTS = source("ranges", "extents", size=GIB)
RUNS = source("runs", once=True)
BLANK = source(blank=True)
EXPORT = source(identity="a snapshot", format="vmdk")


def planned(
    requested: Request,
    source: Source,
    content: Survey,
    space: dict[str, Any],
    scratch: int | None,
    two_passes: str = "",
) -> Plan:
    found = dataclasses.replace(content, **source.ways, **space, scratch=scratch)
    demanded = trust.Demanded(requested.checksum)
    return plan.plan(requested, demanded, source.facts, found, two_passes)


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


def disk(form: str, *compressions: str, size: int | None = GIB, unplaceable: str = "") -> Survey:
    layout = None if unplaceable else LAYOUTS.get(form)
    return Survey(
        format=form, compressions=compressions, virtual_size=size, layout=layout, unplaceable=unplaceable
    )


FILES = tuple(
    chain.ChainFile(f"{number}.qcow2", f"{number}.qcow2", 1, facts.ImageFacts("qcow2", GIB))
    for number in range(3)
)
CHAIN = Survey(format="qcow2", virtual_size=GIB, chain=FILES)


ROWS: list[tuple[Source, Survey, dict[str, Any], Route, bool, str]] = [
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
    (
        EXPORT,
        disk("vmdk"),
        DELTA,
        Route.PLACE,
        False,
        "compared with the target, only what differs is written",
    ),
    (EXPORT, disk("vmdk", unplaceable="long grains"), DELTA, Route.SPOOL, False, "compared with the target"),
    (EXPORT, disk("vmdk"), {}, Route.PLACE, False, "no byte ranges"),
    (RANGES, CHAIN, {}, Route.PLACE, True, "clusters of 3 files"),
    (RANGES, CHAIN, DELTA, Route.UPDATE, True, "qcow2 clusters fetched by range, written in place"),
]


@pytest.mark.parametrize(("offer", "content", "changes", "route", "random", "words"), ROWS)
def test_route_is_chosen_with_its_reason(
    offer: Source, content: Survey, changes: dict[str, Any], route: Route, random: bool, words: str
) -> None:
    requested = dataclasses.replace(REQUEST, **changes)
    made = planned(requested, offer, content, FILE, 20 * GIB)
    assert (made.route, made.random) == (route, random)
    assert words in made.reason
    assert made.describe().startswith(f"{route}: ")


@pytest.mark.parametrize(
    ("offer", "content"),
    [
        (RANGES, disk("raw")),
        (EXTENTS, disk("raw")),
        (RANGES, disk("raw", "gz", size=None)),
        (RANGES, Survey(format="vhd", virtual_size=GIB, raw=GIB)),
    ],
)
def test_target_that_is_a_stream_is_written_in_order(offer: Source, content: Survey) -> None:
    made = planned(REQUEST, offer, content, {**FILE, "ordered": True}, 20 * GIB)
    assert (made.route, made.random, made.scratch) == (Route.STREAM, False, False)


@pytest.mark.parametrize("form", ["qcow2", "vmdk", "vhdx"])
def test_other_formats_need_ranges_or_scratch_for_a_target_that_is_a_stream(form: str) -> None:
    ordered = {**FILE, "ordered": True}
    with pytest.raises(errors.Unsupported, match=f"{form} is not in the order of the disk"):
        planned(REQUEST, STREAM, disk(form), ordered, None)
    made = planned(REQUEST, STREAM, disk(form), ordered, 20 * GIB)
    assert (made.route, made.scratch) == (Route.SPOOL, True)
    made = planned(REQUEST, RANGES, disk(form), ordered, None)
    assert (made.route, made.scratch) == (Route.CONVERT, False)


def test_chain_is_refused_for_a_target_that_is_a_stream() -> None:
    with pytest.raises(errors.Unsupported, match="qcow2 is not in the order of the disk"):
        planned(REQUEST, RANGES, CHAIN, {**FILE, "ordered": True}, 20 * GIB)


TWICE = "more than 64 MiB of the image precede the tables that map them"


@pytest.mark.parametrize(
    ("offer", "scratch", "expected"),
    [
        (STREAM, 20 * GIB, Route.SPOOL),
        (STREAM, None, errors.ScratchRequired),
        (STREAM.stating(once=True), 20 * GIB, errors.Unsupported),
        (RANGES.stating(checksum="md5:" + "0" * 32), None, Route.PLACE),
    ],
)
def test_image_that_must_be_read_twice(offer: Source, scratch: int | None, expected: Any) -> None:
    if isinstance(expected, Route):
        made = planned(REQUEST, offer, disk("qcow2"), FILE, scratch, TWICE)
        assert (made.route, TWICE in made.reason) == (expected, True)
    else:
        with pytest.raises(expected, match=TWICE):
            planned(REQUEST, offer, disk("qcow2"), FILE, scratch, TWICE)


@pytest.mark.parametrize("changes", [{}, DELTA])
def test_layers_need_byte_ranges(changes: dict[str, Any]) -> None:
    with pytest.raises(errors.Unsupported, match="no byte ranges, which the layers of a disk need"):
        planned(dataclasses.replace(REQUEST, **changes), STREAM, CHAIN, FILE, None)


def test_scratch_is_required_only_if_needed() -> None:
    for offer, content, changes, route, _, _ in ROWS:
        requested = dataclasses.replace(REQUEST, **changes)
        if route is Route.SPOOL:
            with pytest.raises(errors.ScratchRequired):
                planned(requested, offer, content, FILE, None)
        else:
            assert not planned(requested, offer, content, FILE, None).scratch


def test_crowded_stream_needs_scratch() -> None:
    """A disk with possibly too many parts for memory needs scratch, as a stream cannot be read twice."""
    once = STREAM.stating(once=True)
    crowded: Any = Laid("grains", crowded=True)
    content = dataclasses.replace(disk("vmdk"), layout=crowded)
    for offer, scratch, route in (
        (once, GIB, Route.SPOOL),
        (once, GIB - 1, Route.PLACE),
        (once, None, Route.PLACE),
        (STREAM, GIB, Route.PLACE),
    ):
        assert planned(REQUEST, offer, content, FILE, scratch).route is route
    assert planned(REQUEST, once, disk("vmdk"), FILE, GIB).route is Route.PLACE


def test_huge_block_map_is_not_planned_for_qemu_img() -> None:
    """It would keep all of it in memory: our own reader tries the stream, and nothing is downloaded."""
    huge: Any = Laid("blocks", crowded=True, map_length=facts.MAX_TABLE + 1)
    content = dataclasses.replace(disk("vhdx"), layout=huge)
    once = STREAM.stating(once=True)
    assert planned(REQUEST, once, content, FILE, GIB).route is Route.PLACE
    with pytest.raises(errors.Refused, match="the block map has"):
        planned(REQUEST, STREAM, content, FILE, GIB, "too many pieces")
    largest: Any = huge._replace(map_length=facts.MAX_TABLE)
    content = dataclasses.replace(content, layout=largest)
    assert planned(REQUEST, STREAM, content, FILE, GIB, "too many pieces").route is Route.SPOOL


def test_too_small_scratch_is_found_before_the_transfer() -> None:
    with pytest.raises(errors.ScratchTooSmall, match="no space left on device"):
        planned(REQUEST, STREAM, disk("vhdx", unplaceable="a log"), FILE, GIB - 1)


@pytest.mark.parametrize("space", [FILE, BLOCK])
def test_image_larger_than_the_volume_is_refused(space: dict[str, Any]) -> None:
    planned(REQUEST, RANGES, disk("qcow2", size=10 * GIB), space, None)
    with pytest.raises(
        errors.TooLarge,
        match=(
            f"virtual image size {10 * GIB + 1} is larger than the reported available storage {10 * GIB}. "
            "A larger PVC is required"
        ),
    ):
        planned(REQUEST, RANGES, disk("qcow2", size=10 * GIB + 1), space, None)


@pytest.mark.parametrize(
    ("space", "requested", "grown"),
    [(FILE, None, 0), (FILE, 2 * GIB, 2 * GIB), (FILE, 20 * GIB, 9 * GIB), (BLOCK, 2 * GIB, 0)],
)
def test_disk_grows_to_the_requested_size(space: dict[str, Any], requested: int | None, grown: int) -> None:
    made = planned(dataclasses.replace(REQUEST, room=Room(size=requested)), RANGES, disk("raw"), space, None)
    assert made.grow_to == grown


@pytest.mark.parametrize(
    ("space", "requested", "size"),
    [(FILE, None, 9 * GIB), (FILE, GIB, 9 * GIB), (BLOCK, GIB, GIB), (BLOCK, None, 10 * GIB)],
)
def test_blank_disk_has_the_requested_size(space: dict[str, Any], requested: int | None, size: int) -> None:
    blank = dataclasses.replace(REQUEST, room=Room(size=requested))
    made = planned(blank, BLANK, Survey(virtual_size=0), space, None)
    assert (made.route, made.virtual_size) == (Route.BLANK, size)


def test_blank_disk_larger_than_the_device_is_refused() -> None:
    blank = dataclasses.replace(REQUEST, room=Room(size=11 * GIB))
    with pytest.raises(errors.TooLarge):
        planned(blank, BLANK, Survey(virtual_size=0), BLOCK, None)


def test_delta_is_merged_without_growing_the_disk() -> None:
    location = staged.Staged("https://x/", current="two", previous="one")
    requested = dataclasses.replace(REQUEST, source="imageio", location=location, image_size=5 * GIB)
    made = planned(requested, RANGES, disk("qcow2"), FILE, 20 * GIB)
    assert (made.route, made.scratch, made.grow_to) == (Route.MERGE, True, 0)
    assert "since checkpoint one" in made.reason
    with pytest.raises(errors.ScratchRequired):
        planned(requested, RANGES, disk("qcow2"), FILE, None)
    with pytest.raises(errors.ScratchTooSmall):
        planned(requested, RANGES, disk("qcow2"), FILE, GIB - 1)


@pytest.mark.parametrize("form", ["html", "empty", "lfs", "zip"])
def test_format_that_is_not_a_disk_is_refused(form: str) -> None:
    with pytest.raises(errors.Unsupported):
        planned(REQUEST, RANGES, disk(form), FILE, 20 * GIB)


def test_obstacle_of_a_source_ends_the_plan() -> None:
    """It can be examined, as the disks of an OVA of which one is to be chosen."""
    obstacle = errors.Unsupported(reason="it has two disks")
    with pytest.raises(errors.Unsupported, match="it has two disks"):
        planned(REQUEST, RANGES.stating(obstacle=obstacle), disk("raw"), FILE, None)


def test_archive_is_unpacked() -> None:
    archive = dataclasses.replace(REQUEST, content_type="archive")
    assert planned(archive, STREAM, disk("tar", "gz", size=None), FILE, None).route is Route.UNPACK
    with pytest.raises(errors.Unsupported, match="content type archive"):
        planned(REQUEST, STREAM, disk("tar", size=None), FILE, None)
    with pytest.raises(errors.Unsupported, match="this is qcow2"):
        planned(archive, STREAM, disk("qcow2"), FILE, None)
    with pytest.raises(errors.RequestError, match="file system"):
        planned(archive, STREAM, disk("tar", size=None), BLOCK, None)


def test_cloned_file_system_is_unpacked_or_its_disk_is_taken() -> None:
    clone = dataclasses.replace(REQUEST, content_type=request.CLONE)
    tar = disk("tar", size=None)
    assert planned(clone, RUNS, tar, FILE, None).route is Route.UNPACK
    assert planned(clone, RUNS, tar, BLOCK, None).route is Route.EXTRACT


@pytest.mark.parametrize(
    ("offer", "form"), [(RANGES, "raw"), (STREAM, "vmdk"), (source("extents", size=GIB), "raw")]
)
def test_delta_is_never_imported_as_a_disk(offer: Source, form: str) -> None:
    with pytest.raises(errors.Unsupported, match="does not support checkpoints"):
        planned(dataclasses.replace(REQUEST, **DELTA), offer, disk(form), FILE, GIB)


def test_delta_has_no_size_and_no_checksum() -> None:
    requested = dataclasses.replace(REQUEST, **DELTA, image_size=2 * GIB)
    assert planned(requested, EXTENTS, disk("raw"), FILE, None).grow_to == 0
    with pytest.raises(errors.Unsupported, match="does not support checkpoints"):
        planned(dataclasses.replace(requested, **CHECKED), EXTENTS, disk("raw"), FILE, None)
