"""Credentials with a line break at their end, as ``echo`` writes them, and with characters that none has."""

from __future__ import annotations

import base64
import json
import re
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.importer import contract, request
from cdi_worker.importer.commands import options, populators
from cdi_worker.importer.roles import importer
from cdi_worker.sources import base, fields, reference
from cdi_worker.sources.kubevirt import locations as kubevirt
from cdi_worker.sources.kubevirt import server
from cdi_worker.sources.objects import locations as objects
from cdi_worker.sources.objects import s3
from cdi_worker.sources.registry import auth
from tests.support import worker

SECRET = "hunter2hunter2"
Way = Callable[[str, Path], str]


def _read(source: str, url: str, **env: str) -> base.Location:
    given = {"IMPORTER_SOURCE": source, "IMPORTER_ENDPOINT": url, "IMPORTER_IMAGE_SIZE": "1Gi", **env}
    found = importer.read(given, contract.Paths())
    request.check(found)
    return found.location


def _user(text: str, _: Path) -> str:
    return _read("http", "https://h/d", IMPORTER_ACCESS_KEY_ID=text, IMPORTER_SECRET_KEY="x").access.user


def _password(text: str, _: Path) -> str:
    return _read("http", "https://h/d", IMPORTER_ACCESS_KEY_ID="x", IMPORTER_SECRET_KEY=text).access.password


def _session_token(text: str, _: Path) -> str:
    keys = {"IMPORTER_ACCESS_KEY_ID": "x", "IMPORTER_SECRET_KEY": "x"}
    return _read("s3", "s3://b/o", IMPORTER_SESSION_TOKEN=text, **keys).access.session_token


def _access_key(text: str, _: Path) -> str:
    return _read("s3", "s3://b/o", IMPORTER_ACCESS_KEY_ID=text, IMPORTER_SECRET_KEY="x").access.user


def _export_token(text: str, _: Path) -> str:
    found = _read("kubevirt", "https://h/volumes/r/disk.img", IMPORTER_EXPORT_TOKEN=text)
    return str(getattr(found, "token"))  # noqa: B009  (of a subclass)


def _export_token_file(text: str, path: Path) -> str:
    path.write_text(text, newline="")
    where = kubevirt.KubeVirt("https://h/volumes/r/disk.img", token_file=str(path))
    return server.Token(where).value


def _file(text: str, path: Path) -> str:
    path.write_text(text, newline="")
    return options.read_secret(str(path))


def _token_file(text: str, path: Path) -> str:
    path.write_text(text, newline="")
    return options.read_secret(str(path), fields.token)


def _docker(text: str, _: Path) -> str:
    """As ``echo user:password | base64`` makes it."""
    packed = base64.b64encode(f"user:{text}".encode()).decode()
    document = {"auths": {"registry.example.org": {"auth": packed}}}
    wanted = reference.parse("docker://registry.example.org/a:b")
    return auth.from_docker(document, wanted, "config.json").password


def _identity(text: str, _: Path) -> str:
    document = {"auths": {"registry.example.org": {"identitytoken": text}}}
    wanted = reference.parse("docker://registry.example.org/a:b")
    return auth.from_docker(document, wanted, "config.json").identity


def _populator(text: str, _: Path) -> str:
    with populators._access({"username": "x", "password": text}, "username", {}) as access:
        return access.password


def _application(text: str, _: Path) -> str:
    return populators.login({"applicationCredentialSecret": text})["application_secret"]


def _populator_token(text: str, _: Path) -> str:
    return populators.login({"token": text})["token"]


#: Where each credential enters, and what a message calls it.
PASSWORDS: Mapping[str, tuple[Way, str]] = {
    "user": (_user, "IMPORTER_ACCESS_KEY_ID"),
    "password": (_password, "IMPORTER_SECRET_KEY"),
    "file": (_file, "secret"),
    "docker": (_docker, "config.json"),
    "populator": (_populator, "password"),
    "application": (_application, "applicationCredentialSecret"),
}
TOKENS: Mapping[str, tuple[Way, str]] = {
    "access key": (_access_key, "IMPORTER_ACCESS_KEY_ID"),
    "session token": (_session_token, "IMPORTER_SESSION_TOKEN"),
    "export token": (_export_token, "IMPORTER_EXPORT_TOKEN"),
    "export token, file": (_export_token_file, "secret"),
    "token, file": (_token_file, "secret"),
    "identity": (_identity, "config.json"),
    "populator, token": (_populator_token, "token"),
}
#: Characters that a header or a login cannot have: a line break within, an escape, a control character of C1.
CONTROL = ("hunter2\rhunter2", "hunter2\nhunter2", "\x1bhunter2", "hunter2\x85")
LETTERS = ("“hunter2”", "hünter2")


def refused(read: Way, text: str, path: Path) -> str:
    """Return the message about a credential, which does not show any of it."""
    with pytest.raises(errors.RequestError) as caught:
        read(text, path)
    assert "nter2" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("way", [*PASSWORDS, *TOKENS])
def test_credential_is_read_and_checked(way: str, tmp_path: Path) -> None:
    """A line break at its end is left out; what cannot be sent is named with its place."""
    (read, name), path = {**PASSWORDS, **TOKENS}[way], tmp_path / "secret"
    for end in ("", "\n", "\r\n"):
        assert read(SECRET + end, path) == SECRET
    for text in CONTROL:
        assert re.search(f"{re.escape(name)}: .*control character.*write it again", refused(read, text, path))
    for text in LETTERS:
        if way in PASSWORDS:
            assert read(text, path) == text
        else:
            assert re.search(f"{re.escape(name)}.*not ASCII.*copy it again", refused(read, text, path))


@pytest.mark.parametrize("text", ["a\nb", "“a”"])
def test_library_reports_a_credential_that_cannot_be_sent(text: str) -> None:
    """It has no names of variables: the error says only what cannot be sent."""
    where = objects.S3("http://127.0.0.1:1/b/o", base.Access(user=text, password="y"))
    with pytest.raises(errors.RequestError) as caught, base.open_image(s3.S3Source(where, cancelling.NEVER)):
        pass
    assert urllib.parse.quote(text) not in str(caught.value)
    assert "AWS4" not in str(caught.value)


@pytest.mark.parametrize("name", ["IMPORTER_SESSION_TOKEN", "IMPORTER_ACCESS_KEY_ID"])
def test_pod_names_the_variable(tmp_path: Path, name: str) -> None:
    pod = worker.Pod(tmp_path)
    env = {"IMPORTER_ACCESS_KEY_ID": "x", "IMPORTER_SECRET_KEY": "y", name: "hunter2\rhunter2"}
    done = pod.call(IMPORTER_SOURCE="s3", IMPORTER_ENDPOINT="http://127.0.0.1:1/b/o", **env)
    assert f"{name}: " in pod.message
    assert "hunter2" not in pod.message + done.errors
    assert "internal" not in pod.message + json.dumps(done.errors)
