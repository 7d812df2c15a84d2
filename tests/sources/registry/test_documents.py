"""Manifests and indexes: the choice of document, platform and file."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cdi_worker import errors
from cdi_worker.sources.registry import documents
from tests.support import containers

IMAGE = containers.Image((containers.layer(*containers.disk(b"d")),))


def test_manifests_of_oci_and_docker_are_parsed() -> None:
    for docker in (False, True):
        image = containers.Image(IMAGE.layers, docker=docker)
        parsed = documents.parse(image.manifest.data, "x")
        assert isinstance(parsed, documents.Manifest)
        assert [item.digest for item in parsed.layers] == [IMAGE.layers[0].digest]
        assert parsed.layers[0].is_layer
        assert parsed.config.size == len(image.config_blob.data)


def test_repeated_member_is_refused() -> None:
    """Parsers differ on which one counts: what was signed for one reader is another image for the next."""
    data = IMAGE.manifest.data
    twice = data[:-1] + b', "layers": []}'
    with pytest.raises(errors.Unsupported, match="a name in it is repeated"):
        documents.parse(twice, "x")
    inside = data.replace(b'"size":', b'"size": 1, "size":', 1)
    assert inside != data
    with pytest.raises(errors.Unsupported, match="a name in it is repeated"):
        documents.parse(inside, "x")


@pytest.mark.parametrize("docker", [False, True])
def test_indexes_of_oci_and_docker_are_parsed(docker: bool) -> None:
    both = containers.index(
        containers.for_platform(IMAGE.manifest, "amd64"),
        containers.for_platform(IMAGE.manifest, "arm64"),
        docker=docker,
    )
    parsed = documents.parse(both.data, "x")
    assert isinstance(parsed, documents.Index)
    assert [item.platform for item in parsed.manifests] == ["linux/amd64", "linux/arm64"]


@pytest.mark.parametrize("document", [{"schemaVersion": 1, "name": "a"}, {"fsLayers": [], "history": []}])
def test_schema_1_is_unsupported(document: object) -> None:
    with pytest.raises(errors.Unsupported, match="schema 1 is obsolete"):
        documents.parse(json.dumps(document).encode(), "x")


@pytest.mark.parametrize("levels", [80, 900, 2000])
@pytest.mark.parametrize("key", ["mediaType", "artifactType"])
def test_value_of_many_levels_is_refused(key: str, levels: int) -> None:
    """Values of other types than expected are printed: 900 levels can be parsed, but not printed."""
    document = json.loads(IMAGE.manifest.data)
    del document["layers"][0]["mediaType"]
    data = (
        json.dumps(document)
        .encode()
        .replace(
            b'"layers": [{', b'"layers": [{"%s": %s, ' % (key.encode(), b"[" * levels + b"]" * levels), 1
        )
    )
    with pytest.raises(errors.Unsupported, match="nested too deeply"):
        documents.parse(data, "x")


def test_document_with_manifests_and_layers_is_refused() -> None:
    document = json.loads(IMAGE.manifest.data) | {"manifests": []}
    with pytest.raises(errors.Refused, match="ambiguous"):
        documents.parse(json.dumps(document).encode(), "x")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"manifests": 1}',
        b'{"layers": [1], "config": {}}',
        b'{"layers": []}',
        b'{"layers": [], "config": {"digest": "sha256:00", "size": 1}}',
        b'{"manifests": [{"digest": "../../etc/passwd", "size": 1}]}',
        json.dumps({"manifests": [{"digest": containers.EMPTY_CONFIG.digest, "size": -1}]}).encode(),
        json.dumps({"manifests": [{"digest": containers.EMPTY_CONFIG.digest, "size": True}]}).encode(),
    ],
)
def test_malformed_document_is_refused(data: bytes) -> None:
    with pytest.raises(errors.Unsupported):
        documents.parse(data, "x")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["manifests", "layers", "config", "digest", "size", "platform", "annotations"]),
        inner, max_size=4,
    ),
    max_leaves=12,
)  # fmt: skip


@given(JSON)
def test_any_json_is_parsed_or_refused(document: object) -> None:
    with contextlib.suppress(errors.Unsupported, errors.Refused):
        documents.parse(json.dumps(document).encode(), "x")


#: An architecture that is not this machine's.
OTHER = "arm64" if containers.MACHINE != "arm64" else "amd64"


def index(*platforms: str) -> documents.Index:
    manifests = []
    for platform in platforms:
        system, _, architecture = platform.rpartition("/")
        blob = containers.Blob(platform.encode(), "")
        manifests.append(documents.Descriptor("", blob.digest, 1, architecture=architecture, system=system))
    return documents.Index(tuple(manifests))


@pytest.mark.parametrize(
    ("platforms", "architecture", "choice"),
    [
        (("linux/arm64", "linux/amd64"), "amd64", "linux/amd64"),
        (("linux/arm64", "linux/amd64"), "x86_64", "linux/amd64"),
        (("linux/arm64", "linux/amd64"), "aarch64", "linux/arm64"),
        (("windows/amd64", "linux/amd64"), "amd64", "linux/amd64"),
        (("windows/amd64",), "amd64", "windows/amd64"),
        (("linux/amd64", "unknown/unknown"), "amd64", "linux/amd64"),
        (("",), "s390x", "unstated"),
        ((f"linux/{OTHER}",), "", f"linux/{OTHER}"),
        ((f"linux/{OTHER}", "unknown/unknown"), "", f"linux/{OTHER}"),
        ((f"linux/{OTHER}", f"linux/{containers.MACHINE}"), "", f"linux/{containers.MACHINE}"),
    ],
)
def test_manifest_is_chosen_by_platform(platforms: tuple[str, ...], architecture: str, choice: str) -> None:
    assert documents.choose(index(*platforms), architecture, "x").platform == choice


@pytest.mark.parametrize("platforms", [("linux/arm64", "linux/s390x"), (), ("unknown/unknown",), ("", "")])
def test_missing_platform_lists_the_available_ones(platforms: tuple[str, ...]) -> None:
    with pytest.raises(errors.WrongPlatform, match="no image for architecture amd64") as caught:
        documents.choose(index(*platforms), "amd64", "x")
    for platform in platforms:
        if "unknown" not in platform:
            assert platform in str(caught.value)


def test_list_of_available_platforms_is_cut() -> None:
    with pytest.raises(errors.WrongPlatform, match="linux/0, linux/1, ") as caught:
        documents.choose(index(*(f"linux/{number}" for number in range(5000))), "amd64", "x")
    assert len(str(caught.value)) < 10_000


def test_several_platforms_of_other_machines_need_a_choice() -> None:
    with pytest.raises(errors.WrongPlatform, match="available: linux/m68k, linux/vax"):
        documents.choose(index("linux/vax", "linux/m68k"), "", "x")


def test_default_platform_is_this_machine() -> None:
    assert documents.normal_architecture("") in {"amd64", "arm64", "s390x", "ppc64le", "riscv64"}


@pytest.mark.parametrize(
    ("stated", "architecture", "fits"),
    [
        ("amd64", "amd64", True),
        ("arm64", "amd64", False),
        ("arm64", "aarch64", True),
        (None, "", True),
        (None, "amd64", False),
        (7, "amd64", False),
        (containers.MACHINE, "", True),
        (OTHER, "", True),
        (OTHER, containers.MACHINE, False),
    ],
)
def test_platform_of_a_plain_image_is_checked(stated: object, architecture: str, fits: bool) -> None:
    config = {"architecture": stated}
    if fits:
        documents.check_platform(config, architecture, "x")
    else:
        with pytest.raises(errors.WrongPlatform):
            documents.check_platform(config, architecture, "x")


KUBEVIRT = containers.Blob(b"1", "application/vnd.kubevirt.disk.raw+gzip")
QCOW2 = containers.Blob(b"2", "application/vnd.kubevirt.disk.qcow2")
FIRST = containers.titled_layer(b"3", "first.img")
SECOND = containers.titled_layer(b"4", "second.img", "application/x-qemu-disk")
LAYER = containers.layer(containers.Entry("a"))
UNTYPED = containers.Blob(LAYER.data, "")
FOLDER = containers.Blob(LAYER.data, LAYER.media_type, {documents.TITLE: "disk", documents.UNPACK: "true"})


def chosen_file(layers: list[containers.Blob], choice: str = "") -> str | None:
    manifest = documents.parse(containers.Image(tuple(layers)).manifest.data, "x")
    assert isinstance(manifest, documents.Manifest)
    found = documents.artifact(manifest, choice, "x")
    return found and found.digest


@pytest.mark.parametrize(
    ("layers", "choice", "expected"),
    [
        ([LAYER], "", None),
        ([UNTYPED], "", None),
        ([FOLDER], "", None),
        ([KUBEVIRT], "", KUBEVIRT),
        ([LAYER, KUBEVIRT], "", KUBEVIRT),
        ([FIRST, QCOW2], "", QCOW2),
        ([FIRST], "", FIRST),
        ([LAYER, SECOND], "", SECOND),
        ([FIRST, SECOND], "second.img", SECOND),
        ([FIRST, SECOND], "application/x-qemu-disk", SECOND),
        ([FIRST, SECOND], FIRST.digest, FIRST),
        ([LAYER], LAYER.digest, LAYER),
    ],
)
def test_file_of_an_artifact_is_chosen(
    layers: list[containers.Blob], choice: str, expected: containers.Blob | None
) -> None:
    assert chosen_file(layers, choice) == (expected.digest if expected else None)


@pytest.mark.parametrize(
    ("layers", "choice", "named"),
    [
        ([FIRST, SECOND], "", "first.img, second.img"),
        ([KUBEVIRT, QCOW2], "", KUBEVIRT.digest),
        ([FIRST, SECOND], "third.img", "first.img, second.img"),
    ],
)
def test_ambiguous_artifact_is_refused(layers: list[containers.Blob], choice: str, named: str) -> None:
    with pytest.raises(errors.Refused, match="choose one") as caught:
        chosen_file(layers, choice)
    assert named in str(caught.value)
