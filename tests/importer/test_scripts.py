"""Commands in scripts: JSON, errors included, quiet runs, and log levels after the sub-command."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support import disks as disks_module
from tests.support import manifests, misbehave, uploads, worker

MIB = 1 << 20
REQUEST, SOURCE, CHECKSUM, TARGET, SCRATCH = 2, 3, 5, 6, 7
server_of_uploads = uploads.server


def run_json(*arguments: str | Path, env: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    """Run a command with ``--json``; return its status and the one object on standard output."""
    done = worker.call(*arguments, "--json", env=env)
    (line,) = done.output.splitlines()
    return done.status, dict(json.loads(line))


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "kind", "words"),
    [
        (("import", "missing", "T"), SOURCE, "Unreachable", "missing: no such file or directory"),
        (
            ("import", "I", "T", "--checksum=md5:" + "0" * 32),
            CHECKSUM,
            "ChecksumMismatch",
            "checksum mismatch",
        ),
        (("import", "I", "I.d/nowhere/disk.img"), TARGET, "TargetError", "no such directory or device"),
        (("import", "I", "T", "--nonsense"), REQUEST, "RequestError", "No such option"),
        (("digest", "disk.img"), SOURCE, "SourceError", "states nothing"),
        (("blank", "I", "1Mi"), TARGET, "TargetExists", "exists"),
        (("upload", "missing", "https://h/"), SOURCE, "Unreachable", "no such file or directory"),
        (("manifest", "missing"), REQUEST, "RequestError", "missing"),
    ],
)
def test_error_is_an_object(
    tmp_path: Path, arguments: tuple[str, ...], status: int, kind: str, words: str
) -> None:
    image, target = tmp_path / "image", tmp_path / "disk.img"
    image.write_bytes(bytes(MIB))
    names = {"I": image, "T": target}
    given = [names.get(each, each.replace("I.d", str(tmp_path / "none"))) for each in arguments]
    found, answer = run_json(*given)
    error = answer["error"]
    assert (found, list(answer)) == (status, ["error"])
    assert (error["kind"], error["status"], error["retryable"]) == (kind, status, False)
    assert words in error["message"]


def test_error_has_its_fields(server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path) -> None:
    url = server.serve("/disk", misbehave.Page(disks.image("vhdx-log").read_bytes(), ranges=False))
    status, answer = run_json("import", url, tmp_path)
    assert (status, answer["error"]["kind"]) == (SCRATCH, "ScratchRequired")
    status, answer = run_json("inspect", url)
    assert (status, answer["format"]) == (0, "vhdx")
    wrong = "0" * 64
    status, answer = run_json("import", url, tmp_path, f"--scratch={tmp_path}", f"--checksum=sha256:{wrong}")
    assert (status, answer["error"]["expected"]) == (CHECKSUM, wrong)
    assert len(answer["error"]["calculated"]) == 64


def test_obstacle_of_an_inspection_is_an_error_too(server: misbehave.Server) -> None:
    url = server.serve("/page", misbehave.Page(b"<!DOCTYPE html><html>Sign in</html>"))
    status, answer = run_json("inspect", url)
    assert (status, answer["error"]["status"], answer["error"]["message"]) == (4, 4, answer["obstacle"])


# -- results -----------------------------------------------------------------------------------


def test_every_command_prints_one_object(
    disks: disks_module.Disks, tmp_path: Path, server_of_uploads: uploads.Server
) -> None:
    image, made = disks.raw(), server_of_uploads.certificates
    assert run_json("import", image, tmp_path / "disk.img")[1]["size"] == 8 * MIB
    assert run_json("inspect", image)[1]["virtualSize"] == 8 * MIB
    assert run_json("blank", tmp_path / "blank.img", "1Mi")[1]["size"] == MIB
    keys = ("--ca-file", made.authority.certificate, "--cert", made.client.certificate)
    answer = run_json("upload", image, server_of_uploads.url(""), *keys, "--key", made.client.key)[1]
    assert (answer["path"], answer["size"], answer["resumed"]) == (str(image), 8 * MIB, 0)


def test_manifest_prints_a_list(tmp_path: Path) -> None:
    path = tmp_path / "dv.yaml"
    space = manifests.Workspace(tmp_path)
    space.volume({"http": {"url": "https://example.org/disk.qcow2"}})
    path.write_text(json.dumps(space.documents[0]))
    status, answer = run_json("manifest", path, "--image=x")
    assert (status, answer["kind"], answer["apiVersion"]) == (0, "List", "v1")
    assert {"PersistentVolumeClaim", "Job"} <= {each["kind"] for each in answer["items"]}


# -- quiet, verbose ----------------------------------------------------------------------------


def test_quiet_prints_nothing_but_errors(disks: disks_module.Disks, tmp_path: Path) -> None:
    for where in (("-q", "import"), ("import", "-q"), ("import", "--quiet", "--progress=lines")):
        done = worker.call(*where, disks.raw(), tmp_path, "--force")
        assert (done.status, done.output, done.errors) == (0, "", "")
    done = worker.call("import", "-q", "missing", tmp_path, "--force")
    assert (done.status, done.output, len(done.errors.splitlines())) == (SOURCE, "", 1)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        done = worker.call("import", "-q", "--verify", disks.raw(), tmp_path / name)
        digest = disks_module.digest(disks.raw(), "sha256")
        # What sha256sum prints, and checks.
        assert (done.output, done.errors) == (f"{digest}  {tmp_path / name / 'disk.img'}\n", "")
    done = worker.call("import", "-q", "--json", disks.raw(), tmp_path, "--force")
    assert json.loads(done.output)["size"] == 8 * MIB
    assert done.errors == ""


@pytest.mark.parametrize(
    ("arguments", "debug"),
    [
        (("-v", "import"), False),
        (("import", "-v"), False),
        (("import", "-v=1"), False),
        (("import", "-v", "4"), True),
        (("-v=4", "import", "-v"), True),
        (("import", "-vvvv"), True),
        (("import", "--verbosity=4"), True),
    ],
)
def test_log_level_may_follow_the_command(tmp_path: Path, arguments: tuple[str, ...], debug: bool) -> None:
    done = worker.call(*arguments, tmp_path / "missing", tmp_path / "disk.img")
    assert done.status == SOURCE, done.errors
    assert re.search(r"^I.* execute\.py:\d+\] request ", done.errors, re.MULTILINE)
    assert bool(re.search(r"^I.* cli\.py:\d+\] trace$", done.errors, re.MULTILINE)) is debug
