"""The importer's contract: killed and started again on the same volumes; without rights."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests import contract, limits, misbehave, oracle, processes, servers, worker
from tests import disks as disks_module

# -- killed, and started again ----------------------------------------------------------------


@pytest.mark.parametrize("volume", ["file", "block"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("variant", ["raw", "qcow2", "vmdk"])
def test_killed_worker_starts_again(
    pod: worker.Pod,
    server: misbehave.Server,
    disks: disks_module.Disks,
    device: Path,
    variant: str,
    number: int,
    volume: str,
) -> None:
    pod.block = device if volume == "block" else None
    data = disks.image(variant).read_bytes()
    good = misbehave.Page(data)
    url = server.serve("/disk", (good, 2), misbehave.Page(data, stall=1000))
    pod.env["IMPORTER_ENDPOINT"] = url
    with worker.started(*pod.arguments, env=pod.env) as process:
        processes.wait_for(lambda: len(server.gets("/disk")) > 2, "the stall")
        process.send_signal(number)
        status = process.wait(20)
    assert status != 0
    oracle.unusable(pod.disk)
    server.serve("/disk", good)
    assert pod.run().status == 0
    assert pod.message == contract.COMPLETE
    contract.check_disk(pod, disks.expected(variant))


# -- rights -----------------------------------------------------------------------------------


def test_without_rights(pod: worker.Pod, web: servers.Web, disks: disks_module.Disks) -> None:
    """A user of its own, a volume of its group, nothing else to write to."""
    for path in (pod.directory, pod.data):
        processes.run("chown", "107:107", path)
    for path in [*pod.directory.parents][:-1]:
        path.chmod(path.stat().st_mode | 0o055)
    pod.env["IMPORTER_ENDPOINT"] = web.url(disks.image("vmdk"))
    done = pod.run(prefix=limits.unprivileged())
    assert (done.status, pod.message) == (0, contract.COMPLETE), done.errors
    contract.check_disk(pod, disks.expected("vmdk"))
    assert pod.disk.stat().st_uid == 107
