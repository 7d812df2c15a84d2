"""What a killed import kept is only continued with the same object; bytes with a checksum are hashed, too."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import random
import re
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.targets import file
from cdi_worker.scratch import journal
from tests.support import devices, kills, misbehave, ovas, processes, vhd_images

MIB, SIZE = kills.MIB, kills.SIZE
#: Noise with a hole, which an import zeroes. It does not end with a sector.
DATA = kills.DATA[: 4 * MIB] + bytes(MIB) + kills.DATA[5 * MIB : -300]
STARTING_OVER = "starting over"

Headers = tuple[tuple[str, str], ...]


def sha256(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


RIGHT, WRONG, OF_A_PART = sha256(DATA), sha256(b"other"), sha256(DATA[: 8 * MIB])


target = devices.targets("file", size=16 * MIB)


def run(url: str, target: Path, checksum: str | None, **options: object) -> cdi_worker.Result:
    return cdi_worker.run(kills.request(url, target, checksum=checksum, **options))


def kill_late(
    server: misbehave.Server, page: misbehave.Page, target: Path, checksum: str | None = RIGHT
) -> str:
    """Kill an import of the page; return its URL, which then serves it at full speed."""
    url = server.url("/disk")
    kills.late(server, page, kills.request(url, target, checksum=checksum))
    return url


def check(target: Path, data: bytes = DATA) -> None:
    assert target.read_bytes()[: len(data)] == data


def part(target: Path) -> Path:
    return target if target.is_block_device() else target.with_name(f"{target.name}.part")


def is_kept(target: Path) -> bool:
    """Return whether a file has a left-over, or a device a journal."""
    if target.is_block_device():
        with target.open("rb") as stream:
            return b"cdi-worker journal" in stream.read(MIB)
    return part(target).exists()


# -- with a checksum -----------------------------------------------------------------------------


@devices.on("file", "block")
def test_killed_import_with_a_checksum_resumes(server: misbehave.Server, target: Path) -> None:
    url = kill_late(server, misbehave.Page(DATA), target)
    sent = server.sent("/disk")
    result = run(url, target, RIGHT)
    assert result.resumed >= kills.KEPT
    assert server.sent("/disk") - sent <= SIZE - kills.KEPT + MIB  # the head of a device
    assert result.verified == {"file": RIGHT}
    check(target)


def test_disk_of_an_ova_resumes_with_the_checksum_of_its_manifest(
    server: misbehave.Server, target: Path
) -> None:
    url = kill_late(server, misbehave.Page(ovas.ova(ovas.Disk(DATA, "disk.raw"))), target, None)
    result = run(url, target, None)
    assert result.resumed >= kills.KEPT
    assert result.verified == {"file": RIGHT}
    check(target)


@pytest.mark.parametrize(
    ("before", "after", "target"),
    [(RIGHT, None, "file"), (None, RIGHT, "block"), (WRONG, RIGHT, "file")],
    indirect=["target"],
)
def test_checksum_may_change_between_two_runs(
    server: misbehave.Server, target: Path, before: str | None, after: str | None
) -> None:
    url = kill_late(server, misbehave.Page(DATA), target, before)
    assert run(url, target, after).resumed >= kills.KEPT
    check(target)


@pytest.mark.parametrize(("wrong", "target"), [(WRONG, "file"), (OF_A_PART, "block")], indirect=["target"])
def test_wrong_checksum_discards_what_was_kept(server: misbehave.Server, target: Path, wrong: str) -> None:
    url = kill_late(server, misbehave.Page(DATA), target)
    with pytest.raises(errors.ChecksumMismatch):
        run(url, target, wrong)
    assert not is_kept(target)
    assert run(url, target, RIGHT).resumed == 0
    check(target)


def test_import_starts_over_once(
    server: misbehave.Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what was resumed cannot be removed."""
    calls = itertools.count(1)

    def stays(_target: file.FileTarget) -> None:
        assert next(calls) <= 2

    url = kill_late(server, misbehave.Page(DATA), target)
    monkeypatch.setattr(file.FileTarget, "_abandon", stays)
    with pytest.raises(errors.ChecksumMismatch):
        run(url, target, WRONG)


@devices.on("block")
def test_kept_bytes_of_another_version_are_not_a_mismatch(
    server: misbehave.Server, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It had the same strong ETag. Controllers take a mismatch for final."""
    other = DATA[:MIB] + random.Random(9).randbytes(2 * MIB) + DATA[3 * MIB :]
    url = kill_late(server, misbehave.Page(other), target, None)
    server.serve("/disk", misbehave.Page(DATA))
    assert run(url, target, RIGHT).resumed == 0
    assert f"{STARTING_OVER}: what was resumed does not have the checksum" in caplog.text
    check(target)


@devices.on("file", "block")
def test_partial_import_of_another_source_that_is_discarded_is_reported(
    server: misbehave.Server, target: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kill_late(server, misbehave.Page(DATA), target)
    run(server.serve("/other", misbehave.Page(DATA[: 4 * MIB])), target, None)
    size = "a part" if target.is_block_device() else r"\d+\.\d MiB"
    words = rf"{STARTING_OVER}: {target} holds {size} of another source, version or request"
    assert re.search(words, caplog.text)
    caplog.clear()
    run(server.url("/other"), target, None)
    assert STARTING_OVER not in caplog.text


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@devices.on("block")
def test_import_that_kept_nothing_is_not_of_another_source(
    server: misbehave.Server, target: Path, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    """It ended while the head was fetched that is not written before the end."""
    page = misbehave.Page(DATA)
    url = server.serve("/disk", dataclasses.replace(page, drip=(8 << 10, 0.02)))
    alone = cdi_worker.FetchOptions(connections=1, chunk=MIB, no_progress=20)
    kills.kill(kills.request(url, target, fetch=alone), lambda: is_kept(target), number)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/disk", page)
    assert run(url, target, None).resumed == 0
    assert STARTING_OVER not in caplog.text


@pytest.mark.parametrize("packed", [False, True])
def test_checksum_that_costs_ranges_is_reported(
    server: misbehave.Server, target: Path, caplog: pytest.LogCaptureFixture, *, packed: bool
) -> None:
    path = target.with_name("disk.qcow2")
    processes.run("qemu-img", "create", "-f", "qcow2", path, "64M")
    body = ovas.ova(ovas.Disk(DATA, "disk.raw"), listed="none") if packed else path.read_bytes()
    url = server.serve("/disk", misbehave.Page(body))
    words = "all of the image is downloaded, and again after an interruption"
    run(url, target, None)
    assert words not in caplog.text
    run(url, target, sha256(body))
    assert caplog.text.count(words) == 1
    caplog.clear()
    # Neither is resumed without a checksum.
    request = kills.request(url, target, checksum=sha256(body))
    assert cdi_worker.verify(request).is_equal
    cdi_worker.run(dataclasses.replace(request, existing="update"))
    assert words not in caplog.text


@devices.on("block")
def test_range_that_storage_has_lost_is_fetched_again(server: misbehave.Server, target: Path) -> None:
    url = kill_late(server, misbehave.Page(DATA), target)
    devices.change(part(target), 2 * MIB + 700, b"damaged")
    result = run(url, target, RIGHT)
    assert result.refetched > 0
    assert result.verified == {"file": RIGHT}
    check(target)


def test_footer_of_a_fixed_vhd_is_hashed(server: misbehave.Server, target: Path) -> None:
    disk = DATA + bytes(300)
    page = misbehave.Page(vhd_images.fixed(disk, b"win "))
    url = kill_late(server, page, target, sha256(page.body))
    with pytest.raises(errors.ChecksumMismatch):
        run(url, target, sha256(disk))
    url = kill_late(server, page, target, sha256(page.body))
    assert run(url, target, sha256(page.body)).resumed >= kills.KEPT
    check(target, disk)


@devices.on("block")
def test_second_kill_keeps_both_parts(server: misbehave.Server, target: Path) -> None:
    page = misbehave.Page(DATA)
    wanted = kills.request(server.serve("/disk", kills.slow(page)), target, checksum=RIGHT)
    for kept in (2 * MIB, 4 * MIB):
        kills.midway(server, wanted, sent=2 * MIB, kept=kept)
    sent = server.sent("/disk")
    server.serve("/disk", page)
    result = cdi_worker.run(wanted)
    assert result.resumed >= 4 * MIB
    assert server.sent("/disk") - sent <= SIZE - result.resumed + MIB
    check(target)


@pytest.mark.parametrize(("changed", "target"), [(False, "file"), (True, "block")], indirect=["target"])
def test_weak_identity_is_sampled_first(server: misbehave.Server, target: Path, *, changed: bool) -> None:
    page = misbehave.Page(DATA, etag=None)
    url = kill_late(server, page, target)
    now = random.Random(10).randbytes(len(DATA) - MIB) + DATA[-MIB:] if changed else DATA
    body = DATA[:MIB] + now[MIB:]
    server.serve("/disk", dataclasses.replace(page, body=body))
    assert bool(run(url, target, sha256(body)).resumed) != changed
    check(target, body)


# -- with the same ETag, date and size -----------------------------------------------------------

#: The sample is all that is kept.
KILLED_AFTER_THE_SAMPLE = """
import os
from cdi_worker.importer import execute
from cdi_worker.scratch import journal
journal._places = lambda records: (span for each in records for span in each.spans)
execute._rounds = lambda *_: os._exit(9)
"""


@functools.cache
def disk(name: str) -> bytes:
    """Return disk "a", "b" or "c". Only the address tells the second from the first one."""
    data = random.Random(name).randbytes(SIZE)
    return disk("a")[:MIB] + data[MIB:] if name == "b" else data


def requested(url: str, target: Path, headers: Headers = ()) -> cdi_worker.Request:
    return kills.request(url, target, access=cdi_worker.Access(headers=headers))


def serve(server: misbehave.Server, paths: Mapping[str, str]) -> None:
    """Serve each disk at its path, all with the same ETag, date and size."""
    for name, path in paths.items():
        server.serve(path, misbehave.Page(disk(name)))


def test_other_query_starts_over(server: misbehave.Server, target: Path) -> None:
    url = {name: server.url(f"/disk?file={name}") for name in "ab"}
    kills.late(server, misbehave.Page(disk("a")), requested(url["a"], target))
    serve(server, {"b": "/disk?file=b"})
    result = cdi_worker.run(requested(url["b"], target))
    assert target.read_bytes() == disk("b")
    assert not result.resumed


def test_redirect_to_another_disk_starts_over(server: misbehave.Server, target: Path) -> None:
    server.serve("/1/disk", kills.slow(misbehave.Page(disk("a"))))
    wanted = requested(server.serve("/latest", misbehave.Page(to=("/1/disk",))), target)
    kills.kill(wanted, lambda: kills.noted(target) >= kills.KEPT)
    processes.wait_for(server.is_quiet, "the connections of the killed")
    server.serve("/latest", misbehave.Page(to=("/2/disk",)))
    serve(server, {"c": "/2/disk"})
    result = cdi_worker.run(wanted)
    assert target.read_bytes() == disk("c")
    assert not result.resumed


def test_change_that_a_sample_has_shown_is_not_forgotten(
    server: misbehave.Server, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run finds it, and is killed at once; the sample of the next one does not show it."""
    changed = bytearray(disk("a"))
    changed[2 * MIB : 2 * MIB + 1000] = bytes(1000)
    page = misbehave.Page(disk("a"), etag=None)
    wanted = requested(server.url("/disk"), target)
    kills.late(server, page, wanted)
    server.serve("/disk", dataclasses.replace(page, body=bytes(changed)))
    with kills.started(wanted, before=KILLED_AFTER_THE_SAMPLE) as killed:
        assert killed.wait(60) == 9
    monkeypatch.setattr(journal, "_places", lambda _: ())
    cdi_worker.run(wanted)
    assert target.read_bytes() == changed


def test_other_signature_resumes(server: misbehave.Server, target: Path) -> None:
    signed = "/disk?versionId=1&X-Amz-Credential=k&X-Amz-Date={0}&X-Amz-Expires=60&X-Amz-Signature={0}"
    kills.late(server, misbehave.Page(disk("a")), requested(server.url(signed.format(1)), target))
    serve(server, {"a": signed.format(2)})
    result = cdi_worker.run(requested(server.url(signed.format(2)), target))
    assert target.read_bytes() == disk("a")
    assert result.resumed >= kills.KEPT


@pytest.mark.parametrize(("header", "resumes"), [("X-Disk", False), ("Authorization", True)])
def test_header_that_may_select_starts_over(
    server: misbehave.Server, target: Path, header: str, *, resumes: bool
) -> None:
    url, now = server.url("/disk"), "a" if resumes else "b"
    kills.late(server, misbehave.Page(disk("a")), requested(url, target, ((header, "first"),)))
    serve(server, {now: "/disk"})
    result = cdi_worker.run(requested(url, target, ((header, "second"),)))
    assert target.read_bytes() == disk(now)
    assert bool(result.resumed) == resumes
