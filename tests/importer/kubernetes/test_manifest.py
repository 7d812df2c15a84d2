"""DataVolumes as plain objects: the documented examples against golden files and Kubernetes' schemas."""

from __future__ import annotations

import os
import subprocess
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdi_worker import errors
from cdi_worker.importer import contract
from cdi_worker.importer.kubernetes import datavolume, documents, manifest
from cdi_worker.importer.kubernetes import pod as datavolume_pod
from cdi_worker.importer.roles import importer
from tests.support import disks as disks_module
from tests.support import kubernetes_schemas, misbehave, repository, servers, worker

EXAMPLES = sorted(repository.DATAVOLUMES.glob("*.yaml"))
GOLDEN = repository.GOLDEN


def parse(example: str | Path) -> datavolume.DataVolume:
    path = example if isinstance(example, Path) else repository.DATAVOLUMES / f"{example}.yaml"
    faults: list[str] = []
    volume = datavolume.parse(datavolume.find(documents.read(str(path)))[0], faults)
    assert faults == []
    return volume


def text(example: str | Path, **settings: Any) -> str:
    """Return the manifest printed for an example."""
    volume = parse(example)
    options = {"image": "cdi-worker", "overhead": Fraction("0.06"), **settings}
    return manifest.dump(manifest.objects(volume, datavolume_pod.Settings(**options)))


def printed_objects(example: str | Path, **settings: Any) -> list[dict[str, Any]]:
    """Return the objects printed for an example."""
    return list(yaml.safe_load_all(text(example, **settings)))


def job(objects: list[dict[str, Any]]) -> Any:
    return next(item for item in objects if item["kind"] == "Job")["spec"]["template"]["spec"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_documented_examples_match_golden_files(example: Path, tmp_path: Path) -> None:
    """The output is unchanged and well-formed for Kubernetes. REGOLD=1 rewrites the golden files."""
    printed = text(example)
    objects = list(yaml.safe_load_all(printed))
    for item in objects:
        assert kubernetes_schemas.faults(item) == []
    for item in objects:
        if item["kind"] == "Job":
            check_restricted(item)
            check_environment(item, parse(example), tmp_path)
    for secret in ("YWRtaW4=", "admin", "c2VjcmV0", "6789", "service_account"):
        assert secret not in printed
    golden = GOLDEN / example.name
    if os.environ.get("REGOLD"):
        golden.write_text(printed)
    assert printed == golden.read_text()


def containers(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the containers of a Job."""
    spec = item["spec"]["template"]["spec"]
    return [*spec["containers"], *spec.get("initContainers", [])]


def check_restricted(item: dict[str, Any]) -> None:
    """Check that a Job has the Pod Security Standards' restricted profile, and limits, in every container."""
    context = item["spec"]["template"]["spec"]["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(item):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True
        assert container["resources"]["limits"] == {"cpu": "750m", "memory": "600M"}


def check_environment(item: dict[str, Any], volume: datavolume.DataVolume, folder: Path) -> None:
    """Check that ``contract`` reads the environment as in a pod, with the keys of Secrets as their values."""
    for container in containers(item):
        values = {each["name"]: each.get("value", "x") for each in container.get("env", [])}
        env = {name: value.replace("$$", "$") for name, value in values.items()}
        if contract.role(env) == "importer":
            request = importer.read(env, contract.Paths(data=str(folder)))
            assert request.content_type == volume.content_type
            assert request.preallocation == volume.preallocation
            assert request.checksum == (volume.source.value("checksum"))
            assert (request.room.size or 0) >= (volume.claim.size or 0)
            shown = volume.source.value("extraHeaders", ())
            assert [f"{name}: {value}" for name, value in request.location.access.headers] == [*shown]
        elif env:
            assert contract.role(env) == "uploadserver"


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        ("containers.0.volumeMount", [], "'volumeMount' was unexpected"),
        ("containers.0.image", 1, "1 is not of type 'string'"),
        ("containers.0.name", None, "'name' is a required property"),
        ("volumes.1.ephemeral.volumeClaimTemplate.spec.storageclassName", "x", "'storageclassName' was"),
        ("volumes.1.ephemeral.volumeClaimTemplate.spec", None, "'spec' is a required property"),
        ("securityContext.seccompProfile.typ", "x", "'typ' was unexpected"),
    ],
)
def test_schemas_are_strict(path: str, value: object, fault: str) -> None:
    """A field with a typo, of another type, or missing (None) is detected at any depth."""
    item = printed_objects("http")[1]
    *steps, last = path.split(".")
    part = item["spec"]["template"]["spec"]
    for step in steps:
        part = part[int(step) if step.isdigit() else step]
    if value is None:
        del part[last]
    else:
        part[last] = value
    found = kubernetes_schemas.faults(item)
    assert len(found) == 2, "one for each release"
    assert fault in found[0]
    assert fault in found[1]


def test_scratch_is_left_out_on_request() -> None:
    """Whether it is mounted without a request is in the golden files."""
    for example, settings, has_scratch in (("http", {}, True), ("http", {"scratch": False}, False)):
        volumes = {volume["name"] for volume in job(printed_objects(example, **settings))["volumes"]}
        assert ("scratch" in volumes) == has_scratch


def test_finished_job_is_deleted_on_request() -> None:
    """Its pods, and with them their scratch claims, are deleted with it."""
    assert "ttlSecondsAfterFinished" not in printed_objects("http")[1]["spec"]
    done = worker.call("manifest", repository.DATAVOLUMES / "http.yaml", "--ttl=600", "--image=x")
    claim, item = yaml.safe_load_all(done.output)
    assert item["spec"]["ttlSecondsAfterFinished"] == 600
    assert kubernetes_schemas.faults(item) == kubernetes_schemas.faults(claim) == []


@pytest.mark.parametrize("example", ["http", "vddk-stages", "block", "registry-node"])
def test_disk_of_a_claim_is_verified_by_a_job(example: str) -> None:
    done = worker.call("manifest", repository.DATAVOLUMES / f"{example}.yaml", "--verify", "--image=x")
    *_, item = found = list(yaml.safe_load_all(done.output))
    assert "PersistentVolumeClaim" not in [each["kind"] for each in found]
    assert kubernetes_schemas.faults(item) == []
    assert item["metadata"]["name"].startswith("verify-")
    for rule in item["spec"].get("podFailurePolicy", {}).get("rules", []):
        assert errors.Differs.status in rule["onExitCodes"]["values"]
    spec = item["spec"]["template"]["spec"]
    (claim,) = (each["persistentVolumeClaim"] for each in spec["volumes"] if "persistentVolumeClaim" in each)
    assert claim["readOnly"] is True
    env = {each["name"]: each.get("value") for each in spec["containers"][0]["env"]}
    assert (env["CDI_WORKER_VERIFY"], env.get("IMPORTER_PREVIOUS_CHECKPOINT")) == ("true", None)
    assert not [each for each in spec.get("initContainers", []) if each["name"].startswith("stage")]


def test_what_has_no_disk_to_compare_with_is_refused() -> None:
    for example in ("archive", "upload", "pvc", "blank"):
        done = worker.call("manifest", repository.DATAVOLUMES / f"{example}.yaml", "--verify", "--image=x")
        assert (done.status, "no disk to compare with" in done.errors) == (2, True)


def test_failed_import_leaves_one_pod() -> None:
    """The worker retries in its pod; each pod of a Job has a scratch claim that stays until the Job goes."""
    item = printed_objects("http")[1]
    (rule,) = item["spec"]["podFailurePolicy"]["rules"]
    # The target of a pod is never standard output.
    others = {errors.Cancelled.status, errors.OutputClosed.status}
    reported = {kind.status for kind in _all_errors(errors.Error)} - others
    assert (rule["action"], rule["onExitCodes"]["operator"]) == ("FailJob", "In")
    assert set(rule["onExitCodes"]["values"]) == reported
    assert "--retries=8" in item["spec"]["template"]["spec"]["containers"][0]["args"]
    again = job(printed_objects("registry-node"))["containers"][0]
    assert not [argument for argument in again["args"] if argument.startswith("--retries")]


def _all_errors(kind: type[errors.Error]) -> set[type[errors.Error]]:
    return {kind}.union(*(_all_errors(derived) for derived in kind.__subclasses__()))


def test_pod_of_a_job_repeats_an_import(pod: worker.Pod, server: misbehave.Server) -> None:
    """A failure that a retry may mend is repeated in the pod; one that none can mend is not."""
    missing = server.serve("/missing", misbehave.Page(b"", status=404))
    env = {**pod.env, "IMPORTER_ENDPOINT": missing}
    assert worker.call(*pod.arguments, "--strict-exit-status", env=env).status == 3
    once = len(server.requests)
    done = worker.call(*pod.arguments, "--strict-exit-status", "--retries=1", env=env)
    assert done.status == 3
    assert len(server.requests) == 3 * once
    assert "failed, retry in 2 s, 1 left: " in done.errors


def test_disk_that_does_not_fit_is_final(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks
) -> None:
    """It has an exit status of its own, and is not repeated. The message is CDI's."""
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.raw()), "IMPORTER_IMAGE_SIZE": "1Mi"}
    done = worker.call(*pod.arguments, "--strict-exit-status", "--retries=8", env=env)
    assert done.status == 8
    assert "retry" not in done.errors
    assert "is larger than the reported available" in pod.message
    assert worker.call(*pod.arguments, env=env).status == 1


def test_secrets_and_config_maps_of_the_file_are_printed(tmp_path: Path) -> None:
    """They are in the namespace of the Job's pod; other objects are named in a warning."""
    example = (repository.DATAVOLUMES / "https.yaml").read_text()
    path = tmp_path / "dv.yaml"
    machine = "---\nkind: VirtualMachine\nmetadata:\n  name: vm\n"
    path.write_text(example.replace("metadata:\n", "metadata:\n  namespace: images\n", 1) + machine)
    given = [document for document in documents.read(str(path)) if document.kind in {"Secret", "ConfigMap"}]
    assert given
    done = worker.call("manifest", path, "--image=x")
    assert done.status == 0, done.errors
    printed = {(item["kind"], item["metadata"]["name"]): item for item in yaml.safe_load_all(done.output)}
    for document in given:
        item = printed[document.kind, document.name]
        assert item["metadata"]["namespace"] == "images"
        assert {**item, "metadata": None} == {**document.content, "metadata": None}
        assert kubernetes_schemas.faults(item) == []
    assert "VirtualMachine vm: not printed; apply it on its own" in done.errors
    assert ("VirtualMachine", "vm") not in printed


def machine(path: Path, *templates: object) -> Path:
    """Write a VirtualMachine with templates of DataVolumes."""
    metadata = {"name": "vm", "namespace": "vms"}
    spec = {"running": False, "dataVolumeTemplates": list(templates)}
    path.write_text(yaml.safe_dump({"kind": "VirtualMachine", "metadata": metadata, "spec": spec}))
    return path


def test_templates_of_a_virtual_machine_are_data_volumes(tmp_path: Path) -> None:
    example, *_ = yaml.safe_load_all((repository.DATAVOLUMES / "https.yaml").read_text())
    example["metadata"]["namespace"] = "vms"
    alone = tmp_path / "dv.yaml"
    alone.write_text(yaml.safe_dump(example))
    # KubeVirt's templates have no kind, and the namespace of the machine.
    metadata = {name: value for name, value in example["metadata"].items() if name != "namespace"}
    path = machine(tmp_path / "vm.yaml", {"metadata": metadata, "spec": example["spec"]})
    done = worker.call("manifest", path, "--image=cdi-worker")
    assert done.status == 0, done.errors
    assert done.output == text(alone)
    assert (
        "VirtualMachine vm: not printed; apply it without spec.dataVolumeTemplates, when the" in done.errors
    )


def test_fault_of_a_template_has_its_path(tmp_path: Path) -> None:
    for template, fault in (
        ("x", "spec.dataVolumeTemplates[0]: is not an object"),
        ({"spec": {"storage": {}}}, "spec.dataVolumeTemplates[0].metadata: missing"),
        (
            {"metadata": {"name": "x"}, "spec": {"sourceRef": {}}},
            "spec.dataVolumeTemplates[0].spec.sourceRef",
        ),
    ):
        done = worker.call("manifest", machine(tmp_path / "vm.yaml", template), "--image=x")
        assert (done.status, fault in done.errors) == (2, True), done.errors


def test_templates_are_a_list(tmp_path: Path) -> None:
    path = tmp_path / "vm.yaml"
    for given in ("x", {"a": 1}, 1):
        path.write_text(yaml.safe_dump({"kind": "VirtualMachine", "spec": {"dataVolumeTemplates": given}}))
        with pytest.raises(errors.RequestError, match=r"spec.dataVolumeTemplates: is not a list"):
            datavolume.find(documents.read(str(path)))


@pytest.mark.parametrize(
    ("example", "annotation", "value", "variable"),
    [
        ("http", "disk", "b.vmdk", "CDI_WORKER_DISK"),
        ("registry", "layer-annotation", "io.kubevirt.disk.name=data", "CDI_WORKER_LAYER_ANNOTATION"),
    ],
)
def test_disk_is_chosen_by_annotation(
    tmp_path: Path, example: str, annotation: str, value: str, variable: str
) -> None:
    found = list(yaml.safe_load_all((repository.DATAVOLUMES / f"{example}.yaml").read_text()))
    found[0]["metadata"]["annotations"] = {f"cdi-worker/{annotation}": value}
    path = tmp_path / "dv.yaml"
    path.write_text(yaml.safe_dump_all(found))
    assert {"name": variable, "value": value} in job(printed_objects(path))["containers"][0]["env"]


def test_one_backup_of_kubevirt_is_not_copied_as_two_stages(tmp_path: Path) -> None:
    """The second would read the first backup again, which looks like a full one."""
    found = list(yaml.safe_load_all((repository.DATAVOLUMES / "kubevirt.yaml").read_text()))
    pairs = (("", "a"), ("a", "b"))
    found[0]["spec"]["checkpoints"] = [{"previous": one, "current": other} for one, other in pairs]
    path = tmp_path / "dv.yaml"
    path.write_text(yaml.safe_dump_all(found))
    refused = worker.call("manifest", path, "--image=x")
    assert refused.status == 2, refused.output
    assert "spec.checkpoints: 2 stages, but every backup has its own URL" in refused.errors
    assert worker.call("manifest", path, "--image=x", "--after=a").status == 0


def test_stages_run_one_after_the_other() -> None:
    spec = job(printed_objects("vddk-stages"))
    names = [container["name"] for container in spec["initContainers"] + spec["containers"]]
    assert names == ["vddk", "stage-1", "importer"]
    env = {item["name"]: item.get("value") for item in spec["containers"][0]["env"]}
    assert env["IMPORTER_FINAL_CHECKPOINT"] == "true"
    assert env["IMPORTER_PREVIOUS_CHECKPOINT"].endswith("63/4")
    later = job(printed_objects("vddk-stages", after="snapshot-1"))
    assert [container["name"] for container in later["initContainers"]] == ["vddk"]


def test_job_without_the_library_runs_on_any_node(tmp_path: Path) -> None:
    """Without CDI nothing supplies an image with VMware's library; an export lease needs none."""
    (tmp_path / "dv.yaml").write_text(
        (repository.DATAVOLUMES / "vddk-stages.yaml").read_text().replace("      initImageURL", "      #")
    )
    for example in (tmp_path / "dv.yaml", "vsphere"):
        spec = job(printed_objects(example))
        assert not {"nodeSelector", "vddk"} & {*spec, *(each["name"] for each in spec["volumes"])}
        assert "vddk" not in [each["name"] for each in spec.get("initContainers", [])]


def test_command_prints_manifest() -> None:
    """The options are passed on; a Job can be suspended."""
    done = worker.call("manifest", EXAMPLES[0], "--suspend", "--image", "registry/x:1")
    assert done.status == 0, done.errors
    item = list(yaml.safe_load_all(done.output))[1]
    assert kubernetes_schemas.faults(item) == []
    assert item["spec"]["suspend"] is True
    assert item["spec"]["template"]["spec"]["containers"][0]["image"] == "registry/x:1"


@pytest.mark.parametrize(("variant", "has_scratch"), [("qcow2", False), ("vhdx-log", True)])
def test_contacting_the_source_decides_about_scratch(
    tmp_path: Path, disks: disks_module.Disks, variant: str, has_scratch: bool
) -> None:
    """The server has no ranges, so qemu-img must wait for the whole image."""
    example = (repository.DATAVOLUMES / "http.yaml").read_text()
    path = tmp_path / "dv.yaml"
    with servers.nginx(tmp_path, disks.directory, servers.Settings(ranges=variant != "vhdx-log")) as web:
        path.write_text(example.replace("http://images.invalid/cirros.img", web.url(disks.image(variant))))
        done = worker.call("manifest", path, "--contact", "--image=x")
    assert done.status == 0, done.errors
    volumes = {volume["name"] for volume in job(list(yaml.safe_load_all(done.output)))["volumes"]}
    assert ("scratch" in volumes) == has_scratch


def test_pod_of_a_job_fails_with_an_exit_status(
    pod: worker.Pod, web: servers.Web, disks: disks_module.Disks
) -> None:
    env = {**pod.env, "IMPORTER_ENDPOINT": web.url(disks.raw()), "IMPORTER_CHECKSUM": f"sha256:{'0' * 64}"}
    assert worker.call(*pod.arguments, env=env).status == 0
    assert worker.call(*pod.arguments, "--strict-exit-status", env=env).status == 5
    assert "checksum mismatch" in pod.outcome["message"]


def test_manifest_is_read_from_standard_input() -> None:
    command = [*worker.COMMAND, "manifest", "-"]
    example = (repository.DATAVOLUMES / "pvc.yaml").read_bytes()
    done = subprocess.run(command, env=worker.ENVIRONMENT, input=example, capture_output=True, check=True)
    assert done.stdout.decode() == (GOLDEN / "pvc.yaml").read_text()


def test_missing_library_is_named(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("raise ImportError")
    path = f"{tmp_path}:{repository.ROOT}"
    done = worker.run("manifest", EXAMPLES[0], env={"PYTHONPATH": path})
    assert done.status == 2
    assert done.error_message.startswith("reading manifests needs the Python package PyYAML: ")
    assert done.error_message.endswith("[kubernetes]'")


def test_unsupported_features_are_reported(tmp_path: Path) -> None:
    example = (repository.DATAVOLUMES / "pvc.yaml").read_text()
    path = tmp_path / "dv.yaml"
    path.write_text(example.replace("  name: pvc\n", "  name: pvc\n  namespace: other\n"))
    done = worker.call("manifest", path)
    assert done.status == 2
    assert done.error_message.startswith("spec.source.pvc.namespace: ")


def test_pod_monitor_selects_our_pods() -> None:
    monitor = yaml.safe_load((repository.ROOT / "deploy/pod-monitor.yaml").read_text())["spec"]["selector"]
    assert monitor["matchLabels"].items() <= manifest.MONITORED.items()
    for rule in monitor["matchExpressions"]:
        assert (rule["operator"], manifest.MONITORED[rule["key"]] in rule["values"]) == ("In", True)
