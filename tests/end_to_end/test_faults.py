"""Bad input: one clear line, the documented status, nothing usable on the target, and a re-run works."""

from __future__ import annotations

import dataclasses
import gzip
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import cdi_worker
from tests.support import (
    devices,
    hostile,
    hostile_archives,
    misbehave,
    oracle,
    pairs,
    processes,
    servers,
    worker,
)
from tests.support import disks as disks_module

MiB = 1 << 20

#: Exit status (docs/reference/exit-status.md).
REQUEST, SOURCE, IMAGE, CHECKSUM, TARGET, SCRATCH, TOO_LARGE = range(2, 9)
#: Seconds without data until a test's worker stops.
IMPATIENT = ("--stall-timeout=1",)


target = devices.targets("file", "block", size=16 * MiB)


def check_failure(done: worker.Completed, status: int, message: str, target: Path) -> None:
    assert (done.status, done.output) == (status, ""), done.errors
    assert message in done.error_message
    assert "Traceback" not in done.errors
    oracle.unusable(target)
    if not target.is_block_device():
        # Files kept for the next attempt are recognised by their name.
        assert all(path.name.startswith("disk.img.part") for path in target.parent.glob("disk.img*"))


def check_rerun(url: str, target: Path, expected: Path) -> None:
    """Import again over what the failure left, without cleaning up."""
    location = cdi_worker.Location(url)
    wanted = cdi_worker.Request(source="http", location=location, target=str(target), existing="replace")
    cdi_worker.run(wanted)
    oracle.same(target, expected, beyond=devices.beyond(target))


@dataclasses.dataclass(frozen=True)
class Case:
    """What is served, the exit status, and the message."""

    serve: Callable[[disks_module.Disks], misbehave.Page]
    status: int
    message: str
    arguments: tuple[str, ...] = ()


def page(**faults: object) -> Callable[[disks_module.Disks], misbehave.Page]:
    """Return what serves a good raw disk, but for ``faults``."""
    return lambda disks: misbehave.Page(**{"body": disks.raw().read_bytes(), **faults})


def packed(
    compression: str, change: Callable[[bytes], bytes]
) -> Callable[[disks_module.Disks], misbehave.Page]:
    return lambda disks: misbehave.Page(change(disks.wrapped("raw", compression).read_bytes()))


def nested(depth: int) -> bytes:
    data = bytes(1000)
    for _ in range(depth):
        data = gzip.compress(data, mtime=0)
    return data


def damage(data: bytes) -> bytes:
    """Return the data with one bit flipped in its middle."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]


HTML = b"<!DOCTYPE html>\n<html><head><title>Sign in</title></head><body>Please sign in</body></html>\n"
SERVED = {
    "html": Case(page(body=HTML, content_type="text/html"), IMAGE, "HTML"),
    "html-as-octets": Case(page(body=HTML), IMAGE, "HTML"),
    "empty": Case(page(body=b""), IMAGE, "empty"),
    "empty-chunked": Case(page(body=b"", framing="chunked", ranges=False), IMAGE, "empty"),
    "401": Case(page(status=401), SOURCE, "401"),
    "403": Case(page(status=403), SOURCE, "403"),
    "404": Case(page(status=404), SOURCE, "404"),
    "500": Case(page(status=500), SOURCE, "500", IMPATIENT),
    "redirect-loop": Case(page(to=("/disk",)), SOURCE, "redirects"),
    "redirect-to-file": Case(page(to=("file:///etc/passwd",)), SOURCE, "not http"),
    "short-body": Case(page(ranges=False, missing=10), SOURCE, "at byte 8388608", IMPATIENT),
    "short-range": Case(page(cut_at=5_000_001), SOURCE, "at byte 5000001", IMPATIENT),
    "total-is-a-lie": Case(
        page(content_range="bytes {first}-{last}/9999999"), SOURCE, "size was 9999999, now 8388608"
    ),
    "checksum": Case(page(), CHECKSUM, "checksum mismatch: expected md5:", ("--checksum=md5:" + "0" * 32,)),
    "checksum-malformed": Case(page(), REQUEST, "checksum", ("--checksum=md5:xyz",)),
    "tar-as-a-disk": Case(
        lambda _: misbehave.Page(hostile_archives.ARCHIVES["innocent"]()), IMAGE, "archive"
    ),
    "gz-in-gz-in-gz-in-gz": Case(lambda _: misbehave.Page(nested(5)), IMAGE, "compressed more than"),
    **{
        f"{kind}-truncated": Case(packed(kind, lambda data: data[:-20]), IMAGE, f"truncated {kind}")
        for kind in disks_module.COMPRESSIONS
    },
    "xz-half": Case(packed("xz", lambda data: data[: len(data) // 2]), IMAGE, "truncated xz"),
    "zst-garbage": Case(packed("zst", lambda data: data + b"x" * 600), IMAGE, "trailing garbage"),
    "bz2-damaged": Case(packed("bz2", damage), IMAGE, "corrupt"),
}


@pytest.mark.parametrize(("name", "target"), pairs.dealt(SERVED, ["file", "block"]), indirect=["target"])
def test_bad_content_is_refused(
    server: misbehave.Server, disks: disks_module.Disks, target: Path, name: str
) -> None:
    case = SERVED[name]
    url = server.serve("/disk", case.serve(disks))
    check_failure(worker.call("import", url, target, *case.arguments), case.status, case.message, target)
    check_rerun(server.serve("/disk", page()(disks)), target, disks.raw())


def test_bad_address_is_reported(tmp_path: Path) -> None:
    for url, status, message in (
        ("http://no-such-host.invalid/disk", SOURCE, "unknown host"),
        ("http://127.0.0.1:1/disk", SOURCE, "connection refused"),
        ("http://127.0.0.1:port/disk", REQUEST, "malformed URL"),
        ("http:///disk", REQUEST, "malformed URL"),
        ("http://a..b/disk", REQUEST, "malformed URL"),
        (f"http://{'a' * 64}.invalid/disk", REQUEST, "malformed URL"),
        ("gopher://127.0.0.1/disk", REQUEST, "gopher"),
        ("/no/such/disk", SOURCE, "no such file"),
    ):
        done = worker.call("import", url, tmp_path / "disk.img")
        check_failure(done, status, message, tmp_path / "disk.img")


@pytest.mark.parametrize("target", ["block"], indirect=True)
def test_stalled_server_is_reported(
    server: misbehave.Server, disks: disks_module.Disks, target: Path
) -> None:
    page = misbehave.Page(disks.raw().read_bytes())
    url = server.serve("/disk", (page, 2), dataclasses.replace(page, stall=0))
    check_failure(worker.call("import", url, target, *IMPATIENT), SOURCE, "timed out", target)
    check_rerun(server.serve("/disk", page), target, disks.raw())


@pytest.mark.parametrize("target", ["file"], indirect=True)
def test_bytes_behind_content_length_are_ignored(
    server: misbehave.Server, disks: disks_module.Disks, target: Path
) -> None:
    """Bytes behind Content-Length are not part of the response (RFC 9112, 6.3)."""
    for ranges in (True, False):
        page = misbehave.Page(disks.raw().read_bytes(), ranges=ranges, extra=5000)
        check_rerun(server.serve("/disk", page), target, disks.raw())


@pytest.mark.parametrize(
    ("good", "target"), [(0, "file"), (2, "block")], ids=["first-contact", "transfer"], indirect=["target"]
)
def test_too_long_a_wait_is_not_honoured(
    server: misbehave.Server, disks: disks_module.Disks, target: Path, good: int
) -> None:
    page = misbehave.Page(disks.raw().read_bytes())
    busy = dataclasses.replace(page, status=429, headers={"Retry-After": "3600"})
    url = server.serve("/disk", (page, good), busy)
    message = "429 Too Many Requests; no data for 0 s, and the server asks to wait 3600 s (at most 600 s"
    check_failure(worker.call("import", url, target), SOURCE, message, target)
    check_rerun(server.serve("/disk", page), target, disks.raw())


@pytest.mark.parametrize(
    ("later", "ranges", "target"),
    [
        ({"etag": '"two"'}, True, "block"),
        ({"etag": "", "modified": "Tue, 03 Nov 2026 10:00:00 GMT"}, False, "block"),
        ({"body": b"another"}, True, "file"),
    ],
    ids=["etag", "modified", "size"],
    indirect=["target"],
)
def test_changed_source_is_reported(
    server: misbehave.Server, disks: disks_module.Disks, target: Path, later: dict[str, object], ranges: bool
) -> None:
    page = misbehave.Page(disks.raw().read_bytes(), ranges=ranges)
    first = (page, 3) if ranges else (dataclasses.replace(page, cut=5_000_000), 1)
    url = server.serve("/disk", first, dataclasses.replace(page, **later))
    check_failure(worker.call("import", url, target), SOURCE, "changed during the transfer", target)
    check_rerun(server.serve("/disk", page), target, disks.raw())


@pytest.mark.parametrize(
    ("variant", "target"),
    [("raw", "block"), ("qcow2-zlib", "file"), ("vmdk", "block"), ("vhdx-log", "file")],
    indirect=["target"],
)
def test_too_large_disk_is_refused_before_the_transfer(
    server: misbehave.Server, disks: disks_module.Disks, target: Path, variant: str
) -> None:
    data = disks.image(variant, "far").read_bytes()
    url = server.serve("/disk", misbehave.Page(data))
    is_device = target.is_block_device()
    done = worker.call("import", url, target, *([] if is_device else ["--size=16Mi"]))
    needs, room = f"{24 * MiB} bytes (24.0 MiB)", f"{16 * MiB} bytes (16.0 MiB)"
    message = f"the disk needs {needs}, --size allows {room}; give a larger --size, or leave it out"
    if is_device:
        message = (
            f"the disk needs {needs}, the target has room for {room}; free space or name a larger target"
        )
    check_failure(done, TOO_LARGE, message, target)
    assert server.sent("/disk") < MiB
    assert not is_device or target.read_bytes() == devices.DIRT * 16 * MiB


@pytest.mark.parametrize(
    ("compression", "target"), pairs.dealt(disks_module.COMPRESSIONS, ["file", "block"]), indirect=["target"]
)
def test_decompression_bomb_is_refused(
    web: servers.Web, disks: disks_module.Disks, target: Path, compression: str
) -> None:
    url = web.url(hostile.bomb(disks, compression))
    done = worker.call("import", url, target, *([] if target.is_block_device() else ["--size=16Mi"]))
    check_failure(done, TOO_LARGE, "larger", target)
    check_rerun(web.url(disks.raw()), target, disks.raw())


@pytest.mark.parametrize(
    ("name", "ranges", "target"),
    [
        (name, ranges, target)
        for name, (ranges, target) in pairs.dealt(
            sorted({*hostile.IMAGES} - {"qcow2-dirty"}),  # accepted, and read
            [(True, "file"), (False, "file"), (True, "block"), (False, "block")],
        )
    ],
    indirect=["target"],
)
def test_hostile_image_is_refused(
    server: misbehave.Server,
    disks: disks_module.Disks,
    target: Path,
    scratch: Path,
    name: str,
    ranges: bool,
) -> None:
    url = server.serve("/disk", misbehave.Page(hostile.image(disks, name).read_bytes(), ranges=ranges))
    done = worker.call("import", url, target, f"--scratch={scratch}")
    check_failure(done, IMAGE, "", target)
    assert not [*scratch.iterdir()]
    check_rerun(server.serve("/disk", misbehave.Page(disks.raw().read_bytes())), target, disks.raw())


# -- target and scratch ------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["block"], indirect=True)
def test_scratch_that_is_missing_or_too_small_is_reported(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path, target: Path
) -> None:
    page = misbehave.Page(disks.image("vhdx-log").read_bytes(), ranges=False)
    url = server.serve("/disk", page)
    check_failure(worker.call("import", url, target), SCRATCH, "scratch space required", target)
    with devices.filesystem("tmpfs", tmp_path, MiB) as small:
        for framing in ("length", "chunked"):
            url = server.serve("/disk", dataclasses.replace(page, framing=framing))
            done = worker.call("import", url, target, f"--scratch={small}")
            check_failure(done, SCRATCH, "scratch", target)
            assert not [*small.iterdir()]


@pytest.mark.parametrize(("variant", "compression"), [("raw", "gz"), ("qcow2", None), ("vhdx-log", None)])
def test_full_target_is_reported(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, scratch: Path, variant: str, compression: str
) -> None:
    url = web.url(disks.wrapped(variant, compression, "dense"))
    with devices.filesystem("tmpfs", tmp_path, 2 * MiB) as small:
        target = small / "disk.img"
        done = worker.call("import", url, target, f"--scratch={scratch}")
        check_failure(done, TOO_LARGE, "", target)
        assert "no space left on device" in done.error_message or "name a larger target" in done.error_message


def test_unwritable_target_is_reported(web: servers.Web, disks: disks_module.Disks, tmp_path: Path) -> None:
    url = web.url(disks.raw())
    places = [tmp_path / "no" / "such" / "disk.img", Path("/dev/no-such-device")]
    for path in places:
        done = worker.call("import", url, path)
        check_failure(done, TARGET, str(path), path)


@pytest.mark.parametrize("variant", ["raw", "vhdx-log"])
def test_failing_device_is_reported(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, variant: str
) -> None:
    with devices.failing(tmp_path, 16 * MiB) as device:
        device.fail()
        done = worker.run("import", web.url(disks.image(variant)), device.path)
        assert done.status == TARGET, done.errors
        device.mend()
        check_rerun(web.url(disks.image(variant)), device.path, disks.expected(variant))


def test_failing_device_does_not_hide_the_first_failure(server: misbehave.Server, tmp_path: Path) -> None:
    """The journal cannot be saved after the transfer has failed."""
    body = random.Random(4).randbytes(12 * MiB)
    url = server.serve("/disk", misbehave.Page(body, stall_at=8 * MiB + 300_000))
    with devices.failing(tmp_path, 16 * MiB) as device:
        with worker.started("import", url, device.path, "--stall-timeout=2") as first:
            processes.wait_for(lambda: server.sent("/disk") > 8 * MiB, "all but the range that stalls")
            device.fail()
            assert first.wait(60) == SOURCE
        device.mend()


def test_malformed_option_is_reported(tmp_path: Path) -> None:
    for option in ("--size=10 GB", "--overhead=much", "--header=no colon"):
        done = worker.call("import", "http://127.0.0.1:1/disk", tmp_path / "disk.img", option)
        assert (done.status, option.partition("=")[0] in done.errors) == (REQUEST, True), option
