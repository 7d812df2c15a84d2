"""Imports from registries, from the first request to the disk on its target."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.sources.registry import locations
from tests.support import containers, devices, oracle, processes, registries, tar_parts, worker
from tests.support import disks as disks_module
from tests.support.containers import Entry, Image


@dataclasses.dataclass
class Importer:
    """Pushes images to a registry, and imports their disks."""

    registry: registries.Registry
    disks: disks_module.Disks
    folder: Path

    @property
    def target(self) -> Path:
        """Return the file that is imported to by default."""
        return self.folder / "disk.img"

    def run(self, image: Image, target: Path | None = None, *, is_spooled: bool = False) -> cdi_worker.Result:
        """Push an image and import it; ``is_spooled``: its format must be complete before it is converted."""
        self.registry.push("disk", image)
        location = cdi_worker.Location(self.registry.reference("disk"), self.registry.access())
        scratch = str(self.folder) if is_spooled else None
        request = cdi_worker.Request(
            existing="replace",
            source="registry",
            location=location,
            target=str(target or self.target),
            scratch=scratch,
        )
        return cdi_worker.run(request)


@pytest.fixture
def importer(guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path) -> Importer:
    return Importer(guarded, disks, tmp_path)


@pytest.mark.parametrize(
    ("variant", "kind", "compression"),
    [
        ("raw", "file", ""),
        ("qcow2-zlib", "block512", "+gzip"),
        ("vmdk-stream", "block4096", "+zstd"),
        ("vhdx-log", "file", "+gzip"),
        ("vhdx-log", "block4096", ""),
    ],
)
def test_image_is_imported_by_each_route(
    importer: Importer, variant: str, kind: str, compression: str
) -> None:
    image = containers.image_of(importer.disks.image(variant), compression)
    with devices.target(kind, importer.folder, 9 << 20) as target:
        importer.run(image, target, is_spooled=variant == "vhdx-log")
        oracle.same(target, importer.disks.expected(variant), beyond=devices.beyond(target))


@pytest.mark.parametrize(
    ("variant", "compression", "dialect"), [("raw", "+gzip", "gnu"), ("vdi-static", "", "1.0")]
)
def test_sparse_disk_is_imported(importer: Importer, variant: str, compression: str, dialect: str) -> None:
    """As ``tar --sparse`` packs it."""
    image = importer.disks.image(variant)
    (importer.folder / "disk").mkdir()
    processes.run("cp", "--sparse=always", image, importer.folder / "disk/disk.img")
    packed = tar_parts.sparse(importer.folder, dialect, "disk")
    data = containers.COMPRESS[compression](packed)
    importer.run(Image((containers.Blob(data, f"{containers.OCI}.layer.v1.tar{compression}"),)))
    oracle.same(importer.target, importer.disks.expected(variant))
    assert len(packed) < image.stat().st_size


@pytest.mark.parametrize(("variant", "compression"), [("raw", "xz"), ("qcow2", "gz")])
def test_compressed_disk_inside_a_layer_is_imported(
    importer: Importer, variant: str, compression: str
) -> None:
    result = importer.run(containers.image_of(importer.disks.wrapped(variant, compression), ""))
    assert result.compressions == (compression,)
    oracle.same(importer.target, importer.disks.expected(variant))


@pytest.mark.parametrize(
    ("variant", "compression", "kind"),
    [("raw", None, "raw"), ("raw", "zst", "raw+zstd"), ("qcow2", "gz", "qcow2+gzip")],
)
def test_artifact_is_imported(importer: Importer, variant: str, compression: str | None, kind: str) -> None:
    data = importer.disks.wrapped(variant, compression).read_bytes()
    blob = containers.Blob(data, f"application/vnd.kubevirt.disk.{kind}")
    importer.run(Image((blob,), containers.EMPTY_CONFIG))
    oracle.same(importer.target, importer.disks.expected(variant))


@pytest.fixture
def exported(guarded: registries.Registry, disks: disks_module.Disks) -> cdi_worker.Request:
    """A virtual machine with two disks."""
    root, data = (disks.wrapped("raw", "zst", content).read_bytes() for content in ("mixed", "dense"))
    guarded.push("machine", containers.machine(rootdisk=(root, "8Mi"), datadisk=(data, "4Mi")))
    location = locations.Registry(guarded.reference("machine"), guarded.access())
    return cdi_worker.Request(source="registry", location=location, target="")


@pytest.mark.parametrize(
    ("name", "content", "way"), [("rootdisk", "mixed", "annotation"), ("datadisk", "dense", "fragment")]
)
def test_disk_of_a_virtual_machine_is_chosen(
    exported: cdi_worker.Request, name: str, content: str, way: str, disks: disks_module.Disks, device: Path
) -> None:
    location: Any = exported.location
    if way == "annotation":
        location = dataclasses.replace(location, layer_annotation=f"io.kubevirt.disk.name={name}")
    else:
        location = dataclasses.replace(location, endpoint=f"{location.endpoint}#{name}")
    found = cdi_worker.inspect(dataclasses.replace(exported, location=location))
    assert found.survey.virtual_size == disks.raw(content).stat().st_size
    cdi_worker.run(dataclasses.replace(exported, location=location, target=str(device), existing="replace"))
    oracle.same(device, disks.raw(content), beyond=devices.DIRT)


def test_disks_of_a_virtual_machine_are_listed(exported: cdi_worker.Request, tmp_path: Path) -> None:
    found = cdi_worker.inspect(exported)
    listed: Any = found.details["disks"]
    assert [disk["name"] for disk in listed] == ["rootdisk", "datadisk"]
    assert "several files among: rootdisk, datadisk" in str(found.obstacle)
    with pytest.raises(errors.Refused, match="several files among: rootdisk, datadisk"):
        cdi_worker.run(dataclasses.replace(exported, target=str(tmp_path / "disk.img")))
    location: Any = exported.location
    wrong = dataclasses.replace(location, layer_annotation="io.kubevirt.disk.name=nothing")
    with pytest.raises(errors.Refused, match=r"no file io\.kubevirt\.disk\.name=nothing among: rootdisk"):
        cdi_worker.inspect(dataclasses.replace(exported, location=wrong))


def test_command_takes_several_annotations(
    exported: cdi_worker.Request, disks: disks_module.Disks, tmp_path: Path
) -> None:
    access, target = exported.location.access, tmp_path / "disk.img"
    (tmp_path / "password").write_text(access.password)
    options = [f"--user={access.user}", f"--password-file={tmp_path / 'password'}"]
    options += [f"--ca-file={access.ca_files[0]}"]
    chosen = [f"--layer-annotation=io.kubevirt.disk.{each}" for each in ("size=4Mi", "name=datadisk")]
    done = worker.call("import", exported.location.endpoint, target, *options, *chosen)
    assert done.status == 0, done.errors
    oracle.same(target, disks.raw("dense"))
    bad = worker.call("import", exported.location.endpoint, target, *options, "--layer-annotation=name")
    assert (bad.status, "'name' is not KEY=VALUE" in bad.error_message) == (2, True)


@pytest.mark.parametrize(
    ("stated", "error", "message", "variant", "compression"),
    [
        ("4Mi", errors.Refused, "4194304 bytes is stated", "raw", "zst"),
        ("x", errors.Refused, "not a quantity", "qcow2", None),
        ("1Pi", errors.TooLarge, "1125899906842624", "raw", "zst"),
    ],
)
def test_wrong_size_of_a_disk_is_refused(
    importer: Importer,
    stated: str,
    error: type[errors.Error],
    message: str,
    variant: str,
    compression: str | None,
    device: Path,
) -> None:
    data = importer.disks.wrapped(variant, compression).read_bytes()
    annotations = {"io.kubevirt.disk.name": "root", "io.kubevirt.disk.size": stated}
    blob = containers.Blob(data, "application/vnd.kubevirt.disk.raw", annotations)
    with pytest.raises(error, match=message):
        importer.run(Image((blob,), containers.EMPTY_CONFIG), device)
    oracle.unusable(device)


# -- layers that must be refused -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("harm", "variant"),
    [("changed", "raw"), ("shorter", "vhdx-log"), ("second", "qcow2"), ("in the disk", "raw")],
)
def test_wrong_layer_leaves_nothing(importer: Importer, harm: str, variant: str, device: Path) -> None:
    """Most of the damage is behind the disk: all of it has been written when the error is found."""
    more = [Entry("disk/second", b"2")] if harm == "second" else []
    disk = importer.disks.image(variant, "dense").read_bytes()
    # Other tests do not use the damaged blob.
    blob = containers.layer(*containers.disk(disk), *more, Entry("etc/x", os.urandom(20_000)), compression="")
    importer.registry.push("disk", Image((blob,)))
    data = bytearray(blob.data)
    if harm in {"changed", "in the disk"}:
        data[-1200 if harm == "changed" else len(data) // 2] ^= 1
    importer.registry.stored(blob.digest).write_bytes(data[:-512] if harm == "shorter" else data)
    with pytest.raises(errors.Refused if harm == "second" else errors.DigestMismatch):
        importer.run(Image((blob,)), device, is_spooled=variant == "vhdx-log")
    oracle.unusable(device)


# -- the command line ------------------------------------------------------------------------------


def cli(guarded: registries.Registry, *arguments: str) -> worker.Completed:
    assert guarded.authority
    options = ("--user", registries.USER, "--ca-file", guarded.authority.certificate)
    return worker.call(*arguments, *options, env={"IMPORTER_SECRET_KEY": registries.PASSWORD})


def test_inspect_reports_format_and_digest(guarded: registries.Registry, disks: disks_module.Disks) -> None:
    image = containers.image_of(disks.image("qcow2"))
    digest = guarded.push("look", image)
    reference = guarded.reference("look")
    output = cli(guarded, "inspect", reference, "--json")
    assert output.status == 0, output.errors
    report = json.loads(output.output)
    assert (report["format"], report["digest"], report["disk"]) == ("qcow2", digest, "/disk/disk.img")
    assert report["platforms"] == [f"linux/{containers.MACHINE}"]
    assert [item["digest"] for item in report["layers"]] == [blob.digest for blob in image.layers]
    assert report["virtualSize"] == disks.raw().stat().st_size
    table = cli(guarded, "inspect", reference)
    assert f"mediaType={image.layers[0].media_type}" in table.output
    printed = cli(guarded, "digest", reference)
    assert printed.output == f"{digest}\n"
    missing = cli(guarded, "digest", f"{reference}-not")
    assert (missing.status, missing.output) == (3, "")
    assert "no such repository, tag or digest" in missing.errors
