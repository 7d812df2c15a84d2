"""The simulator is one: repeatable, and able to find faults."""

from __future__ import annotations

import os
import random
import sys

import pytest

from tests.proofs.simulation import __main__ as simulation
from tests.proofs.simulation import disk, mutants, threads
from tests.proofs.simulation import scheduler as schedulers
from tests.proofs.simulation import world as worlds
from tests.support import processes

#: A system call that is not simulated, and whose failure the product hides.
_UNKNOWN = {
    "images/targets/file.py": {
        'its storage if it is preallocated."""\n': (
            'its storage if it is preallocated."""\n        with contextlib.suppress(AttributeError):\n'
            "            os.nice(0)\n"
        )
    }
}


def test_error_of_the_simulator_is_reported_as_one() -> None:
    machines = worlds.Machines(edits=_UNKNOWN)
    faults = [simulation.run(seed, machines).fault for seed in range(10)]
    found = [fault for fault in faults if fault is not None]
    assert found
    assert not any(fault.is_law for fault in found)
    assert all("ERROR OF THE SIMULATOR" in fault.text for fault in found)
    assert all("os.nice is not simulated" in fault.text for fault in found)


def test_error_of_the_simulator_does_not_count_as_a_found_mutant() -> None:
    with pytest.raises(schedulers.Harness, match="nice is not simulated"):
        mutants.find(mutants.Mutant("unknown", "calls what is not simulated", _UNKNOWN), range(10))


def test_trace_of_a_seed_repeats() -> None:
    def traces(hash_seed: str) -> str:
        command = (sys.executable, "-m", "tests.proofs.simulation", "--seeds=10", "--traces", "--processes=1")
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return processes.run(*command, env=environment).stdout

    one = traces("1")
    assert len(one.splitlines()) > 10
    assert one.splitlines()[:10] == traces("2").splitlines()[:10]


def test_deadlock_is_found() -> None:
    def wait_for_nobody() -> None:
        threads.Event().wait()

    with pytest.raises(schedulers.Stuck, match="deadlock"):
        _run(wait_for_nobody)


def test_endless_run_is_found() -> None:
    def sleep_for_ever() -> None:
        while True:
            schedulers.active().sleep(60)

    with pytest.raises(schedulers.Stuck, match="not over after"):
        _run(sleep_for_ever)


def test_sync_makes_writes_stable_and_a_power_failure_loses_others() -> None:
    storage = disk.Storage(disk.Sparse(bytes(8192)))
    storage.write(0, b"\1" * 4096)
    storage.sync()
    lost = 0
    for number in range(20):
        storage.write(4096, bytes([2 + number]) * 4096)
        storage.lose(random.Random(number))
        assert storage.view.read(0, 4096) == b"\1" * 4096
        lost += storage.view.read(4096, 8192) != bytes([2 + number]) * 4096
    assert 5 < lost < 20


def _run(job: object) -> None:
    schedulers.running = scheduler = schedulers.Scheduler("test")
    process = schedulers.Process("test")
    try:
        task = scheduler.start(process, job, "main")
        scheduler.run(lambda: task.is_done, until=3600, steps=10_000)
    finally:
        scheduler.kill(process)
        schedulers.running = None
