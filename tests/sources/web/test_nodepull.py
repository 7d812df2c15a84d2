"""Node pull from the importer's side: the hand-shake when not all goes well."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base
from cdi_worker.sources.web import locations, nodepull
from tests.support import misbehave, proxy

DATA = bytes(range(256)) * 16


def pulled(
    server: misbehave.Server, tmp_path: Path, name: str = "fedora.raw", access: base.Access | None = None
) -> nodepull.NodePullSource:
    (tmp_path / "ready").write_text(name)
    location = locations.Http(
        server.url("/disk.img"),
        access or base.Access(),
        pull_method="node",
        ready_file=str(tmp_path / "ready"),
        done_file=str(tmp_path / "done"),
    )
    return nodepull.NodePullSource(location, cancelling.Cancel())


def test_the_ready_file_is_waited_for_but_not_for_ever(server: misbehave.Server, tmp_path: Path) -> None:
    """A large image takes the node longer than the minute after which upstream gives up."""
    assert nodepull.READY_PATIENCE > 600
    server.serve("/fedora.raw", misbehave.Page(DATA))
    ready = tmp_path / "late"
    location = locations.Http(
        server.url("/disk.img"), ready_file=str(ready), done_file=str(tmp_path / "done")
    )
    with pytest.raises(errors.Unreachable, match="late: no ready file within 1 s"):
        nodepull.NodePullSource(location, cancelling.Cancel(), 1.0).__enter__()
    threading.Timer(0.5, ready.write_text, ("fedora.raw",)).start()
    with nodepull.NodePullSource(location, cancelling.Cancel(), 20.0) as source:
        assert source.head == DATA


def test_a_ready_file_without_a_name_is_not_ready(server: misbehave.Server, tmp_path: Path) -> None:
    """Upstream's server makes the file and then writes to it."""
    server.serve("/fedora.raw", misbehave.Page(DATA))
    source = pulled(server, tmp_path, "")
    threading.Timer(0.5, (tmp_path / "ready").write_text, ("fedora.raw",)).start()
    with source:
        assert source.head == DATA


def test_a_second_first_contact(server: misbehave.Server, tmp_path: Path) -> None:
    """A name that ends like the placeholder is put in its place once."""
    page = misbehave.Page(DATA)
    server.serve("/my-disk.img", (misbehave.Page(status=503), 1), page)
    source = pulled(server, tmp_path, "my-disk.img")
    with pytest.raises(errors.Transient):
        source.__enter__()
    with source:
        assert source.head == DATA


def test_no_proxy_is_between_the_containers_of_a_pod(server: misbehave.Server, tmp_path: Path) -> None:
    server.serve("/fedora.raw", misbehave.Page(DATA))
    with proxy.Proxy() as between, pulled(server, tmp_path, access=base.Access(http_proxy=between.url)):
        assert not between.requests


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
def test_no_labels_are_no_failure(server: misbehave.Server, tmp_path: Path, page: misbehave.Page) -> None:
    server.serve("/fedora.raw", misbehave.Page(DATA))
    server.serve("/info", page)
    with pulled(server, tmp_path) as source:
        source.finish()
        assert source.labels() == {}
    assert (tmp_path / "done").exists()
