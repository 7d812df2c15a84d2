"""How a disk of the source vddk is read: as the request says, or as this machine allows."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.vmware import choice, exported, locations, source

LIBRARY, LEASE = source.VddkSource, exported.LeaseSource


@pytest.mark.parametrize(
    ("read_by", "architecture", "library", "reader", "why"),
    [
        ("auto", "x86_64", "libvixDiskLib.so.8", LIBRARY, ""),
        ("auto", "x86_64", "", LEASE, "{}: VDDK library not found"),
        ("auto", "aarch64", "libvixDiskLib.so.8", LEASE, "VMware has no VDDK library for aarch64"),
        ("lease", "x86_64", "libvixDiskLib.so.8", LEASE, "as requested"),
        ("lease", "aarch64", "", LEASE, "as requested"),
        # The source refuses it: nothing else is read instead.
        ("vddk", "x86_64", "", LIBRARY, ""),
        ("vddk", "aarch64", "libvixDiskLib.so.8", LIBRARY, ""),
    ],
)
def test_reader_is_chosen_and_named(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    read_by: str,
    architecture: str,
    library: str,
    reader: type[base.Source],
    why: str,
) -> None:
    (tmp_path / "lib64").mkdir()
    if library:
        (tmp_path / "lib64" / library).touch()
    location = locations.Vddk(
        "https://localhost", uuid="u", backing_file="f", vddk_libdir=str(tmp_path), read_by=read_by
    )
    with caplog.at_level(logging.WARNING):
        made = choice.source(location, cancelling.NEVER, architecture)
    assert type(made) is reader
    assert getattr(made, "why", "") == why.format(tmp_path)
    # Who has asked for it knows it.
    said = [record.getMessage() for record in caplog.records]
    assert said == (
        [f"read by an export lease, not by VDDK: {made.why}"] if read_by == "auto" and why else []
    )


def test_library_that_is_demanded_must_be_there(tmp_path: Path) -> None:
    location = locations.Vddk("https://localhost", uuid="u", backing_file="f", vddk_libdir=str(tmp_path))
    for architecture, why in (
        ("aarch64", "VMware has no VDDK library for aarch64"),
        ("x86_64", f"{tmp_path}: VDDK library not found"),
    ):
        with pytest.raises(errors.RequestError) as caught:
            source.VddkSource(location, cancelling.NEVER, architecture).open(base.Opening())
        instead = "auto an export lease reads the disk"
        assert str(caught.value) == f"{why}; with CDI_WORKER_READ_BY {instead}"
        assert caught.value.at_terminal() == f"{why}; with --read-by {instead}"


@pytest.mark.parametrize(
    ("endpoint", "uuid", "url", "machine", "fault"),
    [
        ("vsphere://vc.example.org/4219", "", "https://vc.example.org/sdk", "4219", ""),
        ("VSphere://[::1]:8443/4219/", "", "https://[::1]:8443/sdk", "4219", ""),
        ("vsphere://vc.example.org", "4219", "https://vc.example.org/sdk", "4219", ""),
        ("https://vc.example.org:8443/sdk", "4219", "https://vc.example.org:8443/sdk", "4219", ""),
        ("vsphere://vc.example.org/", "", "https://vc.example.org/sdk", "", "the UUID of a virtual machine"),
        ("https://vc.example.org/4219", "", "https://vc.example.org/4219", "", "the UUID of a virtual mach"),
        ("vsphere:///4219", "", "vsphere:///4219", "4219", "malformed URL"),
        ("vsphere://h:0/4219", "", "https://h:0/sdk", "4219", "malformed URL"),
        # It would not be used, and the login would fail.
        ("vsphere://me:hush@h/4219", "", "https://me:hush@h/sdk", "4219", "the URL (IMPORTER_ENDPOINT) con"),
    ],
)
def test_address_of_a_machine(endpoint: str, uuid: str, url: str, machine: str, fault: str) -> None:
    location = locations.Vsphere(endpoint, uuid=uuid)
    assert (location.url, location.machine) == (url, machine)
    found = list(location.faults())
    assert len(found) == bool(fault)
    assert all(each.startswith(fault) for each in found)
