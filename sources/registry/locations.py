"""The location of a container image."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import ClassVar

from cdi_worker.sources import base, fields


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registry(base.Location):
    """``docker://host/repository[:tag|@digest]`` or ``oci-archive:PATH[:tag]``.

    ``auth_file``: a Docker configuration file with registry credentials.
    """

    #: The folder may also hold client certificates and keys (containers-certs.d(5)).
    certificates: ClassVar[tuple[str, ...]] = (".crt", ".pem")

    architecture: str = fields.field(
        env="IMPORTER_REGISTRY_IMAGE_ARCHITECTURE",
        option="--architecture",
        help="Architecture of the container image [default: this machine's, or the only one].",
        key="platform.architecture",
        # A digest is that of the index, for all architectures.
        verbs=fields.READ,
    )
    layer_annotation: str = fields.field(
        env="CDI_WORKER_LAYER_ANNOTATION",
        option="--layer-annotation",
        help="Annotation of the layer that is the disk: io.kubevirt.disk.name=NAME; may be repeated.",
        key="layerAnnotation",
        lines=True,
    )
    auth_file: str = fields.field(
        env="REGISTRY_AUTH_FILE",
        ambient=True,
        option="--auth-file",
        help="Docker configuration file with registry credentials.",
        file=True,
        selects=False,
    )
    docker_config: str = fields.field(
        env="DOCKER_CONFIG",
        ambient=True,
        help="Folder of Docker's `config.json` with registry credentials.",
        selects=False,
    )

    @property
    def unverifiable(self) -> str:
        return ""

    @property
    def annotations(self) -> dict[str, str]:
        """The annotations that the layer must have."""
        pairs = (line.partition("=") for line in self.layer_annotation.splitlines() if line.strip())
        return {key.strip(): value for key, _, value in pairs}

    def faults(self) -> Iterator[str]:
        yield from base.Location.faults(self)
        for line in self.layer_annotation.splitlines():
            key, equals, _ = line.partition("=")
            if line.strip() and not (equals and key.strip()):
                yield f"layer annotation {line!r} is not KEY=VALUE"

    @property
    def credentials_file(self) -> str:
        """The file with registry credentials; empty without one."""
        found = pathlib.Path(self.docker_config, "config.json")
        return self.auth_file or (str(found) if self.docker_config and found.is_file() else "")
