"""Imports from registries, from the first request to the disk on its target."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from tests.support import containers, devices, oracle, registries, repository
from tests.support import disks as disks_module
from tests.support.containers import Entry, Image

#: Variants that must be complete before they can be converted need scratch.
SPOOLED = frozenset({"vdi", "vhd", "vhdx"})


def push_and_import(
    guarded: registries.Registry, image: Image, target: Path, scratch: Path | None = None
) -> cdi_worker.Result:
    guarded.push("disk", image)
    location = cdi_worker.Location(guarded.reference("disk"), guarded.access())
    return cdi_worker.run(
        cdi_worker.Request(
            existing="replace",
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
def test_format_is_imported_to_a_file(
    guarded: registries.Registry, variant: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    push_and_import(
        guarded, containers.image_of(disks.image(variant)), target, scratch_for(variant, tmp_path)
    )
    oracle.same(target, disks.expected(variant))


@pytest.mark.parametrize("variant", ["raw", "qcow2-zlib", "vmdk-stream", "vhdx"])
def test_routes_work_to_a_device(
    guarded: registries.Registry, variant: str, disks: disks_module.Disks, block: Path, tmp_path: Path
) -> None:
    push_and_import(
        guarded, containers.image_of(disks.image(variant), "+zstd"), block, scratch_for(variant, tmp_path)
    )
    oracle.same(block, disks.expected(variant), beyond=devices.DIRT)


@pytest.mark.parametrize("variant", ["raw", "qcow2"])
@pytest.mark.parametrize("compression", ["gz", "xz", "zst"])
def test_compressed_disk_inside_a_layer_is_imported(
    guarded: registries.Registry, variant: str, compression: str, disks: disks_module.Disks, tmp_path: Path
) -> None:
    target = tmp_path / "disk.img"
    result = push_and_import(guarded, containers.image_of(disks.wrapped(variant, compression), ""), target)
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
def test_artifact_is_imported(
    guarded: registries.Registry,
    variant: str,
    compression: str | None,
    kind: str,
    disks: disks_module.Disks,
    tmp_path: Path,
) -> None:
    data = disks.wrapped(variant, compression).read_bytes()
    blob = containers.Blob(data, f"application/vnd.kubevirt.disk.{kind}")
    target = tmp_path / "disk.img"
    push_and_import(guarded, Image((blob,), containers.EMPTY_CONFIG), target)
    oracle.same(target, disks.expected(variant))


def test_labels_are_reported(guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path) -> None:
    config = containers.config(env=("A=1", "INSTANCETYPE_KUBEVIRT_IO_DEFAULT=u1"))
    result = push_and_import(
        guarded, dataclasses.replace(containers.image_of(disks.raw()), config=config), tmp_path / "disk.img"
    )
    assert result.labels == {"instancetype.kubevirt.io/default": "u1"}


# -- layers that must be refused -------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["raw", "qcow2", "vhdx"])
@pytest.mark.parametrize("harm", ["changed", "shorter", "second"])
def test_wrong_layer_leaves_nothing(
    guarded: registries.Registry,
    harm: str,
    variant: str,
    disks: disks_module.Disks,
    block: Path,
    tmp_path: Path,
) -> None:
    """The damage is behind the disk: all of it has been written when the error is found."""
    more = [Entry("disk/second", b"2")] if harm == "second" else [Entry("etc/x", harm.encode() * 2000)]
    disk = disks.image(variant).read_bytes()
    blob = containers.layer(*containers.disk(disk), *more, compression="")
    image = Image((blob,), containers.config(env=(f"X={harm}{variant}",)))
    guarded.push("disk", image)
    data = bytearray(blob.data)
    if harm == "changed":
        data[-1200] ^= 1
    guarded.stored(blob.digest).write_bytes(data[:-512] if harm == "shorter" else data)
    expected = errors.Refused if harm == "second" else errors.DigestMismatch
    with pytest.raises(expected):
        push_and_import(guarded, image, block, scratch_for(variant, tmp_path))
    oracle.unusable(block)


def test_changed_byte_of_the_disk_is_refused(
    guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path
) -> None:
    blob = containers.layer(*containers.disk(disks.raw("dense").read_bytes()), compression="")
    image = Image((blob,))
    guarded.push("disk", image)
    data = bytearray(blob.data)
    data[len(data) // 2] ^= 1
    guarded.stored(blob.digest).write_bytes(data)
    target = tmp_path / "disk.img"
    with pytest.raises(errors.DigestMismatch):
        push_and_import(guarded, image, target)
    oracle.unusable(target)
    assert not list(tmp_path.glob("*.part*"))


# -- the command line ------------------------------------------------------------------------------


def cli(guarded: registries.Registry, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    assert guarded.authority
    argv = [sys.executable, "-m", "cdi_worker", *arguments, "--ca-file", str(guarded.authority.certificate)]
    secret = {"PATH": "/usr/bin:/bin", "IMPORTER_SECRET_KEY": registries.PASSWORD, **env}
    return subprocess.run(
        argv, env=secret, cwd=repository.ROOT, timeout=60, check=False, capture_output=True, text=True
    )


def test_inspect_reports_format_and_digest(guarded: registries.Registry, disks: disks_module.Disks) -> None:
    image = containers.image_of(disks.image("qcow2"))
    digest = guarded.push("look", image)
    reference = guarded.reference("look")
    output = cli(guarded, "inspect", reference, "--json", "--user", registries.USER)
    assert output.returncode == 0, output.stderr
    report = json.loads(output.stdout)
    assert (report["format"], report["digest"], report["disk"]) == ("qcow2", digest, "/disk/disk.img")
    assert report["platforms"] == [f"linux/{containers.MACHINE}"]
    assert [item["digest"] for item in report["layers"]] == [blob.digest for blob in image.layers]
    assert report["virtualSize"] == disks.raw().stat().st_size
    table = cli(guarded, "inspect", reference, "--user", registries.USER)
    assert f"mediaType={image.layers[0].media_type}" in table.stdout
    printed = cli(guarded, "digest", reference, "--user", registries.USER)
    assert printed.stdout == f"{digest}\n"
    missing = cli(guarded, "digest", f"{reference}-not", "--user", registries.USER)
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "no such repository, tag or digest" in missing.stderr
