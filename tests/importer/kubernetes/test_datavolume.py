"""Validation of manifests: every error at once, each with its path."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import operator
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import yaml

from cdi_worker import errors
from cdi_worker.importer.kubernetes import datavolume, documents
from cdi_worker.sources import base
from tests.support import repository

EXAMPLES = sorted(repository.DATAVOLUMES.glob("*.yaml"))
STORAGE = {"resources": {"requests": {"storage": "64Mi"}}}
HTTP = {"http": {"url": "http://images.invalid/disk.img"}}
IMAGEIO = {"url": "https://e.invalid/api", "diskId": "1", "secretRef": "s", "certConfigMap": "c"}


def faults(spec: dict[str, Any] | None = None, **top: Any) -> list[str]:
    """Return the errors of a DataVolume that is valid except for the arguments."""
    content = {
        "apiVersion": datavolume.API_VERSION,
        "kind": "DataVolume",
        "metadata": {"name": "x"},
        "spec": {"source": HTTP, "storage": STORAGE} | (spec or {}),
    }
    found: list[str] = []
    datavolume.parse(documents.Document("x", content | top), found)
    return found


def parse(name: str) -> datavolume.DataVolume:
    found: list[str] = []
    path = repository.DATAVOLUMES / f"{name}.yaml"
    volume = datavolume.parse(datavolume.find(documents.read(str(path)))[0], found)
    assert found == []
    return volume


def test_faults_of_all_manifests_are_reported_by_name() -> None:
    good = {
        "apiVersion": datavolume.API_VERSION,
        "kind": "DataVolume",
        "spec": {"storage": STORAGE, "source": HTTP},
    }
    wrong = {**good, "spec": {"storage": STORAGE, "source": {"http": {"url": "gopher://images.invalid/x"}}}}
    found = [
        documents.Document(name, {**content, "metadata": {"name": name}})
        for name, content in (("a", wrong), ("b", good), ("c", wrong))
    ]
    with pytest.raises(errors.RequestError) as caught:
        datavolume.parse_all(found)
    assert [fault.partition(":")[0] for fault in caught.value.faults] == ["a", "c"]
    assert [volume.name for volume in datavolume.parse_all(found[1:2])] == ["b"]


def test_values_are_parsed() -> None:
    volume = parse("imageio")
    assert volume.source.value("diskId") == "3406e724-7d02-4225-a620-3e6ef646c68c"
    assert [bool(stage.previous) for stage in volume.checkpoints] == [False, True]
    assert volume.claim.size == 32 << 30
    assert not volume.final
    assert parse("https").source.secret == "endpoint-secret"
    assert parse("headers").source.value("secretExtraHeaders") == ["first-secret", "second-secret"]


def http(**fields: Any) -> dict[str, Any]:
    return {"source": {"http": {**HTTP["http"], **fields}}}


def imageio(**fields: Any) -> dict[str, Any]:
    return {"source": {"imageio": {**IMAGEIO, **fields}}}


def staged(checkpoints: object) -> dict[str, Any]:
    return {"source": {"imageio": IMAGEIO}, "checkpoints": checkpoints}


def storage(**fields: Any) -> dict[str, Any]:
    return {"storage": {**STORAGE, **fields}}


def requested(size: object) -> dict[str, Any]:
    return {"storage": {"resources": {"requests": {"storage": size}}}}


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        (
            {"source": {"ftp": {"url": "ftp://x/y"}}},
            "spec.source.ftp: unknown field; supported: blank, gcs, http, imageio, ",
        ),
        ({"source": {**HTTP, "blank": {}}}, "spec.source: expected one source, found 2: http, blank"),
        ({"source": {}}, "spec.source: missing"),
        ({"source": None}, "spec.source: missing"),
        ({"source": "http"}, "spec.source: is not a mapping"),
        ({"source": None, "sourceRef": {"kind": "DataSource"}}, "spec.sourceRef: refers to a DataSource"),
        ({"source": {"http": {}}}, "spec.source.http.url: missing"),
        ({"source": {"http": {"url": 7}}}, "spec.source.http.url: 7 is not a string; put it in quotes"),
        (
            {"source": {"http": {"url": "ftp://x/y"}}},
            "spec.source.http.url: is not a URL that begins with http: or https:",
        ),
        ({"source": {"http": {"url": "http://[x/y"}}}, "spec.source.http.url: is not a URL"),
        (
            {"source": {"http": {"uri": "x", **HTTP["http"]}}},
            "spec.source.http.uri: unknown field; did you mean 'url'?",
        ),
        (http(extraHeaders=["A: 1", "B"]), "spec.source.http.extraHeaders[1]: malformed extra header"),
        (http(secretExtraHeaders=["../x"]), "spec.source.http.secretExtraHeaders[0]: '../x' is not a name"),
        (http(checksum="crc:1"), "spec.source.http.checksum: "),
        (http(secretRef="a/b"), "spec.source.http.secretRef: 'a/b' is not a name"),
        ({"source": {"registry": {}}}, "spec.source.registry.url: expected either url or imageStream"),
        (
            {"source": {"registry": {"imageStream": "s"}}},
            "spec.source.registry.imageStream: needs pullMethod node",
        ),
        (
            {"source": {"registry": {"url": "docker://r/x", "pullMethod": "push"}}},
            "spec.source.registry.pullMethod: 'push' is not one of pod, node",
        ),
        (imageio(certConfigMap=None), "spec.source.imageio.certConfigMap: missing"),
        (
            {"source": {"kubevirt": {"url": "kubevirt://x/exports/a/map"}}},
            "spec.source.kubevirt.secretRef: missing: the Secret with the token",
        ),
        (
            {"source": {"kubevirt": {"url": "http://x/exports/a/map", "secretRef": "s"}}},
            "spec.source.kubevirt.url: is not a URL that begins with kubevirt: or https:",
        ),
        (imageio(diskId=""), "spec.source.imageio.diskId: missing"),
        ({"source": {"vddk": {"url": "https://v.invalid"}}}, "spec.source.vddk.thumbprint: missing"),
        ({"source": {"vsphere": {"url": "vsphere://v/u"}}}, "spec.source.vsphere.secretRef: missing"),
        (
            {"source": {"vsphere": {"url": "https://v.invalid", "secretRef": "s"}}},
            "spec.source.vsphere.uuid: missing: the UUID of the virtual machine",
        ),
        ({"source": {"pvc": {"name": "a"}}, "pvc": None}, "spec.source.pvc.namespace: missing"),
        ({"storage": {}}, "spec.storage.resources.requests.storage: missing"),
        ({"storage": None}, "spec.storage: expected either spec.pvc or spec.storage, found neither"),
        ({"pvc": STORAGE}, "spec.storage: expected either spec.pvc or spec.storage, found 2"),
        ({"storage": None, "pvc": STORAGE}, "spec.pvc.accessModes: expected one access mode"),
        (requested("10GiB"), "spec.storage.resources.requests.storage: '10GiB' is not a quantity"),
        (requested(True), "spec.storage.resources.requests.storage: true is not a quantity"),
        (requested(0), "spec.storage.resources.requests.storage: must be greater than 0"),
        (storage(accessModes=["RWO"]), "spec.storage.accessModes[0]: 'RWO' is not one of"),
        (storage(volumeMode="block"), "spec.storage.volumeMode: 'block' is not one of Filesystem, Block"),
        (storage(dataSource={}), "spec.storage.dataSource: not supported"),
        (
            {"source": {"blank": {}}, "checkpoints": [{"previous": "", "current": "a"}]},
            "spec.checkpoints: source blank has no checkpoints, only gcs, http, imageio, kubevirt, s3, ",
        ),
        (staged([{"current": "a"}]), "spec.checkpoints[0].previous: missing"),
        (
            staged([{"previous": "", "current": 5}]),
            "spec.checkpoints[0].current: 5 is not a string; put it in quotes",
        ),
        (staged({}), "spec.checkpoints: is not a list"),
        (
            staged([{"previous": "", "current": "a"}, {"previous": "b", "current": "c"}]),
            "spec.checkpoints[1].previous: 'b' is not 'a', the current checkpoint of the stage before",
        ),
        ({"finalCheckpoint": "yes"}, "spec.finalCheckpoint: 'yes' is neither true nor false"),
        ({"contentType": "tar"}, "spec.contentType: 'tar' is not one of kubevirt, archive"),
        (
            {"source": {"blank": {}}, "contentType": "archive"},
            "spec.contentType: source blank cannot provide an archive",
        ),
        (
            {"contentType": "archive", "storage": {**STORAGE, "volumeMode": "Block"}},
            "spec.contentType: an archive needs a volume with a file system",
        ),
        ({"source": {"upload": {"url": "x"}}}, "spec.source.upload.url: unknown field"),
        (http(zebra=1), "spec.source.http.zebra: unknown field; supported: cert"),
        (storage(resources=5), "spec.storage.resources: is not a mapping"),
        ({"preallocation": "true"}, "spec.preallocation: 'true' is neither true nor false"),
        ({"sauce": {}}, "spec.sauce: unknown field; did you mean 'source'?"),
    ],
)
def test_error_in_spec_names_its_path(spec: dict[str, Any], fault: str) -> None:
    found = faults(spec)
    assert any(one.startswith(fault) for one in found), found


def test_error_outside_spec_names_its_path() -> None:
    assert faults(apiVersion="v1")[0].startswith("apiVersion: 'v1' is not cdi.kubevirt.io/v1beta1")
    assert "metadata.name: missing" in faults(metadata={})
    assert faults(metadata={"name": "A_b"})[0].startswith("metadata.name: 'A_b' is not a name")
    assert faults(metadata={"name": "x", "labels": {"a": 1}})[0].startswith(
        "metadata.labels.a: 1 is not a string"
    )
    found: list[str] = []
    datavolume.parse(documents.Document("x", {}), found)
    assert "spec: missing" in found
    assert "status" not in "".join(faults(status={"phase": "Succeeded"}))


def paths(value: object) -> Iterator[tuple[str | int, ...]]:
    """Yield the path of every value inside ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, below in items:
        yield (key,)
        yield from ((key, *path) for path in paths(below))


@functools.cache
def example(path: Path) -> Any:
    """Return a published example, which takes 0.05 s to parse; its content is to be copied."""
    return datavolume.find(documents.read(str(path)))[0].content


@pytest.mark.slow
@hypothesis.given(st.data())
def test_any_value_anywhere_is_valid_or_an_error(data: st.DataObject) -> None:
    path = data.draw(st.sampled_from(EXAMPLES))
    content = copy.deepcopy(example(path))
    *above, last = data.draw(st.sampled_from(list(paths(content))))
    holder = functools.reduce(operator.getitem, above, content)
    odd = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
    holder[last] = data.draw(
        st.recursive(odd, lambda any_: st.lists(any_) | st.dictionaries(st.text(), any_), max_leaves=5)
    )
    datavolume.parse(documents.Document("x", content), [])


def test_every_published_source_has_rules() -> None:
    published = json.loads(Path(datavolume.__file__).with_name("datavolume.json").read_text())
    assert published["$comment"]
    sources = published["properties"]["spec"]["properties"]["source"]["properties"]
    assert sources.keys() | datavolume.OWN.keys() == datavolume.SOURCES.keys()


def test_invalid_values_count_as_absent() -> None:
    """No further errors follow from them, and nothing of them is used."""
    found: list[str] = []
    spec = {
        "source": {"http": {"url": "http://x.invalid/", "secretExtraHeaders": ["../a", "b", 1]}},
        "storage": {"resources": {"requests": {"storage": "10GiB"}}, "accessModes": None},
    }
    content = {"apiVersion": datavolume.API_VERSION, "metadata": {"name": "x"}, "spec": spec}
    volume = datavolume.parse(documents.Document("x", content), found)
    assert volume.source.value("secretExtraHeaders") == ["b"]
    assert volume.claim.size is None
    assert [fault.partition(":")[0] for fault in found] == [
        "spec.source.http.secretExtraHeaders[2]",
        "spec.storage.resources.requests.storage",
        "spec.source.http.secretExtraHeaders[0]",
    ]
    assert spec["source"]["http"]["secretExtraHeaders"] == ["../a", "b", 1]


def test_annotation_cannot_name_a_path() -> None:
    """It names a ConfigMap; --contact looks for those below --secrets."""
    name = "cdi.kubevirt.io/storage.pod.vddk.extraargs"
    metadata = {"name": "x", "annotations": {name: "../../etc"}}
    found = faults({"source": {"vddk": {"url": "https://v.invalid"}}}, metadata=metadata)
    assert any(one.startswith(f"metadata.annotations.{name}: '../../etc' is not a name") for one in found), (
        found
    )


def test_all_errors_are_reported_at_once() -> None:
    found = faults({"source": {"http": {"url": "x"}}, "storage": {}, "contentType": "tar", "extra": 1})
    assert len(found) == 4


def test_secrets_in_a_url_are_not_repeated() -> None:
    assert "hunter2" not in "".join(faults({"source": {"http": {"url": "ftp://u:hunter2@x/y"}}}))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("a: [1, 2", ", line "),
        ("a: &x [1]\nb: *x\n", ", line 2, column 4: aliases"),
        ("a: 1\nb: 2\na: 3\n", ", line 3, column 1: key 'a' appears twice"),
        ("a: !!python/object/apply:os.system [x]\n", ", line 1, column 4: could not determine a constructor"),
        ("[" * 1100 + "]" * 1100, ""),
        ("[" * 65 + "]" * 65, ", line 1, column 65: more than 64 levels of objects and lists"),
        ("- 1\n", ", document 1: is not an object"),
        ("kind: List\nitems: [1]\n", ", document 1: items[0]: is not an object"),
        ("a: \x07\n", ": malformed YAML: "),
        ("? [a]\n: b\n", ", line 1, column 3: a key is not a string"),
        ("a: {? {b: c} : d}\n", ", line 1, column 7: a key is not a string"),
        ("a: {1: b}\n", ", line 1, column 5: key '1' is not a string; put it in quotes"),
        ("~: b\n", ", line 1, column 1: key '~' is not a string; put it in quotes"),
        ("on: b\n", ", line 1, column 1: key 'on' is not a string; put it in quotes"),
        ("a: !!bool maybe\n", ": malformed YAML: "),
        ("a: !!int ''\n", ": malformed YAML: "),
        ("a: !!timestamp x\n", ": malformed YAML: "),
        ("a: !!map [b]\n", ": malformed YAML: "),
        ("a: !!set [b]\n", ": malformed YAML: "),
        (f"a: {'9' * 5000}\n", ": malformed YAML: "),
        ("# " + "x" * documents.LIMIT, ": is larger than 4 MiB"),
    ],
)
def test_malformed_yaml_is_reported_by_line(tmp_path: Path, text: str, fault: str) -> None:
    path = tmp_path / "dv.yaml"
    path.write_text(text)
    with pytest.raises(errors.RequestError) as caught:
        documents.read(str(path))
    assert str(caught.value).startswith(f"{path}{fault}")


def test_yaml_bomb_is_refused(tmp_path: Path) -> None:
    """Nine levels of nine aliases expand to 3 billion values."""
    lines = ["a0: &a0 [x]"] + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10)]
    path = tmp_path / "bomb.yaml"
    path.write_text("\n".join(lines))
    with pytest.raises(errors.RequestError, match="aliases"):
        documents.read(str(path))


def test_unreadable_file_is_reported(tmp_path: Path) -> None:
    with pytest.raises(errors.RequestError, match="no such file"):
        documents.read(str(tmp_path / "none"))
    (tmp_path / "latin").write_bytes(b"a: \xe9\n")
    with pytest.raises(errors.RequestError, match="is not UTF-8 at byte 3"):
        documents.read(str(tmp_path / "latin"))


def test_manifest_is_never_read_in_part(tmp_path: Path) -> None:
    """A document behind the limit would be left out."""
    path = tmp_path / "x.yaml"
    path.write_text("a: 1\n#".ljust(documents.LIMIT, "x"))
    assert len(documents.read(str(path))) == 1
    path.write_text("a: 1\n#".ljust(documents.LIMIT, "x") + "\n---\nb: 1\n")
    with pytest.raises(errors.RequestError, match="is larger than 4 MiB"):
        documents.read(str(path))


def test_timestamps_stay_strings(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("when: 2026-11-20\n---\n---\nkind: List\nitems:\n- {a: 1}\n- {a: 2}\n")
    assert [dict(found.content) for found in documents.read(str(path))] == [
        {"when": "2026-11-20"},
        {"a": 1},
        {"a": 2},
    ]


def test_data_volume_is_required(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump_all([{"kind": "Secret"}, {"kind": "Pod"}]))
    with pytest.raises(
        errors.RequestError, match=r"expected a DataVolume, or .*, found none \(documents: Secret, Pod\)"
    ):
        datavolume.find(documents.read(str(path)))


def test_one_backup_of_kubevirt_is_one_stage() -> None:
    assert len(parse("kubevirt").stages_after("")) == 1
    stages = base.Stage("", "a"), base.Stage("a", "b"), base.Stage("b", "c")
    volume = dataclasses.replace(parse("kubevirt"), checkpoints=stages)
    assert volume.stages_after("b") == stages[2:]
    for copied, count in (("", 3), ("a", 2)):
        with pytest.raises(errors.RequestError, match=f"{count} stages, but every backup has its own URL"):
            volume.stages_after(copied)


def test_later_stages_are_selected() -> None:
    volume = parse("vddk-stages")
    assert [stage.current for stage in volume.stages_after("")] == ["snapshot-1", "snapshot-2"]
    assert [stage.current for stage in volume.stages_after("snapshot-1")] == ["snapshot-2"]
    with pytest.raises(errors.RequestError, match="no checkpoint follows"):
        volume.stages_after("snapshot-2")
    with pytest.raises(errors.RequestError, match="no checkpoint has"):
        volume.stages_after("snapshot-3")


def test_long_text_of_digits_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "dv.yaml"
    path.write_text(f"kind: '{'9' * 5000}'\n")
    assert documents.read(str(path))[0].kind == "9" * 5000
