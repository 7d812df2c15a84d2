"""The image for the architecture that was asked for: its programs, and what VMware offers for it."""

from __future__ import annotations

import json

import pytest

from cdi_worker.sources.registry import documents
from tests.support import pods, processes

pytestmark = pytest.mark.every_platform


@pytest.fixture
def architecture(image: str) -> str:
    """Return the OCI name of the image's architecture."""
    return str(json.loads(processes.run("podman", "image", "inspect", image).stdout)[0]["Architecture"])


def test_programs_have_architecture_of_image(container: pods.Pod, architecture: str) -> None:
    code = "import platform; print(platform.machine())"
    done = container.run("-c", code, entrypoint="/usr/lib/cdi-worker/bin/python3")
    assert documents.normal_architecture(done.stdout.strip()) == architecture, done.stderr


def test_vddk_names_the_missing_library(container: pods.Pod, architecture: str) -> None:
    """VMware has a library for amd64 only, which a user must mount; an export lease needs none."""
    why = f"VMware has no VDDK library for {'aarch64' if architecture == 'arm64' else architecture}"
    if architecture == "amd64":
        why = "/opt/vmware-vix-disklib-distrib: VDDK library not found"
    done = container.run(
        IMPORTER_SOURCE="vddk",
        IMPORTER_ENDPOINT="https://vcenter.invalid/sdk",
        IMPORTER_UUID="u",
        IMPORTER_BACKING_FILE="[store] disk.vmdk",
        IMPORTER_THUMBPRINT="AB" * 20,
    )
    assert (done.returncode, f"not by VDDK: {why}" in done.stderr) == (1, True), done.stderr
    assert "Unable to connect to vddk data source: https://vcenter.invalid" in container.message
