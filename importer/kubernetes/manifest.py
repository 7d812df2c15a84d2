"""A DataVolume as plain Kubernetes objects, for clusters without CDI."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cdi_worker import errors, units
from cdi_worker.importer.kubernetes import datavolume, documents
from cdi_worker.importer.kubernetes import pod as datavolume_pod

#: Annotations that are copied to the pods, with their defaults. A side-car would outlive the import.
POD_ANNOTATIONS = {
    "k8s.v1.cni.cncf.io/networks": "",
    "v1.multus-cni.io/default-network": "",
    "sidecar.istio.io/inject": "false",
    "linkerd.io/inject": "disabled",
}
#: The labels of everything that is written (kubernetes.io/docs/concepts/overview/working-with-objects). The
#: component is that of CDI's objects.
LABELS = {
    "app.kubernetes.io/name": "cdi-worker",
    "app.kubernetes.io/component": "storage",
    "app.kubernetes.io/managed-by": "cdi-worker",
}
#: Those by which deploy/pod-monitor.yaml selects pods, as CDI's have them.
MONITORED = {"cdi.kubevirt.io": "importer", "prometheus.cdi.kubevirt.io": "true"}
#: The exit statuses that the worker reports (docs/reference/exit-status.md), after its own retries. Any other
#: one is of a pod that was killed or stopped (130, 137, 143): another pod resumes.
REPORTED = [*range(1, 10)]
#: Kueue's label of a Job: the LocalQueue in which it waits (https://kueue.sigs.k8s.io/docs/tasks/run/jobs/).
QUEUE = "kueue.x-k8s.io/queue-name"
#: Times that a pod which was killed is replaced; each may leave its scratch (docs/pods/kubernetes.md).
REPLACED = 6
#: Strings that every version of YAML reads as a string without quotes.
PLAIN = re.compile(
    r"(?!(?:y|n|yes|no|on|off|true|false|null|nan|inf)$)[A-Za-z/][A-Za-z0-9./_-]*", re.IGNORECASE
)

Object = datavolume_pod.Object


def objects(volume: datavolume.DataVolume, settings: datavolume_pod.Settings) -> list[Object]:
    """Return the claim and the objects that import into it.

    Raises ``RequestError`` if the DataVolume needs CDI's controllers, or is to wait for Kueue and for a user.
    """
    _check(volume, settings)
    pod = datavolume_pod.Pod(volume, settings)
    made = [] if settings.verify else [_claim(volume, settings)]
    if volume.source.kind in datavolume.CLONES:
        if datavolume.BIND_IMMEDIATELY in volume.annotations:
            # A pod that only mounts the claim, so that the claim is bound.
            pod.add_claim()
            made.append(_job(pod, "bind", pod.container("bind", args=["--version"])))
        return made
    pod.add_target()
    if volume.source.kind == "upload":
        job = _job(pod, "upload", datavolume_pod.upload(pod))
        metadata = _metadata(volume, job["metadata"]["name"])
        selector = {"batch.kubernetes.io/job-name": metadata["name"]}
        port = {"name": "https", "port": 443, "targetPort": datavolume_pod.UPLOAD_PORT}
        spec = {"selector": selector, "ports": [port]}
        return [*made, job, {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": spec}]
    name = "verify" if settings.verify else "importer"
    if (stages := len(volume.checkpoints)) and not settings.verify:
        # The template of a Job cannot change, so later checkpoints get another Job.
        name = f"importer-{stages}"
    return [*made, _job(pod, name, datavolume_pod.importer(pod))]


def all_objects(pairs: Sequence[tuple[datavolume.DataVolume, datavolume_pod.Settings]]) -> list[Object]:
    """Return the objects of several DataVolumes, each with its own settings.

    Raises ``RequestError`` with the faults of all, by name.
    """
    made, faults = [], []
    for volume, own in pairs:
        try:
            made += objects(volume, own)
        except errors.RequestError as err:
            named = f"{volume.name}: " if len(pairs) > 1 else ""
            faults += [f"{named}{fault}" for fault in err.faults]
    if faults:
        raise errors.RequestError(*faults)
    return made


def companions(
    found: Iterable[documents.Document], volumes: Iterable[datavolume.DataVolume]
) -> tuple[list[Object], list[str]]:
    """Return the Secrets and ConfigMaps among documents, and a warning for each document that needs one.

    One without a namespace gets that of the DataVolume, where the pod looks for it. If the DataVolumes are in
    several namespaces, there is a copy in each.
    """
    made, warnings = [], []
    namespaces = list(dict.fromkeys(volume.namespace for volume in volumes))
    known = ", ".join(map(repr, namespaces))
    for document in found:
        name = f"{document.kind or 'document without kind'} {document.name}".rstrip()
        if document.kind not in {"Secret", "ConfigMap"}:
            if datavolume.templates(document):
                # KubeVirt would start it with a disk that is not complete.
                when = "without spec.dataVolumeTemplates, when the Jobs have finished"
                warnings.append(f"{name}: not printed; apply it {when}")
            elif document.kind != "DataVolume":
                warnings.append(f"{name}: not printed; apply it on its own")
            continue
        metadata = document.content.get("metadata")
        metadata = dict(metadata) if isinstance(metadata, Mapping) else {}
        if document.namespace and not {document.namespace, ""}.intersection(namespaces):
            warnings.append(f"{name}: namespace {document.namespace!r} is not the DataVolume's {known}")
        for namespace in [document.namespace] if document.namespace else namespaces:
            own = metadata | ({"namespace": namespace} if namespace else {})
            made.append({**document.content, "metadata": own})
    return made, warnings


def as_list(made: Iterable[Object]) -> str:
    """Return objects as one JSON object, a List, which kubectl reads too."""
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": list(made)})


def dump(made: Iterable[Object]) -> str:
    """Return objects as YAML documents."""
    with errors.optional("writing manifests", package="PyYAML", extra="kubernetes"):
        import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
        # YAML parsers differ on the types of y, 1e9 and 12:30; all read a quoted string as a string.
        style = None if PLAIN.fullmatch(value) else '"'
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)

    Dumper.add_representer(str, text)
    return yaml.dump_all(made, Dumper=Dumper, sort_keys=False, explicit_start=True, width=1 << 20)


def _queue(volume: datavolume.DataVolume, settings: datavolume_pod.Settings) -> str:
    return settings.queue or volume.labels.get(QUEUE, "")


def _check(volume: datavolume.DataVolume, settings: datavolume_pod.Settings) -> None:
    faults = []
    source, claim = volume.source, volume.claim
    if claim.size is None:
        path = f"spec.{claim.section}.resources.requests.storage"
        faults.append(f"{path}: missing; only CDI's controllers can look it up at the source")
    namespace = source.value("namespace")
    if source.kind in datavolume.CLONES and volume.namespace not in {"", namespace}:
        where = f"{namespace!r} is not {volume.namespace!r}"
        faults.append(f"spec.source.{source.kind}.namespace: {where}; only CDI clones across namespaces")
    if settings.suspend and (queue := _queue(volume, settings)):
        held = "to hold the queue, set spec.stopPolicy: Hold in it"
        faults.append(f"--suspend: Kueue starts the Jobs of queue {queue!r}; omit --suspend; {held}")
    if settings.verify and (source.kind in {*datavolume.CLONES, "upload", "blank"} or volume.is_archive):
        what = "an archive" if volume.is_archive else f"source {source.kind}"
        faults.append(f"--verify: {what}: there is no disk to compare with")
    if faults:
        raise errors.RequestError(*faults)


def _claim(volume: datavolume.DataVolume, settings: datavolume_pod.Settings) -> Object:
    spec = {name: value for name, value in volume.claim.spec.items() if value is not None}
    if volume.claim.section == "storage":
        spec.setdefault("accessModes", ["ReadWriteOnce"])
        if not volume.claim.block:
            size = volume.claim.size_with(settings.overhead) // units.MIB
            spec["resources"] = {"requests": {"storage": f"{size}Mi"}}
    name = volume.source.value("name")
    if volume.source.kind == "pvc":
        spec["dataSource"] = {"kind": "PersistentVolumeClaim", "name": name}
    elif volume.source.kind == "snapshot":
        group = "snapshot.storage.k8s.io"
        spec["dataSource"] = {"apiGroup": group, "kind": "VolumeSnapshot", "name": name}
    annotations = {
        name: value
        for name, value in volume.annotations.items()
        if name != "kubectl.kubernetes.io/last-applied-configuration"
    }
    metadata = _metadata(volume, volume.name)
    if annotations:
        metadata["annotations"] = annotations
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def _job(pod: datavolume_pod.Pod, role: str, main: Object) -> Object:
    """Return the Job of a pod. ``main``: the pod's container."""
    volume, settings = pod.volume, pod.settings
    spec: Object = {"backoffLimit": REPLACED}
    if settings.ttl is not None:
        spec["ttlSecondsAfterFinished"] = settings.ttl
    queue = _queue(volume, settings)
    if settings.suspend or queue:
        # Kueue's webhook suspends a Job, too. If Kueue is not there yet, no Job of a queue must start.
        spec["suspend"] = True
    if not pod.restarts:
        rule = {"action": "FailJob", "onExitCodes": {"operator": "In", "values": REPORTED}}
        spec["podFailurePolicy"] = {"rules": [rule]}
    spec["template"] = _template(pod, main)
    # The name of a Job or a Service has at most 63 characters, and no dots.
    name = f"{role}-{volume.name}"
    plain = name.replace(".", "-")
    if plain != name or len(name) > 63:
        name = f"{plain[:54]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    metadata = _metadata(volume, name)
    if queue:
        metadata["labels"] |= {QUEUE: queue}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def _template(pod: datavolume_pod.Pod, main: Object) -> Object:
    user = datavolume_pod.QEMU
    spec: Object = {
        "restartPolicy": "OnFailure" if pod.restarts else "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": user,
            "runAsGroup": user,
            "fsGroup": user,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **pod.more,
    }
    if pod.volume.priority_class:
        spec["priorityClassName"] = pod.volume.priority_class
    if pod.volume.service_account:
        spec["serviceAccountName"] = pod.volume.service_account
    if pod.before:
        spec["initContainers"] = pod.before
    spec |= {"containers": [main, *pod.beside], "volumes": pod.volumes}
    given = pod.volume.annotations
    annotations = {
        name: value for name, usual in POD_ANNOTATIONS.items() if (value := given.get(name, usual))
    }
    # The Job is what waits in a queue: with this label, Kueue could also take its pods for waiting ones.
    labels = {name: value for name, value in pod.volume.labels.items() if name != QUEUE}
    metadata: Object = {
        "annotations": annotations | pod.annotations,
        "labels": {**LABELS, **MONITORED, **labels},
    }
    return {"metadata": metadata, "spec": spec}


def _metadata(volume: datavolume.DataVolume, name: str) -> Object:
    made: Object = {"name": name, "labels": {**LABELS, **volume.labels}}
    namespace = volume.namespace or volume.source.value("namespace")
    if namespace:
        made["namespace"] = namespace
    return made
