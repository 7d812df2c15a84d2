"""The environment and the mounts of a pod, and errors in them."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import pytest

from cdi_worker import errors, sources
from cdi_worker.importer import contract, request
from cdi_worker.importer.roles import importer
from cdi_worker.sources import fields


@pytest.fixture
def paths(tmp_path: Path) -> contract.Paths:
    return contract.Paths(
        data=str(tmp_path),
        block=str(tmp_path / "no-device"),
        scratch=str(tmp_path / "scratch"),
        termination_log=str(tmp_path / "log"),
        extra_headers=str(tmp_path / "headers"),
    )


HTTP = {"IMPORTER_SOURCE": "http", "IMPORTER_ENDPOINT": "http://host/disk"}


@pytest.mark.parametrize(
    ("env", "role"),
    [
        ({"IMPORTER_SOURCE": "http"}, "importer"),
        ({"CLIENT_NAME": "x"}, "uploadserver"),
        ({"TLS_CERT_FILE": "x"}, "uploadserver"),
        ({"UPLOAD_URL": "x"}, "cloner"),
        ({"IMPORTER_SOURCE": "", "HOME": "/"}, None),
        ({}, None),
    ],
)
def test_role_follows_from_the_environment(env: dict[str, str], role: str | None) -> None:
    assert contract.role(env) == role


def read(env: dict[str, str], paths: contract.Paths) -> request.Request:
    """Return the request of an environment, checked as an import does."""
    made = importer.read(env, paths)
    request.check(made)
    return made


def test_all_variables_are_read(paths: contract.Paths, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    made = read(
        {
            **HTTP,
            "IMPORTER_CONTENTTYPE": "",
            "IMPORTER_IMAGE_SIZE": "10Gi",
            "FILESYSTEM_OVERHEAD": "0.06",
            "PREALLOCATION": "true",
            "CACHE_MODE": "TRYNONE",
            "OWNER_UID": "uid",
            "IMPORTER_ACCESS_KEY_ID": "me",
            "IMPORTER_SECRET_KEY": "secret",
            "IMPORTER_CHECKSUM": "MD5:" + "A" * 32,
            "INSECURE_TLS": "true",
            "HTTPS_PROXY": "http://proxy:1",
            "http_proxy": "",
            "no_proxy": "a,b",
        },
        paths,
    )
    assert made.target == f"{tmp_path}/disk.img"
    assert made.scratch == f"{tmp_path}/scratch"
    assert (made.room.size, made.room.overhead) == (10 << 30, Fraction("0.06"))
    assert made.preallocation
    assert made.direct
    assert made.room.owner == "uid"
    access = made.location.access
    assert (access.user, access.password, access.insecure) == ("me", "secret", True)
    assert (access.http_proxy, access.https_proxy, access.no_proxy) == ("", "http://proxy:1", "a,b")
    assert "secret" not in repr(made)
    assert "proxy:1" not in repr(made)


STAGE = {
    "IMPORTER_PREVIOUS_CHECKPOINT": "one",
    "IMPORTER_CURRENT_CHECKPOINT": "two",
    "IMPORTER_FINAL_CHECKPOINT": "true",
}


@pytest.mark.parametrize(
    ("source", "env", "fields"),
    [
        ("registry", {"IMPORTER_REGISTRY_IMAGE_ARCHITECTURE": "s390x"}, {"architecture": "s390x"}),
        (
            "gcs",
            {"GOOGLE_APPLICATION_CREDENTIALS": "/google/credentials.json", "STORAGE_EMULATOR_HOST": "e"},
            {"credentials_file": "/google/credentials.json", "emulator": "e"},
        ),
        ("imageio", {"IMPORTER_DISK_ID": "disk"}, {"disk_id": "disk", "previous": "", "final": False}),
        ("imageio", {"IMPORTER_DISK_ID": "x", **STAGE}, {"previous": "one", "current": "two", "final": True}),
        (
            "vsphere",
            {"IMPORTER_UUID": "u", "CDI_WORKER_QUIESCE": "true", **STAGE},
            {"uuid": "u", "quiesce": True, "current": "two", "final": True},
        ),
        (
            "vddk",
            {
                "IMPORTER_UUID": "u",
                "IMPORTER_BACKING_FILE": "[d] f",
                "IMPORTER_THUMBPRINT": "AB",
                **STAGE,
            },
            {
                "uuid": "u",
                "backing_file": "[d] f",
                "thumbprint": "AB",
                "previous": "one",
                "final": True,
            },
        ),
    ],
)
def test_each_source_reads_its_own_variables(
    paths: contract.Paths, source: str, env: dict[str, str], fields: dict[str, object]
) -> None:
    others = {"IMPORTER_PULL_METHOD": "push", "IMPORTER_DISK_ID": "x", "IMPORTER_BACKING_FILE": "x"}
    others |= {"IMPORTER_UUID": "x"}
    made = read(
        {**HTTP, **others, **env, "IMPORTER_SOURCE": source, "IMPORTER_BACKING_FILE": "f"} | env, paths
    )
    assert {name: getattr(made.location, name) for name in fields} == fields
    assert made.is_delta == (env.get("IMPORTER_PREVIOUS_CHECKPOINT") == "one")


def test_source_without_stages_refuses_a_delta(paths: contract.Paths) -> None:
    with pytest.raises(errors.Unsupported, match="source 'registry': does not support checkpoints"):
        read({**HTTP, **STAGE, "IMPORTER_SOURCE": "registry"}, paths)


def test_checkpoint_names_the_file_of_a_stage(paths: contract.Paths) -> None:
    """Controllers start each stage with the same endpoint."""
    env = {**HTTP, "IMPORTER_ENDPOINT": "https://h/backup/full.qcow2?x=1"}
    assert (
        read(env | {"IMPORTER_CURRENT_CHECKPOINT": "full.qcow2"}, paths).location.endpoint
        == env["IMPORTER_ENDPOINT"]
    )
    delta = {"IMPORTER_PREVIOUS_CHECKPOINT": "full.qcow2", "IMPORTER_CURRENT_CHECKPOINT": "mon day.qcow2"}
    assert read(env | delta, paths).location.endpoint == "https://h/backup/mon%20day.qcow2?x=1"
    for name in ("../x", "/etc/passwd", "..", "a/b"):
        with pytest.raises(errors.RequestError, match="is not the name of a file beside the first"):
            read(env | delta | {"IMPORTER_CURRENT_CHECKPOINT": name}, paths)


def test_mount_points_are_fixed() -> None:
    """The mount points of controllers cannot be configured."""
    assert contract.Paths() == contract.Paths(
        data="/data",
        block="/dev/cdi-block-volume",
        scratch="/scratch",
        termination_log="/dev/termination-log",
        extra_headers="/extraheaders",
        metrics_port=8443,
        mounts={},
    )


def test_all_errors_are_reported_at_once(paths: contract.Paths) -> None:
    with pytest.raises(errors.RequestError) as caught:
        read(
            {
                "IMPORTER_SOURCE": "http",
                "IMPORTER_CONTENTTYPE": "iso",
                "IMPORTER_IMAGE_SIZE": "10Gx",
                "FILESYSTEM_OVERHEAD": "6%",
                "PREALLOCATION": "yes",
                "IMPORTER_CHECKSUM": "sha256:abc",
                "IMPORTER_PULL_METHOD": "push",
                "IMPORTER_EXTRA_HEADER_0": "secret without a colon",
            },
            paths,
        )
    message = str(caught.value)
    for phrase in (
        "'iso'",
        "10Gx",
        "6%",
        "PREALLOCATION='yes'",
        "sha256",
        "push",
        "EXTRA_HEADER_0",
        "endpoint",
    ):
        assert phrase in message
    assert "secret" not in message


@pytest.mark.parametrize(("role", "size"), [(fields.IMPORTER, 1 << 30), (fields.UPLOAD_SERVER, 2 << 30)])
def test_each_role_has_a_variable_for_the_size(role: str, size: int) -> None:
    env = {"IMPORTER_IMAGE_SIZE": "1Gi", "UPLOAD_IMAGE_SIZE": "2Gi", "FILESYSTEM_OVERHEAD": "0.5"}
    found = contract.Reading(env).fields(request.Request, role)
    assert found == {"room": request.Room(size=size, overhead=Fraction(1, 2))}


@pytest.mark.parametrize("value", ["TRUE", "1", "", "no"])
def test_preallocation_must_be_true_or_false(paths: contract.Paths, value: str) -> None:
    with pytest.raises(errors.RequestError):
        read({**HTTP, "PREALLOCATION": value}, paths)


@pytest.mark.parametrize("value", ["1", "1.5", "-0.1", "nan", "1e-2", "0,06"])
def test_overhead_must_be_a_fraction(paths: contract.Paths, value: str) -> None:
    with pytest.raises(errors.RequestError):
        read({**HTTP, "FILESYSTEM_OVERHEAD": value}, paths)


def test_delta_needs_both_checkpoints(paths: contract.Paths) -> None:
    env = {**HTTP, "IMPORTER_SOURCE": "imageio", "IMPORTER_DISK_ID": "d"}
    with pytest.raises(errors.RequestError, match="previous checkpoint without a current one"):
        read({**env, "IMPORTER_PREVIOUS_CHECKPOINT": "one"}, paths)


def test_blank_archive_is_refused(paths: contract.Paths) -> None:
    env = {"IMPORTER_SOURCE": "none", "IMPORTER_CONTENTTYPE": "archive"}
    with pytest.raises(errors.RequestError, match="source 'none' does not support content type archive"):
        read(env, paths)


@pytest.mark.parametrize("source", ["registry", "imageio", "s3", "gcs", "vddk"])
def test_archive_is_refused_by_source(paths: contract.Paths, source: str) -> None:
    env = {**HTTP, "IMPORTER_SOURCE": source, "IMPORTER_CONTENTTYPE": "archive"}
    with pytest.raises(errors.RequestError, match="archive"):
        read(env, paths)


def test_target_of_an_archive_is_the_volume(paths: contract.Paths) -> None:
    assert read({**HTTP, "IMPORTER_CONTENTTYPE": "archive"}, paths).target == paths.data


def test_existing_device_is_the_target(paths: contract.Paths) -> None:
    Path(paths.block).touch()
    assert read(HTTP, paths).target == paths.block


def test_node_pull_needs_its_files(paths: contract.Paths) -> None:
    with pytest.raises(errors.RequestError, match=r"IMPORTER_READY_FILE.*IMPORTER_DONE_FILE"):
        read({**HTTP, "IMPORTER_PULL_METHOD": "node"}, paths)
    files = {"IMPORTER_READY_FILE": "/r", "IMPORTER_DONE_FILE": "/d"}
    location = read({**HTTP, "IMPORTER_PULL_METHOD": "node", **files}, paths).location
    assert (location.pull_method, location.ready_file, location.done_file) == ("node", "/r", "/d")
    for method in ({}, {"IMPORTER_PULL_METHOD": "pod"}):
        assert read({**HTTP, **method, **files}, paths).location.pull_method == "pod"


def mounted_secret(directory: Path, name: str, text: bytes) -> None:
    """Write a key of a Secret as the kubelet does: through links into ``..data``."""
    data = directory / "..2026_11_20"
    data.mkdir(parents=True, exist_ok=True)
    (data / name).write_bytes(text)
    if not (directory / "..data").is_symlink():
        (directory / "..data").symlink_to(data.name)
    (directory / name).symlink_to(f"..data/{name}")


def test_headers_keep_order_and_secrets_come_from_files(paths: contract.Paths) -> None:
    mounted_secret(Path(paths.extra_headers, "one"), "token", b"Authorization: Bearer x\n")
    mounted_secret(Path(paths.extra_headers, "two"), "other", b"X-Two:2")
    env = {**HTTP, "IMPORTER_EXTRA_HEADER_10": "X-Ten: 10", "IMPORTER_EXTRA_HEADER_2": "X-B: a: b"}
    assert read(env, paths).location.access.headers == (
        ("X-B", "a: b"),
        ("X-Ten", "10"),
        ("Authorization", "Bearer x"),
        ("X-Two", "2"),
    )


@pytest.mark.parametrize("text", [b"none", b"a b: c", b": c", b"X: a\nY: b", b"X: \xff\xfe", b"X: a\x00b"])
def test_malformed_secret_header_is_refused(paths: contract.Paths, text: bytes) -> None:
    mounted_secret(Path(paths.extra_headers), "key", text)
    with pytest.raises(errors.RequestError, match="key: malformed extra header"):
        read(HTTP, paths)


def test_hidden_and_special_files_are_not_certificates(tmp_path: Path) -> None:
    mounted_secret(tmp_path, "ca.pem", PEM)
    mounted_secret(tmp_path, "bundle", b"# Some CA\n" + PEM)
    (tmp_path / ".hidden").write_bytes(PEM)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    names = ("bundle", "ca.pem")
    assert contract.certificate_files(str(tmp_path)) == tuple(str(tmp_path / name) for name in names)
    assert contract.certificate_files("") == ()
    assert contract.certificate_files(str(tmp_path / "missing")) == ()


def test_other_files_beside_certificates_are_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """ConfigMaps hold other things besides certificates, and keys; upstream's worker only warns."""
    others = {"README": b"the CA of the lab", "tls.key": b"-----BEGIN PRIVATE KEY-----\n", "empty": b""}
    for name, text in others.items():
        mounted_secret(tmp_path, name, text)
    mounted_secret(tmp_path, "ca.crt", PEM)
    assert contract.certificate_files(str(tmp_path)) == (str(tmp_path / "ca.crt"),)
    assert [name for name in sorted(others) if f"/{name}'" in caplog.text] == sorted(others)


def test_certificates_of_a_registry_end_in_crt(paths: contract.Paths, tmp_path: Path) -> None:
    """Other files in such a folder are client certificates (containers-certs.d(5))."""
    (tmp_path / "certs").mkdir()
    for name in ("a.crt", "b.pem", "client.cert", "client.key"):
        (tmp_path / "certs" / name).write_bytes(PEM)
    env = {"IMPORTER_ENDPOINT": "docker://host/disk", "IMPORTER_CERT_DIR": str(tmp_path / "certs")}
    for source, count in (("registry", 2), ("http", 4)):
        made = read({**env, "IMPORTER_SOURCE": source}, paths)
        files = made.location.access.ca_files
        assert [Path(path).name for path in files] == ["a.crt", "b.pem", "client.cert", "client.key"][:count]


PEM = b"-----BEGIN CERTIFICATE-----\n"


VDDK = {
    "IMPORTER_SOURCE": "vddk",
    "IMPORTER_ENDPOINT": "https://v",
    "IMPORTER_UUID": "u",
    "IMPORTER_BACKING_FILE": "f",
}


def test_number_of_sessions_is_limited(paths: contract.Paths) -> None:
    """More sessions than an ESXi host has memory for make those of other workers fail."""
    for count in ("1", "12"):
        made = read({**VDDK, "IMPORTER_VDDK_CONNECTIONS": count}, paths)
        assert made.location.vddk_connections == int(count)
    for count in ("0", "13", "-1", "1.5", "many"):
        with pytest.raises(errors.RequestError, match=r"IMPORTER_VDDK_CONNECTIONS.*supported: 1 to 12"):
            read({**VDDK, "IMPORTER_VDDK_CONNECTIONS": count}, paths)


def test_way_to_read_is_a_known_one(paths: contract.Paths) -> None:
    for way in ("auto", "vddk", "lease"):
        assert read({**VDDK, "CDI_WORKER_READ_BY": way}, paths).location.read_by == way
    with pytest.raises(errors.RequestError, match=r"'nfc' \(CDI_WORKER_READ_BY\); supported: auto, vddk,"):
        read({**VDDK, "CDI_WORKER_READ_BY": "nfc"}, paths)


def test_vddk_library_is_found_at_its_mount(tmp_path: Path) -> None:
    table = sources.find("vddk").table
    assert table["vddk_libdir"][0].mount == "/opt/vmware-vix-disklib-distrib"
    assert table["vddk_config"][0].mount == "/vddk-args/vddk-config-file"
    config = tmp_path / "config"
    mounts = {"--vddk-libdir": "/library", "--vddk-config": str(config)}
    paths = contract.Paths(data=str(tmp_path), mounts=mounts)
    assert read(VDDK, paths).location.vddk_config == ""
    config.touch()
    location = read(VDDK, paths).location
    assert (location.vddk_libdir, location.vddk_config) == ("/library", str(config))


def test_mount_that_cannot_be_looked_at_is_refused(tmp_path: Path) -> None:
    """A symbolic link in a loop, or a folder that is not ours: not the same as no file."""
    mounts = {"--vddk-config": str(tmp_path / ("x" * 256))}
    with pytest.raises(errors.RequestError, match="xxx: file name too long"):
        read(VDDK, contract.Paths(data=str(tmp_path), mounts=mounts))
