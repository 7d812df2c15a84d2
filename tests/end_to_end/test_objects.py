"""Imports from object stores, from the first request to the disk on its target."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import google_crc32c
import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import devices, kills, meters, misbehave, objectservers, oracle, pairs, worker
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


#: An image for each of the routes: in order, by ranges, as it passes, by QEMU.
ROUTES = ("raw", "qcow2-zlib", "vmdk-stream", "vhdx-log")


@pytest.mark.parametrize(
    ("variant", "kind", "target"), pairs.covering(ROUTES, ("seaweed", "emulator"), ("file", "block"))
)
def test_image_is_imported_from_a_store(
    kind: str,
    variant: str,
    target: str,
    disks: disks_module.Disks,
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    with devices.target(target, tmp_path, 9 << 20) as path:
        store_and_import(request.getfixturevalue(kind), disks.image(variant), path)
        oracle.same(path, disks.expected(variant), beyond=devices.beyond(path))


@pytest.mark.parametrize(("kind", "compression"), [("seaweed", "xz"), ("emulator", "gz")])
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


@pytest.mark.parametrize(
    ("served_object", "variant"), [("s3", "qcow2"), ("gcs", "raw")], indirect=["served_object"]
)
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


@pytest.mark.parametrize(
    ("served_object", "variant", "shift"),
    [("s3", "raw", -1), ("gcs", "qcow2", 512)],
    indirect=["served_object"],
)
def test_shifted_ranges_are_not_used(
    served_object: ServedObject, variant: str, shift: int, disks: disks_module.Disks, tmp_path: Path
) -> None:
    disk = disks.image(variant, "dense").read_bytes()
    lie = dataclasses.replace(served_object.page, body=disk, lie=lambda first, _: first and first + shift)
    serve(served_object, disk, last=lie)
    target = tmp_path / "disk.img"
    cdi_worker.run(request(served_object.kind, served_object.url, target))
    oracle.same(target, disks.expected(variant, "dense"))


@pytest.mark.parametrize("served_object", ["s3"], indirect=True)
def test_progress_is_reported_during_the_import(
    served_object: ServedObject, disks: disks_module.Disks, tmp_path: Path
) -> None:
    disk = disks.image("raw", "dense").read_bytes()
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


def test_killed_worker_resumes(served_object: ServedObject, tmp_path: Path) -> None:
    good = dataclasses.replace(served_object.page, body=kills.DATA)
    serve(
        served_object,
        kills.DATA,
        (good, 2),
        last=dataclasses.replace(good, **kills.SLOW, stall_at=kills.SIZE * 3 // 4),
    )
    target, expected = tmp_path / "disk.img", tmp_path / "expected"
    expected.write_bytes(kills.DATA)
    wanted = dataclasses.replace(request(served_object.kind, served_object.url, target), **kills.OPTIONS)
    kills.kill(wanted, kills.stuck(served_object.server, served_object.path))
    oracle.unusable(target)
    serve(served_object, kills.DATA, last=good)
    result = cdi_worker.run(wanted)
    oracle.same(target, expected)
    assert result.resumed > kills.KEPT
    assert result.resumed + result.read == kills.SIZE


# -- as a pod ------------------------------------------------------------------------------------


def run(pod: worker.Pod, **env: str) -> worker.Completed:
    done = pod.run(NO_GCE_CHECK="true", **env)
    assert objectservers.SECRET_KEY not in done.errors + done.output + pod.message
    return done


def test_pod_imports_from_s3(
    seaweed: objectservers.Store, disks: disks_module.Disks, pod: worker.Pod
) -> None:
    seaweed.put("pod.qcow2", disks.image("qcow2").read_bytes())
    pod.env = {"IMPORTER_SOURCE": "s3", "IMPORTER_ENDPOINT": seaweed.url("pod.qcow2")}
    pod.env |= {"IMPORTER_ACCESS_KEY_ID": KEYS.user, "IMPORTER_SECRET_KEY": KEYS.password}
    assert (run(pod).status, pod.outcome["message"]) == (0, "Import Complete")
    oracle.same(pod.disk, disks.expected("qcow2"))
    assert run(pod, IMPORTER_SECRET_KEY="not-the-key").status == 1
    assert pod.message.startswith("Unable to connect to s3 data source: http://127.0.0.1")
    assert "wrong signature; check the secret key" in pod.message


def test_pod_imports_from_google(
    emulator: objectservers.Emulator, disks: disks_module.Disks, pod: worker.Pod
) -> None:
    emulator.put("pod.vmdk", disks.image("vmdk").read_bytes())
    pod.env = {"IMPORTER_SOURCE": "gcs", "STORAGE_EMULATOR_HOST": emulator.host}
    assert run(pod, IMPORTER_ENDPOINT=emulator.uri("pod.vmdk")).status == 0
    assert pod.outcome["message"] == "Import Complete"
    oracle.same(pod.disk, disks.expected("vmdk"))
    assert run(pod, IMPORTER_ENDPOINT=emulator.uri("nothing")).status == 1
    assert pod.message.startswith("Unable to connect to gcs data source: ")
    assert f"no such object '{emulator.folder}nothing' in bucket 'images'" in pod.message
