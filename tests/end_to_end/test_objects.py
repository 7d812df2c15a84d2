"""Imports from object stores, from the first request to the disk on its target."""

from __future__ import annotations

import base64
import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import devices, forked, meters, misbehave, objectservers, oracle, processes, worker
from tests.support import disks as disks_module

KEYS = cdi_worker.Access(user=objectservers.ACCESS_KEY, password=objectservers.SECRET_KEY)
Put = objectservers.Store | objectservers.Emulator


def store_and_import(store: Put, disk: Path, target: Path) -> cdi_worker.Result:
    """Store a disk and import it, without scratch."""
    store.put(disk.name, disk.read_bytes())
    kind = "s3" if isinstance(store, objectservers.Store) else "gcs"
    return cdi_worker.run(request(kind, store.url(disk.name), target))


def request(kind: str, url: str, target: Path) -> cdi_worker.Request:
    access = KEYS if kind == "s3" else cdi_worker.Access()
    options = cdi_worker.FetchOptions(chunk=256 * 1024, no_progress=20)
    return cdi_worker.Request(
        existing="replace",
        source=kind,
        location=cdi_worker.Location(url, access),
        target=str(target),
        fetch=options,
    )


@pytest.mark.parametrize("variant", disks_module.COMMON)
@pytest.mark.parametrize("kind", ["seaweed", "emulator"])
def test_format_is_imported_to_a_file(
    kind: str, variant: str, disks: disks_module.Disks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = tmp_path / "disk.img"
    store_and_import(request.getfixturevalue(kind), disks.image(variant), target)
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize("variant", ["raw", "qcow2-zlib", "vmdk-stream"])
def test_routes_work_with_a_server_without_ranges(
    rclone: objectservers.Store, variant: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    store_and_import(rclone, disks.image(variant), target)
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize("variant", disks_module.COMMON)
def test_format_is_imported_to_a_device(
    seaweed: objectservers.Store, variant: str, disks: disks_module.Disks, block: Path
) -> None:
    store_and_import(seaweed, disks.image(variant), block)
    oracle.same(block, disks.expected(variant), beyond=devices.DIRT)


@pytest.mark.parametrize("variant", ["raw", "qcow2-zlib", "vmdk-stream"])
def test_routes_work_from_google_to_a_device(
    emulator: objectservers.Emulator, variant: str, disks: disks_module.Disks, block: Path
) -> None:
    store_and_import(emulator, disks.image(variant), block)
    oracle.same(block, disks.expected(variant), beyond=devices.DIRT)


@pytest.mark.parametrize("compression", ["gz", "xz", "zst"])
@pytest.mark.parametrize("kind", ["seaweed", "emulator"])
def test_compressed_disk_is_imported(
    kind: str, compression: str, disks: disks_module.Disks, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    target = tmp_path / "disk.img"
    result = store_and_import(request.getfixturevalue(kind), disks.wrapped("raw", compression), target)
    assert result.compressions == (compression,)
    oracle.same(target, disks.raw())


def test_missing_object_leaves_nothing(seaweed: objectservers.Store, tmp_path: Path) -> None:
    target = tmp_path / "disk.img"
    with pytest.raises(errors.Unreachable, match="no such key"):
        cdi_worker.run(request("s3", seaweed.url("nothing"), target))
    oracle.unusable(target)


# -- temporary errors ----------------------------------------------------------------------------


@dataclasses.dataclass
class ServedObject:
    """An object on a misbehaving server."""

    kind: str
    server: misbehave.Server
    path: str
    url: str
    page: misbehave.Page


@pytest.fixture(params=["s3", "gcs"])
def served_object(request: pytest.FixtureRequest) -> Iterator[ServedObject]:
    with misbehave.Server() as server:
        if request.param == "s3":
            yield ServedObject("s3", server, "/b/o", server.url("/b/o"), misbehave.Page())
        else:
            path = "/download/storage/v1/b/b/o/o?alt=media&generation=7"
            page = misbehave.Page(headers={"x-goog-generation": "7"})
            yield ServedObject("gcs", server, path, server.url("/b/o"), page)


def serve(
    served_object: ServedObject, data: bytes, *turns: tuple[misbehave.Page, int], last: misbehave.Page
) -> None:
    if served_object.kind == "gcs":
        crc = base64.b64encode(google_crc32c.value(data).to_bytes(4)).decode()
        resource = json.dumps({"generation": "7", "size": str(len(data)), "crc32c": crc})
        metadata = misbehave.Page(resource.encode(), ranges=False, content_type="application/json")
        busy = misbehave.Page(b"{}", status=503)
        path = "/storage/v1/b/b/o/o?projection=noAcl&prettyPrint=false"
        served_object.server.serve(path, (busy, 1), metadata)
    served_object.server.serve(served_object.path, *turns, last)


@pytest.mark.parametrize("variant", ["raw", "qcow2", "vmdk-stream"])
def test_resets_and_throttling_are_retried(
    served_object: ServedObject, variant: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    disk = disks.image(variant).read_bytes()
    good = dataclasses.replace(served_object.page, body=disk)
    busy = misbehave.Page(b"<Code>SlowDown</Code>", status=503, headers={"Retry-After": "0"})
    limited = misbehave.Page(b"{}", status=429)
    torn = dataclasses.replace(good, cut=70_000)
    serve(served_object, disk, (good, 1), (busy, 3), (torn, 6), (limited, 2), (torn, 3), last=good)
    target = tmp_path / "disk.img"
    cdi_worker.run(request(served_object.kind, served_object.url, target))
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize("shift", [-1, 512])
@pytest.mark.parametrize("variant", ["raw", "qcow2", "vhdx-log"])
def test_shifted_ranges_are_not_used(
    served_object: ServedObject, variant: str, shift: int, disks: disks_module.Disks, tmp_path: Path
) -> None:
    disk = disks.image(variant, "dense").read_bytes()
    lie = dataclasses.replace(served_object.page, body=disk, lie=lambda first, _: first and first + shift)
    serve(served_object, disk, last=lie)
    target, scratch = tmp_path / "disk.img", tmp_path / "scratch"
    scratch.mkdir()
    wanted = request(served_object.kind, served_object.url, target)
    cdi_worker.run(dataclasses.replace(wanted, scratch=str(scratch)))
    oracle.same(target, disks.expected(variant, "dense"))


@pytest.mark.parametrize(("variant", "content"), [("raw", "dense"), ("vhdx-log", "mixed")])
def test_progress_is_reported_during_the_import(
    served_object: ServedObject, variant: str, content: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    disk = disks.image(variant, content).read_bytes()
    serve(served_object, disk, last=dataclasses.replace(served_object.page, body=disk))
    shown = meters.Percents()
    cdi_worker.run(request(served_object.kind, served_object.url, tmp_path / "disk.img"), shown)
    assert shown.finished
    assert len(shown.between) > 3


@pytest.mark.parametrize("served_object", ["gcs"], indirect=True)
def test_corrupted_object_is_refused(
    served_object: ServedObject, disks: disks_module.Disks, tmp_path: Path
) -> None:
    disk = disks.raw().read_bytes()
    serve(served_object, disk, last=dataclasses.replace(served_object.page, body=disk[:-1] + b"?"))
    target = tmp_path / "disk.img"
    with pytest.raises(errors.ChecksumMismatch):
        cdi_worker.run(request(served_object.kind, served_object.url, target))
    oracle.unusable(target)


IMPORT = """
import json, sys, cdi_worker
kind, url, target, user, password = sys.argv[1:]
location = cdi_worker.Location(url, cdi_worker.Access(user=user, password=password))
options = cdi_worker.FetchOptions(connections=2, chunk=64 * 1024)
done = cdi_worker.run(cdi_worker.Request(
    existing="replace", source=kind, location=location, target=target, fetch=options))
print(json.dumps({"resumed": done.resumed, "read": done.read}))
"""


def test_killed_worker_resumes(
    served_object: ServedObject, disks: disks_module.Disks, tmp_path: Path
) -> None:
    disk = disks.raw("dense").read_bytes()
    good = dataclasses.replace(served_object.page, body=disk)
    # Slow enough for the journal, which is saved every ten seconds.
    serve(served_object, disk, (good, 2), last=dataclasses.replace(good, drip=(64 * 1024, 0.5)))
    target = tmp_path / "disk.img"
    keys = (KEYS.user, KEYS.password) if served_object.kind == "s3" else ("", "")
    argv = [sys.executable, "-c", IMPORT, served_object.kind, served_object.url, str(target), *keys]
    first = forked.Popen[str](argv, env=forked.ENVIRONMENT)
    try:
        processes.wait_for(
            lambda: served_object.server.sent(served_object.path) > len(disk) * 3 // 4, "most of it", 60
        )
    finally:
        first.kill()
        first.wait()
    oracle.unusable(target)
    serve(served_object, disk, last=good)
    again = forked.run(argv, env=forked.ENVIRONMENT, check=True)
    result = json.loads(again.stdout)
    oracle.same(target, disks.raw("dense"))
    assert result["resumed"] > 0
    assert result["resumed"] + result["read"] == len(disk)


# -- as a pod ------------------------------------------------------------------------------------


def pod(directory: Path, **env: str) -> tuple[int, str]:
    """Run the worker as a controller does; return exit status and termination message."""
    message, scratch = directory / "message", directory / "none"
    arguments = ["-v=3", f"--data-dir={directory}", f"--scratch-dir={scratch}"]
    arguments += [f"--termination-log={message}", f"--block-device={scratch}"]
    done = worker.run(*arguments, env={"NO_GCE_CHECK": "true", **env})
    assert objectservers.SECRET_KEY not in done.errors + done.output
    return done.status, message.read_text()


def test_pod_imports_from_s3(seaweed: objectservers.Store, disks: disks_module.Disks, tmp_path: Path) -> None:
    seaweed.put("pod.qcow2", disks.image("qcow2").read_bytes())
    keys = {"IMPORTER_ACCESS_KEY_ID": KEYS.user, "IMPORTER_SECRET_KEY": KEYS.password}
    env = {"IMPORTER_SOURCE": "s3", "IMPORTER_ENDPOINT": seaweed.url("pod.qcow2")}
    status, message = pod(tmp_path, **env, **keys)
    assert (status, json.loads(message)["message"]) == (0, "Import Complete")
    oracle.same(tmp_path / "disk.img", disks.expected("qcow2"))
    status, message = pod(tmp_path, **env, **{**keys, "IMPORTER_SECRET_KEY": "not-the-key"})
    assert status == 1
    assert message.startswith("Unable to connect to s3 data source: http://127.0.0.1")
    assert "wrong signature; check the secret key" in message


def test_pod_imports_from_google(
    emulator: objectservers.Emulator, disks: disks_module.Disks, tmp_path: Path
) -> None:
    emulator.put("pod.vmdk", disks.image("vmdk").read_bytes())
    env = {"IMPORTER_SOURCE": "gcs", "STORAGE_EMULATOR_HOST": emulator.host}
    status, message = pod(tmp_path, **env, IMPORTER_ENDPOINT=emulator.uri("pod.vmdk"))
    assert (status, json.loads(message)["message"]) == (0, "Import Complete")
    oracle.same(tmp_path / "disk.img", disks.expected("vmdk"))
    status, message = pod(tmp_path, **env, IMPORTER_ENDPOINT=emulator.uri("nothing"))
    assert status == 1
    assert message.startswith("Unable to connect to gcs data source: ")
    assert f"no such object '{emulator.folder}nothing' in bucket 'images'" in message
