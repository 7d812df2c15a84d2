"""NBD servers that refuse, stall, or break off while a disk is written to them."""

from __future__ import annotations

import errno
import os
import time
from concurrent import futures
from pathlib import Path

import pytest

pytest.importorskip("nbd")

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import execute, request
from cdi_worker.sources import base
from cdi_worker.sources.local import locations as local
from cdi_worker.sources.nbd import locations, writer
from tests.support import nbd_servers, pairs

MIB = 1 << 20
SIZE = 4 * MIB


def write(directory: Path, disk: nbd_servers.Disk, patience: float = 180.0) -> None:
    """Import a disk of data and zeros to a server."""
    source = directory / "source"
    source.write_bytes(b"\1" * (2 * MIB) + bytes(2 * MIB))
    with nbd_servers.serve(directory / "socket", disk) as socket:
        url = f"nbd+unix:///?socket={socket}"
        access = base.Access(patience=patience)
        execute.run(
            request.Request(
                source="local",
                location=local.LocalFile(str(source)),
                target=url,
                to=locations.Nbd(url, access),
                existing="replace",
            )
        )


def server(**options: object) -> nbd_servers.Disk:
    given = {"sizes": (SIZE,), "flags": nbd_servers.WRITABLE, **options}
    return nbd_servers.Disk(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_silence_ends(tmp_path: Path, after: int) -> None:
    began = time.monotonic()
    with pytest.raises(errors.TargetError, match="no answer within"):
        write(tmp_path, server(silent=after), patience=0.4)
    assert time.monotonic() - began < 30


@pytest.mark.parametrize("after", [0, 1, 3, 6])
def test_reply_that_is_cut_off(tmp_path: Path, after: int) -> None:
    with pytest.raises(errors.TargetError, match=r"the server closed the connection|the connection broke"):
        write(tmp_path, server(cut=after))


@pytest.mark.parametrize(
    ("size", "reason"),
    [
        ((1 << 64) - 1, "impossible size"),
        (0, "larger than the reported available storage 0"),
        (SIZE - 512, "larger than the reported available storage 4193792"),
    ],
)
def test_size_is_checked_before_anything_is_written(tmp_path: Path, size: int, reason: str) -> None:
    disk = server(sizes=(size,))
    with pytest.raises(errors.TargetError, match=reason):
        write(tmp_path, disk)
    assert disk.written == 0


def test_disk_that_does_not_hold_what_was_written_is_lost(tmp_path: Path) -> None:
    """Its size is the largest that there is; the head is read back before success."""
    with pytest.raises(errors.TargetLost):
        write(tmp_path, server(sizes=((1 << 63) - 1,)))


def test_connections_to_disks_of_several_sizes(tmp_path: Path) -> None:
    disk = server(sizes=(SIZE, SIZE + 512), flags=nbd_servers.WRITABLE | nbd_servers.MULTI)
    with nbd_servers.serve(tmp_path / "socket", disk) as socket, futures.ThreadPoolExecutor(8) as threads:
        url = f"nbd+unix:///?socket={socket}"
        device = writer.connect(locations.Nbd(url), cancelling.NEVER, url)
        data = memoryview(bytes(MIB))
        found = [threads.submit(device.write, at * 512, data) for at in range(64)]
        failed = [str(each.exception()) for each in found if each.exception()]
        device.close()
    assert any("another connection is to another disk" in each for each in failed), failed


@pytest.mark.parametrize(
    ("error", "command"),
    pairs.dealt(
        [errno.EPERM, errno.EIO, errno.ENOSPC, errno.ESHUTDOWN, 999], [nbd_servers.FLUSH, nbd_servers.WRITE]
    ),
)
def test_failed_command_is_a_failure(tmp_path: Path, error: int, command: int) -> None:
    """Its reason is that of the server: what is read back from this one is wrong in any case."""
    kind = errors.NoSpace if error == errno.ENOSPC else errors.TargetError
    # An error that NBD does not have is EINVAL.
    reason = os.strerror(errno.EINVAL if error == 999 else error).lower()
    with pytest.raises(kind, match=reason):
        write(tmp_path, server(failing={command: error}))


@pytest.mark.parametrize("error", [errno.EINVAL, errno.EOPNOTSUPP])
def test_zeros_are_written_where_the_server_cannot_zero(tmp_path: Path, error: int) -> None:
    """The server answers reads with other bytes than were written, which the last look at the head finds."""
    disk = server(failing={nbd_servers.ZERO: error})
    with pytest.raises(errors.TargetLost):
        write(tmp_path, disk)
    assert disk.written > SIZE
