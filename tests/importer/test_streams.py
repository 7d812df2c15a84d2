"""Standard input as the source, and standard output as the target."""

from __future__ import annotations

import hashlib
import os
import select
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support import disks as disks_module
from tests.support import forked, misbehave, oracle, ovas, processes, servers, worker

MIB = 1 << 20
REQUEST, UNSUPPORTED, CHECKSUM, SCRATCH, TOO_LARGE, CLOSED = 2, 4, 5, 7, 8, 141


def run(
    *arguments: str | Path, stdin: bytes | None = None, env: Mapping[str, str] | None = None
) -> tuple[int, bytes, str]:
    """Run the command with a pipe as standard input; return status, standard output and error."""
    argv = [*worker.COMMAND, *arguments]
    done = forked.run(argv, env={**worker.ENVIRONMENT, **(env or {})}, stdin=stdin, text=False)
    return done.returncode, done.stdout, done.stderr.decode()


# -- standard input ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "compression"), [("raw", None), ("raw", "gz"), ("qcow2", None), ("vmdk", None), ("raw", "xz")]
)
def test_import_reads_standard_input(
    disks: disks_module.Disks, tmp_path: Path, variant: str, compression: str | None
) -> None:
    target = tmp_path / "disk.img"
    image = disks.wrapped(variant, compression)
    status, _, messages = run("import", "-", target, stdin=image.read_bytes())
    assert status == 0, messages
    oracle.same(target, disks.expected(variant))
    warning = "warning: standard input can be read only once: an interrupted import starts over"
    assert messages.splitlines()[0] == warning


def test_import_reads_a_redirected_file_from_where_it_is(disks: disks_module.Disks, tmp_path: Path) -> None:
    image = disks.raw()
    with image.open("rb") as stream:
        stream.seek(MIB)
        done = subprocess.run(
            [*worker.COMMAND, "import", "-", tmp_path / "disk.img"],
            stdin=stream,
            env=worker.ENVIRONMENT,
            check=False,
            timeout=60,
        )
    assert done.returncode == 0
    assert (tmp_path / "disk.img").read_bytes() == image.read_bytes()[MIB:]


def test_format_that_cannot_pass_names_scratch(disks: disks_module.Disks, tmp_path: Path) -> None:
    data = disks.image("vhdx-log").read_bytes()
    status, _, messages = run("import", "-", tmp_path / "disk.img", stdin=data)
    assert (status, "scratch" in messages) == (SCRATCH, True)
    (tmp_path / "scratch").mkdir()
    status, _, messages = run("import", "-", tmp_path / "disk.img", "--scratch", tmp_path, stdin=data)
    assert status == 0, messages
    oracle.same(tmp_path / "disk.img", disks.expected("vhdx-log"))


def test_checksum_of_standard_input_is_verified(disks: disks_module.Disks, tmp_path: Path) -> None:
    data = disks.raw().read_bytes()
    wrong = f"--checksum=sha256:{'0' * 64}"
    assert run("import", "-", tmp_path / "disk.img", wrong, stdin=data)[0] == CHECKSUM
    assert not [*tmp_path.iterdir()]


def test_inspect_reads_standard_input(disks: disks_module.Disks) -> None:
    status, text, messages = run("inspect", "-", stdin=disks.image("qcow2").read_bytes())
    assert (status, b"qcow2" in text, "once" in messages) == (0, True, False)


@pytest.mark.parametrize("fault", ["closed", "target"])
def test_unusable_standard_input_is_refused(tmp_path: Path, fault: str) -> None:
    target = tmp_path / "disk.img"
    target.write_bytes(bytes(MIB))
    redirect = {"closed": "<&-", "target": '<"$0"'}[fault]
    argv = ["sh", "-c", f'exec "$@" {redirect}', target, *worker.COMMAND, "import", "-", target, "--force"]
    done = subprocess.run(
        argv, env=worker.ENVIRONMENT, capture_output=True, text=True, check=False, timeout=60
    )
    words = {"closed": "standard input", "target": "source and target are the same disk"}[fault]
    assert (done.returncode in {2, 3}, words in done.stderr) == (True, True), done.stderr
    assert target.read_bytes() == bytes(MIB)


# -- standard output --------------------------------------------------------------------------


@pytest.mark.parametrize(("variant", "compression"), [("raw", None), ("raw", "gz"), ("vhd-fixed", None)])
def test_import_writes_a_raw_disk_to_standard_output(
    web: servers.Web, disks: disks_module.Disks, variant: str, compression: str | None
) -> None:
    status, data, messages = run("import", web.url(disks.wrapped(variant, compression)), "-")
    assert status == 0, messages
    assert data == disks.expected(variant).read_bytes()
    assert "imported" in messages


@pytest.mark.parametrize("variant", ["qcow2", "vhdx"])
def test_other_formats_need_ranges_or_scratch_for_standard_output(
    web: servers.Web, disks: disks_module.Disks, variant: str
) -> None:
    image = disks.image(variant)
    status, data, messages = run("import", web.url(image), "-")
    assert (status, data == disks.expected(variant).read_bytes()) == (0, True), messages
    status, data, messages = run("import", "-", "-", stdin=image.read_bytes())
    assert (status, data) == (UNSUPPORTED, b""), messages
    assert f"{variant} is not in the order of the disk" in messages
    assert "name a file or a device as the target, or scratch space (--scratch)" in messages


@pytest.mark.parametrize(
    ("source", "variant", "compression"),
    [
        ("http", "qcow2", None),
        ("standard input", "vmdk-stream", "gz"),
        ("http", "vhdx-log", None),
        ("standard input", "vhd", None),
    ],
)
def test_other_formats_are_written_to_standard_output_from_scratch(
    web: servers.Web,
    disks: disks_module.Disks,
    tmp_path: Path,
    source: str,
    variant: str,
    compression: str | None,
) -> None:
    image = disks.wrapped(variant, compression)
    address, stdin = (web.url(image), None) if source == "http" else ("-", image.read_bytes())
    size = disks.expected(variant).stat().st_size + MIB
    status, data, messages = run("import", address, "-", "--scratch", tmp_path, f"--size={size}", stdin=stdin)
    assert status == 0, messages
    assert data == disks.expected(variant).read_bytes() + bytes(MIB)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("listed", "is_right"), [("first", True), ("last", True), ("last", False)])
def test_disk_of_an_ova_passes_to_standard_output(
    disks: disks_module.Disks, tmp_path: Path, listed: str, *, is_right: bool
) -> None:
    """Nothing is written before the manifest has been compared."""
    image = disks.image("vmdk-stream").read_bytes()
    package = ovas.ova(ovas.Disk(image), listed=listed)
    if not is_right:
        package = package.replace(image, image[:-1] + b"x")
    status, data, messages = run("import", "-", "-", "--scratch", tmp_path, stdin=package)
    if is_right:
        assert (status, data) == (0, disks.expected("vmdk-stream").read_bytes()), messages
    else:
        assert (status, data) == (CHECKSUM, b""), messages
    assert not [*tmp_path.iterdir()]


def test_standard_input_passes_to_standard_output(disks: disks_module.Disks) -> None:
    status, data, messages = run("import", "-", "-", "--size=12Mi", stdin=disks.raw().read_bytes())
    assert status == 0, messages
    assert data == disks.raw().read_bytes() + bytes(4 * MIB)


def test_nothing_else_is_on_standard_output(web: servers.Web, disks: disks_module.Disks) -> None:
    url = web.url(disks.raw())
    for before, after in (((), "--json"), (("-v=4",), "--progress=lines"), ((), "--progress=json")):
        status, data, messages = run(*before, "import", url, "-", after)
        assert (status, data == disks.raw().read_bytes()) == (0, True), messages
    status, data, messages = run("import", f"{url}.missing", "-", "--json")
    assert (status, data) == (3, b"")
    status, data, messages = run("import", url, "-", "--json", "--nonsense")
    assert (status, data) == (REQUEST, b"")


def test_wrong_checksum_leaves_the_disk_without_its_end(web: servers.Web, disks: disks_module.Disks) -> None:
    wrong = f"--checksum=sha256:{'0' * 64}"
    status, data, messages = run("import", web.url(disks.raw()), "-", wrong)
    assert (status, "checksum mismatch" in messages) == (CHECKSUM, True)
    assert len(data) < disks.raw().stat().st_size
    right = f"--checksum=sha256:{hashlib.sha256(disks.raw().read_bytes()).hexdigest()}"
    assert run("import", web.url(disks.raw()), "-", right)[:2] == (0, disks.raw().read_bytes())


def test_size_and_its_limit_hold_for_standard_output(web: servers.Web, disks: disks_module.Disks) -> None:
    assert run("import", web.url(disks.raw()), "-", "--size=4Mi")[:2] == (TOO_LARGE, b"")


def test_closed_standard_output_ends_the_import_quietly(web: servers.Web, disks: disks_module.Disks) -> None:
    command = ["import", web.url(disks.raw()), "-", "--progress=none"]
    process = forked.Popen[bytes](
        [*worker.COMMAND, *command],
        env=worker.ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert (process.wait(60), process.stderr.read()) == (CLOSED, b"")
    process.stderr.close()


def test_signal_ends_an_import_to_a_stalled_pipe(disks: disks_module.Disks, tmp_path: Path) -> None:
    """The reader of the pipe does not read: the worker waits in a write."""
    big = tmp_path / "big"
    big.write_bytes(os.urandom(16 * MIB))
    reader, writer = os.pipe()
    try:
        with worker.started("import", big, "-", "--progress=none", stdout=writer) as process:
            processes.wait_for(lambda: not select.select([], [writer], [], 0)[1], "a full pipe")
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 130
    finally:
        os.close(reader)
        os.close(writer)


def test_server_that_breaks_off_fails_the_pipe(server: misbehave.Server, disks: disks_module.Disks) -> None:
    data = disks.raw().read_bytes()
    url = server.serve("/disk", misbehave.Page(data, ranges=False, cut=3 * MIB))
    status, written, messages = run("import", url, "-", "--stall-timeout=1")
    assert status == 3, messages
    assert data.startswith(written)
    assert len(written) < len(data)


def test_archive_is_refused_for_standard_output(tmp_path: Path) -> None:
    status, data, messages = run("import", "-", "-", "--content-type=archive", stdin=b"x" * MIB)
    assert (status, data) == (REQUEST, b"")
    assert "an archive cannot be written to standard output" in messages


def test_sha256_is_refused_for_standard_output(web: servers.Web, disks: disks_module.Disks) -> None:
    status, data, messages = run("import", web.url(disks.raw()), "-", "--verify")
    assert (status, data, "--verify" in messages) == (REQUEST, b"", True)
