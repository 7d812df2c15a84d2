"""DataVolumes that demand a signature, with annotations of ours."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from cdi_worker.importer.kubernetes import contact, datavolume, documents, manifest, pod
from cdi_worker.sources import trust
from tests.support import containers, registries, repository, signing, worker
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


def demanded(path: Path, folder: Path) -> tuple[trust.Demand, list[str]]:
    """Return what the request demands, and the faults."""
    faults: list[str] = []
    found = documents.read(str(path))
    volume = datavolume.parse(datavolume.find(found)[0], faults)
    reading = contact.Reading(volume, contact.References(found), str(folder), {}, faults)
    return reading.request(Fraction(0)).demand, faults


def test_annotations_arrive_in_the_request(tmp_path: Path) -> None:
    path = changed(tmp_path / "dv.yaml", checksum_file="https://example.org/SHA256SUMS")
    demand, faults = demanded(path, tmp_path)
    assert faults == []
    assert b"BEGIN PUBLIC KEY" in Path(demand.signed_by).read_bytes()
    assert demand.checksum_file == "https://example.org/SHA256SUMS"


@pytest.mark.parametrize(
    ("annotations", "fault"),
    [
        ({"signedby": "x"}, "unknown; did you mean 'cdi-worker/signed-by'"),
        ({"signed_by": " "}, "is empty"),
        ({"signature_policy": "team-keys"}, "unknown; "),
        ({"signed_by": "missing"}, "no ConfigMap missing"),
    ],
)
def test_malformed_annotation_is_a_fault(tmp_path: Path, annotations: dict[str, str], fault: str) -> None:
    path = changed(tmp_path / "dv.yaml", **annotations)
    _, faults = demanded(path, tmp_path)
    assert [each for each in faults if each.startswith("metadata.annotations[cdi-worker/")], faults
    assert any(fault in each for each in faults), faults


def test_pod_gets_the_demand_in_its_environment(tmp_path: Path) -> None:
    faults: list[str] = []
    path = changed(tmp_path / "dv.yaml", checksum_file="https://example.org/SHA256SUMS")
    volume = datavolume.parse(datavolume.find(documents.read(str(path)))[0], faults)
    made = manifest.objects(volume, pod.Settings(image="x", overhead=Fraction(0)))
    container = made[1]["spec"]["template"]["spec"]["containers"][0]
    env = {each["name"]: each.get("value", "") for each in container["env"]}
    assert env["CDI_WORKER_SIGNED_BY"] == "/signatures/signed-by"
    assert env["CDI_WORKER_CHECKSUM_FILE"] == "https://example.org/SHA256SUMS"
    paths = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert paths["signed-by"] == "/signatures/signed-by"


@pytest.mark.parametrize("is_signed", [True, False])
def test_contact_verifies_the_signature(
    guarded: registries.Registry, disks: disks_module.Disks, tmp_path: Path, is_signed: bool
) -> None:
    name = f"contact-{is_signed}".lower()
    digest = guarded.push(name, containers.image_of(disks.raw()))
    if is_signed:
        layer = SIGNER.simple(digest, guarded.name(name))
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
    done = worker.call("manifest", tmp_path / "dv.yaml", "--contact", "--image=x")
    if is_signed:
        assert done.status == 0, done.errors
    else:
        assert (done.status, "signature missing" in done.errors) == (7, True), done.errors
        assert done.output == ""
