"""The command line: output, exit status, and machine-readable forms."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cdi_worker.importer.commands import command as ours
from cdi_worker.importer.commands import group
from tests.support import devices, limits, misbehave, oracle, pairs, repository, servers, tls, worker
from tests.support import disks as disks_module

MiB = 1 << 20
REQUEST, SOURCE, TARGET, SCRATCH, TOO_LARGE = 2, 3, 6, 7, 8


def run_json(*arguments: str | Path, status: int = 0, **env: str) -> dict[str, Any]:
    """Run a command and return the JSON object that it prints in one line."""
    done = worker.call(*arguments, "--json", env=env)
    assert done.status == status, done.errors
    (line,) = done.output.splitlines()
    return dict(json.loads(line))


# -- the program itself -----------------------------------------------------------------------


def test_version_is_printed(tmp_path: Path) -> None:
    """A checkout runs from a folder with all packages, without the metadata of an installation."""
    packages = [Path(path) for path in sys.path if path.endswith("-packages")]
    found = {path.name: path for folder in packages for path in folder.iterdir() if "cdi" not in path.name}
    for name, path in (found | {"cdi_worker": repository.ROOT / "cdi_worker"}).items():
        (tmp_path / name).symlink_to(path)
    argv = [sys.executable, "-S", "-m", "cdi_worker", "--version"]
    env = {**worker.ENVIRONMENT, "PYTHONPATH": str(tmp_path)}

    def run_json() -> str:
        return subprocess.run(argv, cwd=tmp_path, env=env, check=True, capture_output=True, text=True).stdout

    assert run_json() == "cdi-worker, version unknown (not installed)\n"
    (tmp_path / "cdi_worker-1.2.dist-info").mkdir()
    (tmp_path / "cdi_worker-1.2.dist-info/METADATA").write_text("Name: cdi-worker\nVersion: 1.2\n")
    assert run_json() == "cdi-worker, version 1.2\n"


# -- import ------------------------------------------------------------------------------------


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/disk?a=b&X-Amz-Signature={}", "http://u:{}@[::1]:1/?{}"])
def test_traceback_shows_no_secret_of_a_url(tmp_path: Path, url: str) -> None:
    done = worker.call("--verbosity=5", "import", url.format("hunter2", "x=hunter2"), tmp_path / "disk.img")
    assert done.status == SOURCE
    assert "urllib3.exceptions.MaxRetryError" in done.errors
    assert "hunter2" not in done.errors


@pytest.mark.parametrize(("variant", "compression"), [("raw", "gz"), ("qcow2", None), ("vhdx-log", None)])
def test_import_prints_json(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, variant: str, compression: str | None
) -> None:
    target = tmp_path / "disk.img"
    url = web.url(disks.wrapped(variant, compression))
    result = run_json("import", url, target, "--verify")
    assert (result["source"], result["target"], result["format"]) == (
        url,
        str(target),
        variant.partition("-")[0],
    )
    assert result["compression"] == ([compression] if compression else [])
    assert result["size"] == target.stat().st_size == disks.expected(variant).stat().st_size
    assert result["sha256"] == disks_module.digest(disks.expected(variant), "sha256")
    assert result["route"] in {"stream", "place", "convert"}
    assert result["reason"]
    # qemu-img reads the log of a VHDX several times.
    assert 0 < result["read"] < 20 * MiB


def test_import_prints_a_summary(web: servers.Web, disks: disks_module.Disks, tmp_path: Path) -> None:
    url = web.url(disks.wrapped("raw", "xz"))
    digest = disks_module.digest(disks.wrapped("raw", "xz"), "sha256")
    done = worker.call("import", url, tmp_path, "--checksum", f"sha256:{digest}")
    assert done.status == 0
    oracle.same(tmp_path / "disk.img", disks.raw())
    rows = dict(line.strip().split("  ", 1) for line in done.output.splitlines())
    assert rows["imported"] == f"{url} -> {tmp_path}/disk.img"
    assert rows["format"] == "raw in xz"
    assert rows["disk"].startswith(f"{8 * MiB} bytes (8.0 MiB)")
    (written, _) = rows["written"].split(" ", 1)
    assert 0 < int(written) < 8 * MiB
    assert rows["route"].startswith("stream: ")
    assert rows["verified"] == f"sha256:{digest[:12]}… of the file as served"
    assert done.errors == "100.0% done\n"


def test_progress_is_printed_as_json_lines(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    url = server.serve("/disk", misbehave.Page(disks.raw().read_bytes()))
    done = worker.call("import", url, tmp_path, "--json", "--progress=json")
    assert done.status == 0
    lines = [json.loads(line) for line in done.errors.splitlines()]
    assert [line["phase"] for line in lines if line["phase"] == "done"] == ["done"]
    assert {"connect", "transfer", "sync"} < {line["phase"] for line in lines}
    percents = [line["percent"] for line in lines]
    assert percents == sorted(percents)
    assert (percents[0], percents[-1]) == (0, 100)
    assert worker.call("import", url, tmp_path, "--force", "--progress=none").errors == ""


def test_dry_run_changes_nothing(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path, device: Path
) -> None:
    data = disks.image("vhdx-log").read_bytes()
    url = server.serve("/disk", misbehave.Page(data))
    (tmp_path / "volume").mkdir()
    for target in (tmp_path / "volume", device):
        result = run_json("import", url, target, "--dry-run")
        assert (result["format"], result["route"], result["obstacle"]) == ("vhdx", "convert", None)
        assert result["virtualSize"] == 8 * MiB
    result = run_json("import", url, tmp_path / "volume", "--dry-run", "--size=4Mi", status=TOO_LARGE)
    assert "give a larger --size" in result["obstacle"]
    url = server.serve("/disk", misbehave.Page(data, ranges=False))
    result = run_json("import", url, device, "--dry-run", status=SCRATCH)
    assert result["obstacle"].startswith("scratch space required")
    assert not [*(tmp_path / "volume").iterdir()]
    assert device.read_bytes() == devices.DIRT * 16 * MiB


def test_secrets_are_read_from_files_and_environment(disks: disks_module.Disks, tmp_path: Path) -> None:
    authority = tls.Authority(tmp_path / "ca")
    (tmp_path / "headers").mkdir()
    (tmp_path / "headers" / "one").write_text("X-One: hush\n")
    (tmp_path / "password").write_text("s3cret\n")
    page = misbehave.Page(disks.raw().read_bytes(), password="me:s3cret")
    with misbehave.Server(authority.issue()) as server:
        url = server.serve("/disk", page)
        headers = ("--header=X-Two: 2", f"--header-dir={tmp_path / 'headers'}")
        for trust in (f"--ca-file={authority.certificate}", f"--ca-dir={tmp_path / 'ca'}", "--insecure"):
            for secret, env in (((f"--password-file={tmp_path / 'password'}",), {}), ((), ENVIRONMENT)):
                arguments = (url, tmp_path, "--force", "--user=me", trust, *headers, *secret)
                done = worker.call("import", *arguments, env=env)
                assert done.status == 0, done.errors
                assert "hush" not in done.errors + done.output
                assert "s3cret" not in done.errors + done.output
        assert all(
            (lines.headers["x-one"], lines.headers["x-two"]) == ("hush", "2") for lines in server.requests
        )
        assert worker.call("import", url, tmp_path, "--force").status == SOURCE


ENVIRONMENT = {"IMPORTER_SECRET_KEY": "s3cret"}


# -- inspect, blank ----------------------------------------------------------------------------


def test_inspect_names_the_size_of_a_sector(disks: disks_module.Disks, tmp_path: Path) -> None:
    """As the image states it, or for which its partition table was made."""
    image = tmp_path / "image"
    image.write_bytes(bytes(8 * MiB))
    subprocess.run(["/sbin/sfdisk", "-q", image], input=b"label: gpt\n,,L\n", check=True)
    for path in (image, disks.image("vhdx")):
        assert run_json("inspect", path)["sectorSize"] == 512
        assert "sector size  512 bytes" in worker.call("inspect", path).output
    assert run_json("inspect", disks.raw())["sectorSize"] is None


@pytest.mark.parametrize("variant", disks_module.COMMON)
def test_inspect_reports_format_and_sizes(web: servers.Web, disks: disks_module.Disks, variant: str) -> None:
    image = disks.image(variant)
    result = run_json("inspect", web.url(image))
    size = disks.expected(variant).stat().st_size
    assert (result["virtualSize"], result["size"], result["obstacle"]) == (size, image.stat().st_size, None)
    # 6 % for the file system, rounded up to MiB: the smallest volume that holds the disk.
    assert result["volumeSize"] % MiB == 0
    assert size * 1.06 <= result["volumeSize"] < size * 1.06 + 3 * MiB
    assert (result["overhead"], result["ranges"], result["scratch"]) == (0.06, True, False)
    assert result["identity"]
    done = worker.call("inspect", web.url(image))
    assert f"{size} bytes" in done.output
    assert f"route  {result['route']}: " in done.output


def test_details_are_words(server: misbehave.Server, disks: disks_module.Disks) -> None:
    """JSON has names without blanks; a table has none of them."""
    data = disks.raw().read_bytes()
    url = server.serve("/disk.raw", misbehave.Page(data))
    line = f"{hashlib.sha256(data).hexdigest()}  disk.raw\n"
    sums = server.serve("/SHA256SUMS", misbehave.Page(line.encode()))
    assert run_json("inspect", url, "--checksum-file", sums)["checksumFile"] == sums
    assert f" checksum file  {sums}\n" in worker.call("inspect", url, "--checksum-file", sums).output


@pytest.mark.parametrize("compression", ["xz", "zst"])
def test_inspect_shows_the_size_that_a_compression_states(
    web: servers.Web, disks: disks_module.Disks, tmp_path: Path, compression: str
) -> None:
    url = web.url(disks.wrapped("raw", compression))
    size = disks.expected("raw").stat().st_size
    result = run_json("inspect", url)
    assert (result["virtualSize"], result["statedSize"]) == (None, size)
    assert size * 1.06 <= result["volumeSize"] < size * 1.06 + 3 * MiB
    target = tmp_path / "disk.img"
    assert f", as {compression} states" in worker.call("inspect", url).output
    refused = worker.call("import", "--dry-run", "--size", f"{size // 2}", url, target)
    assert (refused.status, "8388608 bytes" in refused.output) == (8, True)


def test_blank_creates_a_disk(tmp_path: Path, device: Path) -> None:
    result = run_json("blank", tmp_path / "disk.img", "3000000")
    assert result["size"] == 3_000_320  # whole sectors
    assert (tmp_path / "disk.img").read_bytes() == bytes(3_000_320)
    assert (tmp_path / "disk.img").stat().st_blocks == 0
    run_json("blank", tmp_path / "full.img", "3Mi", "--preallocate")
    assert (tmp_path / "full.img").stat().st_blocks * 512 >= 3 * MiB
    run_json("blank", device, "4Mi", "--preallocate")
    assert device.read_bytes() == bytes(4 * MiB) + devices.DIRT * 12 * MiB
    done = worker.call("blank", device, "17Mi")
    assert (done.status, "name a larger target" in done.error_message) == (TOO_LARGE, True)
    done = worker.call("blank", tmp_path / "none.img", "4Ei")
    assert (done.status, (tmp_path / "none.img").exists()) == (TOO_LARGE, False)


# -- all commands ------------------------------------------------------------------------------


def test_missing_command_prints_help() -> None:
    done = worker.call()
    assert (done.status, done.output.startswith("Usage: cdi-worker ")) == (REQUEST, True)
    assert len(done.output.splitlines()) <= 20
    assert (worker.call("--help").status, worker.call("import", "-h").status) == (0, 0)


def test_help_of_a_kind_of_source() -> None:
    for command in (("import", "--help", "s3"), ("help", "import", "s3"), ("import", "-h", "s3")):
        text = worker.call(*command).output
        assert "--endpoint-url" in text
        assert "--bitmap" not in text
    text = worker.call("import", "--help").output
    assert " nbd," in text
    assert "--bitmap" not in text
    assert "--data-dir" in worker.call("help", "pod").output
    assert worker.call("help").output == worker.call("--help").output
    assert worker.call("version").output == worker.call("--version").output


def options_in(text: str) -> set[str]:
    """Return the options that a help lists, but for ``--help`` and ``--help-all``."""
    found = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", text, re.MULTILINE)
    return {each for each in found if not each.startswith("--help")}


@pytest.mark.parametrize("name", ["import", "verify", "inspect", "digest"])
def test_short_help_leads_to_every_option(name: str) -> None:
    short = worker.call(name, "--help").output
    assert len(short.splitlines()) <= 40
    assert 5 <= len(options_in(short)) <= 15
    more = short.partition(f"More, with cdi-worker help {name} TOPIC:")[2].partition("\n\n")[0]
    topics = set(re.findall(r"[\w-]+", re.sub("^  (options|kinds of source) ", "", more, flags=re.MULTILINE)))
    by_topic = set[str]()
    for topic in topics:
        found = options_in(worker.call("help", name, topic).output)
        assert found, topic
        by_topic |= found
    everything = worker.call(name, "--help-all").output
    assert worker.call("help", name, "all").output == everything
    assert options_in(short) < options_in(everything) == by_topic
    made = group.command_of(name)
    assert isinstance(made, ours.Command)
    assert by_topic == {f"--{option.key}" for option in made.options if option.key != "help-all"}


def test_raw_disk_with_the_name_of_another_format_is_refused(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(bytes(4096))
    for name in ("x.vmdk", "x.VDI", "x.vhd", "x.vhdx", "x.ova", "x.gz", "x.xz", "x.zst", "x.bz2"):
        done = worker.call("import", tmp_path / "image", tmp_path / name)
        reason = "a raw disk would get this name; name it disk.img, or keep it with --format raw"
        assert (done.status, done.error_message) == (REQUEST, f"{tmp_path}/{name}: {reason}")
    assert worker.call("import", tmp_path / "image", tmp_path / name, "--format", "raw").status == 0
    assert worker.call("verify", tmp_path / "image", tmp_path / name).status == 0


ORDER = "SOURCE comes first, then TARGET"


@pytest.mark.parametrize("name", ["disk.img", "old.qcow2"])
def test_swapped_source_and_target_are_named(tmp_path: Path, name: str) -> None:
    old, new = tmp_path / name, tmp_path / "new.img"
    old.write_bytes(bytes(4096))
    done = worker.call("import", new, old)
    assert done.error_message.startswith(f"{new}: no such file or directory; check the path; a URL begins ")
    assert (done.status, done.error_message.endswith(f"; {ORDER}")) == (2, True), done.errors
    done = worker.call("import", new, "https://h/disk.qcow2")
    assert (done.status, done.error_message.endswith(f"; {ORDER}")) == (2, True), done.errors
    assert old.read_bytes() == bytes(4096)


@pytest.mark.parametrize("name", ["disk.img", "old.qcow2"])
def test_device_in_place_of_the_source_is_named(tmp_path: Path, name: str) -> None:
    """With ``--force`` alone, the file would be replaced."""
    old = tmp_path / name
    old.write_bytes(bytes(4096))
    with devices.loop(tmp_path, MiB) as device:
        done = worker.call("import", device, old)
        reason = f"{old}: exists, and {device} is a device; to replace it, use --force; {ORDER}"
        assert (done.status, done.error_message) == (2, reason)
        done = worker.call("import", tmp_path / "new.img", device)
        assert done.error_message.startswith(f"{tmp_path}/new.img: no such file or directory"), done.errors


def test_help_of_every_command_is_for_people() -> None:
    """No line is too long, and each option has one default: in a pod it may have another one."""
    long = ((name, ours.HELP_ALL) for name in ("import", "verify", "inspect", "digest"))
    for words in (("--help",), *((name, "--help") for name in group.COMMANDS), *long):
        done = worker.call(*words)
        assert (done.status, "\\b" in done.output) == (0, False), done.output
        assert not [line for line in done.output.splitlines() if len(line) > 80]
        text = " ".join(done.output.split())
        assert not re.findall(r"\[default: [^]]*\]\. *\[default: [^]]*\]", text), words


def test_help_is_in_words_and_keeps_paths_whole() -> None:
    """No ``x>=1``, no path that is broken at its hyphen, and the examples are those of the command."""
    pod = worker.call("help", "pod").output
    assert "/dev/cdi-block-volume" in pod
    assert "180; 1 or more]" in " ".join(pod.split())
    for command in ("verify", "inspect"):
        text = " ".join(worker.call(command, "--help", "s3").output.split())
        assert f"cdi-worker {command} --region eu-west-1 s3://bucket/disk.qcow2" in text
        assert "cdi-worker import" not in text


def test_help_lists_only_options_as_options() -> None:
    lines = worker.call("import", "--help").output.splitlines()
    first = lines[lines.index("Common options:") + 1]
    assert first.startswith("  --source ")


MALFORMED = ("http://[::1", "nbd://[::1", "nbd+unix://[", "kubevirt://[", "docker://[", "s3://[", "gs://[")
#: Where an address may be: the addresses are dealt to them.
PLACES = (("digest", "{}"), ("import", "{}", "T"), ("import", "--layer", "{}", "http://h/x", "T"))

#: Arguments, and the message of their refusal. ``T``: a target in an empty folder.
REFUSED = [
    (("destroy", "x"), "No such command 'destroy'"),
    (("imprt", "http://h/x"), "No such command 'imprt'; did you mean 'import'?"),
    (("help", "imprt"), "No such command 'imprt'; did you mean 'import'?"),
    (("help", "import", "ndb"), "no help on 'ndb'; did you mean 'nbd'?"),
    (("help", "blank", "s3"), "no help on 's3'; it has no topics"),
    (("import",), "Usage: cdi-worker import [OPTIONS] SOURCE TARGET Try"),
    (("import", "http://h/x"), "Missing argument 'TARGET'"),
    (("import", "http://h/x", "T", "--nonsense"), "No such option '--nonsense'"),
    (("import", "http://h/x", "T", "--connections=0"), "'--connections': 0 is not in the range 1 to 64"),
    (("import", "http://h/x", "T", "--content-type=floppy"), "'--content-type': 'floppy' is not one of"),
    (("import", "http://h/x", "T", "--content-type=kubvirt"), "did you mean 'kubevirt'?"),
    (("import", "http://h/x", "T", "--progress=jsno"), "did you mean 'json'?"),
    (("import", "http://h/x", "T", "--password-file=/missing"), "File '/missing' does not exist"),
    (
        ("import", "http://h/x", "T", "--user=me"),
        "--user without a password; give it with --password-file",
    ),
    (("blank", "T", "-1"), "No such option '-1'"),
    (("digest", "--source=registry", "http://h/x"), "expected docker://host/repository"),
    *(
        (tuple(word.format(url) for word in place), "malformed URL")
        for url, place in pairs.dealt(MALFORMED, PLACES)
    ),
    (("import", "http://[::1", "T"), "cdi-worker: http://[::1: malformed URL; expected scheme://host/path"),
    (("import", "http://a:b/c@h/x", "T"), "cdi-worker: malformed URL; expected http(s)://host[:port]/path"),
    (("import", "http://a:b/c@h/x", "T"), "; write %2F for a slash"),
    (("import", "http://h:99999/x", "T"), "h:99999/x: malformed URL; expected http(s)://host[:port]/path"),
    (("import", "http:/h/x", "T"), "cdi-worker: http:/h/x: malformed URL"),
    (("import", "s3://", "T"), "cdi-worker: s3://: expected s3://bucket/key"),
    (("upload", __file__, "https://h:port/"), "malformed upload URL; expected http(s)://host"),
    (("upload", __file__, "ftp://h/"), "malformed upload URL; expected http(s)://host"),
    (("import", "htps://h/x", "T"), "did you mean 'https'?"),
    (("inspect", "HTPP://h/x"), "did you mean 'http'?"),
    (("inspect", "--source", "Vddk", "h"), "did you mean 'vddk'?"),
    (("inspect", "telnet://h/x"), "unsupported URL scheme 'telnet'; supported: "),
    (("import", __file__, "s3://bucket/disk.img"), "is not a target; name a file"),
    (("import", __file__, "NBD://host/disk"), "is not a target; name a file"),
    (("import", __file__, "nbds+unix:///?socket=a"), "is not a target; name a file"),
    (("blank", "T", "0"), "a disk of 0 bytes; give a size such as 10Gi"),
    (
        ("import", "--source=imageio", "--disk-id=1", "--previous-checkpoint=1", "https://127.0.0.1:1/", "T"),
        "a previous checkpoint without a current one; use --current-checkpoint",
    ),
]
#: Sources that cannot be read, and what to do.
UNREADABLE = [
    (("http://127.0.0.1:1/x",), "connection refused; check host and port, and that the server runs"),
    (("http://127.0.0.1:1/IMPORTER_DISK_ID",), "http://127.0.0.1:1/IMPORTER_DISK_ID: "),
    (("http://nowhere.invalid/x",), "unknown host; check the name of the host"),
    (("example.org/disk.raw",), "no such file or directory; check the path; a URL begins with https://"),
    (("quay.io/containerdisks/fedora:latest",), "https://, an image in a registry with docker://"),
    (("/proc",), "/proc: is a directory; name the file of the disk"),
    # RFC 6761: no resolver knows it.
    (
        ("s3://bucket/disk", "--region=x.invalid"),
        (
            "s3://bucket/disk: unknown host s3.x.invalid.amazonaws.com; "
            "check the network, or give another server with --endpoint-url"
        ),
    ),
]


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [(arguments, REQUEST, message) for arguments, message in REFUSED]
    + [(("import", *source, "T"), SOURCE, message) for source, message in UNREADABLE]
    + [(("import", __file__, "/dev/null"), TARGET, "/dev/null: is neither a block device")],
)
def test_message_says_what_is_wrong_and_what_to_do(
    tmp_path: Path, arguments: tuple[str, ...], status: int, message: str
) -> None:
    done = worker.call(*(tmp_path / "y" if argument == "T" else argument for argument in arguments))
    assert (done.status, done.output) == (status, "")
    assert message in " ".join(done.errors.split())
    assert "Traceback" not in done.errors
    assert not [*tmp_path.iterdir()]


def test_folder_of_headers_that_cannot_be_searched_is_reported() -> None:
    """Its names can be listed, but not looked at (path_resolution(7))."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        Path(folder, "token").write_text("X-Token: hunter2")
        Path(folder).chmod(0o744)
        arguments = ("--header-dir", folder, "http://127.0.0.1:1/d", "/nowhere/disk.img")
        done = worker.run("import", "--json", *arguments, prefix=limits.unprivileged())
    assert done.errors == f"cdi-worker: {folder}/token: permission denied\n"
    assert (done.status, json.loads(done.output)["error"]["kind"]) == (REQUEST, "RequestError")


#: Gives the command ``digest`` a defect.
DEFECT = """
import errno, os, sys
from cdi_worker.importer import cli
from cdi_worker.importer.commands import digest

def fail(**_: object) -> None:
    number = getattr(errno, sys.argv[1])
    raise OSError(number, os.strerror(number), sys.argv[2])

digest.digest.callback = fail
cli.main(["digest", "--json", "http://u:hunter2-is-secret@h/"])
"""


@pytest.mark.parametrize(("number", "kind"), [("EACCES", "PermissionError"), ("ENOSPC", "OSError")])
def test_unexpected_error_of_the_system_is_an_internal_error(number: str, kind: str) -> None:
    argv = [sys.executable, "-c", DEFECT, number, "/tmp/hunter2-is-secret"]
    done = subprocess.run(argv, check=False, capture_output=True, text=True, cwd=repository.ROOT)
    assert done.stderr.startswith(f"cdi-worker: internal error: {kind}: [Errno "), done.stderr
    assert done.stderr.endswith(": '/tmp/***'; please report it with the output of -v=4\n"), done.stderr
    assert (done.returncode, json.loads(done.stdout)["error"]["status"]) == (1, 1)


def test_checksum_mismatch_says_what_to_do(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(1 << 20)))
    done = worker.call("import", url, tmp_path / "y", f"--checksum=md5:{'0' * 32}")
    assert (done.status, "; check the checksum" in done.error_message) == (5, True), done.errors


def test_login_is_asked_for_by_its_options(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(1 << 20), password="me:secret"))
    done = worker.call("import", url, tmp_path / "y")
    cure = "401 Unauthorized; log in (--user and --password-file)"
    assert (done.status, done.error_message.endswith(cure)) == (3, True), done.errors
    pod = worker.Pod(tmp_path)
    pod.run(IMPORTER_SOURCE="http", IMPORTER_ENDPOINT=url)
    assert pod.message.endswith("401 Unauthorized; log in (spec.source.http.secretRef)")


def test_login_that_was_given_is_not_asked_for(server: misbehave.Server, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(bytes(1 << 20), password="me:secret"))
    done = worker.call("import", url, tmp_path / "y", "--user=me", env={"IMPORTER_SECRET_KEY": "wrong"})
    assert done.error_message.endswith("401 Unauthorized; check user and password"), done.errors
