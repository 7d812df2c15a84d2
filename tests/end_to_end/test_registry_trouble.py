"""Imports from registries that throttle and fail, and imports that are ended early."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import sys
import threading
import time
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import progress
from tests.support import containers, forked, meters, misbehave, oracle, processes, registries
from tests.support import disks as disks_module
from tests.support.containers import Image

MIB = 1 << 20


MANIFEST = "/v2/r/manifests/latest"


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


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("variant", ["raw", "qcow2-zlib"])
def test_resets_and_throttling_are_retried(
    variant: str, ranges: bool, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = Image((containers.layer(*containers.disk(disks.image(variant).read_bytes()), compression=""),))
    good = misbehave.Page(image.layers[0].data, ranges=ranges)
    busy = misbehave.Page(status=429, headers={"Retry-After": "0"})
    torn = dataclasses.replace(good, cut=700_000)
    target = tmp_path / "disk.img"
    with misbehave.Server() as server:
        serve(server, image, (busy, 1), (good, 1), (busy, 2), (torn, 2), (busy, 1), (torn, 1), last=good)
        cdi_worker.run(from_server(server, target))
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("variant", ["raw", "qcow2"])
def test_layer_is_fetched_once(variant: str, ranges: bool, disks: disks_module.Disks, tmp_path: Path) -> None:
    image = Image((containers.layer(*containers.disk(disks.image(variant).read_bytes()), compression=""),))
    layer = image.layers[0]
    with misbehave.Server() as server:
        serve(server, image, last=misbehave.Page(layer.data, ranges=ranges))
        cdi_worker.run(from_server(server, tmp_path / "disk.img"))
        # By ranges, the first answer is broken off: the sockets hold some of it.
        unread = (1 << 20) if ranges else 5000
        assert server.sent(f"/v2/r/blobs/{layer.digest}") < len(layer.data) + unread


@pytest.mark.parametrize("variant", ["raw", "qcow2"])
def test_layer_with_shifted_ranges_is_read_in_order(
    variant: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = Image(
        (containers.layer(*containers.disk(disks.image(variant, "dense").read_bytes()), compression=""),)
    )
    target = tmp_path / "disk.img"
    with misbehave.Server() as server:
        lie = misbehave.Page(image.layers[0].data, lie=lambda first, _: first and first + 512)
        serve(server, image, last=lie)
        cdi_worker.run(from_server(server, target))
    oracle.same(target, disks.expected(variant, "dense"))


@pytest.mark.parametrize("above", [False, True])
def test_ranges_that_stop_working(above: bool, disks: disks_module.Disks, tmp_path: Path) -> None:
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

    with misbehave.Server() as server:
        serve(server, image, last=misbehave.Page(layer.data))
        good = misbehave.Page(broken.data)
        server.serve(f"/v2/r/blobs/{broken.digest}", (good, 2), dataclasses.replace(good, ranges=False))
        cdi_worker.run(from_server(server, target), Told())
    oracle.same(target, disks.expected("raw", "dense"))
    assert above or any(isinstance(failure, errors.NoRanges) for failure in failures)


def test_retries_are_reported(disks: disks_module.Disks, tmp_path: Path) -> None:
    image = Image((containers.layer(*containers.disk(disks.raw("dense").read_bytes()), compression=""),))
    good = misbehave.Page(image.layers[0].data)
    failures: list[errors.Error] = []

    class Told(progress.NullProgress):
        def retry(self, failure: errors.Error) -> None:
            failures.append(failure)

    with misbehave.Server() as server:
        serve(server, image, (good, 1), (dataclasses.replace(good, status=503), 1), last=good)
        cdi_worker.run(from_server(server, tmp_path / "disk.img"), Told())
    assert failures


def test_progress_is_reported_during_the_import(disks: disks_module.Disks, tmp_path: Path) -> None:
    image = containers.image_of(disks.raw("dense"))
    (layer,) = (blob for blob in image.layers if len(blob.data) > MIB)
    shown = meters.Percents()
    with misbehave.Server() as server:
        serve(server, image, last=misbehave.Page())
        for blob in image.layers:
            page = misbehave.Page(blob.data, drip=(256 << 10, 0.01) if blob is layer else None)
            server.serve(f"/v2/r/blobs/{blob.digest}", page)
        cdi_worker.run(from_server(server, tmp_path / "disk.img"), shown)
    assert shown.finished
    assert len(shown.between) > 2


@pytest.mark.parametrize("what", ["manifest", "config"])
def test_cancel_ends_the_first_request(what: str, disks: disks_module.Disks, tmp_path: Path) -> None:
    image = Image((containers.layer(*containers.disk(disks.raw().read_bytes())),))
    path = {"manifest": MANIFEST, "config": f"/v2/r/blobs/{image.config_blob.digest}"}[what]
    data = {"manifest": image.manifest.data, "config": image.config_blob.data}[what]
    cancel = threading.Event()
    with misbehave.Server() as server:
        serve(server, image, last=misbehave.Page(image.layers[0].data))
        server.serve(path, misbehave.Page(data, stall=10))
        threading.Timer(0.5, cancel.set).start()
        begun = time.monotonic()
        with pytest.raises(errors.Cancelled):
            cdi_worker.run(from_server(server, tmp_path / "disk.img"), cancel=cancel)
        assert time.monotonic() - begun < processes.PATIENCE


def test_cancel_ends_the_import(disks: disks_module.Disks, tmp_path: Path) -> None:
    image = Image((containers.layer(*containers.disk(disks.raw("dense").read_bytes()), compression=""),))
    good = misbehave.Page(image.layers[0].data)
    target = tmp_path / "disk.img"
    cancel = threading.Event()
    with misbehave.Server() as server:
        serve(server, image, (good, 1), last=dataclasses.replace(good, stall=100_000))
        threading.Timer(0.5, cancel.set).start()
        with pytest.raises(errors.Cancelled):
            cdi_worker.run(from_server(server, target), cancel=cancel)
    oracle.unusable(target)


# -- as a pod --------------------------------------------------------------------------------------


def pod(directory: Path, data: Path, **env: str) -> tuple[list[str], dict[str, str], Path]:
    """Return the command and environment of a controller, and the path of the message."""
    message = directory / "message"
    argv = [
        sys.executable, "-m", "cdi_worker", "-v=1", f"--data-dir={data}", f"--block-device={directory}/none",
        f"--scratch-dir={directory}/none", f"--termination-log={message}",
    ]  # fmt: skip
    return argv, {**forked.ENVIRONMENT, "IMPORTER_SOURCE": "registry", **env}, message


def test_pod_imports_from_a_registry(
    guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path
) -> None:
    config = containers.config(env=("KUBEVIRT_IO_A=b",))
    guarded.push("pod", dataclasses.replace(containers.image_of(disks.image("raw")), config=config))
    data, certificates = tmp_path / "data", tmp_path / "certs"
    data.mkdir()
    certificates.mkdir()
    assert guarded.authority
    (certificates / "ca.crt").write_bytes(guarded.authority.certificate.read_bytes())
    (certificates / "client.key").write_text("no certificate")
    env = {
        "IMPORTER_ENDPOINT": guarded.reference("pod"),
        "IMPORTER_ACCESS_KEY_ID": registries.USER,
        "IMPORTER_SECRET_KEY": registries.PASSWORD,
        "IMPORTER_CERT_DIR": str(certificates),
        "IMPORTER_IMAGE_SIZE": "16Mi",
    }
    argv, given, message = pod(tmp_path, data, **env)
    done = forked.run(argv, env=given)
    assert done.returncode == 0, done.stderr
    assert json.loads(message.read_text()) == {
        "scratchSpaceRequired": False,
        "preallocationApplied": False,
        "message": "Import Complete",
        "labels": {"kubevirt.io/a": "b"},
    }
    oracle.same(data / "disk.img", disks.expected("raw"))
    assert registries.PASSWORD not in done.stderr + done.stdout

    argv, given, message = pod(tmp_path, data, **{**env, "IMPORTER_SECRET_KEY": "wr0ng"})
    done = forked.run(argv, env=given)
    assert done.returncode == 1
    # The controllers derive the reason ImagePullFailed from these words, as for CDI's own worker.
    beginning = "Unable to process data: failed to pull image: docker://localhost:"
    assert message.read_text().startswith(beginning)
    assert "wr0ng" not in message.read_text() + done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_killed_worker_can_be_run_again(
    how: signal.Signals, disks: disks_module.Disks, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    disk = random.Random(8).randbytes(4 << 20)
    (tmp_path / "expected").write_bytes(disk)
    image = Image((containers.layer(*containers.disk(disk), compression=""),))
    good = misbehave.Page(image.layers[0].data)
    path = f"/v2/r/blobs/{image.layers[0].digest}"
    with misbehave.Server() as server:
        serve(server, image, (good, 1), last=dataclasses.replace(good, drip=(64 * 1024, 0.1)))
        reference = f"docker://127.0.0.1:{server.port}/r"
        argv, env, message = pod(tmp_path, data, IMPORTER_ENDPOINT=reference, INSECURE_TLS="true")
        first = forked.Popen[str](argv, env=env)
        try:
            processes.wait_for(lambda: server.sent(path) > 2 << 20, "half of it", 60)
            first.send_signal(how)
            first.wait(30)
        finally:
            first.kill()
            first.wait()
        oracle.unusable(data / "disk.img")
        serve(server, image, last=good)
        again = forked.run(argv, env=env)
    assert again.returncode == 0, message.read_text()
    oracle.same(data / "disk.img", tmp_path / "expected")


def test_inspect_fetches_only_the_head(tmp_path: Path) -> None:
    disk = random.Random(9).randbytes(8 << 20)
    image = Image((containers.layer(*containers.disk(disk)),))
    with misbehave.Server() as server:
        serve(server, image, last=misbehave.Page(image.layers[0].data))
        cdi_worker.inspect(from_server(server, tmp_path / "disk.img"))
        assert sum(request.sent for request in server.requests) < 1 << 20
