"""Termination messages, compared as strings, as controllers do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cdi_worker import errors, report


def test_message_of_a_completed_import() -> None:
    done = report.complete(blank=False, preallocated=False)
    assert done == report.Report(
        '{"scratchSpaceRequired":false,"preallocationApplied":false,"message":"Import Complete"}', 0
    )


def test_message_of_a_blank_disk() -> None:
    done = report.complete(blank=True, preallocated=True)
    assert done.message == '{"preallocationApplied":true,"message":"Import Complete"}'


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
    assert report.failure(error, "http") == report.Report(message, status)


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


@pytest.mark.parametrize("name", ["gz", "xz", "zst", "bz2"])
def test_compressed_stream_that_ends_early_is_a_failed_pull(name: str) -> None:
    """The controller derives the reason ImagePullFailed from these words."""
    error = errors.Truncated(format=name, reason="the stream ends at byte 7")
    assert "failed to pull image: truncated" in report.failure(error, "http").message


def test_message_is_written_in_one_line(tmp_path: Path) -> None:
    report.write(report.Report("said", 0), str(tmp_path / "log"))
    assert (tmp_path / "log").read_text() == "said"
    report.write(report.Report("said", 0), str(tmp_path / "missing" / "log"))


def test_control_characters_are_removed() -> None:
    """Messages contain names from images and archives: a line break in one would start a line of its own."""
    error = errors.Refused(format="tar", rule="link", reason="\x1b[2Ja  b\nDone.\u202e\udcff\t…é")
    assert str(error) == "tar image refused (link): \ufffd[2Ja  b Done.\ufffd\ufffd …é"
    assert str(errors.RequestError("a\r\nb", "c")) == "a  b; c"
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
