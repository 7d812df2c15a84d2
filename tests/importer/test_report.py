"""Termination messages, compared as strings, as controllers do."""

from __future__ import annotations

import itertools
import json
import os
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.importer import report


def test_message_of_a_completed_import() -> None:
    done = report.complete(blank=False, preallocated=False)
    assert done == report.Report(
        '{"scratchSpaceRequired":false,"preallocationApplied":false,"message":"Import Complete"}', 0
    )


def test_message_of_a_blank_disk() -> None:
    done = report.complete(blank=True, preallocated=True)
    assert done.message == '{"preallocationApplied":true,"message":"Import Complete"}'


def test_details_of_a_server_keep_the_message_whole() -> None:
    hostile = {"Version": "\1" * 10_000, "Host": "é" * 10_000}
    made = report.complete(blank=False, preallocated=False, vddk_info=hostile, labels={"a": "b" * 4000})
    assert len(made.message.encode()) <= report.LIMIT
    parsed = json.loads(made.message)
    assert parsed["message"] == "Import Complete"
    assert set(parsed["vddkInfo"]) == {"Version", "Host"}


def test_message_has_labels_and_vddk_info() -> None:
    done = report.complete(
        blank=False,
        preallocated=False,
        labels={"kubevirt.io/a": "b"},
        vddk_info={"Version": "8", "Host": "esx"},
    )
    parsed = json.loads(done.message)
    assert parsed["labels"] == {"kubevirt.io/a": "b"}
    assert parsed["vddkInfo"] == {"Version": "8", "Host": "esx"}


@pytest.mark.parametrize(
    ("error", "message", "status"),
    [
        (
            errors.ScratchRequired(reason="x"),
            '{"scratchSpaceRequired":true,"preallocationApplied":false,"message":"Import Complete"}',
            0,
        ),
        (
            errors.ChecksumMismatch(algorithm="md5", expected="aa", calculated="bb"),
            '{"message":"Unable to process data: checksum mismatch: expected md5:aa, calculated md5:bb"}',
            0,
        ),
        (
            errors.Unreachable(url="http://h/d", reason="connection\nrefused"),
            "Unable to connect to http data source: http://h/d: connection refused",
            1,
        ),
        (
            errors.TransferFailed(url="http://h/d", offset=7, reason="reset"),
            "Unable to process data: failed to pull image: http://h/d: transfer failed at byte 7: reset",
            1,
        ),
        (
            errors.TooLarge(virtual_size=2, available=1),
            (
                "Unable to process data: virtual image size 2 is larger than the reported available "
                "storage 1. "
                "A larger PVC is required"
            ),
            1,
        ),
        (
            errors.target_error("/data/disk.img", OSError(28, "")),
            "Unable to process data: /data/disk.img: write: no space left on device",
            1,
        ),
        (
            errors.target_error("/data/disk.img", OSError(122, "")),
            "Unable to process data: /data/disk.img: write: disk quota exceeded",
            1,
        ),
    ],
)
def test_failure_has_message_and_status(error: errors.Error, message: str, status: int) -> None:
    assert report.failure(error, "http")[:2] == (message, status)


_SOURCES = ("http", "s3", "gcs", "registry", "imageio", "vddk")
_CONNECT = "Unable to connect to SOURCE data source: "
_PULL = "Unable to process data: failed to pull image: "
_PROCESS = "Unable to process data: "
_FACTS: dict[str, object] = {
    "url": "U", "reason": "R", "offset": 7, "what": "W", "before": "B", "now": "N", "expected": "E",
    "calculated": "C", "wanted": "A", "found": "F", "format": "qcow2", "rule": "X", "fault": "missing",
    "virtual_size": 2, "available": 1, "size": 3, "path": "P", "tool": "T", "exit_status": 1, "package": "K",
    "source": "S", "exception": "Y", "extra": "Z", "seconds": 5.0, "kept": "M", "algorithm": "md5",
    "install": "I",
}  # fmt: skip

#: What CDI v1.6x's importer begins the message with after each failure, for every source; ``registry`` where
#: it differs. CDI contacts all servers but registries in the constructor of the source ("Unable to connect"),
#: and writes "failed to pull image" where it opens an image of a registry or reads a stream to storage.
_PHRASES: dict[type[errors.Error], tuple[str, str]] = {errors.Unreachable: (_CONNECT, _PULL)} | {
    kind: (phrase, phrase)
    for phrase, kinds in {
        _PROCESS: (
            errors.Error, errors.RequestError, errors.MissingExtra, errors.MissingTool, errors.PluginFailed,
            errors.WrongPlatform, errors.UploadFailed, errors.ImageError, errors.Refused, errors.Unsupported,
            errors.Corrupt, errors.Truncated, errors.TrailingGarbage, errors.Untrusted, errors.Differs,
            errors.TargetError, errors.TooLarge, errors.NoSpace, errors.TargetBusy, errors.TargetLost,
            errors.TargetExists, errors.OutputClosed, errors.ScratchTooSmall, errors.ToolFailed,
            errors.NoProgress, errors.Cancelled, errors.Interrupted,
        ),
        _PULL: (
            errors.SourceError, errors.Transient, errors.CutShort, errors.Malformed, errors.TransferFailed,
            errors.Withdrawn, errors.SourceChanged, errors.Reencoded, errors.DigestMismatch, errors.NoRanges,
            errors.WrongRanges,
        ),
    }.items()
    for kind in kinds
}  # fmt: skip


def _classes(kind: type[errors.Error]) -> set[type[errors.Error]]:
    here = {kind} if kind.__module__ == errors.__name__ else set()
    return here.union(*(_classes(below) for below in kind.__subclasses__()))


def _made(kind: type[errors.Error]) -> errors.Error:
    if issubclass(kind, errors.RequestError):
        return kind("fault")
    if issubclass(kind, errors.Transient):
        return kind(url="U", reason="R")
    return kind(**_FACTS)


@pytest.mark.parametrize("source", _SOURCES)
def test_every_failure_of_every_source_has_the_phrase_of_cdi(source: str) -> None:
    json_reported = {errors.ScratchRequired, errors.ChecksumMismatch}
    assert _classes(errors.Error) == set(_PHRASES) | json_reported
    for kind, (usual, registry) in _PHRASES.items():
        beginning = (registry if source == "registry" else usual).replace("SOURCE", source)
        error = _made(kind)
        assert report.failure(error, source) == report.Report(f"{beginning}{error.message({})}", 1), kind


def test_compressed_stream_that_is_not_whole_is_a_failed_pull() -> None:
    """CDI decompresses while it reads: an error of the one is an error of the other."""
    kinds = (errors.Corrupt, errors.Truncated, errors.TrailingGarbage)
    for source, kind, name in itertools.product(_SOURCES, kinds, ("gz", "xz", "zst", "bz2")):
        error = kind(format=name, reason="R", offset=7)
        assert report.failure(error, source).message == f"{_PULL}{error}"


@pytest.mark.parametrize("text", ["x" * 10_000, "é" * 10_000, '"' * 10_000])
def test_message_has_at_most_4096_bytes(text: str) -> None:
    plain = report.failure(errors.ImageError(reason=text), "http")
    assert len(plain.message.encode()) <= report.LIMIT
    final = report.failure(errors.ChecksumMismatch(algorithm=text, expected="", calculated=""), "http")
    assert len(final.message.encode()) <= report.LIMIT
    assert json.loads(final.message)["message"].startswith("Unable to process data: checksum mismatch")


@pytest.mark.parametrize("kind", [errors.Unreachable, errors.Withdrawn])
def test_long_url_keeps_the_reason(kind: type[errors.Error]) -> None:
    error = kind(url=f"https://host/{'x' * 6000}/disk.img", reason="404 Not Found; check the URL")
    message = report.failure(error, "http").message
    assert "https://host/xxx" in message
    assert "x/disk.img: " in message
    assert message.endswith("404 Not Found; check the URL")
    assert message.count("…") == 1


def test_message_that_fits_is_not_shortened() -> None:
    url = f"https://host/{'x' * 3000}"
    assert url in report.failure(errors.Unreachable(url=url, reason="404"), "http").message


def test_message_is_written_in_one_line(tmp_path: Path) -> None:
    report.write(report.Report("said", 0), str(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "said"
    report.write(report.Report("said", 0), str(tmp_path / "missing" / "log"))


def test_message_is_not_written_through_a_link(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    for name, to in (("log", victim), ("dangling", tmp_path / "new")):
        (tmp_path / name).symlink_to(to)
        report.write(report.Report("said", 0), str(tmp_path / name))
    assert victim.read_text() == "precious"
    assert not (tmp_path / "new").exists()


def test_pipe_without_a_reader_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "log")
    assert report.write(report.Report("said", 0, unsaid=1), str(tmp_path / "log")) == 1


def test_message_is_written_in_place(tmp_path: Path) -> None:
    """The kubelet mounts the file: another one in its place would not be read."""
    path = tmp_path / "log"
    path.write_text("of the run before, which was longer")
    before = path.stat().st_ino
    report.write(report.Report("said", 0), str(path))
    assert (path.stat().st_ino, path.read_text()) == (before, "said")


def test_control_characters_are_removed() -> None:
    """Messages contain names from images and archives: a line break in one would start a line of its own."""
    error = errors.Refused(format="tar", rule="link", reason="\x1b[2Ja  b\nDone.\u202e\udcff\t…é")
    assert str(error) == "tar image refused (link): \ufffd[2Ja b Done.\ufffd\ufffd …é"
    assert str(errors.RequestError("a\r\nb", "c")) == "a b; c"
    assert report.internal(ValueError("\x1b[2J")).message.endswith(": \ufffd[2J")


def test_lone_surrogates_are_replaced() -> None:
    """JSON from a server may contain a lone surrogate; the report must be written all the same."""
    assert report.failure(errors.ImageError(reason="\ud800"), "http").message.endswith(": \ufffd")
    assert report.internal(ValueError("\udcff")).message.endswith(": \ufffd")
    labels = {"kubevirt.io/a": "\ud800"}
    parsed = json.loads(report.complete(blank=False, preallocated=False, labels=labels).message)
    assert parsed["labels"] == {"kubevirt.io/a": "?"}


def test_labels_beyond_the_limit_are_omitted() -> None:
    labels = {f"kubevirt.io/{number}": "é" * 1000 for number in range(5)}
    message = report.complete(blank=False, preallocated=True, labels=labels).message
    assert len(message.encode()) <= report.LIMIT
    parsed = json.loads(message)
    assert parsed["message"] == "Import Complete"
    assert list(parsed["labels"]) == ["kubevirt.io/0"]
