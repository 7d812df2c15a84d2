"""DataVolume manifests with the objects they refer to."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path
from typing import Any

import yaml

from cdi_worker.importer.kubernetes import datavolume
from tests.support import worker


@dataclasses.dataclass
class Workspace:
    """A directory with a manifest, its Secrets and ConfigMaps."""

    directory: Path
    documents: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def volume(self, source: dict[str, Any], **spec: Any) -> None:
        """Add a DataVolume; ``spec`` adds or replaces fields of its spec."""
        storage = {"resources": {"requests": {"storage": "32Mi"}}}
        self.documents.append(
            {
                "apiVersion": datavolume.API_VERSION,
                "kind": "DataVolume",
                "metadata": {"name": "x"},
                "spec": {"source": source, "storage": storage} | spec,
            }
        )

    def secret(self, name: str, **data: str) -> None:
        """Add a Secret."""
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
        self.documents.append({"kind": "Secret", "metadata": {"name": name}, "data": encoded})

    def config_map(self, name: str, **data: str) -> None:
        """Add a ConfigMap."""
        self.documents.append({"kind": "ConfigMap", "metadata": {"name": name}, "data": data})

    def printed(self, *arguments: str | Path, **env: str) -> worker.Completed:
        """Run ``cdi-worker manifest`` with these documents."""
        path = self.directory / "dv.yaml"
        path.write_text(yaml.safe_dump_all(self.documents))
        return worker.call("manifest", path, "--image=x", *arguments, env=env)

    def gets_scratch(self, *arguments: str | Path, **env: str) -> bool:
        """Return whether the pod gets scratch space after its source was contacted."""
        done = self.printed("--contact", *arguments, **env)
        assert done.status == 0, done.errors
        (job,) = (each for each in yaml.safe_load_all(done.output) if each["kind"] == "Job")
        volumes = job["spec"]["template"]["spec"]["volumes"]
        return "scratch" in {volume["name"] for volume in volumes}
