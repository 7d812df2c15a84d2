"""Front ends: each translates its own words into settings, and one function makes the request of them."""

from __future__ import annotations

import ast
import dataclasses
from fractions import Fraction
from pathlib import Path

import pytest

from cdi_worker.images.engine import fetch
from cdi_worker.importer import contract, request
from cdi_worker.importer.commands import disk, options
from cdi_worker.importer.kubernetes import datavolume, documents, references, run
from cdi_worker.importer.roles import importer
from cdi_worker.importer.settings import Room, Settings
from tests.support import repository

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
LINE = (URL, "disk.img", "--preallocate", f"--checksum-file={URL}.sums", "--stall-timeout=7")


@pytest.fixture
def by_line() -> request.Request:
    with disk.import_.make_context("import", list(LINE)) as context:
        given = dict(context.params)
        return options.make_request(given.pop("source"), given.pop("target"), given, {})


@pytest.fixture
def by_manifest(tmp_path: Path) -> request.Request:
    path = tmp_path / "dv.yaml"
    path.write_text(MANIFEST)
    found = documents.read(str(path))
    settings = Settings(room=Room(overhead=Fraction("0.06")), stall=7.0)
    place, faults = run.Place(target="disk.img", folder=str(tmp_path)), list[str]()
    volume = datavolume.parse(datavolume.find(found), faults)
    (made,) = run.Planner(volume, references.References(found), place, settings, {}, faults).requests()
    assert faults == []
    return made


@pytest.fixture
def by_environment(paths: contract.Paths) -> request.Request:
    demand = {"checksum_file": f"{URL}.sums"}
    settings = paths.settings._replace(demand=demand, stall=7.0)
    return importer.read(ENV, paths._replace(settings=settings))


def test_front_ends_make_the_same_request(
    by_line: request.Request,
    by_manifest: request.Request,
    by_environment: request.Request,
    paths: contract.Paths,
) -> None:
    """Only a pod has a mount, the mode of the file, and time to wait; a cluster has the volume's size."""
    cluster = Room(size=3 << 30, overhead=Fraction("0.06"))
    assert by_line.room == Room()
    assert dataclasses.replace(by_line, room=cluster) == by_manifest
    pod = dataclasses.replace(
        by_manifest,
        target=f"{paths.data}/disk.img",
        room=dataclasses.replace(cluster, mount=paths.data),
        existing="remove",
        permissions=contract.FILE_MODE,
        wait=contract.WAIT,
    )
    assert pod == by_environment


def test_patience_is_that_of_the_settings(by_line: request.Request) -> None:
    assert by_line.fetch == fetch.Options(no_progress=7.0)
    assert (by_line.connect_patience, by_line.location.access.patience) == (7.0, 7.0)


def test_only_one_function_makes_requests() -> None:
    """Elsewhere in the product than in its module, a request is at most changed."""
    files = sorted(repository.ROOT.glob("importer/**/*.py"))
    calls = [
        (path.relative_to(repository.ROOT).as_posix(), ast.unparse(node.func))
        for path in files
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
    ]
    makers = [path for path, name in calls if name in {"request.Request", "Request", "cdi_worker.Request"}]
    # What an upload server reads has the same name: see ``upload.http``.
    assert sorted({*makers}) == ["importer/request.py", "importer/upload/http.py"]
