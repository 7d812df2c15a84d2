"""Clones as processes, and clones whose ends are killed."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from cdi_worker import contract
from tests.support import clones, devices, oracle, processes, uploads

MIB = uploads.MIB
SYNC = uploads.SYNC
SIZE = clones.SIZE
DONE = clones.DONE
server = uploads.server


def test_clone_runs_as_a_process(
    server: uploads.Server, folder: Path, paths: contract.Paths, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    with clones.start_source(clones.environment(server, "filesystem", folder), log) as process:
        assert process.wait(30) == 0
    assert log.read_text() == "Clone Complete"
    clones.same_tree(folder, paths.data)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_restarted_source_completes_the_clone(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path, number: int
) -> None:
    log = tmp_path / "log"
    with contextlib.ExitStack() as stack:
        target = stack.enter_context(devices.slow(tmp_path, SIZE, bytes_per_second=8 * MIB))
        source = tmp_path / "noise"
        source.write_bytes(random.Random(1).randbytes(SIZE))
        server = stack.enter_context(uploads.Server(certificates, {"DESTINATION": str(target)}, paths))
        env = clones.environment(server, "block", source)
        with clones.start_source(env, log) as process:
            processes.wait_for(lambda: server.received > MIB, "the first bytes")
            process.send_signal(number)
            assert process.wait(20)
        if number == signal.SIGTERM:
            assert log.read_text() == "Unable to process data: cancelled"

        def again() -> bool:
            with clones.start_source(env, log) as process:
                return process.wait(30) == 0

        # As the kubelet does: the target may not have noticed the kill yet.
        processes.wait_for(again, "a run that succeeds", 60)
        assert log.read_text() == "Clone Complete"
        assert server.result().message == DONE
        oracle.same(target, source)


def test_restarted_target_receives_the_clone(
    certificates: uploads.Certificates, paths: contract.Paths, tmp_path: Path
) -> None:
    """The same source continues with the pod that is started as a replacement."""
    source = tmp_path / "noise"
    source.write_bytes(random.Random(2).randbytes(SIZE))
    with devices.slow(tmp_path, SIZE, bytes_per_second=16 * MIB) as target:
        env = {"DESTINATION": str(target)}
        first = uploads.Server(certificates, env, paths)
        second = uploads.Server(certificates, {**env, "LISTEN_PORT": str(first.port)}, paths)
        second.port = first.port
        argv = [sys.executable, "-m", "cdi_worker", "--termination-log=/dev/null"]
        ready = functools.partial(processes.is_listening, first.port)
        log = tmp_path / "log"
        with processes.running(argv, log=log, ready=ready, env={**os.environ, **first.env}) as pod:
            sender = clones.start_source(clones.environment(first, "block", source), tmp_path / "message")
            processes.wait_for(lambda: "transfer" in log.read_text(), "the clone to begin")
            pod.kill()
        with second, sender:
            assert sender.wait(30) == 0
            assert second.result().message == DONE
        oracle.same(target, source)
