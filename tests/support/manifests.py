"""DataVolume manifests with the objects they refer to, run by the command line."""

from __future__ import annotations

import base64
import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from cdi_worker.importer.kubernetes import datavolume
from tests.support import worker

MIB = 1 << 20
SIZE = 32 * MIB
IMPORTED = ["Pending", "ImportScheduled", "ImportInProgress", "Succeeded"]


@dataclasses.dataclass
class Workspace:
    """A directory with a manifest, its Secrets and ConfigMaps, and the target."""

    directory: Path
    documents: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    @property
    def target(self) -> Path:
        """Return the path of the disk to be written."""
        return self.directory / "disk.img"

    def volume(self, source: dict[str, Any], *, size: str | None = "32Mi", **spec: Any) -> None:
        """Add a DataVolume; ``spec`` adds or replaces fields of its spec."""
        requests = {} if size is None else {"resources": {"requests": {"storage": size}}}
        self.documents.append(
            {
                "apiVersion": datavolume.API_VERSION,
                "kind": "DataVolume",
                "metadata": {"name": "x"},
                "spec": {"source": source, "storage": requests} | spec,
            }
        )

    def secret(self, name: str, **data: str) -> None:
        """Add a Secret."""
        encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
        self.documents.append({"kind": "Secret", "metadata": {"name": name}, "data": encoded})

    def config_map(self, name: str, **data: str) -> None:
        """Add a ConfigMap."""
        self.documents.append({"kind": "ConfigMap", "metadata": {"name": name}, "data": data})

    def run(self, *arguments: str | Path, target: Path | None = None, **env: str) -> worker.Completed:
        """Run ``cdi-worker run`` with the manifest, the target and further arguments."""
        path = self.directory / "dv.yaml"
        path.write_text(yaml.safe_dump_all(self.documents))
        where = f"--target={target or self.target}"
        return worker.run("run", path, where, "--stall-timeout=5", *arguments, env=env)

    def plan(self, *arguments: str | Path, **env: str) -> dict[str, Any]:
        """Return the plan printed by a dry run, and check that the dry run leaves nothing behind."""
        done = self.run("--dry-run", "--json", *arguments, **env)
        assert done.status == 0, done.errors
        assert not self.target.exists()
        return dict(json.loads(done.output))


def phases(done: worker.Completed) -> list[str]:
    """Return the phases printed by a run, in order."""
    return [line.split()[0] for line in done.output.splitlines()]
