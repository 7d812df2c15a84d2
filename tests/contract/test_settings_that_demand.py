"""No demand is dropped in silence: security settings, given in every way: empty, misspelt and valid."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

import cdi_worker
from cdi_worker import errors
from cdi_worker.importer import request
from cdi_worker.importer.kubernetes import datavolume, documents
from cdi_worker.sources import trust
from tests.support import misbehave, repository, signing, tls, worker

SIGNER = signing.Signer()
DISK = b"unsigned" * 512


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting. ``valid``: makes a valid value; ``outcome``: what is said then, empty: the import succeeds.

    ``misspelt``: its name without a letter. ``field``: of the library's ``Demand``. ``in_pods``: whether the
    role has a variable of its own for it; the others are CDI's.
    """

    name: str
    misspelt: str
    valid: Callable[[Path], str]
    outcome: str
    field: str = ""
    in_pods: bool = True

    @property
    def variable(self) -> str:
        return f"CDI_WORKER_{self.name.replace('-', '_').upper()}"

    @property
    def misspelt_variable(self) -> str:
        return f"CDI_WORKER_{self.misspelt.replace('-', '_').upper()}"


def _key(folder: Path) -> str:
    return SIGNER.write(folder / "key.pem")


def _authority(folder: Path) -> str:
    path = folder / "authorities"
    path.mkdir(exist_ok=True)
    return str(path)


def _ca_file(folder: Path) -> str:
    return str(tls.Authority(folder).certificate)


SETTINGS = (
    Setting("signed-by", "signedby", _key, "signature not verifiable", "signed_by"),
    Setting("checksum-file", "checksumfile", lambda _: "/missing/SUMS", "/missing/SUMS", "checksum_file"),
    Setting("checksum", "cheksum", lambda _: f"sha256:{64 * '0'}", "checksum mismatch", in_pods=False),
    Setting("ca-dir", "cadir", _authority, "", in_pods=False),
    Setting("ca-file", "cafile", _ca_file, "", in_pods=False),
)
IN_PODS = [each for each in SETTINGS if each.in_pods]


@pytest.fixture
def url(server: misbehave.Server) -> str:
    return server.serve("/disk", misbehave.Page(DISK))


@dataclasses.dataclass(frozen=True)
class Terminal:
    """Imports at a terminal, to a new disk."""

    url: str
    target: Path

    def refuses(self, *arguments: str, said: str, **env: str) -> None:
        done = worker.call("import", self.url, self.target, *arguments, env=env)
        assert (done.status, said in done.errors) == (2, True), done.errors
        assert not self.target.exists()

    def obeys(self, setting: Setting, *arguments: str, **env: str) -> None:
        done = worker.call("import", self.url, self.target, *arguments, env=env)
        assert (done.status == 0) == (not setting.outcome), done.errors
        assert setting.outcome in done.errors
        assert self.target.exists() == (not setting.outcome)
        self.target.unlink(missing_ok=True)


@pytest.fixture
def terminal(url: str, tmp_path: Path) -> Terminal:
    return Terminal(url, tmp_path / "disk.img")


def test_refusal_ends_the_command(url: str, tmp_path: Path) -> None:
    done = worker.run("import", url, tmp_path / "disk.img", "--signed-by=")
    assert (done.status, "'--signed-by': empty; give a value" in done.errors) == (2, True), done.errors
    done = worker.run("import", url, tmp_path / "disk.img", env={"CDI_WORKER_SIGNED_BY": ""})
    assert done.status == 2
    assert done.error_message == "CDI_WORKER_SIGNED_BY: empty; give it a value or unset it"
    assert not [*tmp_path.iterdir()]


# -- at a terminal -----------------------------------------------------------------------------


def test_empty_option_is_refused(terminal: Terminal, tmp_path: Path) -> None:
    for each in SETTINGS:
        option, valid = f"--{each.name}", each.valid(tmp_path)
        for values in ([""], [" "], [valid, ""]):
            given = [f"{option}={value}" for value in values]
            terminal.refuses(*given, said=f"Invalid value for '{option}'")


def test_misspelt_option_is_refused(terminal: Terminal) -> None:
    for each in SETTINGS:
        terminal.refuses(f"--{each.misspelt}=x", said="such option")


def test_empty_variable_is_refused(terminal: Terminal) -> None:
    for each in SETTINGS:
        for value in ("", " "):
            terminal.refuses(said=f"{each.variable}: empty", **{each.variable: value})


def test_misspelt_variable_is_refused(terminal: Terminal) -> None:
    for each in SETTINGS:
        near = f"{each.misspelt_variable}: unknown variable; did you mean '{each.variable}'?"
        terminal.refuses(said=near, **{each.misspelt_variable: "x"})


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda each: each.name)
def test_valid_value_is_obeyed(terminal: Terminal, setting: Setting, tmp_path: Path) -> None:
    value = setting.valid(tmp_path)
    terminal.obeys(setting, f"--{setting.name}={value}")
    terminal.obeys(setting, **{setting.variable: value})


# -- in a pod ----------------------------------------------------------------------------------


def refused(pod: worker.Pod, said: str, **env: str) -> None:
    assert pod.call(**env).status == 1
    assert said in pod.message, pod.message
    assert not [*pod.data.iterdir()]


def test_empty_variable_of_ours_is_refused_in_a_pod(pod: worker.Pod, url: str) -> None:
    for name in (*(each.variable for each in IN_PODS), "CDI_WORKER_DISK", "CDI_WORKER_LAYER_ANNOTATION"):
        refused(pod, f"{name}: empty", IMPORTER_ENDPOINT=url, **{name: ""})


def test_misspelt_variable_is_refused_in_a_pod(pod: worker.Pod, url: str) -> None:
    for each in SETTINGS:
        said = f"{each.misspelt_variable}: unknown variable"
        refused(pod, said, IMPORTER_ENDPOINT=url, **{each.misspelt_variable: "x"})
        assert (f"did you mean '{each.variable}'?" in pod.message) or not each.in_pods, pod.message


def test_demand_of_another_kind_is_refused_in_a_pod(pod: worker.Pod, url: str) -> None:
    """A certificate is a demand that other tools verify."""
    said = "CDI_WORKER_CERTIFICATE_IDENTITY: unknown variable"
    refused(pod, said, IMPORTER_ENDPOINT=url, CDI_WORKER_CERTIFICATE_IDENTITY="x")


def test_variable_of_a_command_is_refused_in_a_pod(pod: worker.Pod, url: str) -> None:
    """A role would not verify it: the checksum of a pod is IMPORTER_CHECKSUM."""
    said = "CDI_WORKER_CHECKSUM: unknown variable"
    refused(pod, said, IMPORTER_ENDPOINT=url, CDI_WORKER_CHECKSUM=f"sha256:{64 * '0'}")


def test_valid_variable_is_obeyed_in_a_pod(pod: worker.Pod, url: str, tmp_path: Path) -> None:
    for each in IN_PODS:
        value = {each.variable: each.valid(tmp_path)}
        refused(pod, each.outcome, IMPORTER_ENDPOINT=url, **value)


def test_variables_of_the_contract_may_be_empty(pod: worker.Pod, url: str) -> None:
    """Controllers set them so where a DataVolume says nothing."""
    names = ("CHECKSUM", "CERT_DIR", "PROXY_CERT_DIR", "ACCESS_KEY_ID", "SECRET_KEY", "IMAGE_SIZE")
    names += ("CONTENTTYPE", "PULL_METHOD", "REGISTRY_IMAGE_ARCHITECTURE", "UUID", "CURRENT_CHECKPOINT")
    env = {f"IMPORTER_{name}": "" for name in names}
    env |= dict.fromkeys(("INSECURE_TLS", "CACHE_MODE", "OWNER_UID", "http_proxy", "HTTPS_PROXY"), "")
    done = pod.call(IMPORTER_ENDPOINT=url, **env)
    assert done.status == 0, done.errors
    assert pod.disk.read_bytes()[: len(DISK)] == DISK


def of_a_service(name: str, ports: dict[str, int], host: str = "10.0.0.1") -> dict[str, str]:
    """Return what a kubelet sets for a Service (k8s.io/kubernetes, pkg/kubelet/envvars, FromServices).

    ``ports``: by name, of which the first may be empty.
    """
    prefix = name.upper().replace("-", "_")
    first = next(iter(ports.values()))
    made = {f"{prefix}_SERVICE_HOST": host, f"{prefix}_SERVICE_PORT": str(first)}
    made |= {
        f"{prefix}_SERVICE_PORT_{port.upper().replace('-', '_')}": str(number)
        for port, number in ports.items()
        if port
    }
    address = f"[{host}]" if ":" in host else host
    made[f"{prefix}_PORT"] = f"tcp://{address}:{first}"
    for number in ports.values():
        for protocol in ("tcp", "udp", "sctp"):
            each = f"{prefix}_PORT_{number}_{protocol.upper()}"
            made |= {each: f"{protocol}://{address}:{number}", f"{each}_PROTO": protocol}
            made |= {f"{each}_PORT": str(number), f"{each}_ADDR": host}
    return made


def test_variables_of_a_service_are_not_ours(pod: worker.Pod, url: str) -> None:
    """Kubernetes sets them beside every Service whose name begins like our variables."""
    pod.metrics_port = None
    env = of_a_service("import", {"": 80})
    names = ("cdi-worker", "cdi-worker-metrics", "cdi-worker-signedby", "cdi-worker-a-service-port-b")
    for name, host in zip(names, ("10.0.0.1", "fd00::1") * 2, strict=True):
        env |= of_a_service(name, {"https": 443, "long-name": 8443}, host)
    done = pod.call(IMPORTER_ENDPOINT=url, **env)
    assert done.status == 0, done.errors
    done = worker.call("blank", pod.directory / "blank", "1Mi", env=env)
    assert done.status == 0, done.errors


def test_variable_beside_a_service_is_still_ours(pod: worker.Pod, url: str) -> None:
    env = of_a_service("cdi-worker-metrics", {"https": 443})
    pod.metrics_port = None
    said = "Invalid value for '--metrics-port': 'x' is not"
    refused(pod, said, IMPORTER_ENDPOINT=url, **{**env, "CDI_WORKER_METRICS_PORT": "x"})
    del env["CDI_WORKER_METRICS_SERVICE_HOST"]
    refused(pod, "METRICS_SERVICE_PORT: unknown", IMPORTER_ENDPOINT=url, **env)
    refused(pod, "SIGNEDBY_PORT: unknown", IMPORTER_ENDPOINT=url, CDI_WORKER_SIGNEDBY_PORT="tcp://x")


def test_upload_server_beside_a_service_named_listen() -> None:
    """The same names for other variables: LISTEN_PORT=tcp://10.0.0.1:80."""
    env = of_a_service("listen", {"": 80}) | of_a_service("kubernetes", {"https": 443}) | {"HOME": "/"}
    code = "from cdi_worker.importer import contract; print(*sorted(contract.environment()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**worker.ENVIRONMENT, **env}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    left = done.stdout.split()
    assert "HOME" in left
    assert [name for name in left if name.startswith("LISTEN_")] == []
    assert {"KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT"} < {*left}


def test_clone_source_refuses_a_demand(tmp_path: Path) -> None:
    pod = worker.Pod(tmp_path)
    env = {"UPLOAD_URL": "https://127.0.0.1:1/", "MOUNT_POINT": str(tmp_path), "VOLUME_MODE": "filesystem"}
    env |= {"CLIENT_KEY": "x", "CLIENT_CERT": "x", "SERVER_CA_CERT": "x", "CDI_WORKER_SIGNED_BY": "/k"}
    assert pod.call(**env).status == 1
    assert "signature not verifiable: a clone has none" in pod.message


def test_programs_of_controllers_refuse_the_same() -> None:
    for program in ("openstack-populator", "cdi-source-update-poller"):
        for env, said in (
            ({"CDI_WORKER_SIGNED_BY": ""}, "CDI_WORKER_SIGNED_BY: empty"),
            ({"CDI_WORKER_SIGNEDBY": "x"}, "did you mean 'CDI_WORKER_SIGNED_BY'?"),
            ({"CDI_WORKER_CONNECTIONS": "200"}, "200 is not in the range"),
        ):
            done = worker.call(program, env=env)
            assert (done.status, said in done.errors) == (2, True), done.errors


def test_populator_refuses_to_verify(tmp_path: Path) -> None:
    given = ("--engine-url=https://127.0.0.1:1", "--disk-id=x", f"--volume-path={tmp_path / 'disk.img'}")
    done = worker.call("ovirt-populator", *given, env={"CDI_WORKER_VERIFY": "true"})
    said = "CDI_WORKER_VERIFY: only the disk of an import can be verified"
    assert (done.status, said in done.errors) == (1, True), done.errors


def test_poller_refuses_an_empty_checksum_file() -> None:
    arguments = ["-ns=n", "-cron=c", "-url=http://127.0.0.1:1/x", "-certdir="]
    done = worker.call("cdi-source-update-poller", *arguments, "--checksum-file=")
    assert (done.status, "Invalid value for '--checksum-file'" in done.errors) == (2, True), done.errors


# -- manifests ---------------------------------------------------------------------------------


def faults(change: Callable[[dict[str, object], dict[str, object]], object]) -> list[str]:
    """Return the faults of the example with changed annotations and HTTP source."""
    (made, *_) = yaml.safe_load_all((repository.DATAVOLUMES / "http.yaml").read_text())
    change(made["metadata"].setdefault("annotations", {}), made["spec"]["source"]["http"])
    found: list[str] = []
    datavolume.parse(documents.Document("-", made), found)
    return found


ANNOTATIONS = (*datavolume.DEMANDS, datavolume.DISK, datavolume.LAYER_ANNOTATION)


def test_empty_annotation_is_refused() -> None:
    for name, value in itertools.product(ANNOTATIONS, ("", " ", "\n")):
        found = faults(lambda annotations, _, given={name: value}: annotations.update(given))
        assert found == [f"metadata.annotations[{name}]: is empty"], value


def test_misspelt_annotation_is_refused() -> None:
    for name in ANNOTATIONS:
        (found,) = faults(lambda annotations, _, given={name[:-1]: "x"}: annotations.update(given))
        assert found.endswith(f"did you mean '{name}'?")


def test_empty_checksum_of_a_manifest_is_refused() -> None:
    (found,) = faults(lambda _, source: source.update(checksum=""))
    assert found.startswith("spec.source.http.checksum: invalid checksum ''")


def test_valid_annotations_are_accepted() -> None:
    given = dict.fromkeys(datavolume.DEMANDS, "x")
    assert faults(lambda annotations, _: annotations.update(given)) == []


# -- the library -------------------------------------------------------------------------------


def wanted(demand: trust.Demand = trust.NOTHING, checksum: str | None = None) -> request.Request:
    location = cdi_worker.Location("http://127.0.0.1/disk")
    return request.Request(
        source="http", location=location, target="disk.img", demand=demand, checksum=checksum
    )


def test_empty_demand_of_the_library_is_refused() -> None:
    for field in filter(None, (each.field for each in SETTINGS)):
        for value in ("", " "):
            with pytest.raises(errors.RequestError, match=f"demand: {field} is empty"):
                request.check(wanted(trust.Demand(**{field: value})))


def test_empty_checksum_of_the_library_is_refused() -> None:
    with pytest.raises(errors.RequestError, match="invalid checksum ''"):
        request.check(wanted(checksum=""))


def test_library_without_a_demand_has_no_faults() -> None:
    request.check(wanted())
    request.check(wanted(trust.Demand(signed_by="key.pem")))
