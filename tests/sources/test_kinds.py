"""Kinds of sources: what each folder declares, and the locations made from it."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

from cdi_worker import errors, sources
from cdi_worker.sources import base
from cdi_worker.sources.local import blank
from cdi_worker.sources.local import locations as local
from cdi_worker.sources.ovirt import locations as ovirt
from tests.support import worker

KINDS = list(sources.own())
NAMES = {
    "gcs",
    "glance",
    "http",
    "imageio",
    "kubevirt",
    "local",
    "nbd",
    "none",
    "registry",
    "s3",
    "vddk",
    "volume",
    "vsphere",
}


def test_names_and_schemes_are_unique() -> None:
    assert sorted(kind.name for kind in KINDS) == sorted(NAMES)
    schemes = [scheme for kind in KINDS for scheme in kind.schemes]
    assert len(schemes) == len(set(schemes))


def test_looking_for_kinds_loads_no_protocol() -> None:
    code = "import sys; from cdi_worker import sources; print(len(list(sources.own()))); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    count, names = done.stdout.splitlines()
    assert int(count) == len(NAMES)
    assert not [
        name for name in names.split() if name.startswith("cdi_worker.sources.") and name.count(".") > 2
    ]


def test_kinds_are_consistent() -> None:
    for kind in KINDS:
        assert callable(pkgutil.resolve_name(str(kind.source)))
        assert issubclass(kind.location_type, base.Location)
        assert sources.find(kind.name) == kind
        for field, default in kind.table.values():
            assert field.help
            assert field.option == "" or field.option.startswith("--")
            assert field.env or field.option
            assert field.flag == isinstance(default, bool)


def test_the_same_option_is_the_same_field() -> None:
    """Two sources may share an option; the command line defines it once."""
    fields = {field for kind in KINDS for field, _ in kind.table.values() if field.option}
    assert len({field.option for field in fields}) == len(fields)


def test_plain_location_is_converted() -> None:
    access = base.Access(user="me")
    made = sources.find("imageio").accept(base.Location("https://x/", access))
    assert made == ovirt.Imageio("https://x/", access)
    assert sources.find("imageio").accept(made) is made


def test_location_of_another_source_is_refused() -> None:
    with pytest.raises(errors.RequestError, match=r"source 's3': the location must be .*S3, not Imageio"):
        sources.find("s3").accept(ovirt.Imageio("https://x/", disk_id="d"))


def test_stage_is_refused_for_source_without_stages() -> None:
    kind = sources.find("registry")
    assert kind.fill("docker://x", base.Access(), lambda _: None) == kind.location_type("docker://x")
    with pytest.raises(errors.Unsupported, match="does not support checkpoints"):
        kind.fill("docker://x", base.Access(), lambda field: "one" if field is base.PREVIOUS else None)


def test_unknown_kind_lists_the_known_ones() -> None:
    with pytest.raises(
        errors.RequestError, match=r"unknown source 'ftp'; supported: gcs, glance, http, .*vddk"
    ):
        sources.find("ftp")
    with pytest.raises(
        errors.RequestError, match=r"URL scheme 'ftp'; supported: docker, file, glance, gs, http"
    ):
        sources.find_scheme("ftp")


def test_blank_source_has_no_endpoint() -> None:
    assert list(blank.Nowhere("").faults()) == []
    assert list(local.Local("").faults()) == ["no endpoint (IMPORTER_ENDPOINT) given"]


def test_snapshot_is_not_a_checkpoint(tmp_path: Path) -> None:
    address = ("vsphere://127.0.0.1:1/u", tmp_path / "disk.img", "--snapshot=one")
    done = worker.call("import", *address, "--current-checkpoint=two")
    assert (done.status, "give no other one (--snapshot)" in done.error_message) == (2, True)
