"""Of a source that holds several disks one is chosen, or all are imported at once and usable together."""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import progress, together
from tests.support import devices, forked, kills, misbehave, oracle, processes, several, vmdk_stream, worker
from tests.support import disks as disks_module
from tests.support.several import Disk

MiB = 1 << 20
VARIANT = "vmdk-tables-last"
#: Lets ``kills`` run all disks.
ALL = "import cdi_worker; from cdi_worker.importer import together; cdi_worker.run = together.run_all"
#: Raw disks of noise.
SIZE = 4 * MiB


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    with several.registered():
        yield


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "disks"
    made.mkdir()
    return made


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    """Return the address of the source, without its scheme."""
    return tmp_path / "listed"


def page(data: bytes, **more: object) -> misbehave.Page:
    """Return what serves a disk: in order, and without a length."""
    return misbehave.Page(data, **{"ranges": False, "framing": "chunked", **more})


def noise(number: int, size: int = SIZE) -> bytes:
    return random.Random(number).randbytes(size)


def serve(server: misbehave.Server, listed: Path, *pages: misbehave.Page) -> None:
    """Serve raw disks a, b, c …, and list them."""
    names = "abcdefghij"[: len(pages)]
    urls = [server.serve(f"/{name}", each) for name, each in zip(names, pages, strict=True)]
    each = zip(names, urls, pages, strict=True)
    several.write(
        listed, *(Disk(f"{name}.raw", url, len(page.body), format="raw") for name, url, page in each)
    )


def check(folder: Path, *pages: misbehave.Page) -> None:
    names = "abcdefghij"[: len(pages)]
    assert sorted(os.listdir(folder)) == [f"{name}.img" for name in names]
    for name, each in zip(names, pages, strict=True):
        assert (folder / f"{name}.img").read_bytes() == each.body, name


# -- one disk


@pytest.mark.parametrize("choice", ["2", "Hard disk 2", "2001", "[store] vm/b.vmdk"])
def test_disk_is_chosen(
    server: misbehave.Server, disks: disks_module.Disks, listed: Path, tmp_path: Path, choice: str
) -> None:
    wanted = server.serve("/b", page(disks.image(VARIANT).read_bytes()))
    other = server.serve("/a", page(noise(1)))
    names = [(f"Hard disk {n}", f"[store] vm/{name}.vmdk", str(1999 + n)) for n, name in ((1, "a"), (2, "b"))]
    several.write(listed, Disk("a.vmdk", other, 9, names[0]), Disk("b.vmdk", wanted, None, names[1], "vmdk"))
    target = tmp_path / "disk.img"
    result = cdi_worker.run(several.request(listed, target, disk=choice))
    oracle.same(target, disks.expected(VARIANT))
    assert server.gets("/a") == []
    # The source is finished with its disk, and what both know is in the result.
    assert several.calls(listed) == [
        "open",
        "open b.vmdk",
        "verify b.vmdk",
        "verify",
        "finish",
        "close b.vmdk",
        "close",
    ]
    assert (result.vddk_info, result.verified) == ({"Version": "several"}, {"b.vmdk": "sha256:0"})


@pytest.mark.parametrize("choice", ["", "3", "b"])
def test_ambiguous_choice_lists_the_disks(
    server: misbehave.Server, listed: Path, tmp_path: Path, choice: str
) -> None:
    """The sentence is that of an OVA."""
    url = server.serve("/a", page(noise(1)))
    named = Disk("b.vmdk", url, None, ("Hard disk 2", "2001"), "raw")
    several.write(listed, Disk("a.vmdk", url, SIZE, format="raw"), named)
    with pytest.raises(errors.Refused) as caught:
        cdi_worker.run(several.request(listed, tmp_path / "disk.img", disk=choice))
    what = f"has no disk {choice!r}" if choice else "holds 2 disks"
    assert f": {what}: 1 a.vmdk ({SIZE} bytes), 2 Hard disk 2 (2001)" in str(caught.value)
    assert "; choose one (--disk)" in caught.value.at_terminal()
    assert not (tmp_path / "disk.img").exists()
    assert several.calls(listed)[-1] == "close"


def test_inspect_lists_the_disks(server: misbehave.Server, listed: Path) -> None:
    serve(server, listed, page(noise(1)), page(noise(2)))
    done = worker.call("inspect", "--json", f"several:{listed}")
    assert done.status != 0
    found = json.loads(done.output)
    assert "holds 2 disks" in found["obstacle"]
    assert found["disks"][1] == {"index": 2, "file": "b.raw", "names": ["b.raw"], "capacity": SIZE}
    done = worker.call("inspect", "--json", f"several:{listed}", "--disk=2")
    assert (done.status, json.loads(done.output)["served"]) == (0, server.url("/b")), done.errors


def test_disk_that_cannot_be_imported_is_refused_alone(
    server: misbehave.Server, listed: Path, folder: Path
) -> None:
    urls = [server.serve(path, page(noise(1))) for path in ("/a", "/b")]
    several.write(
        listed,
        Disk("a.raw", urls[0], SIZE, format="raw", obstacle="is a mapped LUN"),
        Disk("b.raw", urls[1], SIZE, format="raw"),
    )
    with pytest.raises(errors.Unsupported, match=r"disk 'a\.raw' is a mapped LUN"):
        cdi_worker.run(several.request(listed, folder / "a.img", disk="1"))
    with pytest.raises(errors.Unsupported, match="is a mapped LUN"):
        together.run_all(several.request(listed, folder))
    assert server.requests == []
    cdi_worker.run(several.request(listed, folder / "b.img", disk="2"))
    assert os.listdir(folder) == ["b.img"]


def test_first_answer_of_a_chosen_disk_is_retried(
    server: misbehave.Server, listed: Path, tmp_path: Path
) -> None:
    good = page(noise(1))
    url = server.serve("/a", (dataclasses.replace(good, status=503), 2), good)
    several.write(listed, Disk("a.raw", url, SIZE, format="raw"))
    cdi_worker.run(several.request(listed, tmp_path / "disk.img"))
    assert (tmp_path / "disk.img").read_bytes() == good.body


# -- all disks


def test_all_disks_are_imported_at_the_same_time(
    server: misbehave.Server, disks: disks_module.Disks, listed: Path, folder: Path
) -> None:
    """Each is slow: one after the other they would take four times as long."""
    data = disks.image(VARIANT).read_bytes()
    names = ("a", "b", "c", "d")
    urls = [server.serve(f"/{name}", page(data, drip=(len(data) // 8, 0.1))) for name in names]
    size = disks.expected(VARIANT).stat().st_size
    several.write(
        listed, *(Disk(f"{n}.vmdk", url, size, format="vmdk") for n, url in zip(names, urls, strict=True))
    )
    results = together.run_all(several.request(listed, folder))
    for name in names:
        oracle.same(folder / f"{name}.img", disks.expected(VARIANT))
    assert server.busiest == together.STREAMS == 4
    assert [Path(each.target).name for each in results] == [f"{name}.img" for name in names]
    assert {tuple(each.vddk_info.items()) for each in results} == {(("Version", "several"),)}
    assert [each.verified for each in results] == [{f"{name}.vmdk": "sha256:0"} for name in names]
    calls = several.calls(listed)
    assert calls.count("open") == 1
    # Whether all are right is known before the first becomes usable.
    assert (
        max(calls.index(f"verify {name}.vmdk") for name in names)
        < calls.index("verify")
        < calls.index("finish")
    )


def test_connections_bound_the_streams(server: misbehave.Server, listed: Path, folder: Path) -> None:
    pages = [page(noise(n, MiB), drip=(MiB // 8, 0.02)) for n in range(3)]
    serve(server, listed, *pages)
    done = worker.call("import", "--all", "--connections=1", f"several:{listed}", folder)
    assert done.status == 0, done.errors
    assert server.busiest == 1
    check(folder, *pages)
    server.busiest = 0
    done = worker.call("import", "--all", "--connections=2", "--force", f"several:{listed}", folder)
    assert (done.status, server.busiest) == (0, 2), done.errors
    check(folder, *pages)


def test_no_disk_is_usable_before_the_source_is_verified(
    server: misbehave.Server, listed: Path, folder: Path
) -> None:
    pages = [page(noise(n)) for n in range(3)]
    serve(server, listed, *pages)
    listed.with_name("refuse").touch()
    with pytest.raises(errors.DigestMismatch):
        together.run_all(several.request(listed, folder))
    assert os.listdir(folder) == []
    assert "finish" not in several.calls(listed)
    listed.with_name("refuse").unlink()
    together.run_all(several.request(listed, folder))
    check(folder, *pages)


def test_first_failure_ends_the_others(server: misbehave.Server, listed: Path, folder: Path) -> None:
    """One fails late, while others have not sent anything for a while, which their own limits would allow."""
    good, bad = page(noise(1)), page(noise(2), drip=(SIZE // 8, 0.1))
    stalled, last = page(noise(3), stall_at=SIZE // 2), page(noise(5))
    serve(server, listed, good, stalled, stalled, bad, last)
    server.serve("/d", (dataclasses.replace(bad, cut=SIZE // 2), 1), misbehave.Page(status=404))
    began = time.monotonic()
    with pytest.raises(errors.Error) as caught:
        together.run_all(several.request(listed, folder))
    assert time.monotonic() - began < 10
    assert "404" in str(caught.value)
    assert not [name for name in os.listdir(folder) if name.endswith(".img")]
    assert len(server.gets("/b")) == len(server.gets("/c")) == 1
    assert [
        thread.name for thread in threading.enumerate() if thread.name.startswith(("disk", "fetch"))
    ] == []
    pages = [good, page(noise(3)), page(noise(3)), page(noise(2)), last]
    serve(server, listed, *pages)
    together.run_all(several.request(listed, folder))
    check(folder, *pages)


def test_failed_disk_does_not_wait_for_its_stream(
    server: misbehave.Server, listed: Path, folder: Path
) -> None:
    """What is wrong has been read, while its thread waits for what the server does not send."""
    data = bytearray(gzip.compress(noise(9, 16 * MiB), 1, mtime=0))
    data[MiB : 2 * MiB] = bytes(range(256)) * 4096
    urls = [
        server.serve("/a", page(noise(1), drip=(SIZE // 8, 0.1))),
        server.serve("/b", page(bytes(data), stall_at=4 * MiB)),
    ]
    several.write(
        listed,
        Disk("a.raw", urls[0], SIZE, format="raw"),
        Disk("b.raw.gz", urls[1], 16 * MiB),
    )
    began = time.monotonic()
    with pytest.raises(errors.ImageError):
        together.run_all(several.request(listed, folder))
    assert time.monotonic() - began < 10
    assert os.listdir(folder) == []


def test_error_that_nobody_expects_ends_the_others(
    server: misbehave.Server, listed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = [page(noise(n), drip=(SIZE // 8, 0.1)) for n in range(3)]
    serve(server, listed, *pages)
    opened = several.One.open

    def failing(self: several.One, opening: cdi_worker.Opening) -> cdi_worker.Facts:
        if self.name.endswith("/b"):
            raise KeyError("page")
        return opened(self, opening)

    monkeypatch.setattr(several.One, "open", failing)
    with pytest.raises(errors.PluginFailed, match="KeyError: 'page'"):
        together.run_all(several.request(listed, folder))
    assert os.listdir(folder) == []


def test_sigterm_ends_all_and_the_same_command_continues(
    server: misbehave.Server, listed: Path, folder: Path
) -> None:
    pages = [page(noise(n)) for n in range(3)]
    serve(server, listed, *(dataclasses.replace(each, stall_at=SIZE * 3 // 4) for each in pages))
    with started(listed, folder) as run:
        processes.wait_for(lambda: len(server.requests) == 3 and all_sent(server), "the streams")
        run.send_signal(signal.SIGTERM)
        began = time.monotonic()
        assert run.wait(processes.PATIENCE) != 0
    assert time.monotonic() - began < 5
    assert not [name for name in os.listdir(folder) if name.endswith(".img")]
    assert several.calls(listed)[-1] == "close"
    serve(server, listed, *pages)
    together.run_all(several.request(listed, folder))
    check(folder, *pages)


def all_sent(server: misbehave.Server) -> bool:
    return all(each.sent >= SIZE * 3 // 4 for each in server.requests)


#: Kills the worker before it gives a disk its name: the first argument is the number of the disk.
KILLER = """
import os, signal, sys
left = int(sys.argv.pop(1))
inner = os.replace
def killing(path, *arguments, **more):
    global left
    if str(path).endswith(".part"):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
    return inner(path, *arguments, **more)
os.replace = killing
from tests.support import several
several.register()
from cdi_worker.importer import cli
sys.exit(cli.main(sys.argv[1:]))
"""


def started(listed: Path, folder: Path, number: int = 0) -> forked.Popen[str]:
    """Start the command, which is killed before the disk of this number becomes usable; 0: it is not."""
    argv = [sys.executable, "-c", KILLER, str(number), "import", "--all", f"several:{listed}", str(folder)]
    return forked.Popen[str](argv, env=forked.ENVIRONMENT, text=True)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_same_command_succeeds_after_a_kill_between_the_renames(
    server: misbehave.Server, listed: Path, folder: Path, number: int
) -> None:
    pages = [page(noise(n)) for n in range(3)]
    serve(server, listed, *pages)
    with started(listed, folder, number) as run:
        assert run.wait(processes.PATIENCE) == -signal.SIGKILL
    usable = sorted(name for name in os.listdir(folder) if name.endswith(".img"))
    assert len(usable) == number - 1
    for name in usable:
        assert (folder / name).read_bytes() == pages["abc".index(name[0])].body
    done = worker.call("import", "--all", f"several:{listed}", folder)
    assert done.status == 0, done.errors
    check(folder, *pages)


def test_kills_at_random_moments(
    server: misbehave.Server, listed: Path, folder: Path, pytestconfig: pytest.Config
) -> None:
    """The second run gets other bytes of the same disks."""
    # Noise of 16 bytes: its compression depends on the level.
    disks = [noise(number, SIZE * 2).translate(bytes(range(16)) * 16) for number in range(3)]
    size = len(disks[0])
    urls = [server.url(f"/{number}") for number in range(3)]
    several.write(listed, *(Disk(f"{n}.vmdk", url, size, format="vmdk") for n, url in enumerate(urls)))
    asked = several.request(listed, folder, journal_interval=0.0)
    streams = [[vmdk_stream.streamed(disk, level=level) for disk in disks] for level in (1, 6)]
    for moment in kills.moments(pytestconfig):
        for number, data in enumerate(streams[0]):
            server.serve(f"/{number}", page(data, drip=(128 << 10, 0.01)))
        with kills.started(asked, before=f"{several.BEFORE}\n{ALL}") as run:
            with contextlib.suppress(subprocess.TimeoutExpired):
                run.wait(moment)
            run.kill()
            is_done = run.wait(processes.PATIENCE) == 0
        for number, data in enumerate(streams[1]):
            server.serve(f"/{number}", page(data))
        if not is_done:
            # It may have been killed when all disks were usable.
            with contextlib.suppress(errors.TargetExists):
                together.run_all(asked)
        assert sorted(os.listdir(folder)) == ["0.img", "1.img", "2.img"], moment
        for number, disk in enumerate(disks):
            assert (folder / f"{number}.img").read_bytes() == disk, (number, moment)
            (folder / f"{number}.img").unlink()


def test_of_two_runs_at_once_one_fails(server: misbehave.Server, listed: Path, folder: Path) -> None:
    pages = [page(noise(n), drip=(SIZE // 8, 0.5)) for n in range(3)]
    serve(server, listed, *pages)
    with started(listed, folder) as run:
        processes.wait_for((folder / "c.img.part").exists, "the first run")
        done = worker.call("import", "--all", f"several:{listed}", folder)
        assert "another run writes to it" in done.error_message
        assert run.wait(processes.PATIENCE) == 0
    check(folder, *pages)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ("../../etc/passwd", "passwd.img"),
        ("/a/b.vmdk", "b.img"),
        ("..", "disk2.img"),
        (".", "disk2.img"),
        ("", "disk2.img"),
        (".hidden", "hidden.img"),
        ("a.img.lock", "a.img.img"),
        ("-rf", "-rf.img"),
        ("n\0ul\n.raw", "n_ul_.img"),
        ("disk.img.part", "disk.img.img"),
        ("b.raw.gz", "b.img"),
    ],
)
def test_name_of_a_file_stays_in_the_folder(
    server: misbehave.Server, listed: Path, folder: Path, file: str, name: str
) -> None:
    url = server.serve("/a", page(noise(1, MiB)))
    several.write(listed, *(Disk(each, url, MiB, format="raw") for each in ("a.img", file)))
    together.run_all(several.request(listed, folder))
    assert sorted(os.listdir(folder)) == sorted(["a.img", name])
    assert sorted(path.name for path in folder.parent.iterdir()) == ["calls", "disks", "listed"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (("a.vmdk", "b/a.raw"), r"two disks would be .*a\.img; choose each"),
        (("a.vmdk", "a" * 300), "name too long"),
        (
            [f"{number}.vmdk" for number in range(101)],
            "101 disks, at most 100 are imported together; choose each",
        ),
    ],
)
def test_names_that_cannot_be_files_are_refused_before_anything_is_read(
    server: misbehave.Server, listed: Path, folder: Path, files: list[str], message: str
) -> None:
    url = server.serve("/a", page(noise(1)))
    several.write(listed, *(Disk(each, url, SIZE, format="raw") for each in files))
    with pytest.raises(errors.Error, match=message):
        together.run_all(several.request(listed, folder))
    assert (os.listdir(folder), server.requests) == ([], [])


def test_a_hundred_disks_are_imported_with_few_files_open(
    server: misbehave.Server, listed: Path, folder: Path
) -> None:
    url = server.serve("/a", page(noise(1, MiB)))
    several.write(listed, *(Disk(f"{number}.raw", url, MiB, format="raw") for number in range(100)))
    together.run_all(several.request(listed, folder))
    assert len(os.listdir(folder)) == 100
    assert {(folder / f"{number}.img").read_bytes() for number in range(100)} == {noise(1, MiB)}


def test_checksum_of_several_disks_is_refused(server: misbehave.Server, listed: Path, folder: Path) -> None:
    serve(server, listed, page(noise(1)))
    with pytest.raises(errors.RequestError, match="a checksum is that of one disk"):
        together.run_all(several.request(listed, folder, checksum=f"sha1:{'0' * 40}"))
    wrong = several.request(listed, folder / "a.img", checksum=f"sha1:{'0' * 40}")
    with pytest.raises(errors.ChecksumMismatch):
        cdi_worker.run(wrong)
    assert os.listdir(folder) == []


def test_existing_file_is_refused_before_anything_is_read(
    server: misbehave.Server, listed: Path, folder: Path
) -> None:
    serve(server, listed, page(noise(1)), page(noise(2)))
    (folder / "b.img").write_bytes(b"old")
    with pytest.raises(errors.TargetExists):
        together.run_all(several.request(listed, folder))
    assert (os.listdir(folder), server.requests) == (["b.img"], [])


# -- verify --all


def test_all_disks_are_compared(server: misbehave.Server, listed: Path, folder: Path) -> None:
    pages = [page(noise(n)) for n in range(3)]
    serve(server, listed, *pages)
    assert worker.call("import", "--all", f"several:{listed}", folder).status == 0
    listed.with_name("calls").unlink()
    command = ("verify", "--all", "--json", f"several:{listed}", folder)
    done = worker.call(*command)
    assert (done.status, [json.loads(line)["equal"] for line in done.output.splitlines()]) == (0, [True] * 3)
    assert several.calls(listed).count("open") == 1
    assert several.calls(listed)[-3:] == ["verify", "finish", "close"]
    devices.change(folder / "b.img", 5, b"x")
    done = worker.call(*command)
    found = [json.loads(line)["equal"] for line in done.output.splitlines()]
    assert (done.status, found) == (9, [True, False, True]), done.errors
    (folder / "b.img").unlink()
    assert worker.call(*command).status == 6


# -- progress


class _Counting(cdi_worker.NullProgress):
    """Adds up as a reporter does."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.phases: list[tuple[str, int | None]] = []
        self.total = self.count = self.size = 0

    def phase(self, name: str, total: int | None) -> None:
        self.phases.append((name, total))
        self.total = total or self.total

    def advance(self, count: int) -> None:
        with self.lock:
            self.count += count

    keep = advance

    def skip(self, count: int) -> None:
        with self.lock:
            self.total -= count

    def disk(self, size: int) -> None:
        self.size = size


@pytest.mark.parametrize("framing", ["chunked", "length"])
def test_progress_is_that_of_all(
    server: misbehave.Server, disks: disks_module.Disks, listed: Path, folder: Path, framing: str
) -> None:
    """With a length the bytes of the stream count, else those of the disk."""
    data, size = disks.image(VARIANT).read_bytes(), disks.expected(VARIANT).stat().st_size
    urls = [server.serve(f"/{n}", page(data, framing=framing)) for n in range(3)]
    several.write(listed, *(Disk(f"{n}.vmdk", url, size, format="vmdk") for n, url in enumerate(urls)))
    found = _Counting()
    together.run_all(several.request(listed, folder), found)
    assert [each for each in found.phases if each[0] != "connect"] == [("transfer", 3 * size), ("sync", None)]
    assert found.size == 3 * size
    # A stream is read until its disk is complete: a few bytes of its end may not have counted.
    assert found.total - 64 * 1024 <= found.count <= found.total


def test_shares_of_one_phase_add_up() -> None:
    """One disk is smaller on the wire, one continues an earlier attempt, and then begins again."""
    total = _Counting()
    total.phase("transfer", 200)
    one, other = (progress.Share(total, 100) for _ in range(2))
    one.phase("transfer", 60)
    one.advance(60)
    assert (total.count, total.total) == (60, 160)
    other.resume(30, 80)
    other.skip(20)
    other.keep(30)
    other.phase("transfer", 100)
    other.advance(40)
    other.skip(10)
    assert total.count == total.total == 130
    other.phase("connect", None)
    other.phase("transfer", 100)
    other.advance(100)
    assert total.count == total.total == 230
