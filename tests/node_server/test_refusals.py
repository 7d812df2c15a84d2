"""The node pull server refuses directories without a single disk, and reports errors at start."""

from __future__ import annotations

import os
import shutil
import socket

import pytest

from tests.support import node_servers


def test_missing_directory_is_refused(empty_node: node_servers.Container) -> None:
    (empty_node.root / "disk").rmdir()
    assert "/disk is not a directory of this image" in empty_node.refusal()


def test_directory_without_file_is_refused(empty_node: node_servers.Container) -> None:
    (empty_node.root / "disk/sub").mkdir()
    assert "no file below /disk" in empty_node.refusal()


def test_several_files_are_refused(empty_node: node_servers.Container) -> None:
    empty_node.put("a.img")
    empty_node.put("sub/b.img")
    errors = empty_node.refusal()
    assert "more than one file" in errors
    assert "/disk/a.img" in errors
    assert "/disk/sub/b.img" in errors


@pytest.mark.parametrize("where", ["disk/disk.img", "disk"])
def test_symbolic_links_are_refused(empty_node: node_servers.Container, where: str) -> None:
    secret = empty_node.root / "secret"
    secret.mkdir()
    (secret / "token").write_text("secret")
    (empty_node.root / "disk").rmdir()
    if where != "disk":
        (empty_node.root / "disk").mkdir()
    (empty_node.root / where).symlink_to("/secret/token" if where != "disk" else "/secret")
    assert "is not a " in empty_node.refusal()


def test_pipe_is_refused(empty_node: node_servers.Container) -> None:
    os.mkfifo(empty_node.root / "disk/disk.img")
    assert "/disk/disk.img is not a regular file" in empty_node.refusal()


@pytest.mark.parametrize("name", ["disk\n.img", " disk.img", "disk.img ", "disk\x7f"])
def test_file_name_unsafe_in_ready_file_is_refused(empty_node: node_servers.Container, name: str) -> None:
    empty_node.put(name)
    assert "the name of the file" in empty_node.refusal()


def test_unreadable_file_is_refused(empty_node: node_servers.Container) -> None:
    empty_node.put("disk.img").chmod(0)
    assert "/disk/disk.img: Permission denied (user 107)" in empty_node.refusal()


@pytest.mark.parametrize("sign", ["usr/lib/bootc", "ostree", "sysroot/ostree"])
def test_bootable_container_image_is_refused(empty_node: node_servers.Container, sign: str) -> None:
    empty_node.put("disk.img")
    (empty_node.root / sign).mkdir(parents=True)
    (empty_node.root / "dev").mkdir()
    log = empty_node.root / "dev/termination-log"
    log.touch()
    log.chmod(0o666)
    errors = empty_node.refusal()
    assert "this is a bootable container image" in errors
    assert log.read_text() in errors


def test_port_in_use_is_reported(empty_node: node_servers.Container) -> None:
    empty_node.put("disk.img")
    with socket.create_server(("127.0.0.1", empty_node.port)):
        assert f"cannot listen on 127.0.0.1:{empty_node.port}: Address already in use" in empty_node.refusal()


def test_unwritable_ready_file_is_reported(empty_node: node_servers.Container) -> None:
    empty_node.put("disk.img")
    shutil.rmtree(empty_node.root / "shared")
    assert "cannot write the ready file /shared/ready: No such file or directory" in empty_node.refusal()
