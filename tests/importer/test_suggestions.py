"""A misspelt value is answered with the nearest one, as misspelt commands and options are."""

from __future__ import annotations

from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.sources.glance import locations
from tests.support import worker

HINT = "did you mean '{}'?"


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (("import", "--content-type", "kubvirt", "http://h/x", "disk.img"), "kubevirt"),
        (("import", "--progress", "jsno", "http://h/x", "disk.img"), "json"),
        (("import", "htps://h/x", "disk.img"), "https"),
        (("inspect", "HTPP://h/x"), "http"),
        (("inspect", "dokcer://h/x"), "docker"),
        (("inspect", "--source", "Vddk", "h"), "vddk"),
        (("imprt", "http://h/x"), "import"),
    ],
)
def test_command_line_suggests_the_nearest_value(arguments: tuple[str, ...], near: str) -> None:
    done = worker.run(*arguments)
    assert done.status == 2, done.errors
    assert HINT.format(near) in done.errors.lower()


@pytest.mark.parametrize(
    "arguments", [("import", "--progress", "zzz", "a", "b"), ("inspect", "gopher://h/x")]
)
def test_nothing_near_is_no_suggestion(arguments: tuple[str, ...]) -> None:
    done = worker.run(*arguments)
    assert (done.status, "did you mean" in done.errors.lower()) == (2, False), done.errors


def test_choice_in_a_variable_is_suggested_too() -> None:
    done = worker.run("import", "http://h/x", "disk.img", env={"CDI_WORKER_PROGRESS": "lnes"})
    assert HINT.format("lines") in done.errors.lower()
    assert "CDI_WORKER_PROGRESS" in done.errors


@pytest.mark.parametrize(
    ("env", "near"),
    [
        ({"IMPORTER_SOURCE": "htttp"}, "http"),
        ({"IMPORTER_SOURCE": "http", "IMPORTER_CONTENTTYPE": "archiv"}, "archive"),
        ({"IMPORTER_SOURCE": "http", "IMPORTER_PULL_METHOD": "nod"}, "node"),
    ],
)
def test_pod_suggests_the_nearest_value(tmp_path: Path, env: dict[str, str], near: str) -> None:
    pod = worker.Pod(tmp_path)
    done = pod.run(IMPORTER_ENDPOINT="http://127.0.0.1:1/x", **env)
    assert done.status == 1
    assert HINT.format(near) in pod.message


def test_location_suggests_the_nearest_value() -> None:
    found = locations.Glance("http://h", image_id="7", interface="publc", auth_type="passwrd")
    assert {HINT.format("public"), HINT.format("password")} <= {
        fault.rpartition("; ")[2] for fault in found.faults()
    }


def test_values_of_any_length_and_kind_are_compared() -> None:
    assert errors.did_you_mean("", ["http"]) == ""
    assert errors.did_you_mean("http", []) == ""
    assert errors.did_you_mean("x" * 1_000_000, ["http"]) == ""
    assert errors.did_you_mean("VERSIONTLS1.3", ["VersionTLS12", "VersionTLS13"]) == HINT.format(
        "VersionTLS13"
    )
