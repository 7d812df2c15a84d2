"""Tests of the devices and file systems."""

from __future__ import annotations

import errno
import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.support import devices, processes

MiB = 1 << 20


@pytest.mark.parametrize("sector", [512, 4096])
def test_loop_device_is_dirty_and_has_sector_size(tmp_path: Path, sector: int) -> None:
    with devices.loop(tmp_path, 2 * MiB, sector=sector) as device:
        assert device.is_block_device()
        assert device.read_bytes() == b"\xff" * 2 * MiB
        assert processes.run("blockdev", "--getss", device).stdout.strip() == str(sector)
    assert list(tmp_path.iterdir()) == []


def test_failing_device_fails_until_mended(tmp_path: Path) -> None:
    with devices.failing(tmp_path, MiB) as device:
        file = os.open(device.path, os.O_RDWR)
        try:
            os.pwrite(file, b"a" * 4096, 0)
            os.fsync(file)
            device.fail()
            os.pwrite(file, b"b" * 4096, 0)
            with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                os.fsync(file)
            device.mend()
            os.pwrite(file, b"c" * 4096, 0)
            os.fsync(file)
        finally:
            os.close(file)


def test_slow_device_limits_write_rate(tmp_path: Path) -> None:
    with devices.slow(tmp_path, 2 * MiB, bytes_per_second=2 * MiB) as device:
        began = time.monotonic()
        subprocess.run(
            ["dd", "if=/dev/zero", f"of={device}", "bs=1M", "count=2", "oflag=direct", "status=none"],
            check=True,
        )
        assert time.monotonic() - began > 0.5
