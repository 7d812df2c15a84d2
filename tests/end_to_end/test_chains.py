"""Chains of qcow2 files become one disk: that which qemu-img reads of the real chain."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import fetch
from cdi_worker.sources.local import locations as local_locations
from cdi_worker.sources.web import locations as http
from tests.support import chains, devices, misbehave, oracle, ovas, pairs, processes, ways, worker

MIB = 1 << 20
TARGETS = ["file", "block512", "block4096"]

target = devices.targets(*TARGETS, size=17 * MIB)
ON_A_DEVICE = pytest.mark.parametrize("target", ["block512"], indirect=True)


@pytest.fixture
def chain(tmp_path: Path) -> chains.Chain:
    (tmp_path / "chain").mkdir()
    return chains.Chain(tmp_path / "chain")


def plain(chain: chains.Chain) -> None:
    chain.base("16M", "write -P 1 0 6M", "write -P 2 9M 3M")
    chain.overlay("write -P 3 1M 64k", "write -P 4 5M 2M", "write -P 5 15M 1M")
    chain.overlay("write -P 6 1028k 1000", "write -P 7 10M 1M")


def zeros(chain: chains.Chain) -> None:
    """Zero clusters hide what is below them, discarded ones too."""
    chain.base("16M", "write -P 1 0 16M")
    chain.overlay("write -z 0 2M", "write -z -u 3M 1M", "discard 5M 1M", "write -P 2 7M 1M")
    chain.overlay("write -P 3 1M 128k", "write -z 7M 512k", "write -z 15M 1M")


def compressed(chain: chains.Chain) -> None:
    """A newer file hides a part of a compressed cluster."""
    chain.base("16M", "write -c -P 1 0 4M", "write -c -P 2 8M 2M", options="cluster_size=2M")
    chain.overlay("write -P 3 500k 4k", "write -c -P 4 1M 64k", options="compression_type=zstd")
    chain.overlay("write -P 5 1032k 4096", "write -c -P 6 3M 4k", options="cluster_size=4k")


def subclusters(chain: chains.Chain) -> None:
    chain.base("16M", "write -P 1 0 8M", options="cluster_size=4k")
    extended = "extended_l2=on,cluster_size=128k"
    chain.overlay(
        "write -P 2 4k 4k", "write -z 20k 8k", "write -P 3 1M 1M", "discard 1100k 100k", options=extended
    )
    chain.overlay("write -z 1M 4k", "write -P 4 1060k 4k", "write -c -P 5 2M 128k", options=extended)


def larger(chain: chains.Chain) -> None:
    chain.base(7 * MIB + 512, "write -P 1 0 7M", f"write -P 2 {7 * MIB} 512")
    chain.overlay("write -P 3 9M 64k", size="12M")
    chain.overlay("write -P 4 13M 1M", size=16 * MIB - 1024)


def smaller(chain: chains.Chain) -> None:
    """What a smaller file in the middle hides stays hidden when the disk grows again."""
    chain.base("16M", "write -P 1 0 16M")
    chain.overlay("write -P 2 1M 64k", size=5 * MIB + 1536)
    chain.overlay("write -P 3 12M 64k", size="14M")


def smallest(chain: chains.Chain) -> None:
    chain.base("16M", "write -P 1 0 16M", options="cluster_size=2M")
    chain.overlay("write -P 2 64k 64k", size=5 * MIB + 512)


def raw(chain: chains.Chain) -> None:
    chain.base(5 * MIB, "write -P 1 0 3M", "write -P 2 4M 512", form="raw")
    chain.overlay("write -P 3 1M 64k", "write -z 2M 64k", size="8M")
    chain.overlay("write -P 4 7M 64k")


def old(chain: chains.Chain) -> None:
    """Version 2 has no zero flag."""
    chain.base("16M", "write -P 1 0 4M", options="compat=0.10")
    chain.overlay("write -P 2 1M 64k", "write -c -P 3 2M 64k", options="compat=0.10")
    chain.overlay("write -P 4 3M 64k", options="compat=0.10,cluster_size=512")


def bitmaps(chain: chains.Chain) -> None:
    base = chain.base("16M", "write -P 1 0 4M")
    processes.run("qemu-img", "bitmap", "--add", base, "monday")
    layer = chain.overlay("write -P 2 1M 64k")
    processes.run("qemu-img", "bitmap", "--add", layer, "tuesday")
    processes.run("qemu-img", "snapshot", "-q", "-c", "inside", layer)
    processes.run("qemu-io", "-f", "qcow2", "-c", "write -P 3 1M 4k", layer)


def committed(chain: chains.Chain) -> None:
    """A commit leaves an empty layer, or one less."""
    plain(chain)
    processes.run("qemu-img", "commit", "-q", "-f", "qcow2", chain.top)


def empty(chain: chains.Chain) -> None:
    chain.base("16M")
    chain.overlay()
    chain.overlay("write -z 0 16M")


def many(chain: chains.Chain) -> None:
    chain.base("16M", "write -P 1 0 16M")
    for number in range(1, 10):
        chain.overlay(f"write -P {number + 1} {number * 1500}k 2000k")


def preallocated(chain: chains.Chain) -> None:
    chain.base("16M", "write -P 1 0 1M", options="preallocation=full")
    chain.overlay("write -P 2 64k 64k", "write -z 512k 128k", "write -P 3 512k 4k")


def at_random(seed: int) -> Callable[[chains.Chain], None]:
    """Return what makes a chain whose size changes with each file."""

    def make(chain: chains.Chain) -> None:
        chance = random.Random(seed)
        chain.base("12M", "write -P 1 0 12M")
        for number in range(4):
            size = chance.randrange(1, 24) * 512 * 1024 + chance.choice([0, 512, 4096])
            at = chance.randrange(0, size - 4096) // 512 * 512
            chain.overlay(f"write -P {number + 2} {at} 4096", size=size)

    return make


KINDS = [plain, zeros, compressed, subclusters, larger, smaller, smallest, raw, old, bitmaps]
KINDS += [committed, empty, many, preallocated]


def serve(server: misbehave.Server, files: list[Path], **page: Any) -> list[str]:
    made = [misbehave.Page(path.read_bytes(), etag=f'"{path.name}"', **page) for path in files]
    return [server.serve(f"/{path.name}", each) for path, each in zip(files, made, strict=True)]


def request(addresses: list[str], target: Path, **options: Any) -> cdi_worker.Request:
    first, *layers = addresses
    values = {"fetch": fetch.FetchOptions(connections=2, no_progress=20), **options}
    return ways.request(first, target, layers=tuple(map(cdi_worker.Location, layers)), **values)


@pytest.mark.parametrize(
    ("make", "target"),
    # Two more whose ends are within a sector of 4096 bytes.
    [*pairs.dealt(KINDS, TARGETS), (larger, "block4096"), (smallest, "block4096")],
    indirect=["target"],
)
def test_disk_is_that_of_the_real_chain(
    server: misbehave.Server, chain: chains.Chain, target: Path, make: Callable[[chains.Chain], None]
) -> None:
    make(chain)
    expected = chain.disk()
    result = cdi_worker.run(request(serve(server, chain.files), target))
    oracle.same(target, expected, beyond=devices.beyond(target))
    assert result.size == expected.stat().st_size
    assert [name.rpartition("/")[2] for name, _ in result.layers] == [path.name for path in chain.files]


def test_local_chain_without_names_is_the_same_disk(chain: chains.Chain) -> None:
    plain(chain)
    expected = chain.disk()
    for path in chain.files[1:]:
        chain.unnamed(path)
    cdi_worker.run(request(local(chain.files), chain.target))
    oracle.same(chain.target, expected)


def local(paths: list[Path]) -> list[str]:
    return [str(path) for path in paths]


def test_only_needed_clusters_are_fetched(server: misbehave.Server, chain: chains.Chain) -> None:
    chain.base("64M", "write -P 1 0 32M")
    chain.overlay("write -P 2 1M 30M")
    chain.overlay("write -z 0 32M", "write -P 3 8M 1M")
    expected = chain.disk()
    addresses = serve(server, chain.files)
    result = cdi_worker.run(request(addresses, chain.target))
    oracle.same(chain.target, expected)
    assert [count for _, count in result.layers] == [0, 0, MIB]
    assert sum(server.sent(f"/{path.name}") for path in chain.files) < 4 * MIB
    assert result.read < 4 * MIB


WRONG = {
    "base is missing": ([1, 2], "needs its backing file .*base.qcow2.*, which is missing"),
    "layer is missing": (
        [0, 2],
        "its backing file is 'layer-1.qcow2', but the file before it is 'base.qcow2'",
    ),
    "layers are swapped": ([0, 2, 1], "'layer-1.qcow2' is given after it; give the oldest file first"),
    "all are reversed": ([2, 1, 0], "needs its backing file"),
    "a layer is given twice": ([0, 1, 1], "a layer is given twice"),
}


@ON_A_DEVICE
def test_wrong_list_is_refused_before_the_target_is_touched(
    server: misbehave.Server, chain: chains.Chain, target: Path
) -> None:
    plain(chain)
    before = target.read_bytes()
    for wrong, (order, message) in WRONG.items():
        with pytest.raises((errors.Refused, errors.RequestError)) as caught:
            cdi_worker.run(request(serve(server, [chain.files[index] for index in order]), target))
        assert re.search(message, str(caught.value)), (wrong, str(caught.value))
    assert target.read_bytes() == before


def test_smaller_file_without_a_name_is_refused(chain: chains.Chain) -> None:
    """Push backups name no backing file: a disk does not shrink, so the files are in the wrong order."""
    chain.base("8M")
    chain.overlay(size="12M")
    chain.overlay(size="16M")
    for path in chain.files[1:]:
        chain.unnamed(path)
    first, second, third = local(chain.files)
    with pytest.raises(errors.Refused, match=r"has 12582912 bytes, less than .*; check the order"):
        cdi_worker.run(request([first, third, second], chain.target))


def test_complete_disk_is_not_a_layer(chain: chains.Chain, tmp_path: Path) -> None:
    """Its dirty bitmaps show that a machine has run on it."""
    chain.base("8M", "write -P 1 0 1M")
    other = tmp_path / "other.qcow2"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", other, "8M")
    processes.run("qemu-img", "bitmap", "--add", other, "monday")
    with pytest.raises(errors.Refused, match="has the dirty bitmaps 'monday': it is a complete disk"):
        cdi_worker.run(request([*local(chain.files), str(other)], chain.target))


def test_backing_format_must_be_that_of_the_file(chain: chains.Chain, tmp_path: Path) -> None:
    """A raw base whose guest wrote the header of a qcow2 image to it is not read as one."""
    chain.base(MIB, form="raw")
    chain.overlay("write -P 1 512k 64k")
    inner = tmp_path / "inner.qcow2"
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", inner, "1M")
    chain.files[0].write_bytes(inner.read_bytes().ljust(MIB, b"\0"))
    with pytest.raises(errors.Refused, match=r"its backing file is raw, but .*base.raw is qcow2"):
        cdi_worker.run(request(local(chain.files), chain.target))


NAMES_NEVER_OPENED = (
    "/etc/passwd",
    "https://169.254.169.254/latest",
    "json:{}",
    'json:{"file": {"file": {"file": 5}}}',
    "json:" + "[" * 900,
    "nbd://localhost:10809/x",
    "\x1b[31mred",
    "\udcff",
    "x" * 1023,
    "..",
)


def test_name_of_a_backing_file_is_compared_and_never_opened(chain: chains.Chain) -> None:
    plain(chain)
    for name in NAMES_NEVER_OPENED:
        chains.rename_backing(chain.files[1], name.encode("utf-8", "surrogateescape"))
        with pytest.raises(errors.Refused) as caught:
            cdi_worker.run(request(local(chain.files), chain.target))
        said = str(caught.value)
        assert ("its backing file is" in said, said.isprintable()) == (True, True), (name, said)


NAMES_OF_THE_BASE = (
    "base.qcow2",
    "../x/base.qcow2",
    "file:base.qcow2",
    "https://old.example.org/a/base.qcow2?token=x",
    'json:{"driver": "qcow2", "file": {"driver": "file", "filename": "/images/base.qcow2"}}',
    'json:{"file.filename": "/images/base.qcow2"}',
)


def test_name_may_lead_to_where_the_file_was(chain: chains.Chain, tmp_path: Path) -> None:
    plain(chain)
    expected = chain.disk()
    for number, name in enumerate(NAMES_OF_THE_BASE):
        chains.rename_backing(chain.files[1], name.encode())
        cdi_worker.run(request(local(chain.files), tmp_path / f"{number}.img"))
        oracle.same(tmp_path / f"{number}.img", expected)


def test_path_of_a_layer_may_be_no_text(chain: chains.Chain) -> None:
    plain(chain)
    expected = chain.disk()
    folder = chain.top.parent.rename(chain.top.parent.with_name("not-\udcff"))
    cdi_worker.run(request(local([folder / file.name for file in chain.files]), chain.target))
    oracle.same(chain.target, folder / expected.name)


@ON_A_DEVICE
def test_truncated_layer_is_refused(chain: chains.Chain, target: Path) -> None:
    plain(chain)
    top = chain.top.read_bytes()
    chain.top.write_bytes(top[: len(top) - 3 * 65536])
    with pytest.raises(errors.Truncated):
        cdi_worker.run(request(local(chain.files), target))
    oracle.unusable(target)


def test_layers_need_byte_ranges(server: misbehave.Server, chain: chains.Chain) -> None:
    plain(chain)
    with pytest.raises(errors.Unsupported, match="no byte ranges, which the layers of a disk need"):
        cdi_worker.run(request(serve(server, chain.files, ranges=False), chain.target))


def test_server_that_lies_about_ranges_of_a_layer_is_noticed(
    server: misbehave.Server, chain: chains.Chain
) -> None:
    plain(chain)
    addresses = serve(server, chain.files[:2])
    page = misbehave.Page(chain.top.read_bytes(), lie=lambda first, number: first + 512 if first else 0)
    with pytest.raises(errors.NoRanges, match="byte ranges not available"):
        cdi_worker.run(request([*addresses, server.serve("/layer-2.qcow2", page)], chain.target))
    oracle.unusable(chain.target)


def test_inspection_of_a_layer_without_its_tables_names_the_cause(
    server: misbehave.Server, chain: chains.Chain
) -> None:
    chain.base("1200M", "write -P 1 0 1M")
    chain.overlay("write -P 2 1M 64k")
    # Its second table is behind the first response.
    chain.overlay("write -P 3 1M 64k", "write -P 4 1000M 64k")
    addresses = serve(server, chain.files[:2])
    page = misbehave.Page(chain.top.read_bytes())
    gone = server.serve("/layer-2.qcow2", (page, 1), misbehave.Page(status=404))
    with pytest.raises(errors.Unreachable, match="404"):
        cdi_worker.inspect(dataclasses.replace(request([*addresses, gone], Path()), target=""))


@ON_A_DEVICE
def test_killed_import_resumes_and_any_changed_layer_starts_it_over(
    server: misbehave.Server, chain: chains.Chain, target: Path
) -> None:
    chain.base("16M", "write -P 1 0 8M")
    chain.overlay("write -P 2 2M 8M")
    chain.overlay("write -P 3 12M 2M", "write -P 4 1M 64k")
    expected = chain.disk()
    broken = misbehave.Page(chain.top.read_bytes(), etag='"layer-2.qcow2"', cut_at=1 << 20)
    addresses = serve(server, chain.files)
    server.serve("/layer-2.qcow2", broken)
    wanted = request(addresses, target, journal_interval=0.05)
    wanted = dataclasses.replace(wanted, fetch=fetch.FetchOptions(connections=2, no_progress=1))
    with pytest.raises((errors.TransferFailed, errors.NoRanges)):
        cdi_worker.run(wanted)
    oracle.unusable(target)
    serve(server, chain.files)
    resumed = cdi_worker.run(wanted)
    oracle.same(target, expected, beyond=devices.beyond(target))
    assert resumed.resumed > 4 * MIB
    server.serve("/layer-2.qcow2", broken)
    with pytest.raises((errors.TransferFailed, errors.NoRanges)):
        cdi_worker.run(wanted)
    serve(server, chain.files)
    server.serve("/layer-1.qcow2", misbehave.Page(chain.files[1].read_bytes(), etag='"other"'))
    assert cdi_worker.run(wanted).resumed == 0
    oracle.same(target, expected, beyond=devices.beyond(target))


@ON_A_DEVICE
def test_layer_that_changes_during_the_import_ends_it(
    server: misbehave.Server, chain: chains.Chain, target: Path
) -> None:
    plain(chain)
    addresses = serve(server, chain.files)
    body = chain.files[1].read_bytes()
    pages = (misbehave.Page(body, etag='"a"'), 1), misbehave.Page(body[::-1], etag='"b"')
    server.serve("/layer-1.qcow2", *pages)
    with pytest.raises(errors.SourceChanged):
        cdi_worker.run(request(addresses, target))
    oracle.unusable(target)


def test_credentials_are_not_sent_to_the_server_of_another_layer(tmp_path: Path) -> None:
    access = cdi_worker.Access(user="u", password="secret")
    first = cdi_worker.Location("https://a.example.org/full.qcow2", access)
    for other in (
        "https://b.example.org/x.qcow2",
        "http://a.example.org/x.qcow2",
        "https://a.example.org:444/x",
    ):
        wanted = request([first.endpoint, other], tmp_path / "disk.img")
        layers = (cdi_worker.Location(other, access),)
        with pytest.raises(errors.RequestError, match="name all layers at that of the first file"):
            cdi_worker.run(dataclasses.replace(wanted, location=first, layers=layers))


# -- stages --------------------------------------------------------------------------------------------


def staged(address: str, previous: str, current: str) -> Any:
    kind = http.Http if address.startswith("http") else local_locations.LocalFile
    return kind(address, previous=previous, current=current)


def stage(addresses: list[str], target: Path, previous: str, current: str) -> cdi_worker.Result:
    wanted = request(addresses, target)
    return cdi_worker.run(dataclasses.replace(wanted, location=staged(addresses[0], previous, current)))


@pytest.mark.parametrize(
    ("make", "target"),
    pairs.dealt([plain, smaller, zeros, compressed, subclusters, preallocated], TARGETS),
    indirect=["target"],
)
def test_layers_are_applied_to_a_disk_that_holds_the_earlier_ones(
    server: misbehave.Server, chain: chains.Chain, target: Path, make: Callable[[chains.Chain], None]
) -> None:
    make(chain)
    expected = chain.disk()
    addresses = serve(server, chain.files)
    names = [path.name for path in chain.files]
    stage(addresses[:1], target, "", names[0])
    # One by one, the last two together.
    for index in range(1, len(addresses) - 2):
        stage([addresses[index]], target, names[index - 1], names[index])
    at = max(1, len(addresses) - 2)
    stage(addresses[at:], target, names[at - 1], names[-1])
    oracle.same(target, expected, beyond=b"\0")
    assert not [*target.parent.glob("disk.img.*")]


@pytest.mark.parametrize(
    ("make", "target"),
    pairs.dealt([smaller, at_random(0), at_random(1)], ["block4096", "file", "block512"]),
    indirect=["target"],
)
def test_disk_that_shrinks_and_grows_between_stages_has_no_old_bytes(
    chain: chains.Chain, target: Path, make: Callable[[chains.Chain], None]
) -> None:
    """What is behind the end of a stage reads as zeros when a later stage is larger."""
    make(chain)
    expected = chain.disk()
    names = [path.name for path in chain.files]
    for before, name, path in zip(["", *names[:-1]], names, local(chain.files), strict=True):
        stage([path], target, before, name)
    oracle.same(target, expected, beyond=b"\0")


def test_stage_from_another_checkpoint_is_refused(chain: chains.Chain) -> None:
    plain(chain)
    target = chain.target
    base, _, second = local(chain.files)
    stage([base], target, "", "base.qcow2")
    before = target.read_bytes()
    with pytest.raises(
        errors.Refused, match=r"its backing file is 'layer-1.qcow2', but the file before it is"
    ):
        stage([second], target, "base.qcow2", "layer-2.qcow2")
    for path in chain.files[1:]:
        chain.unnamed(path)
    with pytest.raises(errors.TargetError, match=r"holds the disk at checkpoint base.qcow2"):
        stage([second], target, "layer-1.qcow2", "layer-2.qcow2")
    assert target.read_bytes() == before


def test_stage_after_a_killed_first_stage_is_refused(chain: chains.Chain, tmp_path: Path) -> None:
    """A disk was there before, which the first stage would have replaced."""
    plain(chain)
    target, part = chain.target, tmp_path / "disk.img.part"
    base, first, _ = local(chain.files)
    old = b"\xff" * (64 << 20)
    target.write_bytes(old)
    part.write_bytes(old[: 1 << 20])
    with pytest.raises(errors.TargetError, match=r"is beside .*disk.img.part, the unfinished disk"):
        stage([first], target, "base.qcow2", "layer-1.qcow2")
    assert target.read_bytes() == old
    stage([base], target, "", "base.qcow2")
    # With a checkpoint it is the right disk, whatever was begun since then.
    part.write_bytes(old[: 1 << 20])
    stage([first], target, "base.qcow2", "layer-1.qcow2")
    assert not part.exists()


def test_delta_does_not_change_a_disk_that_has_another_name(chain: chains.Chain, tmp_path: Path) -> None:
    """It would stay usable by that name, and hold a part of the delta."""
    plain(chain)
    target, link = chain.target, tmp_path / "copy.img"
    addresses, names = [str(path) for path in chain.files], [path.name for path in chain.files]
    stage(addresses[:1], target, "", names[0])
    link.hardlink_to(target)
    before = target.read_bytes()
    with pytest.raises(errors.TargetError, match="several hard links"):
        stage(addresses[1:2], target, names[0], names[1])
    assert link.read_bytes() == target.read_bytes() == before
    link.unlink()
    stage(addresses[1:2], target, names[0], names[1])


def test_stage_leads_to_another_checkpoint(chain: chains.Chain) -> None:
    plain(chain)
    first, second = (path.name for path in chain.files[:2])
    stage([str(chain.files[0])], chain.target, "", first)
    with pytest.raises(errors.RequestError, match="the previous checkpoint is the current one"):
        stage([str(chain.files[1])], chain.target, first, first)
    stage([str(chain.files[1])], chain.target, first, second)


def test_disk_of_layers_is_remembered_as_the_last_one(chain: chains.Chain) -> None:
    """The delta to an earlier file would change only a part of the disk."""
    plain(chain)
    expected = chain.disk()
    target = chain.target
    base, *layers = local(chain.files)
    with pytest.raises(errors.RequestError, match=r"'base.qcow2': .* is 'layer-2.qcow2'; name that"):
        stage([base, *layers], target, "", "base.qcow2")
    assert not target.exists()
    stage([base], target, "", "base.qcow2")
    before = target.read_bytes()
    with pytest.raises(errors.RequestError, match=r"'layer-1.qcow2': .* is 'layer-2.qcow2'; name that"):
        stage(layers, target, "base.qcow2", "layer-1.qcow2")
    assert target.read_bytes() == before
    stage([layers[0], chain.top.as_uri()], target, "base.qcow2", "layer-2.qcow2")
    oracle.same(target, expected)


def test_larger_delta_needs_a_larger_target(chain: chains.Chain) -> None:
    larger(chain)
    target = chain.target
    base, first, _ = local(chain.files)
    stage([base], target, "", "base.qcow2")
    with pytest.raises(errors.TooLarge):
        stage([first], target, "base.qcow2", "layer-1.qcow2")
    assert target.exists()


def test_interrupted_stage_is_run_again(server: misbehave.Server, chain: chains.Chain) -> None:
    plain(chain)
    expected = chain.disk()
    target = chain.target
    base, *layers = serve(server, chain.files)
    stage([base], target, "", "base.qcow2")
    server.serve(
        "/layer-2.qcow2",
        (misbehave.Page(chain.top.read_bytes(), etag='"layer-2.qcow2"'), 2),
        misbehave.Page(status=410),
    )
    with pytest.raises(errors.SourceError):
        stage(layers, target, "base.qcow2", "layer-2.qcow2")
    assert not target.exists()
    serve(server, chain.files)
    with pytest.raises(errors.TargetError, match=r"with a part of the delta to layer-2\.qcow2"):
        stage(layers[:1], target, "base.qcow2", "layer-1.qcow2")
    stage(layers, target, "base.qcow2", "layer-2.qcow2")
    oracle.same(target, expected)


def replaced(chain: chains.Chain) -> tuple[bytes, bytes]:
    """Return two versions of an increment, as long as each other: the disk was reverted, and less is new."""
    chain.base("16M", "write -P 1 0 16M")
    old = chain.overlay("write -P 2 1M 4M", "write -P 3 12M 2M").read_bytes()
    del chain.files[1:], chain.forms[1:]
    new = chain.overlay("write -P 9 12M 2M").read_bytes()
    return old, new.ljust(len(old), b"\0")


@pytest.mark.parametrize(
    ("before", "after", "is_cut"),
    [
        ({"etag": '"1"'}, {"etag": '"2"'}, True),
        ({"etag": '"1"'}, {"etag": None, "modified": None}, False),
        # The same second: only the first bytes differ.
        ({"etag": None}, {"etag": None}, True),
        ({"etag": None}, {"etag": None}, False),
    ],
)
def test_increment_that_was_replaced_is_not_applied_over_the_old_one(
    server: misbehave.Server,
    chain: chains.Chain,
    tmp_path: Path,
    before: dict[str, Any],
    after: dict[str, Any],
    is_cut: bool,
) -> None:
    """Clusters that only the old one has would stay."""
    old, new = (
        misbehave.Page(data, **page) for data, page in zip(replaced(chain), (before, after), strict=True)
    )
    target = chain.target
    held = tmp_path / ("disk.img.changing" if is_cut else "disk.img")
    first = server.serve("/base.qcow2", misbehave.Page(chain.files[0].read_bytes()))
    stage([first], target, "", "base.qcow2")
    wanted = request([server.serve("/layer-1.qcow2", old)], target)
    wanted = dataclasses.replace(
        wanted,
        location=staged(wanted.location.endpoint, "base.qcow2", "layer-1.qcow2"),
        fetch=fetch.FetchOptions(connections=1, chunk=MIB, no_progress=1),
    )
    if is_cut:
        server.serve("/layer-1.qcow2", dataclasses.replace(old, cut_at=5 * MIB))
        with pytest.raises((errors.TransferFailed, errors.NoRanges)):
            cdi_worker.run(wanted)
    else:
        cdi_worker.run(wanted)
    part = held.read_bytes()
    assert b"\2" * MIB in part
    server.serve("/layer-1.qcow2", new)
    with pytest.raises(errors.TargetError, match="but of other files than these: one was replaced"):
        cdi_worker.run(wanted)
    assert held.read_bytes() == part
    server.serve("/layer-1.qcow2", old)
    cdi_worker.run(wanted)
    server.serve("/layer-1.qcow2", new)
    stage([first], target, "", "base.qcow2")
    cdi_worker.run(wanted)
    oracle.same(target, chain.disk())


# -- the command line ------------------------------------------------------------------------------------


def test_layers_on_the_command_line(server: misbehave.Server, chain: chains.Chain) -> None:
    plain(chain)
    expected = chain.disk()
    base, first, second = serve(server, chain.files)
    target = chain.target
    dry = worker.call("import", "--dry-run", base, target, "--layer", first, "--layer", second)
    assert dry.status == 0, dry.errors
    assert f"layer 1  {base}: 6.9 MiB of 16.0 MiB (names no backing file)" in dry.output
    assert f"layer 3  {second}: 1.1 MiB of 16.0 MiB (backing file {chain.files[1]})" in dry.output
    size = sum(path.stat().st_size for path in chain.files)
    assert f"size as served  {size} bytes" in dry.output
    assert not target.exists()
    done = worker.call("import", "--json", base, target, "--layer", first, "--layer", second)
    assert done.status == 0, done.errors
    oracle.same(target, expected)
    found = json.loads(done.output)
    assert [layer["name"] for layer in found["chain"]] == [base, first, second]
    assert sum(layer["bytes"] for layer in found["chain"]) == sum(
        layer["bytes"]
        for layer in json.loads(
            worker.call("inspect", "--json", base, f"--layer={first}", f"--layer={second}").output
        )["chain"]
    )
    env = {"CDI_WORKER_LAYER": f"{first}\n{second}"}
    done = worker.call("import", "--force", "-q", base, target, env=env)
    assert done.status == 0, done.errors
    oracle.same(target, expected)


def test_layers_of_a_pod(server: misbehave.Server, chain: chains.Chain, pod: worker.Pod) -> None:
    plain(chain)
    expected = chain.disk()
    base, *layers = serve(server, chain.files)
    pod.env |= {
        "IMPORTER_ENDPOINT": base,
        "CDI_WORKER_LAYER": "\n".join(layers),
        "IMPORTER_IMAGE_SIZE": "16Mi",
    }
    assert pod.call().status == 0
    oracle.same(pod.disk, expected)


def test_pod_reads_no_layers_beside_the_file_of_its_checkpoint(
    server: misbehave.Server, chain: chains.Chain, pod: worker.Pod
) -> None:
    """Its address is made that of the checkpoint's file, which is then the first one and not the last."""
    plain(chain)
    base, _, second = serve(server, chain.files)
    pod.env |= {"IMPORTER_ENDPOINT": base, "IMPORTER_IMAGE_SIZE": "16Mi"}
    assert pod.call(IMPORTER_CURRENT_CHECKPOINT="base.qcow2").status == 0
    before = pod.disk.read_bytes()
    stages = {"IMPORTER_PREVIOUS_CHECKPOINT": "base.qcow2", "IMPORTER_CURRENT_CHECKPOINT": "layer-1.qcow2"}
    assert pod.call(**stages, CDI_WORKER_LAYER=second).status != 0
    assert "CDI_WORKER_LAYER and IMPORTER_CURRENT_CHECKPOINT exclude each other" in pod.message
    assert pod.disk.read_bytes() == before


def delta_in_ova(tmp_path: Path, at: str = "1M") -> tuple[Path, Path]:
    """Return a raw disk, and an OVA with a qcow2 of what has changed since."""
    full, changed, package = tmp_path / "full.raw", tmp_path / "changed.qcow2", tmp_path / "changed.ova"
    full.write_bytes(random.Random(1).randbytes(4 << 20))
    processes.run("qemu-img", "create", "-q", "-f", "qcow2", "-b", full, "-F", "raw", changed)
    processes.run("qemu-io", "-f", "qcow2", "-c", f"write -P 9 {at} 64k", changed)
    package.write_bytes(ovas.ova(ovas.Disk(changed.read_bytes(), changed.name, capacity=4)))
    return full, package


@pytest.mark.parametrize("options", [["--disk=1"], ["--all"]])
def test_delta_may_be_in_an_ova(tmp_path: Path, options: list[str]) -> None:
    full, package = delta_in_ova(tmp_path)
    folder = tmp_path / "disks"
    folder.mkdir()
    disk = folder / "changed.img"
    names = "--previous-checkpoint=full.raw", "--current-checkpoint=changed.qcow2"
    assert worker.call("import", full, disk, "--current-checkpoint=full.raw").status == 0
    again = "import", *options, package, folder if "--all" in options else disk, *names
    done = worker.call(*again)
    assert done.status == 0, done.errors
    expected = tmp_path / "expected.raw"
    processes.run("qemu-img", "convert", "-O", "raw", tmp_path / "changed.qcow2", expected)
    oracle.same(disk, expected)
    assert worker.call(*again).status == 0
    os.utime(package, (1, 1))
    assert worker.call(*again).status == 0
    (tmp_path / "new").mkdir()
    package.write_bytes(delta_in_ova(tmp_path / "new", at="3M")[1].read_bytes())
    done = worker.call(*again)
    assert "holds the disk at checkpoint changed.qcow2, but of other files than these" in done.errors
    oracle.same(disk, expected)


def test_delta_in_an_ova_that_was_replaced_is_refused(server: misbehave.Server, tmp_path: Path) -> None:
    """In the same second: only the first bytes of its disk differ."""
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    full, old = delta_in_ova(tmp_path / "old")
    _, new = delta_in_ova(tmp_path / "new", at="3M")
    assert old.stat().st_size == new.stat().st_size
    target = tmp_path / "disk.img"
    stage([str(full)], target, "", "full.raw")
    address = server.serve("/changed.ova", misbehave.Page(old.read_bytes(), etag=None))
    stage([address], target, "full.raw", "changed.qcow2")
    stage([address], target, "full.raw", "changed.qcow2")
    before = target.read_bytes()
    server.serve("/changed.ova", misbehave.Page(new.read_bytes(), etag=None))
    with pytest.raises(errors.TargetError, match="but of other files than these"):
        stage([address], target, "full.raw", "changed.qcow2")
    assert target.read_bytes() == before
