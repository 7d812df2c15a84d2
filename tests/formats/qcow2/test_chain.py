"""Names of backing files: compared by their last part, and shown without what may be secret."""

from __future__ import annotations

import pytest

from cdi_worker import errors
from cdi_worker.formats import facts
from cdi_worker.formats.qcow2 import chain


def file(name: str, backing: str | None = None, found: str = "qcow2") -> chain.ChainFile:
    return chain.ChainFile(name, name, 1 << 20, facts.ImageFacts(found, 1 << 20, backing=backing))


SIGNED = "https://user:hunter2@host/disks/base.qcow2?X-Amz-Signature=hunter2"


@pytest.mark.parametrize(
    "backing",
    [
        "base.qcow2",
        "/disks/base.qcow2",
        "file:/disks/base.qcow2",
        "base.qcow2?",
        SIGNED,
        f'json:{{"driver": "qcow2", "file": {{"driver": "https", "url": 1, "filename": "{SIGNED}"}}}}',
        f'json:{{"file.filename": "{SIGNED}"}}',
        'json:{"file": {"file": {"path": "/disks/base.qcow2"}}}',
    ],
)
def test_secret_in_the_name_of_a_backing_file_is_not_shown(backing: str) -> None:
    chain.check([file("base.qcow2?" if backing.endswith("?") else "base.qcow2"), file("new.qcow2", backing)])
    for files in ([file("new.qcow2", backing)], [file("other.qcow2"), file("new.qcow2", backing)]):
        with pytest.raises(errors.Refused, match=r"base\.qcow2") as caught:
            chain.check(files)
        assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("backing", ["json:[[[", "json:" + "[" * 1000, "json:1", 'json:{"file": 1}'])
def test_backing_file_without_a_known_name_is_refused(backing: str) -> None:
    with pytest.raises(errors.Refused, match="its backing file is 'json:"):
        chain.check([file("base.qcow2"), file("new.qcow2", backing)])


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ([file("a", found="vmdk"), file("b")], "the first file of a chain must be qcow2 or raw"),
        ([file("a"), file("b", found="raw")], "a layer must be qcow2"),
        ([file("a", "z"), file("b", "a")], "needs its backing file 'z'"),
        ([file("b", "a"), file("a")], "needs its backing file 'a'"),
        ([file("z"), file("b", "a"), file("a", "z")], "is given after it"),
        ([file("a"), file("c", "b")], "its backing file is 'b', but the file before it is 'a'"),
        (
            [file("a"), file("b", "a"), file("b", "a")],
            "its backing file is 'a', but the file before it is 'b'",
        ),
        ([file("x") for _ in range(chain.MOST + 1)], "commit some of them"),
    ],
)
def test_files_that_are_not_one_chain_are_refused(files: list[chain.ChainFile], words: str) -> None:
    with pytest.raises(errors.Error, match=words):
        chain.check(files)


def test_wrong_format_or_size_below_is_refused() -> None:
    named = facts.ImageFacts("qcow2", 1 << 20, backing="a", backing_format="raw")
    with pytest.raises(errors.Refused, match="its backing file is raw, but a is qcow2"):
        chain.check([file("a"), chain.ChainFile("b", "b", 1 << 20, named)])
    with pytest.raises(errors.Refused, match="check the order"):
        chain.check([file("a"), chain.ChainFile("b", "b", 1 << 20, facts.ImageFacts("qcow2", 512))])


def test_bitmaps_of_a_complete_disk_are_not_a_layer() -> None:
    whole = facts.ImageFacts("qcow2", 1 << 20, bitmaps=("monday",))
    with pytest.raises(errors.Refused, match="it is a complete disk"):
        chain.check([file("a"), chain.ChainFile("b", "b", 1 << 20, whole)])
