"""Imports from registries, from the first contact to the disk on its target."""

from __future__ import annotations

import dataclasses
import json
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import importer
from importer import errors
from tests import containers, devices, meters, misbehave, oracle, processes, registries, tls
from tests import disks as disks_module
from tests.containers import Entry, Image

MIB = 1 << 20
REPOSITORY = Path(__file__).parents[1]
#: What has to be whole before it can be converted goes through scratch.
SPOOLED = frozenset({"vdi", "vhd", "vhdx"})


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[registries.Registry]:
    """Run a registry with TLS and passwords."""
    directory = tmp_path_factory.mktemp("registry")
    authority = tls.Authority(directory / "ca")
    with registries.registry(directory, authority=authority, password=True) as running:
        yield running


def image_of(disk: Path, compression: str = "+gzip") -> Image:
    """Return an image with a disk between other layers."""
    return Image(
        (
            containers.layer(Entry("disk/old.img", b"old" * 100)),
            containers.layer(Entry("etc/a"), *containers.disk(disk.read_bytes()), compression=compression),
            containers.layer(Entry("disk/.wh.old.img"), Entry("etc/b")),
        )
    )


def brought(
    served: registries.Registry, image: Image, target: Path, scratch: Path | None = None
) -> importer.Result:
    served.push("disk", image)
    location = importer.Location(served.reference("disk"), served.access())
    return importer.run(
        importer.Request(
            source="registry",
            location=location,
            target=str(target),
            scratch=str(scratch) if scratch else None,
        )
    )


def scratch_for(variant: str, tmp_path: Path) -> Path | None:
    if variant not in SPOOLED:
        return None
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    return scratch


@pytest.mark.parametrize("variant", disks_module.COMMON)
def test_every_format_comes_to_a_file(
    served: registries.Registry, variant: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    brought(served, image_of(disks.image(variant)), target, scratch_for(variant, tmp_path))
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize("variant", ["raw", "qcow2-zlib", "vmdk-stream", "vhdx"])
def test_every_route_leads_to_a_device(
    served: registries.Registry, variant: str, disks: disks_module.Disks, block: Path, tmp_path: Path
) -> None:
    brought(served, image_of(disks.image(variant), "+zstd"), block, scratch_for(variant, tmp_path))
    oracle.same(block, disks.expected(variant), beyond=devices.DIRT)


@pytest.mark.parametrize("variant", ["raw", "qcow2"])
@pytest.mark.parametrize("compression", ["gz", "xz", "zst"])
def test_compressed_disks_inside_a_layer(
    served: registries.Registry, variant: str, compression: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    result = brought(served, image_of(disks.wrapped(variant, compression), ""), target)
    assert result.compressions == (compression,)
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize(
    ("variant", "compression", "kind"),
    [
        ("raw", "gz", "raw+gzip"),
        ("raw", None, "raw"),
        ("qcow2", None, "qcow2"),
        ("qcow2-zstd", None, "qcow2"),
    ],
)
def test_artifacts(
    served: registries.Registry,
    variant: str,
    compression: str | None,
    kind: str,
    disks: disks_module.Disks,
    tmp_path: Path,
) -> None:
    data = disks.wrapped(variant, compression).read_bytes()
    blob = containers.Blob(data, f"application/vnd.kubevirt.disk.{kind}")
    target = tmp_path / "disk.img"
    brought(served, Image((blob,), containers.EMPTY_CONFIG), target)
    oracle.same(target, disks.expected(variant))


def test_labels_come_along(served: registries.Registry, disks: disks_module.Disks, tmp_path: Path) -> None:
    config = containers.config(env=("A=1", "INSTANCETYPE_KUBEVIRT_IO_DEFAULT=u1"))
    result = brought(served, dataclasses.replace(image_of(disks.raw()), config=config), tmp_path / "disk.img")
    assert result.labels == {"instancetype.kubevirt.io/default": "u1"}


# -- what must not become a disk -------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["raw", "qcow2", "vhdx"])
@pytest.mark.parametrize("harm", ["changed", "shorter", "second"])
def test_nothing_is_left_of_a_wrong_layer(
    served: registries.Registry,
    harm: str,
    variant: str,
    disks: disks_module.Disks,
    block: Path,
    tmp_path: Path,
) -> None:
    """The harm is behind the disk: all of that has been written when it shows."""
    more = [Entry("disk/second", b"2")] if harm == "second" else [Entry("etc/x", harm.encode() * 2000)]
    disk = disks.image(variant).read_bytes()
    blob = containers.layer(*containers.disk(disk), *more, compression="")
    image = Image((blob,), containers.config(env=(f"X={harm}{variant}",)))
    served.push("disk", image)
    data = bytearray(blob.data)
    if harm == "changed":
        data[-1200] ^= 1
    served.stored(blob.digest).write_bytes(data[:-512] if harm == "shorter" else data)
    expected = errors.Refused if harm == "second" else errors.DigestMismatch
    with pytest.raises(expected):
        brought(served, image, block, scratch_for(variant, tmp_path))
    oracle.unusable(block)


def test_a_changed_byte_of_the_disk(
    served: registries.Registry, disks: disks_module.Disks, tmp_path: Path
) -> None:
    blob = containers.layer(*containers.disk(disks.raw("dense").read_bytes()), compression="")
    image = Image((blob,))
    served.push("disk", image)
    data = bytearray(blob.data)
    data[len(data) // 2] ^= 1
    served.stored(blob.digest).write_bytes(data)
    target = tmp_path / "disk.img"
    with pytest.raises(errors.DigestMismatch):
        brought(served, image, target)
    oracle.unusable(target)
    assert not list(tmp_path.glob("*.part*"))


# -- trouble on the way ----------------------------------------------------------------------------


MANIFEST = "/v2/r/manifests/latest"


def serve(
    server: misbehave.Server, image: Image, *turns: tuple[misbehave.Page, int], last: misbehave.Page
) -> None:
    """Serve an image whose only layer takes turns."""
    server.serve(MANIFEST, misbehave.Page(image.manifest.data))
    config, layer = image.config_blob, image.layers[0]
    server.serve(f"/v2/r/blobs/{config.digest}", misbehave.Page(config.data))
    server.serve(f"/v2/r/blobs/{layer.digest}", *turns, last)


def from_server(server: misbehave.Server, target: Path) -> importer.Request:
    location = importer.Location(f"docker://127.0.0.1:{server.port}/r", importer.Access(insecure=True))
    return importer.Request(source="registry", location=location, target=str(target))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("variant", ["raw", "qcow2-zlib"])
def test_resets_and_throttling_are_outlasted(
    variant: str, ranges: bool, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = Image((containers.layer(*containers.disk(disks.image(variant).read_bytes()), compression=""),))
    good = misbehave.Page(image.layers[0].data, ranges=ranges)
    busy = misbehave.Page(status=429, headers={"Retry-After": "0"})
    torn = dataclasses.replace(good, cut=700_000)
    target = tmp_path / "disk.img"
    with misbehave.Server() as server:
        serve(server, image, (busy, 1), (good, 1), (busy, 2), (torn, 2), (busy, 1), (torn, 1), last=good)
        importer.run(from_server(server, target))
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize("ranges", [True, False])
@pytest.mark.parametrize("variant", ["raw", "qcow2"])
def test_a_layer_is_fetched_once(
    variant: str, ranges: bool, disks: disks_module.Disks, tmp_path: Path
) -> None:
    image = Image((containers.layer(*containers.disk(disks.image(variant).read_bytes()), compression=""),))
    layer = image.layers[0]
    with misbehave.Server() as server:
        serve(server, image, last=misbehave.Page(layer.data, ranges=ranges))
        importer.run(from_server(server, tmp_path / "disk.img"))
        assert server.sent(f"/v2/r/blobs/{layer.digest}") < len(layer.data) + 1000


def test_progress_is_told_on_the_way(disks: disks_module.Disks, tmp_path: Path) -> None:
    image = image_of(disks.raw("dense"))
    (layer,) = (blob for blob in image.layers if len(blob.data) > MIB)
    shown = meters.Percents()
    with misbehave.Server() as server:
        serve(server, image, last=misbehave.Page())
        for blob in image.layers:
            page = misbehave.Page(blob.data, drip=(256 << 10, 0.01) if blob is layer else None)
            server.serve(f"/v2/r/blobs/{blob.digest}", page)
        importer.run(from_server(server, tmp_path / "disk.img"), shown)
    assert shown.finished
    assert len(shown.between) > 2


@pytest.mark.parametrize("what", ["manifest", "config"])
def test_cancelling_the_first_look(what: str, disks: disks_module.Disks, tmp_path: Path) -> None:
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
            importer.run(from_server(server, tmp_path / "disk.img"), cancel=cancel)
        assert time.monotonic() - begun < 10


def test_cancelling(disks: disks_module.Disks, tmp_path: Path) -> None:
    image = Image((containers.layer(*containers.disk(disks.raw("dense").read_bytes()), compression=""),))
    good = misbehave.Page(image.layers[0].data)
    target = tmp_path / "disk.img"
    cancel = threading.Event()
    with misbehave.Server() as server:
        serve(server, image, (good, 1), last=dataclasses.replace(good, stall=100_000))
        threading.Timer(0.5, cancel.set).start()
        with pytest.raises(errors.Cancelled):
            importer.run(from_server(server, target), cancel=cancel)
    oracle.unusable(target)


# -- as a pod --------------------------------------------------------------------------------------


def pod(directory: Path, data: Path, **env: str) -> tuple[list[str], dict[str, str], Path]:
    """Return how a controller starts the worker, and where the message goes."""
    message = directory / "message"
    argv = [
        sys.executable, "-m", "importer", "-v=1", f"--data-dir={data}", f"--block-device={directory}/none",
        f"--scratch-dir={directory}/none", f"--termination-log={message}",
    ]  # fmt: skip
    return argv, {"PATH": "/usr/bin:/bin", "IMPORTER_SOURCE": "registry", **env}, message


def test_as_a_pod(served: registries.Registry, disks: disks_module.Disks, tmp_path: Path) -> None:
    config = containers.config(env=("KUBEVIRT_IO_A=b",))
    served.push("pod", dataclasses.replace(image_of(disks.image("raw")), config=config))
    data, certificates = tmp_path / "data", tmp_path / "certs"
    data.mkdir()
    certificates.mkdir()
    assert served.authority
    (certificates / "ca.crt").write_bytes(served.authority.certificate.read_bytes())
    (certificates / "client.key").write_text("no certificate")
    env = {
        "IMPORTER_ENDPOINT": served.reference("pod"),
        "IMPORTER_ACCESS_KEY_ID": registries.USER,
        "IMPORTER_SECRET_KEY": registries.PASSWORD,
        "IMPORTER_CERT_DIR": str(certificates),
        "IMPORTER_IMAGE_SIZE": "16Mi",
    }
    argv, given, message = pod(tmp_path, data, **env)
    done = subprocess.run(
        argv, env=given, cwd=REPOSITORY, timeout=60, check=False, capture_output=True, text=True
    )
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
    done = subprocess.run(
        argv, env=given, cwd=REPOSITORY, timeout=60, check=False, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert message.read_text().startswith("Unable to connect to registry data source: docker://localhost:")
    assert "wr0ng" not in message.read_text() + done.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_run_again_after_the_end_of_the_worker(
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
        first = subprocess.Popen(argv, env=env, cwd=REPOSITORY)
        try:
            processes.wait_for(lambda: server.sent(path) > 2 << 20, "half of it", 60)
            first.send_signal(how)
            first.wait(30)
        finally:
            first.kill()
            first.wait()
        oracle.unusable(data / "disk.img")
        serve(server, image, last=good)
        again = subprocess.run(argv, env=env, cwd=REPOSITORY, timeout=60, check=False)
    assert again.returncode == 0, message.read_text()
    oracle.same(data / "disk.img", tmp_path / "expected")


# -- the command line ------------------------------------------------------------------------------


def cli(served: registries.Registry, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    assert served.authority
    argv = [sys.executable, "-m", "importer", *arguments, "--ca-file", str(served.authority.certificate)]
    secret = {"PATH": "/usr/bin:/bin", "IMPORTER_SECRET_KEY": registries.PASSWORD, **env}
    return subprocess.run(
        argv, env=secret, cwd=REPOSITORY, timeout=60, check=False, capture_output=True, text=True
    )


def test_inspect_and_digest(served: registries.Registry, disks: disks_module.Disks) -> None:
    image = image_of(disks.image("qcow2"))
    digest = served.push("look", image)
    reference = served.reference("look")
    told = cli(served, "inspect", reference, "--json", "--user", registries.USER)
    assert told.returncode == 0, told.stderr
    seen = json.loads(told.stdout)
    assert (seen["format"], seen["digest"], seen["disk"]) == ("qcow2", digest, "/disk/disk.img")
    assert seen["platforms"] == [f"linux/{containers.MACHINE}"]
    assert [item["digest"] for item in seen["layers"]] == [blob.digest for blob in image.layers]
    assert seen["virtualSize"] == disks.raw().stat().st_size
    table = cli(served, "inspect", reference, "--user", registries.USER)
    assert f"mediaType={image.layers[0].media_type}" in table.stdout
    printed = cli(served, "digest", reference, "--user", registries.USER)
    assert printed.stdout == f"{digest}\n"
    missing = cli(served, "digest", f"{reference}-not", "--user", registries.USER)
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "no such repository, tag or digest" in missing.stderr


def test_looking_fetches_only_the_head(tmp_path: Path) -> None:
    disk = random.Random(9).randbytes(8 << 20)
    image = Image((containers.layer(*containers.disk(disk)),))
    with misbehave.Server() as server:
        serve(server, image, last=misbehave.Page(image.layers[0].data))
        importer.inspect(from_server(server, tmp_path / "disk.img"))
        assert sum(seen.sent for seen in server.requests) < 1 << 20
