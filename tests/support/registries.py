"""A real registry (docker-registry) on 127.0.0.1, with a choice of authorization."""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import http.server
import json
import re
import time
import urllib.parse
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils

from cdi_worker.sources import base
from tests.support import containers, processes, threaded, tls

USER, PASSWORD = "cdi", "secret:with@marks"


LOG = "output.log"


@dataclasses.dataclass
class Registry:
    """A running registry that stores blobs below ``storage``, and repositories below ``folder``.

    Test processes that share a registry have folders of their own. Blobs are named by their digests and
    shared: those that a test damages must differ from all others.
    """

    port: int
    storage: Path
    authority: tls.Authority | None
    session: requests.Session
    folder: str = ""

    @property
    def host(self) -> str:
        """Return host and port, as in an image reference."""
        return f"localhost:{self.port}"

    @property
    def url(self) -> str:
        """Return the base URL of the registry."""
        return f"http{'s' if self.authority else ''}://{self.host}"

    def name(self, repository: str) -> str:
        """Return the full name of a repository, as in an image reference."""
        return f"{self.host}/{self.folder}{repository}"

    def reference(self, repository: str, target: str = ":latest") -> str:
        """Return the endpoint of an image."""
        return f"docker://{self.name(repository)}{target}"

    def access(self, **changes: Any) -> base.Access:
        """Return credentials and CA for pulling any image; ``changes`` replace fields."""
        trusted = (str(self.authority.certificate),) if self.authority else ()
        fields = {"user": USER, "password": PASSWORD, "ca_files": trusted, **changes}
        return base.Access(**fields)

    def push(self, repository: str, image: containers.Image, tag: str = "latest") -> str:
        """Push the blobs and the manifest; return the manifest's digest."""
        for blob in image.blobs:
            self.push_blob(repository, blob.data)
        return self.push_manifest(repository, image.manifest, tag)

    def push_manifest(self, repository: str, manifest: containers.Blob, tag: str = "") -> str:
        """Push a manifest or an index; without a tag, by digest only."""
        answer = self.session.put(
            f"{self.url}/v2/{self.folder}{repository}/manifests/{tag or manifest.digest}",
            data=manifest.data,
            headers={"Content-Type": manifest.media_type},
        )
        assert answer.status_code == 201, answer.text
        return manifest.digest

    def push_blob(self, repository: str, data: bytes) -> None:
        """Push a blob."""
        digest = containers.Blob(data, "").digest
        started = self.session.post(f"{self.url}/v2/{self.folder}{repository}/blobs/uploads/")
        assert started.status_code == 202, started.text
        upload_url = started.headers["Location"]
        join = "&" if urllib.parse.urlsplit(upload_url).query else "?"
        answer = self.session.put(f"{upload_url}{join}digest={digest}", data=data)
        assert answer.status_code == 201, answer.text

    def answered(self, repository: str) -> list[tuple[str, int]]:
        """Return path and status of the GETs of a repository so far, in the order of their ends."""
        found = re.findall(rf'"GET (/v2/{self.folder}{repository}/\S+) \S+" (\d+) ', self._log())
        return [(path, int(status)) for path, status in found]

    def clients(self, repository: str) -> set[str]:
        """Return address and port of the connections over which a repository was read."""
        get = rf'method=GET http.request.remoteaddr="(\S+)" http.request.uri="?/v2/{self.folder}{repository}/'
        return set(re.findall(f"http.request.{get}", self._log()))

    def _log(self) -> str:
        return (self.storage.parent / LOG).read_text()

    def stored(self, digest: str) -> Path:
        """Return the file of a blob, for tests that damage it."""
        algorithm, _, value = digest.partition(":")
        return self.storage / "docker/registry/v2/blobs" / algorithm / value[:2] / value / "data"


@contextlib.contextmanager
def registry(
    directory: Path,
    *,
    authority: tls.Authority | None = None,
    password: bool = False,
    rounds: int = 4,
    tokens: Tokens | None = None,
) -> Iterator[Registry]:
    """Run a registry: with TLS if there is an authority; requiring the password, or tokens.

    ``rounds``: the binary logarithm of the number of rounds of bcrypt, for each request with the password.
    """
    processes.need("docker-registry")
    directory.mkdir(parents=True, exist_ok=True)
    session = requests.Session()
    session.trust_env = False
    running = Registry(processes.free_port(), directory / "storage", authority, session)
    settings: dict[str, Any] = {
        "version": "0.1",
        "log": {"level": "info"},
        "storage": {"filesystem": {"rootdirectory": str(running.storage)}},
        "http": {"addr": f"127.0.0.1:{running.port}"},
    }
    if authority:
        pair = authority.issue()
        settings["http"]["tls"] = {"certificate": str(pair.certificate), "key": str(pair.key)}
        session.verify = str(authority.certificate)
    if password:
        processes.need("htpasswd")
        passwords = directory / "htpasswd"
        passwords.write_text(processes.run("htpasswd", "-Bbn", "-C", str(rounds), USER, PASSWORD).stdout)
        settings["auth"] = {"htpasswd": {"realm": "private", "path": str(passwords)}}
        session.auth = (USER, PASSWORD)
    if tokens:
        settings["auth"] = {
            "token": {
                "realm": tokens.url, "service": "tests", "issuer": "tests",
                "rootcertbundle": str(tokens.authority.certificate),
            }
        }  # fmt: skip
        session.auth = _Pushing(tokens)
    configuration = directory / "config.yml"
    # JSON is YAML.
    configuration.write_text(json.dumps(settings))
    argv = ["docker-registry", "serve", configuration]
    log = directory / LOG
    with session, processes.running(argv, log=log, ready=lambda: processes.is_listening(running.port)):
        yield running


class _Pushing(requests.auth.AuthBase):
    """Sign the requests of ``Registry.push`` with tokens that allow pushing."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        repository = urllib.parse.urlsplit(request.url or "").path.removeprefix("/v2/")
        for end in ("/manifests/", "/blobs/"):
            repository = repository.partition(end)[0]
        token = self._tokens.token(USER, [f"repository:{repository}:pull,push"], lifetime=300)
        request.headers["Authorization"] = f"Bearer {token}"
        return request


class Tokens(threaded.Threaded):
    """A token server (distribution specification): the user may pull everything, others ``public/…``.

    ``lifetime``: seconds a token is valid; the registry accepts it 60 seconds longer, so the claim is that
    much shorter. ``member``: the name of the token in the response. ``refresh``: an identity token that
    replaces user and password in a POST. ``trouble``: status codes of the next responses.
    """

    LEEWAY = 60

    def __init__(
        self,
        authority: tls.Authority,
        *,
        lifetime: float = 300,
        member: str = "token",
        host: str = "localhost",
    ) -> None:
        self.host = host
        self.authority = authority
        self.lifetime = lifetime
        self.member = member
        self.refresh = "refresh-me"
        self.trouble: list[int] = []
        self.issued: list[str] = []
        super().__init__(_HTTP(("127.0.0.1", 0), self), authority.issue())

    @property
    def url(self) -> str:
        """Return the URL of the token endpoint."""
        return f"https://{self.host}:{self.port}/token"

    def token(self, user: str, scopes: list[str], *, lifetime: float | None = None) -> str:
        """Return a signed token (RFC 7519) that contains its certificate, which the registry checks."""
        lifetime = self.lifetime - self.LEEWAY if lifetime is None else lifetime
        now = int(time.time())
        claims = {
            "iss": "tests", "sub": user, "aud": "tests", "exp": int(now + lifetime), "nbf": now - 600,
            "iat": now, "jti": str(uuid.uuid4()), "access": [_grant(scope, user) for scope in scopes],
        }  # fmt: skip
        pem = self.authority.certificate.read_text().strip().splitlines()
        head = {"alg": "ES256", "typ": "JWT", "x5c": ["".join(pem[1:-1])]}
        signed = b".".join(_base64(json.dumps(part).encode()) for part in (head, claims))
        key = self.authority._key
        r, s = utils.decode_dss_signature(key.sign(signed, ec.ECDSA(hashes.SHA256())))
        return (signed + b"." + _base64(r.to_bytes(32, "big") + s.to_bytes(32, "big"))).decode()


class _HTTP(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], tokens: Tokens) -> None:
        self.tokens = tokens
        super().__init__(address, _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that do not trust the certificate."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _HTTP

    def log_message(self, *_: object) -> None:
        """Log nothing; ``Tokens.issued`` has the tokens."""

    def do_GET(self) -> None:
        """Issue a token for a user, or for an anonymous client."""
        query = urllib.parse.parse_qs(urllib.parse.urlsplit(self.path).query)
        user = ""
        if (header := self.headers.get("Authorization", "")).startswith("Basic "):
            user, _, password = base64.b64decode(header[6:]).decode().partition(":")
            if (user, password) != (USER, PASSWORD):
                return self._answer(401, {})
        return self._issue(user, query)

    def do_POST(self) -> None:
        """Issue a token for a refresh token."""
        text = self.rfile.read(int(self.headers["Content-Length"])).decode()
        form = urllib.parse.parse_qs(text)
        good = form.get("grant_type") == ["refresh_token"] and "service" in form and "client_id" in form
        if not good or form.get("refresh_token") != [self.server.tokens.refresh]:
            return self._answer(401, {})
        return self._issue(USER, form)

    def _issue(self, user: str, query: dict[str, list[str]]) -> None:
        tokens = self.server.tokens
        if tokens.trouble:
            return self._answer(tokens.trouble.pop(0), {})
        token = tokens.token(user, query.get("scope", []))
        tokens.issued.append(token)
        return self._answer(200, {tokens.member: token})

    def _answer(self, status: int, body: dict[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def _grant(scope: str, user: str) -> dict[str, Any]:
    kind, _, rest = scope.partition(":")
    name, _, actions = rest.rpartition(":")
    allowed = actions.split(",") if user or name.startswith("public/") else []
    return {"type": kind, "name": name, "actions": allowed}


def _base64(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")
