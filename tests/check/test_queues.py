"""Queues of Kueue as documented: the example's form, and the arithmetic of the page."""

from __future__ import annotations

import copy
import math
import re
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi_worker import units
from cdi_worker.images.engine import fetch
from cdi_worker.importer.kubernetes import datavolume, documents, manifest, pod
from cdi_worker.sources.vmware import locations, source
from tests.support import kubernetes_schemas, repository

PAGE = (repository.ROOT / "docs/pods/scale.md").read_text()
QUEUES = list(yaml.safe_load_all((repository.ROOT / "deploy/kueue.yaml").read_text()))
#: MB of buffers of all sessions with an ESXi host (VDDK guide, NFC Session Limits), and of one of ours.
BUFFERS = 48
SESSION = math.prod(map(int, re.findall(r"=(\d+)", source.CONFIGURATION))) * 64 // 1024


def jobs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == "Job"]


def test_documented_queues_have_the_form_of_kueues_definitions() -> None:
    for item in QUEUES:
        assert kubernetes_schemas.faults(item) == []
        broken = copy.deepcopy(item)
        broken.setdefault("spec", {})["nominal"] = 1
        assert "'nominal' was unexpected" in kubernetes_schemas.faults(broken)[0]
    broken = copy.deepcopy(next(item for item in QUEUES if item["kind"] == "ClusterQueue"))
    del broken["spec"]["resourceGroups"][0]["flavors"][0]["resources"][0]["nominalQuota"]
    assert "'nominalQuota' is a required property" in kubernetes_schemas.faults(broken)[0]


def test_documented_queues_belong_together() -> None:
    """Each LocalQueue has its ClusterQueue; each resource has a quota, in the order that Kueue requires."""
    names = {kind: {item["metadata"]["name"] for item in QUEUES if item["kind"] == kind}
             for kind in ("ClusterQueue", "LocalQueue", "ResourceFlavor")}  # fmt: skip
    local = [item for item in QUEUES if item["kind"] == "LocalQueue"]
    assert {item["spec"]["clusterQueue"] for item in local} == names["ClusterQueue"] == names["LocalQueue"]
    assert set(re.findall(r"--queue (\S+) ", PAGE)) < names["LocalQueue"]
    for item in QUEUES:
        for group in item.get("spec", {}).get("resourceGroups", []):
            for flavor in group["flavors"]:
                assert flavor["name"] in names["ResourceFlavor"]
                assert [each["name"] for each in flavor["resources"]] == group["coveredResources"]


def _requested(spec: dict[str, Any]) -> dict[str, int]:
    """Return what a pod requests, as Kubernetes counts: containers together, or the largest before them."""

    def amounts(container: dict[str, Any]) -> dict[str, int]:
        cpu, memory = (container["resources"]["requests"][name] for name in ("cpu", "memory"))
        assert cpu.endswith("m")
        assert container["resources"]["requests"].keys() == {"cpu", "memory"}
        return {"cpu": int(cpu[:-1]), "memory": units.parse_quantity(memory)}

    main = [amounts(container) for container in spec["containers"]]
    before = [amounts(container) for container in spec.get("initContainers", [])]
    return {
        name: max([sum(each[name] for each in main), *(each[name] for each in before)])
        for name in ("cpu", "memory")
    }


def test_quota_of_pods_is_what_limits_a_queue() -> None:
    """CPU and memory, which must have a quota as well, suffice for all pods of every kind of source."""
    for item in QUEUES:
        if item["kind"] != "ClusterQueue":
            continue
        (group,) = item["spec"]["resourceGroups"]
        quota = {each["name"]: str(each["nominalQuota"]) for each in group["flavors"][0]["resources"]}
        assert int(quota["pods"]) <= BUFFERS // SESSION // locations.Vddk("").vddk_connections
        for path in sorted(repository.GOLDEN.glob("*.yaml")):
            for made in jobs(list(yaml.safe_load_all(path.read_text()))):
                assert made["spec"].get("parallelism", 1) == 1
                requested = _requested(made["spec"]["template"]["spec"])
                assert int(quota["pods"]) * requested["cpu"] <= int(quota["cpu"].removesuffix("m")), path
                assert int(quota["pods"]) * requested["memory"] <= units.parse_quantity(quota["memory"]), path


def test_documented_estimate_is_printed(tmp_path: Path) -> None:
    """The page's commands run as they are; the queues are those of deploy/kueue.yaml, with the same pods."""
    example = PAGE.partition("## How many pods")[2]
    commands = re.findall(r"^    ((?:for|deploy/estimate.py) .*)$", example, re.MULTILINE)
    assert len(commands) == 3
    (tmp_path / "deploy").symlink_to(repository.ROOT / "deploy")

    def run(command: str) -> str:
        return subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
        ).stdout

    listed, estimated, queues = map(run, commands)
    assert listed == ""
    assert f"```text\n{estimated}```\n" in PAGE
    assert queues == (repository.ROOT / "deploy/kueue.yaml").read_text()
    assert commands[2].startswith(f"{commands[1]} --kueue ")


def test_documented_estimate_follows_from_its_rates(tmp_path: Path) -> None:
    """The time is the longest of three: the workers', the hosts' network's and the storage's."""
    disks = int(_stated(r"Here (\d+) disks"))
    data, hosts = _stated(r"with (\d+) GiB of data each"), int(_stated(r"on (\d+) ESXi hosts"))
    rate, network = _stated(r"--rate (\d+)Mi/s"), _stated(r"--host-link (\d+)Gbit") * 1e9 / 8 / 2**20
    storage, total = _stated(r"--storage (\d+)Mi/s"), disks * data * 1024
    rows = re.findall(r"^ +(\d+) +(\d+) +([\d.]+) +([\d.]+) GB +([\d.]+)  \w", PAGE, re.MULTILINE)
    assert len(rows) > 2
    memory = units.parse_quantity(pod.RESOURCES["limits"]["memory"])
    cpu = int(pod.RESOURCES["limits"]["cpu"].removesuffix("m")) / 1000
    for each, pods, hours, gigabytes, cpus in rows:
        workers = int(each) * hosts
        assert int(pods) == workers
        seconds = max(total / (workers * rate), total / (hosts * network), total / storage)
        assert float(hours) == pytest.approx(seconds / 3600, rel=0.03, abs=0.06)
        assert float(gigabytes) == pytest.approx(workers * memory / 1e9, abs=0.06)
        assert float(cpus) == workers * cpu


def _stated(pattern: str) -> float:
    found = re.search(pattern, PAGE)
    assert found, pattern
    return float(found[1])


def test_documented_requests_to_object_stores() -> None:
    """A request has 4 to 16 MiB, so that so many pods stay below what a store answers."""
    options = fetch.FetchOptions()
    assert f"mostly reads {options.chunk >> 20} to {fetch._LARGE >> 20} MiB at a time" in PAGE
    rate = _stated(r"at (\d+) MiB/s \d+ times a second or less")
    often = rate / (options.chunk >> 20)
    assert f"at {rate:.0f} MiB/s {often:.0f} times a second or less" in PAGE
    for limit in (5500, 5000):
        assert re.search(
            rf"\| {limit} reads a second .* \| {limit / often:.0f} pods at {rate:.0f} MiB/s \|", PAGE
        )
    assert (
        f"up to {options.connections} (`--connections`) | 16 pods open {16 * options.connections} |" in PAGE
    )


def test_documented_limits_of_hosts() -> None:
    connections = locations.Vddk("").vddk_connections
    assert f"a worker has {connections} | at most {52 // connections} pods for all hosts" in PAGE
    assert f"a worker has {connections} sessions of {SESSION} MB" in PAGE
    assert f"at most {BUFFERS // SESSION // connections} pods for each host" in PAGE
    assert locations.MOST_CONNECTIONS == BUFFERS // SESSION


def test_documented_memory_of_sessions() -> None:
    """Each row of the table on NFC buffers follows from the size of a session."""
    page = (repository.ROOT / "docs/sources/vmware.md").read_text()
    for sessions in (1, 2, 3):
        workers = BUFFERS // (SESSION * sessions)
        assert f"| {sessions} | {SESSION * sessions} MB | {workers} |" in page


def test_scratch_of_killed_pods_is_as_documented() -> None:
    example = yaml.safe_load((repository.DATAVOLUMES / "http.yaml").read_text())
    example["spec"]["storage"]["resources"]["requests"]["storage"] = "10Gi"
    faults: list[str] = []
    volume = datavolume.parse(documents.Document("x", example), faults)
    assert faults == []
    _, item = manifest.objects(volume, pod.Settings(image="x", overhead=Fraction("0.06")))
    volumes = item["spec"]["template"]["spec"]["volumes"]
    (claim,) = (each["ephemeral"]["volumeClaimTemplate"] for each in volumes if each["name"] == "scratch")
    size = int(claim["spec"]["resources"]["requests"]["storage"]) / (1 << 30)
    pods = 1 + item["spec"]["backoffLimit"]
    page = (repository.ROOT / "docs/pods/kubernetes.md").read_text()
    assert f"needs {size:.1f} GiB of scratch" in page
    assert f"at most {pods} | at most {pods * size:.1f} GiB" in page
