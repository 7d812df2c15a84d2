"""Front ends: each translates its own words into settings, and one function makes the request of them."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from pathlib import Path

import pytest

from cdi_worker.images.engine import fetch
from cdi_worker.importer import contract, request
from cdi_worker.importer.commands import import_, options
from cdi_worker.importer.kubernetes import contact, datavolume, documents
from cdi_worker.importer.request import Room
from cdi_worker.importer.roles import importer
from cdi_worker.sources import trust

URL, SHA256 = "https://example.org/disk.qcow2", "sha256:" + "a" * 64
MANIFEST = f"""
apiVersion: cdi.kubevirt.io/v1beta1
kind: DataVolume
metadata: {{name: disk, annotations: {{cdi-worker/checksum-file: "{URL}.sums"}}}}
spec:
  preallocation: true
  source: {{http: {{url: "{URL}"}}}}
  pvc: {{accessModes: [ReadWriteOnce], resources: {{requests: {{storage: 3Gi}}}}}}
"""
ENV = {
    "IMPORTER_SOURCE": "http",
    "IMPORTER_ENDPOINT": URL,
    "IMPORTER_IMAGE_SIZE": "3Gi",
    "FILESYSTEM_OVERHEAD": "0.06",
    "PREALLOCATION": "true",
}
LINE = (URL, "disk.img", "--preallocate", f"--checksum-file={URL}.sums")


@pytest.fixture
def by_line() -> request.Request:
    with import_.import_.make_context("import", list(LINE)) as context:
        given = dict(context.params)
        return options.make_request("import", given.pop("source"), given.pop("target"), given, {})


@pytest.fixture
def by_manifest(tmp_path: Path) -> request.Request:
    path = tmp_path / "dv.yaml"
    path.write_text(MANIFEST)
    found = documents.read(str(path))
    (volume,) = datavolume.parse_all(datavolume.find(found))
    reading = contact.Reading(volume, contact.References(found), str(tmp_path), {})
    made = reading.request(Fraction("0.06"))
    assert reading.faults == []
    return made


@pytest.fixture
def by_environment(paths: contract.Paths) -> request.Request:
    settings = {**paths.settings, "demand": trust.Demand(checksum_file=f"{URL}.sums")}
    return importer.read(ENV, paths._replace(settings=settings))


def test_front_ends_make_the_same_request(
    by_line: request.Request,
    by_manifest: request.Request,
    by_environment: request.Request,
    paths: contract.Paths,
) -> None:
    """Only a pod has a mount, the mode of the file, and time to wait; a cluster has the volume's size.

    What is only contacted has no target.
    """
    cluster = Room(size=3 << 30, overhead=Fraction("0.06"))
    assert by_line.room == Room()
    assert dataclasses.replace(by_line, target="", room=cluster) == by_manifest
    pod = dataclasses.replace(
        by_manifest,
        target=f"{paths.data}/disk.img",
        room=cluster._replace(mount=paths.data),
        existing="remove",
        permissions=contract.FILE_MODE,
        wait=contract.WAIT,
    )
    assert pod == by_environment


def test_patience_is_that_of_the_settings() -> None:
    with import_.import_.make_context("import", [*LINE, "--stall-timeout=7"]) as context:
        given = dict(context.params)
        by_line = options.make_request("import", given.pop("source"), given.pop("target"), given, {})
    assert by_line.fetch == fetch.FetchOptions(no_progress=7.0)
    assert (by_line.connect_patience, by_line.location.access.patience) == (7.0, 7.0)


def test_settings_of_a_pod_are_fields_of_a_request() -> None:
    """Start-up: modules that read settings do not import the request, so they repeat names."""
    assert {*contract.POD} <= {each.name for each in dataclasses.fields(request.Request)}
