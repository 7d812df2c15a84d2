"""Manifests of many DataVolumes, Jobs that wait in a queue of Kueue, and what is documented about both."""

from __future__ import annotations

import copy
import math
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi_worker import units
from cdi_worker.importer.kubernetes import manifest, pod
from cdi_worker.sources.vmware import locations, source
from tests.support import disks as disks_module
from tests.support import kubernetes_schemas, repository, servers, worker

QUEUE = "kueue.x-k8s.io/queue-name"
LABELS, MONITORED = manifest.LABELS, manifest.MONITORED
PAGE = (repository.ROOT / "docs/pods/kubernetes.md").read_text()
QUEUES = list(yaml.safe_load_all((repository.ROOT / "deploy/kueue.yaml").read_text()))
#: MB of buffers of all sessions with an ESXi host (VDDK guide, NFC Session Limits), and of one of ours.
BUFFERS = 48
SESSION = math.prod(map(int, re.findall(r"=(\d+)", source.CONFIGURATION))) * 64 // 1024
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"user": "x"}}


def data_volume(name: str, **changes: Any) -> dict[str, Any]:
    """Return a DataVolume; ``changes`` are fields of its metadata."""
    made: dict[str, Any] = yaml.load((repository.DATAVOLUMES / "http.yaml").read_text(), yaml.CSafeLoader)
    made["metadata"] = {"name": name, **changes}
    return made


def printed(path: Path, content: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    path.write_text(yaml.dump_all(content, Dumper=yaml.CSafeDumper))
    done = worker.run("manifest", path, "--image=x", *options)
    assert done.status == 0, done.errors
    return list(yaml.load_all(done.output, yaml.CSafeLoader))


def refused(path: Path, content: list[dict[str, Any]], *options: str) -> str:
    """Return the message for an invalid request."""
    path.write_text(yaml.safe_dump_all(content))
    done = worker.run("manifest", path, "--image=x", *options)
    assert (done.status, done.output) == (2, "")
    return done.errors


def jobs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == "Job"]


def test_many_data_volumes_share_a_queue(tmp_path: Path) -> None:
    """A thousand disks in one file, as documented: each Job has Kueue's label and starts suspended."""
    objects = printed(
        tmp_path / "x.yaml", [data_volume(f"disk-{number}") for number in range(1000)], "--queue=esx-1"
    )
    assert len(objects) == 2000
    assert len({item["metadata"]["name"] for item in jobs(objects)}) == 1000
    for item in jobs(objects):
        assert item["metadata"]["labels"] == {**LABELS, QUEUE: "esx-1"}
        assert item["spec"]["suspend"] is True
    for item in objects[-2:]:
        assert kubernetes_schemas.faults(item) == []


def test_label_of_the_data_volume_selects_the_queue(tmp_path: Path) -> None:
    """The option overrides it. The pods do not have the label: it is the Job that waits."""
    path = tmp_path / "x.yaml"
    given = [data_volume("a", labels={QUEUE: "esx-1", "team": "x"}), data_volume("b")]
    first, second = jobs(printed(path, given))
    assert first["metadata"]["labels"] == {**LABELS, QUEUE: "esx-1", "team": "x"}
    assert first["spec"]["template"]["metadata"]["labels"] == {**LABELS, **MONITORED, "team": "x"}
    assert first["spec"]["suspend"] is True
    assert "suspend" not in second["spec"]
    assert second["metadata"]["labels"] == LABELS
    for item in jobs(printed(path, given, "--queue=esx-2")):
        assert item["metadata"]["labels"][QUEUE] == "esx-2"


def test_job_of_a_queue_is_not_started_by_hand(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    message = refused(path, [data_volume("a")], "--suspend", "--queue=esx-1")
    assert "--suspend: Kueue starts the Jobs of queue 'esx-1'; omit --suspend" in message
    assert "--suspend" in refused(path, [data_volume("a", labels={QUEUE: "esx-1"})], "--suspend")


@pytest.mark.parametrize("name", ["ESX", "a b", "-a", "a" * 64])
def test_name_of_a_queue_is_checked(tmp_path: Path, name: str) -> None:
    message = refused(tmp_path / "x.yaml", [data_volume("a")], f"--queue={name}")
    assert "is not the name of a LocalQueue" in message


def test_faults_of_all_data_volumes_are_reported_by_name(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    broken = [data_volume("a"), data_volume("b"), data_volume("c")]
    del broken[0]["spec"]["source"]["http"]["url"]
    broken[2]["spec"]["source"] = {"vddk": {}}
    message = refused(path, broken)
    assert "a: spec.source.http.url: missing" in message
    assert "c: spec.source.vddk.uuid: missing" in message
    assert "b: " not in message
    clones = [data_volume(name, namespace="x") for name in "ab"]
    for each in clones:
        each["spec"]["source"] = {"pvc": {"name": "disk", "namespace": "y"}}
    message = refused(path, clones)
    assert "a: spec.source.pvc.namespace" in message
    assert "b: spec.source.pvc.namespace" in message


def test_name_of_a_data_volume_appears_once_in_a_namespace(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    given = [data_volume("a", namespace="x"), data_volume("a", namespace="y")]
    assert len(jobs(printed(path, given))) == 2
    message = refused(path, [*given, given[0]])
    assert "DataVolume x/a: appears twice" in message


def test_secret_is_printed_for_each_namespace(tmp_path: Path) -> None:
    """A pod reads Secrets of its own namespace only. One with a namespace stays where it is."""
    path = tmp_path / "x.yaml"
    given = [
        data_volume("a", namespace="x"),
        data_volume("b", namespace="y"),
        data_volume("c", namespace="x"),
    ]
    objects = printed(path, [SECRET, *given])
    found = [item["metadata"]["namespace"] for item in objects if item["kind"] == "Secret"]
    assert found == ["x", "y"]
    placed = {**SECRET, "metadata": {"name": "keys", "namespace": "y"}}
    objects = printed(path, [placed, *given])
    assert [item for item in objects if item["kind"] == "Secret"] == [placed]


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
    page = (repository.ROOT / "docs/sources/warm-migration.md").read_text()
    for sessions in (1, 2, 3):
        workers = BUFFERS // (SESSION * sessions)
        assert f"| {sessions} | {SESSION * sessions} MB | {workers} |" in page


def test_each_source_is_contacted(tmp_path: Path, disks: disks_module.Disks) -> None:
    """Only the Job whose image qemu-img must read from scratch gets scratch space."""
    given = []
    with servers.nginx(tmp_path, disks.directory, servers.Settings(ranges=False)) as web:
        for name, image in (("a", disks.raw()), ("b", disks.image("vhdx-log"))):
            given.append(data_volume(name))
            given[-1]["spec"]["source"] = {"http": {"url": web.url(image)}}
        objects = printed(tmp_path / "x.yaml", given, "--contact")
    volumes = [
        {each["name"] for each in item["spec"]["template"]["spec"]["volumes"]} for item in jobs(objects)
    ]
    assert ["scratch" in each for each in volumes] == [False, True]
