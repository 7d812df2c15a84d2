"""``--map``: only what bmaptool has mapped is fetched and verified; what is wrong is fetched again."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.formats import bmap
from cdi_worker.images.disks import mapped
from cdi_worker.sources import trust
from tests.support import (
    bmaptool,
    devices,
    disks,
    forked,
    meters,
    misbehave,
    oracle,
    ovas,
    processes,
    servers,
    signers,
    worker,
)
from tests.support.mapped_disks import (
    DATA,
    KIB,
    MAPPED,
    MIB,
    PACKED,
    SIZE,
    Made,
    asked,
    flipped,
    make,
    packed,
    same,
    serve,
)
from tests.support.pages import Page

target = devices.targets("file", "block512", "block4096", size=32 * MIB)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("made") / "disk.raw")


# -- what is fetched


def test_holes_are_not_requested(made: Made, target: Path, tmp_path: Path) -> None:
    with servers.nginx(tmp_path_factory_dir(tmp_path), made.disk.parent) as web:
        (made.disk.parent / "disk.bmap").write_bytes(made.map)
        url = web.url(made.disk)
        result = cdi_worker.run(asked(url, web.url("disk.bmap"), target))
        sent = lambda: sum(int(each["bytes"]) for each in web.requests() if each["path"] == "/disk.raw")  # noqa: E731
        processes.wait_for(lambda: sent() >= MAPPED - 320 * KIB, "nginx's log")
    same(target, made)
    assert result.plan.route is cdi_worker.Route.EXTENTS
    assert result.read == sum(end - start for start, end, _ in made.ranges)
    # The head, which is known, and the gaps that are shorter than a request.
    assert sent() < MAPPED + MIB
    assert result.verified == {"map": f"sha256:{hashlib.sha256(made.map).hexdigest()}"}


def tmp_path_factory_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "nginx"
    folder.mkdir()
    return folder


@pytest.mark.parametrize("form", list(PACKED))
def test_stream_is_verified_as_it_passes(
    server: misbehave.Server, made: Made, target: Path, form: str
) -> None:
    page = Page(packed(made, form), ranges=form != "plain")
    result = cdi_worker.run(asked(*serve(server, made, page), target))
    same(target, made)
    assert result.plan.route is cdi_worker.Route.STREAM
    assert "verified by its map" in result.plan.reason
    assert "map" in result.verified


@pytest.mark.parametrize("ranges", [True, False])
def test_disk_of_any_size_and_checksum(server: misbehave.Server, tmp_path: Path, *, ranges: bool) -> None:
    """The last block is a part of one, and its checksum is that of the part."""
    made = make(tmp_path / "odd", ((4096, 5000), (9 * MIB, MIB + 100)), 10 * MIB + 100)
    parsed = bmap.parse(made.map)
    data = made.data
    digests = ((start, end, hashlib.sha512(data[start:end]).digest()) for start, end, _ in parsed.ranges)
    blocks = dataclasses.replace(parsed, ranges=tuple(digests), algorithm="sha512")
    target = tmp_path / "disk.img"
    for text in (made.map, bmap.write(blocks)):
        cdi_worker.run(asked(*serve(server, Made(made.disk, text), Page(data, ranges=ranges)), target))
        assert target.read_bytes() == data + bytes(-len(data) % 512)


@pytest.mark.parametrize("seed", range(20))
def test_random_disks(server: misbehave.Server, tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    size = chance.randrange(1, 3000) * 4096 + chance.choice([0, 0, 512, 1])
    starts = sorted(chance.randrange(0, size, 4096) for _ in range(chance.randrange(0, 40)))
    pieces = tuple((at, min(size - at, chance.choice([1, 4096, 65536, MIB + 7]))) for at in starts)
    made = make(tmp_path / "random", pieces, size, seed)
    target = devices.fill(tmp_path / "disk.img", size // 512 * 512 + 512)
    form = chance.choice(["plain", "ranges", "gz", "update"])
    body = packed(made, "gz") if form == "gz" else made.data
    page = Page(body, ranges=form in {"ranges", "update"})
    existing = "update" if form == "update" else "replace"
    cdi_worker.run(asked(*serve(server, made, page), target, existing=existing))
    assert target.read_bytes() == made.data + bytes(-size % 512)


# -- what is wrong


@pytest.mark.parametrize("number", range(1, 7))
@pytest.mark.parametrize("lie", ["bit", "another-range", "zeros"])
def test_wrong_range_is_fetched_again(
    server: misbehave.Server, made: Made, target: Path, number: int, lie: str
) -> None:
    """The first answer says what the disk is: all later ones are right but one."""
    good = Page(made.data)
    bodies = {
        "bit": flipped(made.data, 3 * MIB + 77, 6 * MIB, 12 * MIB + 5000, 22 * MIB),
        "zeros": bytes(SIZE),
    }
    bad = dataclasses.replace(
        good, body=bodies.get(lie, made.data), lie=_other if lie.startswith("an") else None
    )
    url, map_ = serve(server, made, (good, number), (bad, 1), good)
    result = cdi_worker.run(asked(url, map_, target))
    same(target, made)
    assert result.verified["map"]


def _other(first: int, _number: int) -> int:
    return max(0, first - 4096 * 3)


@pytest.mark.parametrize(("number", "shift"), [(1, 4096), (3, -7 * MIB)], ids=["other-data", "zeros"])
def test_only_the_wrong_range_is_fetched_again(
    server: misbehave.Server, made: Made, target: Path, number: int, shift: int
) -> None:
    """The first answer for it has other bytes. Zeros are written late, but not over the right ones."""
    start, end, _ = made.ranges[number]
    lies = iter([shift])

    def lie(first: int, _number: int) -> int:
        return first + (next(lies, 0) if start - 512 <= first < end else 0)

    request = asked(*serve(server, made, Page(made.data, lie=lie)), target, read_back=True)
    meter = meters.Percents()
    result = cdi_worker.run(request, meter)
    same(target, made)
    assert result.plan.route is cdi_worker.Route.EXTENTS
    assert result.read == sum(end - start for start, end, _ in made.ranges) + end - start
    assert result.confirmed > SIZE - 2 * MIB
    assert next(lies, None) is None


@pytest.mark.parametrize("ranges", [True, False])
def test_disk_with_a_range_that_stays_wrong_is_refused(
    server: misbehave.Server, made: Made, target: Path, *, ranges: bool
) -> None:
    start, end, _ = made.ranges[1]
    page = Page(flipped(made.data, 4 * MIB + 1), ranges=ranges)
    with pytest.raises(errors.MapMismatch, match=f"bytes {start} to {end - 1} have another checksum"):
        cdi_worker.run(asked(*serve(server, made, page), target))
    oracle.unusable(target)
    if ranges:
        assert server.sent("/disk") < MAPPED + (mapped.AGAIN + 1) * (end - start)


@pytest.mark.parametrize("form", ["plain", "gz"])
def test_stream_with_data_where_nothing_is_mapped_is_refused(
    server: misbehave.Server, made: Made, target: Path, form: str
) -> None:
    page = Page(PACKED[form](flipped(made.data, 10 * MIB)), ranges=False)
    with pytest.raises(errors.MapMismatch, match="are not mapped, and not zeros"):
        cdi_worker.run(asked(*serve(server, made, page), target))
    oracle.unusable(target)


@pytest.mark.parametrize("form", ["plain", "ranges", "gz"])
@pytest.mark.parametrize("more", [-4096, -1, 1, 4096])
def test_image_of_another_size_is_refused(
    server: misbehave.Server, made: Made, target: Path, form: str, more: int
) -> None:
    body = (made.data + bytes(4096))[: SIZE + more]
    page = Page(PACKED["gz"](body) if form == "gz" else body, ranges=form == "ranges")
    with pytest.raises(errors.MapMismatch):
        cdi_worker.run(asked(*serve(server, made, page), target))
    oracle.unusable(target)
    # What the server states is compared before the disk is fetched.
    assert form != "ranges" or server.sent("/disk") <= MIB


@pytest.mark.parametrize("form", ["qcow2", "vmdk", "vhd-fixed", "tar"])
@pytest.mark.parametrize("ranges", [True, False])
def test_other_formats_are_refused(
    server: misbehave.Server, disks: disks.Disks, target: Path, tmp_path: Path, form: str, *, ranges: bool
) -> None:
    # A copy: bmaptool writes the map beside it, where another process may do the same.
    path = tmp_path / "image"
    path.write_bytes((disks.tar() if form == "tar" else disks.image(form)).read_bytes())
    other = Made(path, bmaptool.create(path))
    page = Page(path.read_bytes(), ranges=ranges)
    with pytest.raises(errors.Unsupported, match="--map is for a raw disk"):
        cdi_worker.run(asked(*serve(server, other, page), target))
    oracle.unusable(target)


def test_hostile_map_is_refused(server: misbehave.Server, made: Made, target: Path) -> None:
    bomb = b'<!DOCTYPE bmap [<!ENTITY a "aaaaaaaaaa">]>' + made.map.partition(b"?>")[2]
    for text in (bomb, made.map.replace(b" 0-74", b" 0-75"), b"", b"<html>", made.map[:-20]):
        url, map_ = serve(server, Made(made.disk, text))
        with pytest.raises(errors.ImageError):
            cdi_worker.run(asked(url, map_, target))
        assert not server.gets("/disk")


def test_source_that_stalls_is_no_mismatch(server: misbehave.Server, made: Made, target: Path) -> None:
    url, map_ = serve(server, made, Page(made.data, stall_at=4 * MIB))
    request = asked(url, map_, target)
    options = dataclasses.replace(request.fetch, no_progress=1.5)
    location = cdi_worker.Location(url, access=cdi_worker.Access(patience=1.5))
    with pytest.raises(errors.TransferFailed):
        cdi_worker.run(dataclasses.replace(request, fetch=options, location=location))
    oracle.unusable(target)
    serve(server, made)
    cdi_worker.run(request)
    same(target, made)


def test_outages_are_no_mismatch(server: misbehave.Server, made: Made, target: Path) -> None:
    good = Page(made.data)
    cut = dataclasses.replace(good, cut_range=100_000)
    url, map_ = serve(server, made, (good, 1), (cut, 2), (dataclasses.replace(good, status=503), 2), good)
    result = cdi_worker.run(asked(url, map_, target))
    same(target, made)
    assert result.read == sum(end - start for start, end, _ in made.ranges)


# -- interrupted imports

WORKER = """
import sys, cdi_worker
from cdi_worker.images.engine import fetch
from cdi_worker.sources import trust
cdi_worker.run(cdi_worker.Request(
    existing="replace", source="http", location=cdi_worker.Location(sys.argv[1]), target=sys.argv[3],
    journal_interval=0.05, demand=trust.Demand(map=sys.argv[2]),
    fetch=fetch.Options(connections=2, chunk=1 << 20),
))
"""
#: By bmaptool one range, and by us one for each MiB.
DENSE = ((0, SIZE),)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return make(tmp_path_factory.mktemp("dense") / "dense.raw", DENSE)


def short(made: Made) -> Made:
    """Return the disk with a map of short ranges."""
    data = made.data
    cuts = [(at, min(SIZE, at + MIB)) for at in range(0, SIZE, MIB)]
    ranges = tuple((start, end, hashlib.sha256(data[start:end]).digest()) for start, end in cuts)
    return Made(made.disk, bmap.write(bmap.Map(SIZE, 4096, ranges)))


def kill_midway(
    server: misbehave.Server, made: Made, target: Path, page: Page | None = None
) -> tuple[str, str]:
    """Kill an import after a good part of the disk; return the URLs, which a whole server serves then."""
    page = page or Page(made.data)
    url, map_ = serve(server, made, dataclasses.replace(page, drip=(256 * KIB, 0.03)))
    argv = [sys.executable, "-c", WORKER, url, map_, target]
    with forked.Popen[str](argv, env=forked.ENVIRONMENT) as killed:
        processes.wait_for(lambda: server.sent("/disk") > 17 * MIB, "a good part of the disk")
        killed.send_signal(signal.SIGKILL)
    assert killed.returncode
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.requests.clear()
    server.serve("/disk", page)
    return url, map_


@pytest.mark.parametrize("etag", ['"one"', None], ids=["strong", "weak"])
@pytest.mark.parametrize("length", ["one-range", "ranges"])
def test_killed_import_resumes(
    server: misbehave.Server, dense: Made, target: Path, length: str, etag: str | None
) -> None:
    """What is there of a long range is hashed from storage."""
    made = dense if length == "one-range" else short(dense)
    url, map_ = kill_midway(server, made, target, Page(made.data, etag=etag))
    oracle.unusable(target)
    result = cdi_worker.run(asked(url, map_, target))
    same(target, made)
    assert result.resumed >= 3 * MIB
    assert result.read <= SIZE - 3 * MIB
    assert server.sent("/disk") <= SIZE - 2 * MIB


@pytest.mark.parametrize("length", ["one-range", "ranges"])
def test_what_was_wrong_before_a_kill_is_fetched_again(
    server: misbehave.Server, dense: Made, target: Path, length: str
) -> None:
    """The range has not been verified when the import was killed: nothing of it is trusted."""
    made = dense if length == "one-range" else short(dense)
    wrong = Page(flipped(made.data, 5 * MIB // 2))
    if length == "one-range":
        kill_midway(server, made, target, wrong)
    else:
        kill_midway(server, made, target)
        with target.open("r+b") if target.is_block_device() else Path(f"{target}.part").open("r+b") as stream:
            stream.seek(5 * MIB // 2)
            stream.write(b"x" * 10)
    result = cdi_worker.run(asked(*serve(server, made), target))
    same(target, made)
    assert result.verified["map"]


def test_other_map_starts_over(server: misbehave.Server, dense: Made, tmp_path: Path) -> None:
    """What was written without a map, or by another one, was not verified by this."""
    target = tmp_path / "disk.img"
    url, map_ = kill_midway(server, dense, target)
    result = cdi_worker.run(dataclasses.replace(asked(url, map_, target), demand=trust.NOTHING))
    assert (result.resumed, result.read) == (0, SIZE)
    target.unlink()
    url, _ = kill_midway(server, dense, target)
    map_ = server.serve("/disk.bmap", Page(short(dense).map))
    result = cdi_worker.run(asked(url, map_, target))
    assert (result.resumed, result.read) == (0, SIZE)
    same(target, dense)


# -- whose map it is


@pytest.fixture(scope="module")
def people() -> Iterator[signers.OpenPGP]:
    with signers.people() as made:
        yield made


@pytest.fixture
def key(people: signers.OpenPGP, tmp_path: Path) -> str:
    return people.exported("good", tmp_path)


@pytest.mark.parametrize("how", ["inline", ".asc", ".sig"])
def test_signed_map_is_verified(
    server: misbehave.Server, made: Made, people: signers.OpenPGP, key: str, tmp_path: Path, how: str
) -> None:
    target = tmp_path / "disk.img"
    url, map_ = serve(server, made)
    if how == "inline":
        server.serve("/disk.bmap", Page(people.sign("good", made.map, "--clear-sign")))
    else:
        more = ["--armor"] * (how == ".asc")
        server.serve(f"/disk.bmap{how}", Page(people.sign("good", made.map, "--detach-sign", *more)))
    result = cdi_worker.run(asked(url, map_, target, demand={"signed_by": key}))
    same(target, made)
    (found,) = result.signatures
    assert found.reference == map_
    assert found.digest == result.verified["map"] == f"sha256:{hashlib.sha256(made.map).hexdigest()}"
    # Without the demand, a signature is no hindrance.
    cdi_worker.run(asked(url, map_, target))
    same(target, made)


@pytest.mark.parametrize("fault", ["missing", "other-key", "other-data", "inline-changed", "around"])
def test_map_without_the_demanded_signature_is_refused(
    server: misbehave.Server, made: Made, people: signers.OpenPGP, key: str, tmp_path: Path, fault: str
) -> None:
    target = tmp_path / "disk.img"
    other = make(tmp_path / "other.raw", seed=2)
    url, map_ = serve(server, other)
    if fault == "other-key":
        server.serve("/disk.bmap.sig", Page(people.sign("other", other.map)))
    elif fault == "other-data":
        server.serve("/disk.bmap.sig", Page(people.sign("good", made.map)))
    elif fault == "inline-changed":
        text = people.sign("good", made.map, "--clear-sign")
        server.serve("/disk.bmap", Page(text.replace(b"<BlockMap>", b"<BlockMap >")))
    elif fault == "around":
        # The map of another disk in front of the signed one: only what is signed counts.
        server.serve("/disk.bmap", Page(other.map + people.sign("good", made.map, "--clear-sign")))
    kind = errors.MapMismatch if fault == "around" else errors.Untrusted
    with pytest.raises(kind):
        cdi_worker.run(asked(url, map_, target, demand={"signed_by": key}))
    assert fault == "around" or not server.gets("/disk")
    assert not target.exists()


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"have": "old.bmap"}, "add --update"),
        ({"have": "old.bmap", "existing": "update", "read_back": True}, "--have with --map"),
        ({"content_type": "archive"}, "one raw disk"),
        ({"layers": (cdi_worker.Location("http://h/l"),)}, "one raw disk"),
        ({"format": "qcow2", "compress": True}, "omit --compress"),
        ({"demand": {"identity": "a", "issuer": "b", "trusted_root": "c"}}, "use --signed-by"),
    ],
)
def test_faults_of_the_request(tmp_path: Path, more: dict[str, Any], fault: str) -> None:
    with pytest.raises(errors.RequestError, match=fault):
        cdi_worker.run(asked("http://127.0.0.1:9/d", "/no.bmap", tmp_path / "disk.img", **more))


# -- at a terminal


def test_command_shows_the_map(server: misbehave.Server, made: Made, tmp_path: Path) -> None:
    url, map_ = serve(server, made)
    done = worker.run("import", "--json", "--dry-run", url, tmp_path / "disk.img", f"--map={map_}")
    shown = json.loads(done.output)
    assert (shown["map"], shown["mapped"]) == (map_, sum(end - start for start, end, _ in made.ranges))
    assert (shown["mapSize"], shown["mapRanges"], shown["route"]) == (SIZE, len(DATA), "extents")
    done = worker.run("inspect", url, f"--map={map_}")
    assert "only mapped ranges are fetched" in done.output
    path = tmp_path / "local.bmap"
    path.write_bytes(made.map)
    done = worker.run("import", url, tmp_path / "disk.img", f"--map={path}")
    assert done.status == 0, done.errors
    serve(server, made, Page(flipped(made.data, 4 * MIB)))
    done = worker.run("import", "--force", url, tmp_path / "disk.img", f"--map={path}")
    assert (done.status, "checksum mismatch: " in done.errors) == (5, True), done.errors
    oracle.same(tmp_path / "disk.img", made.disk)


# -- the bytes that have shown the format


@pytest.mark.parametrize("place", [0, 100 * KIB, SIZE - 300], ids=["first", "head", "footer"])
@pytest.mark.parametrize("etag", ['"one"', None])
def test_wrong_first_response_is_fetched_again(
    server: misbehave.Server, target: Path, tmp_path: Path, place: int, etag: str | None
) -> None:
    """They were read once, to examine the image, and are examined again."""
    made = make(tmp_path / "full", ((0, 3 * MIB), (20 * MIB, 4 * MIB)))
    good = Page(made.data, etag=etag)
    bad = dataclasses.replace(good, body=flipped(made.data, place))
    url, map_ = serve(server, made, *([(bad, 1)] if place < MIB else [(good, 2), (bad, 2)]), good)
    result = cdi_worker.run(asked(url, map_, target))
    same(target, made)
    assert result.verified["map"]
    # The footer is read with others again, which shows the difference: then all is read as one stream.
    assert (result.plan.route is cdi_worker.Route.EXTENTS) == (place < MIB)


def test_first_response_that_stays_wrong_is_an_error(
    server: misbehave.Server, made: Made, target: Path
) -> None:
    url, map_ = serve(server, made, Page(flipped(made.data, 100 * KIB)))
    with pytest.raises(errors.MapMismatch, match="bytes 0 to 307199 have another checksum, 4 times"):
        cdi_worker.run(asked(url, map_, target))
    oracle.unusable(target)


@pytest.mark.parametrize("form", ["qcow2", "vmdk"])
def test_format_that_the_first_response_has_hidden_is_refused(
    server: misbehave.Server, disks: disks.Disks, target: Path, tmp_path: Path, form: str
) -> None:
    """The map is that of an image file, which is examined by the bytes that are right."""
    path = tmp_path / "image"
    path.write_bytes(disks.image(form).read_bytes())
    other = Made(path, bmaptool.create(path))
    url, map_ = serve(server, other, (Page(bytes(4096) + other.data[4096:]), 1), Page(other.data))
    with pytest.raises(errors.ImageError, match="--map is for a raw disk"):
        cdi_worker.run(asked(url, map_, target))
    oracle.unusable(target)


@pytest.mark.parametrize("times", [1, 60], ids=["once", "always"])
def test_disk_in_a_package_is_fetched_again(
    server: misbehave.Server, made: Made, tmp_path: Path, times: int
) -> None:
    """Its first bytes are fetched by those of the package, which are examined again, too."""
    target = tmp_path / "disk.img"
    package = ovas.ova(ovas.Disk(made.data, "disk.raw", capacity=SIZE >> 20), listed="not")
    place = package.index(made.data[:4096]) + 50 * KIB
    bad, good = Page(flipped(package, place)), Page(package)
    url, map_ = serve(server, made, (bad, times), good)
    if times == 1:
        cdi_worker.run(asked(url, map_, target))
        same(target, made)
    else:
        with pytest.raises(errors.MapMismatch, match="bytes 0 to 307199 have another checksum"):
            cdi_worker.run(asked(url, map_, target))
        assert not target.exists()
