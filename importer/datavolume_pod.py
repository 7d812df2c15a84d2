"""The pod that carries out a DataVolume without CDI: the worker contract's environment and mounts."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from typing import Any

from importer import contract, datavolume

#: User and group of qemu in KubeVirt's images, to which the disk shall belong; CDI's pods run as them.
QEMU = 107
#: What CDI gives a worker when nobody says otherwise.
RESOURCES = {"requests": {"cpu": "100m", "memory": "60M"}, "limits": {"cpu": "750m", "memory": "600M"}}

PATHS = contract.Paths()

Object = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the manifest does not say. ``overhead``: the part of a file system to leave free.

    ``scratch``: whether to mount scratch; None: unless it is known not to be needed. ``after``: the
    checkpoint that is on the volume already.
    """

    image: str
    overhead: Fraction
    scratch: bool | None = None
    scratch_class: str | None = None
    suspend: bool = False
    after: str = ""


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

    def set(self, **values: str) -> None:
        """Add variables of the environment; empty ones say nothing and are left out."""
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
        """Return a container of our image with what has been gathered."""
        made: Object = {"name": name, "image": self.settings.image, "imagePullPolicy": "IfNotPresent"}
        made |= {"args": ["-v=1", "--strict-exit-status"], **more, "env": list(self.env)}
        made |= {"volumeMounts": list(self.mounts)}
        if self.volume.claim.block:
            made["volumeDevices"] = [{"name": "data", "devicePath": PATHS.block}]
        return _restricted(made)

    def helper(self, name: str, image: str, **more: Any) -> Object:
        """Return a container of another image, or of ours for another purpose."""
        return _restricted({"name": name, "image": image, "imagePullPolicy": "IfNotPresent", **more})


def needs_scratch(volume: datavolume.DataVolume, settings: Settings) -> bool:
    """Tell whether scratch is mounted: where it is needed, and where only the bytes can tell.

    A pod without a controller cannot ask for scratch and be started again.
    """
    if settings.scratch is not None:
        return settings.scratch
    if volume.source.kind == "imageio":
        return any(stage.previous for stage in volume.checkpoints)
    return volume.source.kind not in {"blank", "vddk"} and not volume.is_archive


def overhead(volume: datavolume.DataVolume, settings: Settings) -> Fraction:
    """Return the part of the volume to leave to its file system."""
    return Fraction(0) if volume.claim.block else settings.overhead


def _restricted(container: Object) -> Object:
    """Return a container as the Pod Security Standards' restricted profile wants it, with limits."""
    return container | {
        "resources": RESOURCES,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def add_claim(pod: Pod) -> None:
    """Give the pod its volume."""
    source = {"persistentVolumeClaim": {"claimName": pod.volume.name}}
    if pod.volume.claim.block:
        pod.volumes.append({"name": "data", **source})
    else:
        pod.mount("data", PATHS.data, source)


def add_target(pod: Pod) -> None:
    """Give the pod its volume, scratch where it may need some, and a place for temporary files."""
    add_claim(pod)
    if needs_scratch(pod.volume, pod.settings):
        pod.mount("scratch", PATHS.scratch, {"ephemeral": _scratch(pod)})
    # Sockets and bundles of certificates; the root file system is read-only.
    pod.mount("tmp", "/tmp", {"emptyDir": {"sizeLimit": "64Mi"}})  # noqa: S108


def _scratch(pod: Pod) -> Object:
    """Return a claim that lives as long as the pod, of the size that CDI's has."""
    storage_class = pod.settings.scratch_class
    if storage_class is None:
        storage_class = pod.volume.claim.storage_class
    spec: Object = {
        "accessModes": ["ReadWriteOnce"],
        "volumeMode": "Filesystem",
        "resources": {"requests": {"storage": str(pod.volume.claim.size)}},
    }
    if storage_class is not None:
        spec["storageClassName"] = storage_class
    return {"volumeClaimTemplate": {"spec": spec}}


def claim_size(volume: datavolume.DataVolume, settings: Settings) -> int:
    """Return the bytes that the claim asks for."""
    return volume.claim.size_with(overhead(volume, settings))


def decimal(fraction: Fraction) -> str:
    """Return a fraction as the contract has it: ``0.06``, ``0``."""
    return f"{float(fraction):g}"


def boolean(value: object) -> str:
    """Return a truth as the contract has it."""
    return "true" if value else "false"
