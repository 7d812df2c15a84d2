"""The glance source, with the real Keystone and Glance."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import execute, plan, request
from cdi_worker.importer.result import Result
from cdi_worker.sources import base
from cdi_worker.sources.glance import keystone, locations, source
from tests.support import devices, disks, misbehave, objectservers, openstack, oracle, pairs, reading, worker

#: The first test starts the services.
pytestmark = pytest.mark.timeout(openstack.START * 2)

MIB = 1 << 20
#: Glance's name of each format of ``disks.FORMATS``.
FORMATS = {
    "raw": "raw",
    "iso": "iso",
    "qcow2": "qcow2",
    "vmdk-stream": "vmdk",
    "vdi": "vdi",
    "vhd": "vhd",
}


def location(cloud: openstack.Cloud, image: str, **changes: str) -> locations.Glance:
    """Return the location of an image, read as the administrator over the internal endpoint."""
    settings = {
        "user_name": openstack.USER,
        "user_password": openstack.PASSWORD,
        "project_name": openstack.PROJECT,
        "default_domain": "default",
        "interface": "internal",
        **changes,
    }
    return locations.Glance(cloud.internal, image_id=image, **settings)


def import_(where: locations.Glance, target: Path, **changes: str) -> Result:
    wanted = request.Request(source="glance", location=where, target=str(target), connect_patience=1.0)
    return execute.run(dataclasses.replace(wanted, **changes))


def opened(where: locations.Glance) -> contextlib.AbstractContextManager[base.Image]:
    return base.open_image(source.GlanceSource(where, cancelling.NEVER))


@pytest.fixture(scope="module")
def stored(cloud: openstack.Cloud, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """An image of 3 MiB, and its bytes."""
    path = tmp_path_factory.mktemp("image") / "disk.raw"
    path.write_bytes(random.Random(5).randbytes(3 * MIB))
    return cloud.upload(path, "raw"), path


@pytest.mark.parametrize(("variant", "block"), pairs.dealt(FORMATS, [512, 4096]), indirect=["block"])
def test_every_format_is_imported_and_verified_without_scratch(
    cloud: openstack.Cloud, disks: disks.Disks, block: Path, variant: str
) -> None:
    image = cloud.upload(disks.image(variant), FORMATS[variant])
    done = import_(location(cloud, image), block)
    oracle.same(block, disks.expected(variant), beyond=devices.DIRT)
    assert not done.plan.scratch


def test_image_is_converted_from_scratch_if_there_is_some(
    cloud: openstack.Cloud, disks: disks.Disks, tmp_path: Path
) -> None:
    (tmp_path / "scratch").mkdir()
    image = cloud.upload(disks.image("vhdx-log"), "vhdx")
    done = import_(location(cloud, image), tmp_path / "disk.img", scratch=str(tmp_path / "scratch"))
    assert done.plan.route is plan.Route.SPOOL
    oracle.same(tmp_path / "disk.img", disks.expected("vhdx-log"))


def test_raw_disk_with_the_header_of_another_format_stays_raw(
    cloud: openstack.Cloud, disks: disks.Disks, tmp_path: Path
) -> None:
    """A guest can write a qcow2 header with a backing file to its raw disk."""
    image = disks.image("qcow2")
    import_(location(cloud, cloud.upload(image, "raw")), tmp_path / "disk.img")
    oracle.same(tmp_path / "disk.img", image)


def test_content_must_have_the_stated_format(
    cloud: openstack.Cloud, stored: tuple[str, Path], tmp_path: Path
) -> None:
    image = cloud.upload(stored[1], "qcow2")
    with pytest.raises(errors.ImageError, match="qcow2"):
        import_(location(cloud, image), tmp_path / "disk.img")
    oracle.unusable(tmp_path / "disk.img")


@pytest.mark.parametrize("variant", ["raw", "qcow2", "vhdx"])
def test_damaged_image_is_never_usable(
    cloud: openstack.Cloud, disks: disks.Disks, device: Path, variant: str
) -> None:
    """Glance does not verify what it reads from its store; the checksum of the record does."""
    image = cloud.upload(disks.image(variant), variant)
    with cloud.stored(image).open("r+b") as stream:
        stream.seek(-700_000, 2)
        stream.write(b"damaged")
    with pytest.raises(errors.ChecksumMismatch, match="checksum mismatch: expected sha512"):
        import_(location(cloud, image), device)
    oracle.unusable(device)


def test_ranges_and_stream_return_the_bytes(cloud: openstack.Cloud, stored: tuple[str, Path]) -> None:
    image, path = stored
    data = path.read_bytes()
    with opened(location(cloud, image)) as found:
        assert (found.facts.size, found.facts.format) == (len(data), "raw")
        assert [each.partition(":")[0] for each in found.facts.checksum.split(",")] == ["sha512", "md5"]
        assert found.facts.digest == found.facts.checksum.partition(",")[0]
        assert found.facts.identity is not None
        assert f"{found.facts.checksum} size {len(data)}" in found.facts.identity
        assert reading.read_range(found.source.ranges, 1_000_001, 70_000) == data[1_000_001:1_070_001]
        assert reading.read_through_engine(found) == data


@pytest.fixture
def few_renewals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MOST_RENEWALS", 1)


@pytest.mark.usefixtures("few_renewals")
def test_token_that_is_refused_is_renewed(cloud: openstack.Cloud, stored: tuple[str, Path]) -> None:
    image, path = stored
    data = path.read_bytes()
    with opened(location(cloud, image)) as found:
        for _ in range(source.MOST_RENEWALS + 1):
            cloud.revoke(found.source._image._token)
            assert reading.read_through_engine(found) == data


class Revoked(keystone.Keystone):
    """A login whose tokens are revoked as soon as they are made."""

    def __init__(self, cloud: openstack.Cloud, where: locations.Glance) -> None:
        super().__init__(where, cancelling.NEVER)
        self._cloud = cloud

    def token(self) -> str:
        token = super().token()
        self._cloud.revoke(token)
        return token


@pytest.mark.usefixtures("few_renewals")
def test_renewal_ends_if_every_token_is_refused(cloud: openstack.Cloud, stored: tuple[str, Path]) -> None:
    where = location(cloud, stored[0])
    with opened(where) as found, contextlib.closing(found.source._image._keystone):
        found.source._image._keystone = Revoked(cloud, where)
        cloud.revoke(found.source._image._token)
        with pytest.raises(errors.Unreachable, match="refuses the token"):
            reading.read_through_engine(found)


def test_token_that_cannot_be_renewed_is_an_error(cloud: openstack.Cloud, stored: tuple[str, Path]) -> None:
    token = cloud.token()
    with opened(location(cloud, stored[0], auth_type="token", token=token)) as found:
        cloud.revoke(found.source._image._token)
        with pytest.raises(errors.Unreachable, match="refuses the token"):
            reading.read_through_engine(found)


@pytest.mark.parametrize("method", ["password", "id", "token", "application id", "application name"])
def test_every_way_to_log_in(cloud: openstack.Cloud, stored: tuple[str, Path], method: str) -> None:
    credential = cloud.application_credential()
    nobody = {"user_name": "", "user_password": "", "project_name": "", "default_domain": ""}
    changes = {
        "password": {"user_domain_name": "Default", "project_domain_name": "Default", "default_domain": ""},
        "id": {"user_name": "", "user_id": credential["user_id"], "project_id": credential["project_id"]},
        "token": {
            **nobody,
            "token": cloud.token(),
            "project_name": openstack.PROJECT,
            "domain_id": "default",
        },
        "application id": {
            **nobody,
            "application_id": credential["id"],
            "application_secret": "hush",
        },
        "application name": {
            "auth_type": "v3applicationcredential",
            "application_name": credential["name"],
            "application_secret": "hush",
        },
    }[method]
    with opened(location(cloud, stored[0], **changes)) as found:
        assert found.facts.head == stored[1].read_bytes()[: len(found.facts.head)]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"user_password": "wrong"}, "login refused; check user, password"),
        ({"project_name": "nothing"}, "login refused"),
        ({"default_domain": ""}, "HTTP 400"),
        ({"region": "Mars"}, "no internal endpoint of an image service in region 'Mars'"),
        ({"interface": "admin"}, "no admin endpoint of an image service"),
        ({"image_id": "7"}, "no such image"),
        ({"image_id": "../../v2/images"}, "no such image"),
    ],
)
def test_failures_say_what_to_check(
    cloud: openstack.Cloud, stored: tuple[str, Path], changes: dict[str, str], text: str
) -> None:
    where = dataclasses.replace(location(cloud, stored[0]), **changes)
    with pytest.raises(errors.Unreachable, match=text) as caught, opened(where):
        pass
    assert openstack.PASSWORD not in str(caught.value) + repr(where)


def test_image_without_bytes_is_refused(cloud: openstack.Cloud) -> None:
    with (
        pytest.raises(errors.Unreachable, match="the image is queued, not active"),
        opened(location(cloud, cloud.upload(None, "raw"))),
    ):
        pass


def test_unsupported_container_is_refused(cloud: openstack.Cloud, stored: tuple[str, Path]) -> None:
    image = cloud.upload(stored[1], "vmdk", container="ova")
    with pytest.raises(errors.Unsupported, match="container ova"), opened(location(cloud, image)):
        pass


@pytest.mark.parametrize(
    "changes",
    [
        {"size": None},
        {"size": "1"},
        {"size": -1},
        {"disk_format": []},
        {"container_format": {}},
        {"os_hash_value": 7},
        {"os_hash_value": "7"},
        {"checksum": "no MD5", "os_hash_algo": None},
        {"checksum": "no MD5"},
    ],
)
def test_malformed_metadata_is_refused(changes: dict[str, object]) -> None:
    whole = {
        "status": "active",
        "size": 1,
        "disk_format": "raw",
        "container_format": "bare",
        "os_hash_algo": "sha512",
        "os_hash_value": "0" * 128,
    }
    assert source.parse(json.dumps(whole).encode(), "x").size == 1
    with pytest.raises(errors.Unreachable, match="x: the answer does not describe an image"):
        source.parse(json.dumps(whole | changes).encode(), "x")


class Elsewhere(keystone.Keystone):
    """A login to a cloud whose image service is another server."""

    def __init__(self, url: str, where: locations.Glance) -> None:
        super().__init__(where, cancelling.NEVER)
        self._url = url

    def token(self) -> str:
        return "token"

    def image_service(self) -> str:
        return self._url


@pytest.mark.parametrize("stated", [999, 1001])
def test_image_of_another_size_than_stated_is_refused(server: misbehave.Server, stated: int) -> None:
    """Glance itself does not contradict itself; a proxy or a cache before it may. There is no checksum."""
    metadata = {"status": "active", "size": stated, "disk_format": "raw", "container_format": "bare"}
    server.serve("/v2/images/i", misbehave.Page(json.dumps(metadata).encode()))
    server.serve("/v2/images/i/file", misbehave.Page(bytes(1000)))
    where = locations.Glance(server.url("/v3"), image_id="i", user_id="u", user_password="p", project_id="p")
    found = source.GlanceSource(where, cancelling.NEVER)
    found._image._keystone.close()
    found._image._keystone = Elsewhere(server.url("").rstrip("/"), where)
    with pytest.raises(errors.SourceChanged, match=f"size.*{stated}.*1000"):
        found.open(base.Opening())


def test_all_hashes_of_the_metadata_count() -> None:
    found = {"os_hash_algo": "sha256", "os_hash_value": "AB" * 32, "checksum": "cd" * 16}
    found |= {"status": "active", "size": 1, "disk_format": "raw"}
    assert source.parse(json.dumps(found).encode(), "x").checksum == f"sha256:{'ab' * 32},md5:{'cd' * 16}"


@pytest.mark.parametrize("data", [b"", b"[]", b"7", b'{"status": "active"}', b"\xff", b"[" * 100_000])
def test_response_that_is_no_image_is_refused(data: bytes) -> None:
    with pytest.raises(errors.Unreachable, match="does not describe an image"):
        source.parse(data, "x")


def test_another_server_is_recognised(cloud: openstack.Cloud, stored: tuple[str, Path]) -> None:
    """Glance itself, for example, is not Keystone."""
    where = dataclasses.replace(location(cloud, stored[0]), endpoint=cloud.images)
    with pytest.raises(errors.Unreachable, match="check the URL"), opened(where):
        pass


@pytest.mark.parametrize("status", [400, 429])
def test_secret_that_keystone_repeats_is_hidden(status: int) -> None:
    body = json.dumps({"error": {"message": "cannot use hunter2-hunter2", "code": status}})
    with objectservers.post_service(body, "application/json", status=status) as service:
        where = locations.Glance(
            service.url, image_id="i", application_id="a", application_secret="hunter2-hunter2"
        )
        with pytest.raises(errors.Error, match=r"cannot use \*\*\*") as caught:
            keystone.Keystone(where, cancelling.NEVER).token()
    assert service.bodies
    assert "hunter2" not in str(caught.value)


def test_version_document_that_needs_a_login_is_an_error() -> None:
    """The library would deadlock."""
    with objectservers.post_service("{}", "application/json") as service:
        where = locations.Glance(
            f"{service.url}/v3", image_id="i", user_id="u", user_password="p", project_id="p"
        )
        with pytest.raises(errors.Unreachable, match="only after a login; check the URL of Keystone"):
            keystone.Keystone(where, cancelling.NEVER).token()


def test_invalid_location_lists_all_faults() -> None:
    where = locations.Glance("", interface="secret", auth_type="kerberos")
    assert len(list(where.faults())) == 4
    missing = locations.Glance("https://cloud", image_id="7", application_id="x")
    assert list(missing.faults()) == ["the secret of the application credential is missing"]
    nobody = locations.Glance("https://cloud", base.Access(user="x"), image_id="7")
    assert list(nobody.faults()) == [
        "OpenStack needs a user and a password, a token, or an application credential"
    ]


def test_command_line_uses_openstack_s_variables_and_ca(
    cloud: openstack.Cloud, stored: tuple[str, Path], tmp_path: Path
) -> None:
    arguments = ["import", "--source", "glance", "--image-id", stored[0], "--ca-file", cloud.authority]
    done = worker.run(*arguments, cloud.public, tmp_path / "disk.img", env=cloud.environment)
    assert done.status == 0, done.errors
    oracle.same(tmp_path / "disk.img", stored[1])
    failed = worker.run(*arguments[:-2], cloud.public, tmp_path / "other.img", env=cloud.environment)
    assert (failed.status, "certificate verify failed" in failed.error_message) == (3, True)
