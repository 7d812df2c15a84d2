"""Node pull from the importer's side: the handshake, and its failures."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

import cdi_worker
from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.web import locations, nodepull
from tests.support import misbehave, ovas

DATA = bytes(range(256)) * 16


def located(
    server: misbehave.Server, tmp_path: Path, name: str, access: base.Access | None = None
) -> locations.Http:
    (tmp_path / "ready").write_text(name)
    return locations.Http(
        server.url("/disk.img"),
        access or base.Access(),
        pull_method="node",
        ready_file=str(tmp_path / "ready"),
        done_file=str(tmp_path / "done"),
    )


def pulled(
    server: misbehave.Server, tmp_path: Path, name: str = "fedora.raw", access: base.Access | None = None
) -> nodepull.NodePullSource:
    return nodepull.NodePullSource(located(server, tmp_path, name, access), cancelling.Cancel())


def test_waiting_for_the_ready_file_is_limited(server: misbehave.Server, tmp_path: Path) -> None:
    """Pulling a large image may take longer than the minute that upstream waits."""
    assert nodepull.READY_PATIENCE > 600
    server.serve("/fedora.raw", misbehave.Page(DATA))
    ready = tmp_path / "late"
    location = locations.Http(
        server.url("/disk.img"), ready_file=str(ready), done_file=str(tmp_path / "done")
    )
    with pytest.raises(errors.Unreachable, match="late: no ready file within 1 s"):
        nodepull.NodePullSource(location, cancelling.Cancel(), 1.0).open(base.Opening())
    threading.Timer(0.2, ready.write_text, ("fedora.raw",)).start()
    with base.open_image(nodepull.NodePullSource(location, cancelling.Cancel(), 20.0)) as image:
        assert image.facts.head == DATA


def test_empty_ready_file_is_not_ready(server: misbehave.Server, tmp_path: Path) -> None:
    """Upstream's server creates the file before it writes to it."""
    server.serve("/fedora.raw", misbehave.Page(DATA))
    source = pulled(server, tmp_path, "")
    threading.Timer(0.2, (tmp_path / "ready").write_text, ("fedora.raw",)).start()
    with base.open_image(source) as image:
        assert image.facts.head == DATA


def test_second_contact_uses_the_same_name(server: misbehave.Server, tmp_path: Path) -> None:
    """A file name that ends like the placeholder is inserted only once."""
    page = misbehave.Page(DATA)
    server.serve("/my-disk.img", (misbehave.Page(status=503), 1), page)
    source = pulled(server, tmp_path, "my-disk.img")
    with pytest.raises(errors.Transient):
        source.open(base.Opening())
    with base.open_image(source) as image:
        assert image.facts.head == DATA


def test_server_of_a_package_ends_too(server: misbehave.Server, tmp_path: Path) -> None:
    """It exits on the done file, whatever it has served."""
    server.serve("/vm.ova", misbehave.Page(ovas.ova(ovas.Disk(DATA * 16, "disk.raw"))))
    server.serve("/info", misbehave.Page(b'{"env": ["INSTANCETYPE_KUBEVIRT_IO_DEFAULT_PREFERENCE=fedora"]}'))
    location, target = located(server, tmp_path, "vm.ova"), tmp_path / "disk.img"
    result = cdi_worker.run(cdi_worker.Request(source="http", location=location, target=str(target)))
    assert target.read_bytes() == DATA * 16
    assert result.labels == {"instancetype.kubevirt.io/default-preference": "fedora"}
    assert (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "page",
    [
        misbehave.Page(b'{"env": ["KUBEVIRT_IO_A=1"]}', missing=10),
        misbehave.Page(b'{"env": ["KUBEVIRT_IO_A=1"]}', cut=5),
        misbehave.Page(b"[" * 100_000),
        misbehave.Page(b"{"),
        misbehave.Page(status=500),
    ],
)
def test_missing_labels_are_ignored(server: misbehave.Server, tmp_path: Path, page: misbehave.Page) -> None:
    server.serve("/fedora.raw", misbehave.Page(DATA))
    server.serve("/info", page)
    with base.open_image(pulled(server, tmp_path)) as image:
        assert image.finish().labels == {}
    assert (tmp_path / "done").exists()


def test_done_file_is_not_created_through_a_link(server: misbehave.Server, tmp_path: Path) -> None:
    """The other container of the pod has an image of somebody else, and writes to the same volume."""
    server.serve("/fedora.raw", misbehave.Page(DATA))
    (tmp_path / "done").symlink_to(tmp_path / "elsewhere")
    with base.open_image(pulled(server, tmp_path)) as image, pytest.raises(errors.TargetError, match="done"):
        image.finish()
    assert not (tmp_path / "elsewhere").exists()


def test_done_file_may_exist(server: misbehave.Server, tmp_path: Path) -> None:
    server.serve("/fedora.raw", misbehave.Page(DATA))
    (tmp_path / "done").touch()
    with base.open_image(pulled(server, tmp_path)) as image:
        image.finish()


@pytest.mark.parametrize("kind", ["link", "fifo", "device"])
def test_ready_file_is_a_file(server: misbehave.Server, tmp_path: Path, kind: str) -> None:
    """Its content becomes a request to the other container: no link to a secret, and no endless file."""
    source = pulled(server, tmp_path)
    ready = tmp_path / "ready"
    ready.unlink()
    if kind == "fifo":
        os.mkfifo(ready)
    else:
        (tmp_path / "secret").write_text("hush")
        ready.symlink_to(tmp_path / "secret" if kind == "link" else "/dev/zero")
    with pytest.raises(errors.Unreachable, match="cannot read the ready file"):
        source.open(base.Opening())
    assert not server.requests


def test_endless_ready_file_is_not_read_to_its_end(server: misbehave.Server, tmp_path: Path) -> None:
    page = misbehave.Page(DATA)
    server.serve(f"/{'x' * nodepull.LONGEST_NAME}", page)
    with base.open_image(pulled(server, tmp_path, "x" * (64 << 20))) as image:
        assert image.facts.head == DATA
