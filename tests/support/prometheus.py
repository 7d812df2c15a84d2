"""A real Prometheus that scrapes workers on this machine."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tests.support import processes

#: Seconds between two scrapes.
INTERVAL = 1


@dataclasses.dataclass(frozen=True)
class Server:
    """A running Prometheus."""

    port: int

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the series of an expression now: ``metric`` and ``value`` of each."""
        asked = urllib.parse.urlencode({"query": expression})
        url = f"http://127.0.0.1:{self.port}/api/v1/query?{asked}"
        with urllib.request.urlopen(url, timeout=processes.PATIENCE) as answer:
            found = json.load(answer)
        assert found["status"] == "success"
        return list(found["data"]["result"])


@contextlib.contextmanager
def running(directory: Path, pods: Mapping[str, int]) -> Iterator[Server]:
    """Run Prometheus; ``pods``: the metrics ports of workers by the name of their pod."""
    processes.need("prometheus")
    job = {
        "job_name": "worker",
        "scheme": "https",
        "tls_config": {"insecure_skip_verify": True},
        "static_configs": [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"namespace": "vms", "pod": pod}}
            for pod, port in pods.items()
        ],
    }
    configuration = directory / "prometheus.json"
    # JSON is YAML.
    configuration.write_text(
        json.dumps({"global": {"scrape_interval": f"{INTERVAL}s"}, "scrape_configs": [job]})
    )
    port = processes.free_port()
    argv = [
        "prometheus",
        f"--config.file={configuration}",
        f"--storage.tsdb.path={directory / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    log = directory / "prometheus.log"
    with processes.running(argv, log=log, ready=lambda: _is_ready(port)):
        yield Server(port)


def _is_ready(port: int) -> bool:
    """Report whether queries are answered: it listens before it has opened its storage."""
    address = f"http://127.0.0.1:{port}/-/ready"
    with contextlib.suppress(OSError), urllib.request.urlopen(address, timeout=1):
        return True
    return False
