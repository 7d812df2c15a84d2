"""Helper programs of CDI's importer image, with their flags: polling of sources and size detection."""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click
import requests
import urllib3

from cdi_worker import errors, masking, sources
from cdi_worker.formats import smalljson
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, report, request
from cdi_worker.importer.commands import parameters
from cdi_worker.importer.roles import importer
from cdi_worker.sources import certificates, fields, smallfile, watched
from cdi_worker.sources.web import connections
from cdi_worker.sources.web import session as sessions

log = logging.getLogger(__name__)

#: The settings of a remedy where CDI starts the poller, which is for registries only.
OF_REGISTRY: Final = {
    "ca_files": "spec.template.spec.source.registry.certConfigMap",
    "insecure": "insecureRegistries in the configuration of CDI",
}
#: The same where a CronJob starts it.
NAMES: Final = {"ca_files": "-certdir", "insecure": "INSECURE_TLS"}
VARIABLES: Final = (
    contract.Variable("KUBERNETES_SERVICE_HOST", "address of the cluster's API server", required=True),
    contract.Variable("KUBERNETES_SERVICE_PORT", "its port", "443"),
)
#: Folder of the service account in a pod (Kubernetes, "Accessing the Kubernetes API from a Pod").
ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


@click.command("cdi-source-update-poller", hidden=True)
@click.option("-ns", "namespace", required=True, help="Namespace of the DataImportCron.")
@click.option("-cron", "name", required=True, help="Name of the DataImportCron.")
@click.option("-url", "url", required=True, help="Disk to watch (docker://, https://, s3://, gs://, …).")
@parameters.option(
    parameters.GENERAL,
    "--checksum-file",
    "sums",
    here=True,
    help="File with the checksum of the disk (URL), instead of itself.",
)
@click.option("-certdir", "certificates", default="", help="Folder of CA certificates to trust.")
@click.option("--account", default=ACCOUNT, help="Folder of the pod's credentials.")
@click.pass_obj
def poll(obj: parameters.Context, /, url: str, certificates: str, sums: str | None, **cron: str) -> int:
    """Write a source's digest to its DataImportCron."""
    env = contract.environment()
    watching = Cron(env=env, **cron)
    source = sources.find_scheme(url.partition("://")[0] if "://" in url else "")
    given = {
        **env,
        "IMPORTER_SOURCE": source.name,
        "IMPORTER_ENDPOINT": url,
        "IMPORTER_CERT_DIR": certificates,
        "IMPORTER_PROXY_CERT_DIR": "/proxycerts/",
    }
    # The Secrets and proxies of an importer in this environment.
    where = importer.read(given, contract.Paths()).location
    try:
        found = watched.digest(source, where, sums or "", request.CONNECT_PATIENCE, obj.cancel)
    except errors.Error as err:
        names = OF_REGISTRY if source.name == "registry" else NAMES
        text = err.message(names)
        log.error("failed: %s", text)  # noqa: TRY400  (one line for the reader of the pod's log)
        log.debug("trace", exc_info=True)
        return err.status
    click.echo(f"{'wanted' if watching.note(named(found)) else 'known'}: {found}")
    return 0


@click.command("cdi-image-size-detection", hidden=True)
@click.option("-image-path", "path", required=True, help="Disk to measure.")
@click.option("--termination-log", default=contract.Paths().termination_log)
def measure(path: str, termination_log: str) -> int:
    """Write the size of a disk to the termination log."""
    # Disks on CDI's volumes are raw. Their first bytes belong to the guest and are not interpreted.
    with (
        errors.on_target(path, "look at"),
        open(path, "rb", buffering=0, opener=smallfile.open_without_wait) as disk,
    ):
        size = disk.seek(0, os.SEEK_END)
    click.echo(size)
    return report.write(report.Report(str(size), 0, unsaid=1), termination_log)


#: Annotation with the digest to import next; CDI's controller watches it.
DESIRED = "cdi.kubevirt.io/storage.import.sourceDesiredDigest"
#: Seconds to wait for the API server.
TIMEOUT = 30
#: Bytes of an answer: etcd stores objects of at most 1.5 MiB.
LARGEST = 4 << 20
#: Attempts to update an object that others change at the same time.
ATTEMPTS = 5


class Cron:
    """A DataImportCron of this pod's cluster. ``account``: the folder of the service account."""

    def __init__(self, namespace: str, name: str, account: str, env: Mapping[str, str]) -> None:
        reading = contract.Reading(env, VARIABLES)
        host, port = reading.text("KUBERNETES_SERVICE_HOST"), reading.text("KUBERNETES_SERVICE_PORT")
        if reading.faults:
            raise errors.RequestError(f"{reading.faults[0]}; run this command in a pod")
        host = f"[{host}]" if ":" in host else host
        path = f"/apis/cdi.kubevirt.io/v1beta1/namespaces/{namespace}/dataimportcrons/{name}"
        self.url = f"https://{host}:{port}{path}"
        self._name = name
        self._account = Path(account)

    def note(self, digest: str) -> bool:
        """Request the import of ``digest`` unless it is imported or requested; return whether it was new."""
        for _ in range(ATTEMPTS):
            cron = self._call("GET")
            try:
                # Kubernetes leaves empty maps out; others write null.
                metadata, status = cron["metadata"], cron.get("status") or {}
                annotations = metadata.get("annotations") or {}
                if metadata.get("name") != self._name:
                    raise self._odd()
                if digest in (status.get("currentImportDigest"), annotations.get(DESIRED)):
                    return False
                metadata["annotations"] = {**annotations, DESIRED: digest}
            except (AttributeError, KeyError, TypeError) as err:
                raise self._odd() from err
            # CDI's role allows update, not patch. The resource version detects changes by others.
            if self._call("PUT", cron) is not None:
                return True
        raise errors.Transient(
            url=self.url, reason=f"changed by another client at each of {ATTEMPTS} attempts"
        )

    def _odd(self) -> errors.Unreachable:
        return errors.Unreachable(url=self.url, reason="the answer is not the DataImportCron")

    def _call(self, method: str, body: object = None) -> Any:
        """Return the API server's answer, None for a conflict (409). Raises ``Unreachable``."""
        try:
            path = self._account / "token"
            token = fields.named(fields.token, path.read_text(encoding="utf-8"), str(path))
            masking.register(self, token)
            tls = certificates.context()
            certificates.trust(tls, str(self._account / "ca.crt"))
            with requests.Session() as session:
                session.trust_env = False
                session.mount("https://", connections.Adapter(lambda: tls, 1, cancelling.NEVER))
                with session.request(
                    method,
                    self.url,
                    json=body,
                    headers={"Authorization": f"Bearer {token}"},
                    timeout=TIMEOUT,
                    allow_redirects=False,
                    stream=True,
                ) as answer:
                    if answer.status_code == requests.codes.conflict:
                        return None
                    answer.raise_for_status()
                    data = sessions.body(answer, LARGEST)
            if len(data) > LARGEST:
                raise self._odd()
            return smalljson.parse(data)
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError) as err:
            raise errors.Unreachable(url=self.url, reason=err) from err
        except ValueError as err:
            raise self._odd() from err


def named(digest: str) -> str:
    """Return a digest in the form from which CDI's controller makes the name of a DataVolume.

    It takes only ``sha256:`` and ``uid:`` and uses the first 12 characters after it (``createDvName``, in
    CDI's pkg/controller/dataimportcron-controller.go). Other digests are hashed.
    """
    if re.fullmatch(r"sha256:[0-9a-f]{64}", digest):
        return digest
    return f"sha256:{hashlib.sha256(digest.encode()).hexdigest()}"
