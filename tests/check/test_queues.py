"""Queues of Kueue as documented: the example's form, and the arithmetic of the page."""

from __future__ import annotations

import copy
import math
import re
from fractions import Fraction
from typing import Any

import yaml

from cdi_worker import units
from cdi_worker.importer.kubernetes import datavolume, documents, manifest, pod
from cdi_worker.sources.vmware import locations, source
from tests.support import kubernetes_schemas, repository

PAGE = (repository.ROOT / "docs/pods/kubernetes.md").read_text()
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
    assert {item["spec"]["clusterQueue"] for item in local} == names["ClusterQueue"] == {"esx-1", "esx-2"}
    for name in names["LocalQueue"]:
        assert f"--queue {name} " in PAGE
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
        assert f"at most {quota['pods']} for each host" in PAGE
        for path in sorted(repository.GOLDEN.glob("*.yaml")):
            for made in jobs(list(yaml.safe_load_all(path.read_text()))):
                assert made["spec"].get("parallelism", 1) == 1
                requested = _requested(made["spec"]["template"]["spec"])
                assert int(quota["pods"]) * requested["cpu"] <= int(quota["cpu"]) * 1000, path
                assert int(quota["pods"]) * requested["memory"] <= units.parse_quantity(quota["memory"]), path


def _stated(pattern: str) -> float:
    found = re.search(pattern, PAGE)
    assert found, pattern
    return float(found[1])


def test_documented_arithmetic() -> None:
    """Every figure of the table follows from the sentence above it and from the limits of a pod."""
    disks, size = _stated(r"For (\d+) disks"), _stated(r"disks of (\d+) GiB")
    data = _stated(r"with (\d+) GiB of data")
    hosts, rate = _stated(r"on (\d+) hosts behind"), _stated(r"with (\d+) MiB/s for one worker")
    network, storage = _stated(r"(\d+) MiB/s for the network"), _stated(r"and (\d+) MiB/s for the storage")
    cpu = int(pod.RESOURCES["limits"]["cpu"].removesuffix("m")) / 1000
    memory = units.parse_quantity(pod.RESOURCES["limits"]["memory"])
    scratch = size / 0.94
    total = disks * data * 1024
    rows = re.findall(r"^\| (\d+) \| (\d+) \| .* GiB \|$", PAGE, re.MULTILINE)
    assert [int(row[0]) for row in rows] == [1, 2, 4]
    for each, _ in rows:
        workers = int(each) * hosts
        times = {
            "workers": total / (workers * rate),
            "network": total / (hosts * network),
            "storage": total / storage,
        }
        limit = max(times, key=lambda name: times[name])
        expected = (
            f"| {each} | {workers:.0f} | {times[limit] / 3600:.1f} h | {limit} "
            f"| {workers * memory / 1e9:.1f} GB | {workers * cpu:.0f} | {workers * scratch:.0f} GiB |"
        )
        assert expected in PAGE
    assert f"More than {storage / rate:.0f} workers gain nothing" in PAGE
    # Jobs that finish within the seconds of --ttl, at the speed of the storage.
    finished = round(600 * min(storage, 16 * rate) / (data * 1024))
    assert f"at most {finished} Jobs finish in that time, and hold {finished * scratch:.0f} GiB" in PAGE


def test_documented_limits_of_hosts() -> None:
    connections = locations.Vddk("").vddk_connections
    assert f"a worker has {connections} | at most {52 // connections} for all queues" in PAGE
    assert f"a worker has {connections} sessions of {SESSION} MB" in PAGE
    assert f"at most {BUFFERS // SESSION // connections} for each host" in PAGE
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
    assert f"needs {size:.1f} GiB of scratch" in PAGE
    assert f"at most {pods} | at most {pods * size:.1f} GiB" in PAGE
