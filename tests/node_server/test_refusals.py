"""The server of node pull says what is no disk, and what it cannot do."""

from __future__ import annotations

import os
import shutil
import socket

import pytest

from tests.support import node_servers


def test_no_directory(empty_node: node_servers.Container) -> None:
    (empty_node.root / "disk").rmdir()
    assert "/disk is not a directory of this image" in empty_node.refusal()


def test_no_file(empty_node: node_servers.Container) -> None:
    (empty_node.root / "disk/sub").mkdir()
    assert "no file below /disk" in empty_node.refusal()


def test_several_files(empty_node: node_servers.Container) -> None:
    empty_node.put("a.img")
    empty_node.put("sub/b.img")
    said = empty_node.refusal()
    assert "more than one file" in said
    assert "/disk/a.img" in said
    assert "/disk/sub/b.img" in said


@pytest.mark.parametrize("where", ["disk/disk.img", "disk"])
def test_links(empty_node: node_servers.Container, where: str) -> None:
    secret = empty_node.root / "secret"
    secret.mkdir()
    (secret / "token").write_text("secret")
    (empty_node.root / "disk").rmdir()
    if where != "disk":
        (empty_node.root / "disk").mkdir()
    (empty_node.root / where).symlink_to("/secret/token" if where != "disk" else "/secret")
    assert "is not a " in empty_node.refusal()


def test_pipes(empty_node: node_servers.Container) -> None:
    os.mkfifo(empty_node.root / "disk/disk.img")
    assert "/disk/disk.img is not a regular file" in empty_node.refusal()


@pytest.mark.parametrize("name", ["disk\n.img", " disk.img", "disk.img ", "disk\x7f"])
def test_names_that_a_ready_file_cannot_tell(empty_node: node_servers.Container, name: str) -> None:
    empty_node.put(name)
    assert "the name of the file" in empty_node.refusal()


def test_unreadable(empty_node: node_servers.Container) -> None:
    empty_node.put("disk.img").chmod(0)
    assert "/disk/disk.img: Permission denied (user 107)" in empty_node.refusal()


@pytest.mark.parametrize("sign", ["usr/lib/bootc", "ostree", "sysroot/ostree"])
def test_bootable_images(empty_node: node_servers.Container, sign: str) -> None:
    empty_node.put("disk.img")
    (empty_node.root / sign).mkdir(parents=True)
    (empty_node.root / "dev").mkdir()
    log = empty_node.root / "dev/termination-log"
    log.touch()
    log.chmod(0o666)
    said = empty_node.refusal()
    assert "this is a bootable container image" in said
    assert log.read_text() in said


def test_busy_port(empty_node: node_servers.Container) -> None:
    empty_node.put("disk.img")
    with socket.create_server(("127.0.0.1", empty_node.port)):
        assert f"cannot listen on 127.0.0.1:{empty_node.port}: Address already in use" in empty_node.refusal()


def test_ready_file_that_cannot_be_written(empty_node: node_servers.Container) -> None:
    empty_node.put("disk.img")
    shutil.rmtree(empty_node.root / "shared")
    assert "cannot write the ready file /shared/ready: No such file or directory" in empty_node.refusal()
