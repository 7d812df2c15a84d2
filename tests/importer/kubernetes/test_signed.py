"""DataVolumes that demand a signature, with annotations of ours."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi_worker.importer.kubernetes import datavolume, documents, manifest, pod, references, run
from cdi_worker.importer.settings import Settings
from cdi_worker.sources import trust
from tests.support import containers, oracle, registries, repository, signing, worker
from tests.support import disks as disks_module

EXAMPLE = repository.DATAVOLUMES / "signed.yaml"
SIGNER = signing.Signer()


def changed(path: Path, **annotations: str | None) -> Path:
    """Write the example with other annotations and return its path."""
    found = list(yaml.safe_load_all(EXAMPLE.read_text()))
    for name, value in annotations.items():
        found[0]["metadata"]["annotations"][f"cdi-worker/{name.replace('_', '-')}"] = value
    path.write_text(yaml.safe_dump_all(found))
    return path


def demanded(path: Path, folder: Path, **settings: Any) -> tuple[trust.Demand, list[str]]:
    """Return what the request demands, and the faults."""
    faults: list[str] = []
    found = documents.read(str(path))
    volume = datavolume.parse(datavolume.find(found), faults)
    place = run.Place(target="", folder=str(folder))
    keys = references.References(found)
    (wanted,) = run.Planner(volume, keys, place, Settings(**settings), {}, faults).requests()
    return wanted.demand, faults


def test_annotations_arrive_in_the_request(tmp_path: Path) -> None:
    path = changed(tmp_path / "dv.yaml")
    demand, faults = demanded(path, tmp_path)
    assert faults == []
    assert b"BEGIN PUBLIC KEY" in Path(demand.signed_by).read_bytes()
    assert demand.annotations == (("env", "prod"), ("stage", "released"))
    assert "insecureAcceptAnything" in Path(demand.policy).read_text()


def test_options_replace_annotations(tmp_path: Path) -> None:
    demand, _ = demanded(EXAMPLE, tmp_path, demand={"signed_by": "/other.pem"})
    assert (demand.signed_by, len(demand.annotations)) == ("/other.pem", 2)


@pytest.mark.parametrize(
    ("annotations", "fault"),
    [
        ({"signedby": "x"}, "unknown; did you mean 'cdi-worker/signed-by'"),
        ({"signed_by": " "}, "is empty"),
        ({"signature_annotation": "a"}, "expected KEY=VALUE"),
        ({"signed_by": "missing"}, "no ConfigMap missing"),
        ({"trusted_root": "team-keys"}, "has no key trusted_root.json"),
    ],
)
def test_malformed_annotation_is_a_fault(tmp_path: Path, annotations: dict[str, str], fault: str) -> None:
    path = changed(tmp_path / "dv.yaml", **annotations)
    _, faults = demanded(path, tmp_path)
    assert [each for each in faults if each.startswith("metadata.annotations[cdi-worker/")], faults
    assert any(fault in each for each in faults), faults


def test_pod_gets_the_demand_in_its_environment() -> None:
    faults: list[str] = []
    volume = datavolume.parse(datavolume.find(documents.read(str(EXAMPLE))), faults)
    made = manifest.objects(volume, pod.Settings(image="x", overhead=Fraction(0)))
    container = made[1]["spec"]["template"]["spec"]["containers"][0]
    env = {each["name"]: each.get("value", "") for each in container["env"]}
    assert env["CDI_WORKER_SIGNED_BY"] == "/signatures/signed-by"
    assert env["CDI_WORKER_SIGNATURE_ANNOTATION"] == "env=prod\nstage=released\n"
    assert env["CDI_WORKER_SIGNATURE_POLICY"] == "/signatures/signature-policy/policy.json"
    paths = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert paths["signed-by"] == "/signatures/signed-by"
    assert paths["signature-policy"] == "/signatures/signature-policy"


@pytest.mark.parametrize("is_signed", [True, False])
def test_run_verifies_the_signature(
    guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path, is_signed: bool
) -> None:
    name = f"run-{is_signed}".lower()
    digest = guarded.push(name, containers.image_of(disks.raw()))
    if is_signed:
        layer = SIGNER.simple(digest, f"{guarded.host}/{name}", {"env": "prod", "stage": "released"})
        signing.attach(guarded, name, digest, layer)
    documents = list(yaml.safe_load_all(changed(tmp_path / "dv.yaml").read_text()))
    documents[0]["spec"]["source"]["registry"] |= {
        "url": guarded.reference(name),
        "secretRef": "login",
        "certConfigMap": "ca",
    }
    documents[1]["data"] = {"a.pem": signing.Signer().pem.decode(), "b.pem": SIGNER.pem.decode()}
    assert guarded.authority
    login = {"accessKeyId": registries.USER, "secretKey": registries.PASSWORD}
    documents += [
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "login"}, "stringData": login},
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "ca"},
            "data": {"ca.pem": guarded.authority.certificate.read_text()},
        },
    ]
    (tmp_path / "dv.yaml").write_text(yaml.safe_dump_all(documents))
    target = tmp_path / "disk.img"
    done = worker.run("run", tmp_path / "dv.yaml", f"--target={target}", "--overhead=0")
    if is_signed:
        assert done.status == 0, done.errors
        oracle.same(target, disks.raw())
    else:
        assert (done.status, "signature missing" in done.errors) == (7, True), done.errors
        assert not target.exists()
