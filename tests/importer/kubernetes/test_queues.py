"""Manifests of many DataVolumes, and Jobs that wait in a queue of Kueue."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cdi_worker.importer.kubernetes import manifest
from tests.support import disks as disks_module
from tests.support import kubernetes_schemas, repository, servers, worker

QUEUE = "kueue.x-k8s.io/queue-name"
LABELS, MONITORED = manifest.LABELS, manifest.MONITORED
SECRET = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "stringData": {"user": "x"}}


def data_volume(name: str, **changes: Any) -> dict[str, Any]:
    """Return a DataVolume; ``changes`` are fields of its metadata."""
    made: dict[str, Any] = yaml.load((repository.DATAVOLUMES / "http.yaml").read_text(), yaml.CSafeLoader)
    made["metadata"] = {"name": name, **changes}
    return made


def printed(path: Path, content: list[dict[str, Any]], *options: str) -> list[dict[str, Any]]:
    path.write_text(yaml.dump_all(content, Dumper=yaml.CSafeDumper))
    done = worker.call("manifest", path, "--image=x", *options)
    assert done.status == 0, done.errors
    return list(yaml.load_all(done.output, yaml.CSafeLoader))


def refused(path: Path, content: list[dict[str, Any]], *options: str) -> str:
    """Return the message for an invalid request."""
    path.write_text(yaml.safe_dump_all(content))
    done = worker.call("manifest", path, "--image=x", *options)
    assert (done.status, done.output) == (2, "")
    return done.errors


def jobs(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item for item in objects if item["kind"] == "Job"]


def test_many_data_volumes_share_a_queue(tmp_path: Path) -> None:
    """A hundred disks in one file: each Job has Kueue's label and starts suspended."""
    objects = printed(
        tmp_path / "x.yaml", [data_volume(f"disk-{number}") for number in range(100)], "--queue=esx-1"
    )
    assert len(objects) == 200
    assert len({item["metadata"]["name"] for item in jobs(objects)}) == 100
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


def test_name_of_a_queue_is_checked(tmp_path: Path) -> None:
    for name in ("ESX", "a b", "-a", "a" * 64):
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
