"""Imports from registries that throttle and fail, and imports that are ended early."""

from __future__ import annotations

import dataclasses
import random
import signal
import threading
import time
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import progress
from tests.support import containers, kills, meters, misbehave, oracle, processes, registries, worker
from tests.support import disks as disks_module
from tests.support.containers import Image

MIB = 1 << 20


MANIFEST = "/v2/r/manifests/latest"


def image_of(disk: bytes) -> Image:
    return Image((containers.layer(*containers.disk(disk), compression=""),))


def serve(
    server: misbehave.Server, image: Image, *turns: tuple[misbehave.Page, int], last: misbehave.Page
) -> None:
    """Serve an image whose only layer has the given responses in turn."""
    server.serve(MANIFEST, misbehave.Page(image.manifest.data))
    config, layer = image.config_blob, image.layers[0]
    server.serve(f"/v2/r/blobs/{config.digest}", misbehave.Page(config.data))
    server.serve(f"/v2/r/blobs/{layer.digest}", *turns, last)


def from_server(server: misbehave.Server, target: Path) -> cdi_worker.Request:
    location = cdi_worker.Location(f"docker://127.0.0.1:{server.port}/r", cdi_worker.Access(insecure=True))
    return cdi_worker.Request(existing="replace", source="registry", location=location, target=str(target))


@pytest.mark.parametrize(("variant", "ranges"), [("raw", False), ("qcow2-zlib", True)])
def test_resets_and_throttling_are_retried(
    server: misbehave.Server, variant: str, ranges: bool, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = image_of(disks.image(variant).read_bytes())
    good = misbehave.Page(image.layers[0].data, ranges=ranges)
    busy = misbehave.Page(status=429, headers={"Retry-After": "0"})
    torn = dataclasses.replace(good, cut=700_000)
    target = tmp_path / "disk.img"
    serve(server, image, (busy, 1), (good, 1), (busy, 2), (torn, 2), (busy, 1), (torn, 1), last=good)
    cdi_worker.run(from_server(server, target))
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize(("variant", "ranges"), [("raw", False), ("qcow2", True)])
def test_layer_is_fetched_once(
    server: misbehave.Server, variant: str, ranges: bool, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = image_of(disks.image(variant).read_bytes())
    layer = image.layers[0]
    serve(server, image, last=misbehave.Page(layer.data, ranges=ranges))
    cdi_worker.run(from_server(server, tmp_path / "disk.img"))
    # By ranges, the first answer is broken off: the sockets hold some of it.
    unread = (1 << 20) if ranges else 5000
    assert server.sent(f"/v2/r/blobs/{layer.digest}") < len(layer.data) + unread


def test_layer_with_shifted_ranges_is_read_in_order(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    disk = disks.image("qcow2", "dense").read_bytes()
    image = image_of(disk)
    target = tmp_path / "disk.img"
    lie = misbehave.Page(image.layers[0].data, lie=lambda first, _: first and first + 512)
    serve(server, image, last=lie)
    cdi_worker.run(from_server(server, target))
    oracle.same(target, disks.expected("qcow2", "dense"))


@pytest.mark.parametrize("above", [False, True])
def test_ranges_that_stop_working(
    server: misbehave.Server, above: bool, disks: disks_module.Disks, tmp_path: Path
) -> None:
    """The blob, of the disk or of a layer above it, is read once more, in order."""
    noise = containers.layer(
        containers.Entry("etc/noise", random.Random(1).randbytes(3 << 20)), compression=""
    )
    layer = containers.layer(*containers.disk(disks.raw("dense").read_bytes()), compression="")
    image = Image((layer, noise) if above else (layer,))
    broken = image.layers[-1]
    target = tmp_path / "disk.img"
    failures: list[errors.Error] = []

    class Told(progress.NullProgress):
        def retry(self, failure: errors.Error) -> None:
            failures.append(failure)

    serve(server, image, last=misbehave.Page(layer.data))
    good = misbehave.Page(broken.data)
    server.serve(f"/v2/r/blobs/{broken.digest}", (good, 2), dataclasses.replace(good, ranges=False))
    cdi_worker.run(from_server(server, target), Told())
    oracle.same(target, disks.expected("raw", "dense"))
    assert above or any(isinstance(failure, errors.NoRanges) for failure in failures)


def test_progress_is_reported_during_the_import(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = containers.image_of(disks.raw("dense"))
    (layer,) = (blob for blob in image.layers if len(blob.data) > MIB)
    shown = meters.Percents()
    serve(server, image, last=misbehave.Page())
    for blob in image.layers:
        page = misbehave.Page(blob.data, drip=(256 << 10, 0.01) if blob is layer else None)
        server.serve(f"/v2/r/blobs/{blob.digest}", page)
    cdi_worker.run(from_server(server, tmp_path / "disk.img"), shown)
    assert shown.finished
    assert len(shown.between) > 2


def test_cancel_ends_the_first_request(
    server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = Image((containers.layer(*containers.disk(disks.raw().read_bytes())),))
    cancel = threading.Event()
    serve(server, image, last=misbehave.Page(image.layers[0].data))
    server.serve(MANIFEST, misbehave.Page(image.manifest.data, stall=10))
    threading.Timer(0.5, cancel.set).start()
    begun = time.monotonic()
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(from_server(server, tmp_path / "disk.img"), cancel=cancel)
    assert time.monotonic() - begun < processes.PATIENCE


def test_cancel_ends_the_import(server: misbehave.Server, disks: disks_module.Disks, tmp_path: Path) -> None:
    image = image_of(disks.raw("dense").read_bytes())
    good = misbehave.Page(image.layers[0].data)
    target = tmp_path / "disk.img"
    cancel = threading.Event()
    serve(server, image, (good, 1), last=dataclasses.replace(good, stall=100_000))
    threading.Timer(0.5, cancel.set).start()
    with pytest.raises(errors.Cancelled):
        cdi_worker.run(from_server(server, target), cancel=cancel)
    oracle.unusable(target)


def test_pod_imports_from_a_registry(
    guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path, pod: worker.Pod
) -> None:
    config = containers.config(env=("KUBEVIRT_IO_A=b",))
    guarded.push("pod", dataclasses.replace(containers.image_of(disks.image("raw")), config=config))
    certificates = tmp_path / "certs"
    certificates.mkdir()
    assert guarded.authority
    (certificates / "ca.crt").write_bytes(guarded.authority.certificate.read_bytes())
    (certificates / "client.key").write_text("no certificate")
    pod.env = {
        "IMPORTER_SOURCE": "registry",
        "IMPORTER_ENDPOINT": guarded.reference("pod"),
        "IMPORTER_ACCESS_KEY_ID": registries.USER,
        "IMPORTER_SECRET_KEY": registries.PASSWORD,
        "IMPORTER_CERT_DIR": str(certificates),
        "IMPORTER_IMAGE_SIZE": "16Mi",
    }
    done = pod.call()
    assert done.status == 0, done.errors
    assert pod.outcome == {
        "scratchSpaceRequired": False,
        "preallocationApplied": False,
        "message": "Import Complete",
        "labels": {"kubevirt.io/a": "b"},
    }
    oracle.same(pod.disk, disks.expected("raw"))
    assert registries.PASSWORD not in done.errors + done.output

    done = pod.call(IMPORTER_SECRET_KEY="wr0ng")
    assert done.status == 1
    # The controllers derive the reason ImagePullFailed from these words, as for CDI's own worker.
    assert pod.message.startswith("Unable to process data: failed to pull image: docker://localhost:")
    assert "wr0ng" not in pod.message + done.errors


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_worker_can_be_run_again(
    server: misbehave.Server, how: signal.Signals, tmp_path: Path
) -> None:
    (tmp_path / "expected").write_bytes(kills.DATA)
    target = tmp_path / "disk.img"
    image = image_of(kills.DATA)
    good = misbehave.Page(image.layers[0].data)
    path = f"/v2/r/blobs/{image.layers[0].digest}"
    serve(
        server, image, (good, 1), last=dataclasses.replace(good, **kills.SLOW, stall_at=kills.SIZE * 3 // 4)
    )
    wanted = dataclasses.replace(from_server(server, target), **kills.OPTIONS)
    kills.kill(wanted, kills.stuck(server, path), how)
    oracle.unusable(target)
    serve(server, image, last=good)
    # The layer is read again, and verified as a whole.
    result = cdi_worker.run(wanted)
    assert result.read >= kills.SIZE
    assert result.resumed > MIB
    assert result.written < kills.SIZE - MIB
    oracle.same(target, tmp_path / "expected")


def test_inspect_fetches_only_the_head(server: misbehave.Server, tmp_path: Path) -> None:
    disk = random.Random(9).randbytes(8 << 20)
    image = Image((containers.layer(*containers.disk(disk)),))
    serve(server, image, last=misbehave.Page(image.layers[0].data))
    cdi_worker.inspect(from_server(server, tmp_path / "disk.img"))
    assert sum(request.sent for request in server.requests) < 1 << 20
