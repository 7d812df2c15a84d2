"""The pod that imports a DataVolume without CDI: environment and mounts of the worker contract."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from cdi_worker import units
from cdi_worker.importer import contract
from cdi_worker.importer.kubernetes import datavolume
from cdi_worker.importer.request import Request
from cdi_worker.sources import base, fields

#: User and group of qemu in KubeVirt's images, who must own the disk. CDI's pods run as them.
QEMU = 107
#: CDI's default for a worker.
RESOURCES = {"requests": {"cpu": "100m", "memory": "60M"}, "limits": {"cpu": "750m", "memory": "600M"}}

#: Times that a failed import is repeated in its pod, for 8 minutes in all. Another pod of the Job would have
#: another scratch claim, and the claim of this one would stay until the Job is deleted: a claim that an ended
#: pod refers to cannot be deleted (kubernetes/kubernetes#120756). A killed pod is replaced nevertheless. To
#: restart its container in place needs ``restartPolicyRules`` of Kubernetes 1.35, and such restarts are not
#: counted: a pod that is always killed would never fail.
RETRIES = 8

PATHS = contract.Paths()

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings beyond the manifest. ``overhead``: the part of a file system to leave free.

    ``scratch``: whether to mount scratch; None: if it may be needed. ``ttl``: seconds after which
    a finished Job is deleted, with its pods and their scratch. ``queue``: the LocalQueue of Kueue, also as a
    label of the DataVolume. ``after``: the checkpoint already on the volume. ``verify``: compare the disk on
    the claim, and write nothing.
    """

    image: str
    overhead: Fraction
    scratch: bool | None = None
    scratch_class: str | None = None
    suspend: bool = False
    queue: str | None = None
    ttl: int | None = None
    after: str = ""
    verify: bool = False


@dataclasses.dataclass
class Pod:
    """The parts of a pod, as its source and volume need them."""

    volume: datavolume.DataVolume
    settings: Settings
    env: list[Object] = dataclasses.field(default_factory=list)
    mounts: list[Object] = dataclasses.field(default_factory=list)
    volumes: list[Object] = dataclasses.field(default_factory=list)
    before: list[Object] = dataclasses.field(default_factory=list)
    beside: list[Object] = dataclasses.field(default_factory=list)
    more: Object = dataclasses.field(default_factory=dict)
    annotations: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def restarts(self) -> bool:
        """Whether the kubelet restarts the container that failed: not the stages before it.

        The server of a node pull would otherwise keep a pod alive whose import has failed.
        """
        return self.volume.source.node_pull or len(self.stages) > 1

    @property
    def stages(self) -> tuple[base.Stage, ...]:
        """The stages that run. A disk is compared with the whole source as of the last one."""
        if self.settings.verify:
            return tuple(each._replace(previous="") for each in self.volume.checkpoints[-1:])
        return self.volume.stages_after(self.settings.after)

    @property
    def size(self) -> int:
        """The size of the claim in bytes."""
        return self.volume.claim.size_with(self.settings.overhead)

    @property
    def overhead(self) -> str:
        """The part of the volume that its file system needs, in the contract's form: ``0.06``, ``0``."""
        return "0" if self.volume.claim.block else f"{float(self.settings.overhead):g}"

    def set(self, **values: str) -> None:
        """Add environment variables; empty ones are left out."""
        # In a manifest $(NAME) stands for another variable, and $$ for $.
        self.env += [
            {"name": name, "value": value.replace("$", "$$")} for name, value in values.items() if value
        ]

    def set_from(self, name: str, source: Object) -> None:
        self.env.append({"name": name, "valueFrom": source})

    def mount(self, name: str, path: str, source: Object, **more: Any) -> None:
        self.volumes.append({"name": name, **source})
        self.mounts.append({"name": name, "mountPath": path, **more})

    def container(self, name: str, **more: Any) -> Object:
        """Return a container of our image with the environment and mounts so far."""
        args = ["-v=1", "--strict-exit-status"]
        if not self.restarts:
            args.append(f"--retries={RETRIES}")
        made: Object = {"args": args, **more, "env": list(self.env), "volumeMounts": list(self.mounts)}
        if self.volume.claim.block:
            made["volumeDevices"] = [{"name": "data", "devicePath": PATHS.block}]
        return self.helper(name, self.settings.image, **made)

    def helper(self, name: str, image: str, **more: Any) -> Object:
        """Return a container with limits and the Pod Security Standards' restricted profile."""
        return {
            "name": name,
            "image": image,
            "imagePullPolicy": "IfNotPresent",
            **more,
            "resources": RESOURCES,
            "securityContext": {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
                "readOnlyRootFilesystem": True,
            },
            "terminationMessagePolicy": "FallbackToLogsOnError",
        }

    def add_claim(self) -> None:
        """Mount the claim."""
        claim: Object = {"claimName": self.volume.name}
        if self.settings.verify:
            claim["readOnly"] = True
        source = {"persistentVolumeClaim": claim}
        if self.volume.claim.block:
            self.volumes.append({"name": "data", **source})
        else:
            self.mount("data", PATHS.data, source)

    def add_target(self) -> None:
        """Mount the claim, scratch if it may be needed, and a folder for temporary files."""
        self.add_claim()
        claim, kind = self.volume.claim, self.volume.source.kind
        # No controller starts a pod again with scratch: it is there unless the source never needs it.
        needs_scratch = self.settings.scratch
        if needs_scratch is None and kind == "imageio":
            needs_scratch = any(stage.previous for stage in self.volume.checkpoints)
        elif needs_scratch is None:
            never = kind in {"blank", "vddk", "vsphere", "kubevirt"}
            needs_scratch = not never and not self.volume.is_archive
        if needs_scratch:
            # An ephemeral claim, deleted with the pod, of the size that CDI uses: a disk as large as the
            # target must fit on it, and it always has a file system.
            size = units.volume_size(self.size, self.settings.overhead) if claim.block else self.size
            spec: Object = {
                "accessModes": ["ReadWriteOnce"],
                "volumeMode": "Filesystem",
                "resources": {"requests": {"storage": str(size)}},
            }
            given = self.settings.scratch_class
            storage_class = claim.storage_class if given is None else given
            if storage_class is not None:
                spec["storageClassName"] = storage_class
            self.mount("scratch", PATHS.scratch, {"ephemeral": {"volumeClaimTemplate": {"spec": spec}}})
        # Sockets and bundles of certificates; the root file system is read-only.
        self.mount("tmp", "/tmp", {"emptyDir": {"sizeLimit": "64Mi"}})  # noqa: S108  (the directory of a container)


def boolean(value: object) -> str:
    """Return a boolean in the contract's form."""
    return "true" if value else "false"


#: The hand-shake of a node pull (contract, Node pull).
SHARED = "/shared"
NODE_PORT = 8100
#: The folder of the upload server's certificates, and its port.
UPLOAD_TLS = "/upload-tls"
UPLOAD_PORT = 8443
#: The folder of keys for signatures.
SIGNATURES = "/signatures/signed-by"


def upload(pod: Pod) -> Object:
    """Return the container of an upload server."""
    # The user creates it.
    secret = {"secret": {"secretName": f"{pod.volume.name}-upload"}}
    pod.mount("tls", UPLOAD_TLS, secret, readOnly=True)
    pod.set(
        TLS_CERT_FILE=f"{UPLOAD_TLS}/tls.crt",
        TLS_KEY_FILE=f"{UPLOAD_TLS}/tls.key",
        CLIENT_CERT_FILE=f"{UPLOAD_TLS}/ca.crt",
        CLIENT_NAME="uploadclient",
        UPLOAD_IMAGE_SIZE=str(pod.size),
        FILESYSTEM_OVERHEAD=pod.overhead,
        PREALLOCATION=boolean(pod.volume.preallocation),
    )
    probe = {"httpGet": {"path": "/healthz", "port": UPLOAD_PORT, "scheme": "HTTPS"}}
    _add_signatures(pod)
    ports = [{"name": "upload", "containerPort": UPLOAD_PORT}]
    return pod.container("uploadserver", ports=ports, readinessProbe=probe)


def importer(pod: Pod) -> Object:
    """Return the container of an import; add the containers that run before and beside it."""
    source = pod.volume.source
    if source.node_pull:
        _add_node_pull(pod)
    else:
        pod.set(IMPORTER_SOURCE=source.provider.name, IMPORTER_ENDPOINT=source.url)
    pod.set(
        IMPORTER_CONTENTTYPE=pod.volume.content_type,
        IMPORTER_IMAGE_SIZE=str(pod.size),
        FILESYSTEM_OVERHEAD=pod.overhead,
        PREALLOCATION=boolean(pod.volume.preallocation),
        CDI_WORKER_DISK=pod.volume.disk,
        CDI_WORKER_VERIFY="true" if pod.settings.verify else "",
        **_variables(source),
        **{
            f"IMPORTER_EXTRA_HEADER_{number}": each
            for number, each in enumerate(source.value("extraHeaders", ()))
        },
    )
    # The same for all pods of a Job, so that a pod resumes where the one before was killed.
    label = "metadata.labels['batch.kubernetes.io/controller-uid']"
    pod.set_from("OWNER_UID", {"fieldRef": {"fieldPath": label}})
    _add_secrets(pod)
    _add_signatures(pod)
    if image := source.value("initImageURL"):
        # VMware's library may not be redistributed: the user's image copies it into /opt.
        volume = {"name": "vddk", "mountPath": contract.LIBRARY_VOLUME}
        pod.before.append(pod.helper("vddk", image, volumeMounts=[volume]))
        library = "vmware-vix-disklib-distrib"
        path = f"{contract.LIBRARY_VOLUME}/{library}"
        pod.mount("vddk", path, {"emptyDir": {}}, subPath=library, readOnly=True)
        # There is no library for other machines; a cluster may have both kinds.
        pod.more["nodeSelector"] = {"kubernetes.io/arch": "amd64"}
    if name := source.value("extraArgs"):
        pod.mount("vddk-args", "/vddk-args", {"configMap": {"name": name}}, readOnly=True)
    # The last stage is the pod's container, each earlier one an init container.
    stages, common = pod.stages, pod.env
    for number, stage in enumerate(stages, 1):
        is_last = number == len(stages)
        pod.env = list(common)
        pod.set(
            IMPORTER_PREVIOUS_CHECKPOINT=stage.previous,
            IMPORTER_CURRENT_CHECKPOINT=stage.current,
            IMPORTER_FINAL_CHECKPOINT=boolean(is_last and pod.volume.final),
        )
        if not is_last:
            pod.before.append(pod.container(f"stage-{number}"))
    ports = [{"name": "metrics", "containerPort": PATHS.metrics_port}]
    return pod.container("importer", ports=ports)


def _variables(source: datavolume.Source) -> dict[str, str]:
    """Return the variables of the fields that the DataVolume's source has (``sources.fields``)."""
    # The importer of a node pull does not see the registry.
    owners = () if source.node_pull else (source.provider.location_type,)
    values = {
        field.env: source.value(field.key) or ""
        for owner in (*owners, Request, base.Access)
        for _, field, _ in fields.declared(owner)
        if field.env and field.key and not field.entry
    }
    return {name: boolean(value) if isinstance(value, bool) else value for name, value in values.items()}


def _add_secrets(pod: Pod) -> None:
    source = pod.volume.source
    secret = {"secret": {"secretName": source.secret}}
    if source.secret and source.kind == "gcs":
        pod.mount("credentials", "/google", secret, readOnly=True)
        pod.set(GOOGLE_APPLICATION_CREDENTIALS="/google/credentials.json")
    elif source.secret and source.kind == "kubevirt":
        pod.mount("export-token", "/export-token", secret, readOnly=True)
    elif source.secret and not source.node_pull:
        for name, key in (("IMPORTER_ACCESS_KEY_ID", "accessKeyId"), ("IMPORTER_SECRET_KEY", "secretKey")):
            pod.set_from(name, {"secretKeyRef": {"name": source.secret, "key": key}})
        if source.kind == "s3":
            token = {"name": source.secret, "key": "sessionToken", "optional": True}
            pod.set_from("IMPORTER_SESSION_TOKEN", {"secretKeyRef": token})
    if (certificates := source.value("certConfigMap")) and not source.node_pull:
        pod.mount("certs", "/certs", {"configMap": {"name": certificates}}, readOnly=True)
        pod.set(IMPORTER_CERT_DIR="/certs")
    for index, name in enumerate(source.value("secretExtraHeaders", ())):
        path = f"{PATHS.extra_headers}/{index}"
        pod.mount(f"headers-{index}", path, {"secret": {"secretName": name}}, readOnly=True)


def _add_signatures(pod: Pod) -> None:
    """Mount the keys of the demanded signatures; a source that cannot verify them refuses in the pod."""
    for field, value in pod.volume.demand.items():
        if field == "signed_by":
            pod.mount("signed-by", SIGNATURES, {"configMap": {"name": value}}, readOnly=True)
        text = SIGNATURES if field == "signed_by" else value
        pod.set(**{f"{contract.PREFIX}_{field.upper()}": text})


def _add_node_pull(pod: Pod) -> None:
    source = pod.volume.source
    ready, done, server = (f"{SHARED}/{name}" for name in ("ready", "done", "server"))
    pod.set(
        IMPORTER_SOURCE="http",
        IMPORTER_ENDPOINT=f"http://localhost:{NODE_PORT}/disk.img",
        IMPORTER_PULL_METHOD="node",
        IMPORTER_READY_FILE=ready,
        IMPORTER_DONE_FILE=done,
    )
    pod.mount("shared", SHARED, {"emptyDir": {"sizeLimit": "64Mi"}})
    shared = [{"name": "shared", "mountPath": SHARED}]
    copy = ["cp", "/usr/bin/cdi-containerimage-server", server]
    pod.before.append(pod.helper("copy-server", pod.settings.image, command=copy, volumeMounts=shared))
    serve = [server, "-p", str(NODE_PORT), "-image-dir", "/disk", "-ready-file", ready, "-done-file", done]
    image = source.value("imageStream") or source.url.removeprefix("docker://")
    pod.beside.append(pod.helper("server", image, command=serve, volumeMounts=shared))
    if source.secret:
        pod.more["imagePullSecrets"] = [{"name": source.secret}]
    if architecture := source.value("platform.architecture"):
        pod.more["nodeSelector"] = {"kubernetes.io/arch": architecture}
    if source.value("imageStream"):
        pod.annotations["alpha.image.policy.openshift.io/resolve-names"] = "*"
