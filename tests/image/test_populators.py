"""Forklift's populators in real containers, with the pod that CDI's controllers create for them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.importer.commands import test_populators
from tests.support import devices, disks, meters, openstack, oracle, ovirt_disks, pods, processes

#: The first test starts the services.
pytestmark = pytest.mark.timeout(openstack.START * 2)

#: The contract's port, which no argument changes.
PORT = 8443
UID = test_populators.UID


@pytest.fixture(params=["file", "device"])
def populator(request: pytest.FixtureRequest, image: str, tmp_path: Path) -> Iterator[pods.Pod]:
    """Return a pod with a volume of either mode: user 107, no scratch, no folder for temporary files."""
    pod = pods.Pod(tmp_path / "pod", image, user="107:107", mount_point="/mnt", device_path="/dev/block")
    if request.param == "file":
        yield pod
    else:
        with pods.device(tmp_path, owner=107) as pod.block:
            yield pod


def populate(pod: pods.Pod, name: str, secret: Mapping[str, str], metric: str, *arguments: str) -> str:
    """Run a populator to its end, and see its progress grow on the way; return its output.

    ``name``: the command of CDI's controllers; empty: none, as of Forklift's.
    """
    target = "/dev/block" if pod.block else "/mnt/disk.img"
    common = [f"--volume-path={target}", "--secret-name=x", f"--owner-uid={UID}", "--pvc-size=16777216"]
    if not name:
        common += ["--cr-name=a", "--cr-namespace=b"]
    expression = re.compile(metric + r'\{ownerUID="' + UID + r'"\} (\d{1,3}\.?\d*)')

    def percent() -> float:
        # None before the source has answered.
        found = expression.search(meters.scrape(PORT))
        return float(found[1]) if found else 0.0

    with pod.running(*arguments, *common, port=PORT, entrypoint=name or None, env=secret) as running:
        processes.wait_for(lambda: 0 < percent() < 100, "progress")
        status = running.wait(60)
    output = (pod.directory / "output").read_text()
    assert status == 0, output
    return output


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("openstack-populator", "kubevirt_cdi_openstack_populator_progress_total"),
        ("", r"\nopenstack_populator_progress"),
    ],
    ids=["CDI", "Forklift"],
)
def test_openstack_image(
    populator: pods.Pod, cloud: openstack.Cloud, disks: disks.Disks, name: str, metric: str
) -> None:
    image = cloud.upload(disks.image("qcow2"), "qcow2")
    secret = test_populators.secret(cloud) | {"regionName": openstack.SLOW_REGION}
    arguments = (f"--endpoint={cloud.public}", f"--image-id={image}")
    output = populate(populator, name, secret, metric, *arguments)
    assert openstack.PASSWORD not in output
    check(populator, disks.expected("qcow2"))


@pytest.mark.parametrize(
    ("name", "metric"),
    [("ovirt-populator", "kubevirt_cdi_ovirt_progress_total"), ("", r"\novirt_progress")],
    ids=["CDI", "Forklift"],
)
def test_ovirt_disk(populator: pods.Pod, ovirt_disk: ovirt_disks.Setup, name: str, metric: str) -> None:
    ovirt_disk.engine.delay = "200ms"
    secret = test_populators.engine_secret(ovirt_disk)
    arguments = (f"--engine-url={test_populators.engine_url(ovirt_disk)}", "--disk-id=disk")
    output = populate(populator, name, secret, metric, *arguments)
    assert secret["password"] not in output
    check(populator, ovirt_disk.now)
    ovirt_disk.check_ended("finished_success")


def check(pod: pods.Pod, expected: Path) -> None:
    """Check that the volume holds the disk, and nothing else."""
    oracle.same(pod.disk, expected, beyond=devices.DIRT if pod.block else b"\0")
    if not pod.block:
        assert [path.name for path in pod.data.iterdir()] == ["disk.img"]
        assert pod.disk.stat().st_uid == 107
