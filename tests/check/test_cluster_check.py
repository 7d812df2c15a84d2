"""The check of a cluster: its DataVolumes expect what the worker does, and its comparison compares."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi_worker import units
from cdi_worker.importer.kubernetes import datavolume, documents
from tests.support import devices, forked, kubernetes_schemas, processes, repository, uploads, worker

server = uploads.server
CHECK = repository.ROOT / "deploy/check"
PAGE = (CHECK / "README.md").read_text()
NAMESPACE = "cdi-check"
#: The messages that CDI's controllers replace, by what they show instead (contract, Outcome).
REPLACED = {"DataVolume too small to contain image": "is larger than the reported available"}
#: What CDI's other roles do.
OTHERS = {"upload", "clone"}
#: Nothing is written to it.
EMPTY = {"blank-block"}


def load(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((CHECK / name).read_text()))


VOLUMES = {each["metadata"]["name"]: each for each in load("datavolumes.yaml")}
EXPECTED = {name: each["metadata"]["annotations"]["expected"] for name, each in VOLUMES.items()}
REFERENCES = {each["metadata"]["name"]: each for each in load("compare.yaml")}


def claimed(name: str) -> int:
    """Return the size of a volume, in bytes."""
    return units.parse_quantity(VOLUMES[name]["spec"]["storage"]["resources"]["requests"]["storage"])


def command(start: str) -> str:
    """Return the command of the page that begins so, in one line and without kubectl."""
    text = PAGE.replace("\\\n", " ").replace("|\n", "| ")
    (line,) = re.findall(rf"^ +.*?({re.escape(start)}.*)$", text, re.MULTILINE)
    return re.sub(r" *\| kubectl.*", "", re.sub(" +", " ", line))


def test_datavolumes_have_the_form_of_cdis_definition() -> None:
    for file in ("datavolumes.yaml", "compare.yaml"):
        found = datavolume.find(documents.read(str(CHECK / file)))
        assert len(datavolume.parse_all(found)) == len(load(file))


def test_other_objects_have_the_form_of_kubernetes_definitions() -> None:
    objects = load("source.yaml")
    assert [each["kind"] for each in objects] == ["Namespace", "Deployment", "Service"]
    for each in objects:
        assert kubernetes_schemas.faults(each) == []
    broken = copy.deepcopy(objects[1])
    broken["spec"]["template"]["spec"]["containers"][0]["args"] = "x"
    assert kubernetes_schemas.faults(broken)


def test_source_is_as_a_restricted_namespace_demands() -> None:
    namespace, deployment, _ = load("source.yaml")
    assert namespace["metadata"]["labels"] == {"pod-security.kubernetes.io/enforce": "restricted"}
    pod = deployment["spec"]["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
    }


def test_objects_belong_together() -> None:
    """One namespace, one server, one image; the token is for the claim of the upload."""
    (made,) = load("kustomization.yaml")
    namespace, deployment, service = load("source.yaml")
    assert made["namespace"] == namespace["metadata"]["name"] == NAMESPACE
    assert made["resources"] == ["source.yaml", "datavolumes.yaml"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    (image,) = made["images"]
    assert image["name"] == container["image"]
    ours = yaml.safe_load((repository.ROOT / "deploy/worker/image.yaml").read_text())["data"]["image"]
    assert f"{image['newName']}:{image['newTag']}" == ours
    (files,) = made["configMapGenerator"]
    volumes = deployment["spec"]["template"]["spec"]["volumes"]
    assert {"name": "check", "configMap": {"name": files["name"]}} in volumes
    assert container["command"][1] == f"/check/{files['files'][0]}"
    host = f"{service['metadata']['name']}.{NAMESPACE}.svc"
    assert container["command"][3:] == [host, *(str(each["port"]) for each in service["spec"]["ports"])]
    for each in (*VOLUMES.values(), *REFERENCES.values()):
        url = next(iter(each["spec"]["source"].values())).get("url", "")
        assert not url or re.match(rf"(http://{host}:8080|docker://{host}:8443)/", url)
    (token,) = load("token.yaml")
    assert (token["apiVersion"], token["kind"]) == ("upload.cdi.kubevirt.io/v1beta1", "UploadTokenRequest")
    assert token["metadata"]["namespace"] == NAMESPACE
    assert "upload" in VOLUMES[token["spec"]["pvcName"]]["spec"]["source"]


def test_every_datavolume_is_bound_at_once_and_has_an_expectation() -> None:
    for name, each in VOLUMES.items():
        assert datavolume.BIND_IMMEDIATELY in each["metadata"]["annotations"]
        label = "succeeds" if EXPECTED[name] == "Succeeded" else "fails"
        assert each["metadata"]["labels"] == {"check": label}


def test_every_claim_can_have_any_file_system() -> None:
    for name in VOLUMES:
        assert claimed(name) >= max(devices.SMALLEST.values()), name


def test_every_volume_that_succeeds_is_compared() -> None:
    succeed = {name for name, expected in EXPECTED.items() if expected == "Succeeded"}
    assert set(REFERENCES) == succeed - EMPTY
    for name, each in REFERENCES.items():
        modes = [made["spec"]["storage"]["volumeMode"] for made in (each, VOLUMES[name])]
        assert modes[0] == modes[1], name
        assert each["metadata"]["namespace"] == NAMESPACE


def test_page_lists_the_expectations() -> None:
    listed = {
        name: text
        for names, text in re.findall(r"^\| ([\w, -]+) \| (.*) \|$", PAGE, re.MULTILINE)
        for name in names.split(", ")
        if names != "DataVolume"
    }
    assert set(listed) == set(VOLUMES)
    for name, text in listed.items():
        assert f"`{EXPECTED[name]}`" in text or text == "the same, on a device"
        assert ("verify-NAME" in text or "the same" in text) == (name in REFERENCES)


def test_page_names_what_exists() -> None:
    """Names in commands of kubectl, which no test runs."""
    assert set(re.findall(r"deploy/check/?[\w.]*", PAGE)) == {
        "deploy/check", "deploy/check/token.yaml", "deploy/check/compare.yaml"
    }  # fmt: skip
    for path in re.findall(r"deploy/check/[\w.]+|(?<=\()[\w./-]+(?=\))", PAGE):
        assert (repository.ROOT / path).exists() or (CHECK / path).exists(), path
    assert set(re.findall(r"kubectl (?:-n|delete namespace) (\S+?)[ `]", PAGE)) == {NAMESPACE}
    assert set(re.findall(r"deployment/(\S+)", PAGE)) == {"source"}
    assert set(re.findall(r"datavolume/(\S+)", PAGE)) == {"upload"}
    config_maps = {
        source["certConfigMap"]
        for each in VOLUMES.values()
        for source in each["spec"]["source"].values()
        if "certConfigMap" in source
    }
    assert set(re.findall(r"create configmap (\S+)", PAGE)) == config_maps
    assert re.findall(r"-l check=(\w+)", PAGE) == ["succeeds"]


# -- with the server and the worker -----------------------------------------------------------------


@pytest.fixture(scope="module")
def ports() -> tuple[int, int]:
    return processes.free_port(), processes.free_port()


@pytest.fixture(scope="module")
def served(ports: tuple[int, int], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder that the check's server serves on loopback."""
    processes.need("qemu-img", "openssl")
    folder = tmp_path_factory.mktemp("srv")
    argv = [sys.executable, str(CHECK / "source.py"), str(folder), "localhost", *map(str, ports)]
    log = tmp_path_factory.mktemp("log") / "output"
    with processes.running(argv, log=log, ready=lambda: all(map(processes.is_listening, ports))):
        yield folder


@pytest.fixture(scope="module")
def comparing() -> dict[str, dict[str, Any]]:
    """The Jobs that the page's command prints, by the name of the claim."""
    line = command("cdi-worker manifest").replace("cdi-worker", f"{sys.executable} -m cdi_worker", 1)
    script = f"image=registry.example.org/cdi-worker:1\n{line}"
    done = forked.run(["sh", "-c", script], cwd=repository.ROOT, env=worker.ENVIRONMENT, timeout=60)
    jobs = list(yaml.safe_load_all(done.stdout))
    assert {each["kind"] for each in jobs} == {"Job"}
    for each in jobs:
        assert kubernetes_schemas.faults(each) == []
        assert each["metadata"]["namespace"] == NAMESPACE
        (claim,) = (v["persistentVolumeClaim"] for v in _pod(each)["volumes"] if "emptyDir" not in v)
        assert claim == {"claimName": each["metadata"]["name"].removeprefix("verify-"), "readOnly": True}
    return {each["metadata"]["name"].removeprefix("verify-"): each for each in jobs}


def _pod(job: dict[str, Any]) -> dict[str, Any]:
    return dict(job["spec"]["template"]["spec"])


def _run(pod: worker.Pod, job: dict[str, Any], ports: tuple[int, int], served: Path) -> worker.Completed:
    """Run the container of a Job, on the volumes of ``pod`` and with the server on loopback."""
    (container,) = _pod(job)["containers"]
    env = {each["name"]: each.get("value", "") for each in container["env"]}
    for port, ours in zip(("8080", "8443"), ports, strict=True):
        env = {
            name: value.replace(f"source.cdi-check.svc:{port}", f"localhost:{ours}")
            for name, value in env.items()
        }
    if "IMPORTER_CERT_DIR" in env:
        pod.directory.joinpath("certs").mkdir(exist_ok=True)
        (pod.directory / "certs/ca.pem").write_bytes((served / "ca.pem").read_bytes())
        env["IMPORTER_CERT_DIR"] = str(pod.directory / "certs")
    pod.log.unlink(missing_ok=True)
    return worker.call(
        *pod.arguments, *(each for each in container["args"] if "retries" not in each), env=env
    )


@pytest.fixture
def pod(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[worker.Pod]:
    """A pod with the volume of the DataVolume that the test is about, without scratch space."""
    made = worker.Pod(tmp_path)
    name = request.getfixturevalue("name")
    if VOLUMES[name]["spec"]["storage"]["volumeMode"] != "Block":
        yield made
        return
    with devices.loop(tmp_path, claimed(name)) as device:
        made.block = device
        yield made


def _compare(pod: worker.Pod, job: dict[str, Any], ports: tuple[int, int], served: Path) -> None:
    """Compare the disk, which is equal; and again, with one byte of it changed."""
    done = _run(pod, job, ports, served)
    assert done.status == 0, done.errors
    assert pod.outcome["message"] == "Verification Complete"
    with pod.disk.open("r+b") as file:
        file.seek((1 << 20) - 1)
        before = file.read(1)[0]
        file.seek((1 << 20) - 1)
        file.write(bytes([before ^ 1]))
    done = _run(pod, job, ports, served)
    assert done.status == 9, done.errors


@pytest.mark.parametrize("name", [name for name in VOLUMES if name not in OTHERS])
def test_expectation_is_what_the_worker_does(
    name: str,
    pod: worker.Pod,
    ports: tuple[int, int],
    served: Path,
    comparing: dict[str, dict[str, Any]],
    tmp_path: Path,
) -> None:
    (tmp_path / "dv.yaml").write_text(yaml.safe_dump(VOLUMES[name]))
    printed = worker.call("manifest", "--image", "worker:1", tmp_path / "dv.yaml")
    job = next(each for each in yaml.safe_load_all(printed.output) if each["kind"] == "Job")
    done = _run(pod, job, ports, served)
    if EXPECTED[name] != "Succeeded":
        assert done.status != 0
        assert REPLACED.get(EXPECTED[name], EXPECTED[name]) in pod.message
        assert not pod.disk.exists()
        return
    assert done.status == 0, done.errors
    outcome = pod.outcome
    assert (outcome["message"], outcome.get("scratchSpaceRequired", False)) == ("Import Complete", False)
    if name not in EMPTY:
        _compare(pod, comparing[name], ports, served)


def test_upload_of_the_page_runs(
    server: uploads.Server,
    tmp_path: Path,
    ports: tuple[int, int],
    served: Path,
    comparing: dict[str, dict[str, Any]],
) -> None:
    line = command("cdi-worker upload").replace("/srv", str(served))
    assert "--token-file /dev/stdin" in line
    line = line.replace("https://cdi-uploadproxy.cdi.svc", f"https://localhost:{server.port}")
    line = line.replace("cdi-worker", f"{sys.executable} -m cdi_worker", 1)
    client = server.certificates.client
    script = f"echo token | {line} --cert {client.certificate} --key {client.key}"
    done = forked.run(["sh", "-c", script], env=worker.ENVIRONMENT, timeout=60)
    assert done.returncode == 0, done.stderr
    _compare(worker.Pod(tmp_path), comparing["upload"], ports, served)


@pytest.mark.parametrize("name", ["clone"])
def test_clone_is_compared(
    name: str,
    pod: worker.Pod,
    ports: tuple[int, int],
    served: Path,
    comparing: dict[str, dict[str, Any]],
) -> None:
    """The file of `raw`, on a device that is larger."""
    with pod.disk.open("r+b") as file:
        file.write((served / "disk.raw").read_bytes())
    _compare(pod, comparing[name], ports, served)
