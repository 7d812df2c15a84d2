"""Object stores on 127.0.0.1: SeaweedFS and rclone serve S3, an emulator serves Google's API."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import http.server
import json
import signal
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import requests

from tests.support import processes, threaded, tls

ACCESS_KEY = "AKIDTEST"
SECRET_KEY = "secret-of-the-tests"
#: Has the smallest useful AWS policy: may read objects, but not list them.
READER = ("AKIDREADER", "secret-of-the-reader")
BUCKET = "images"


@dataclasses.dataclass(frozen=True)
class Store:
    """A running S3 server. ``tls_port``: of the same store over https, 0 for none.

    ``folder``: of the objects of this test process, which shares the server with others.
    """

    port: int
    tls_port: int = 0
    folder: str = ""

    def endpoint(self, *, tls: bool = False) -> str:
        """Return the URL of the server."""
        return f"https://localhost:{self.tls_port}" if tls else f"http://127.0.0.1:{self.port}"

    def url(self, name: str, *, bucket: str = BUCKET, tls: bool = False) -> str:
        """Return the endpoint of an object."""
        return f"{self.endpoint(tls=tls)}/{bucket}/{self.folder}{name}"

    def uri(self, name: str) -> str:
        """Return the address of an object that is independent of the server."""
        return f"s3://{BUCKET}/{self.folder}{name}"

    def client(self) -> Any:
        """Return a boto3 client with all permissions."""
        import boto3
        from botocore.config import Config

        quiet = Config(
            response_checksum_validation="when_required", request_checksum_calculation="when_required"
        )
        return boto3.client(
            "s3",
            endpoint_url=self.endpoint(),
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
            config=quiet,
        )

    def put(self, name: str, data: bytes, *, bucket: str = BUCKET) -> None:
        """Store an object."""
        self.client().put_object(Bucket=bucket, Key=self.folder + name, Body=data)


@contextlib.contextmanager
def seaweed(directory: Path, pair: tls.KeyPair | None = None) -> Iterator[Store]:
    """Run SeaweedFS with a private bucket, and a bucket ``public`` that anyone may read."""
    weed = _program("weed")
    store = Store(processes.free_port(), processes.free_port() if pair else 0)
    rights = directory / "s3.json"
    rights.write_text(json.dumps({"identities": [
        _identity("admin", (ACCESS_KEY, SECRET_KEY), "Admin", "Read", "Write", "List"),
        _identity("reader", READER, f"Read:{BUCKET}"),
        _identity("anonymous", None, "Read:public"),
    ]}))  # fmt: skip
    argv = [weed, "mini", f"-dir={directory}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1"]
    argv += [
        "-admin.ui=false",
        "-webdav=false",
        "-volume.preStopSeconds=0",
        f"-s3.port={store.port}",
        f"-s3.config={rights}",
        # Otherwise it is in /tmp, and stays.
        f"-s3.localSocket={directory / 's3.sock'}",
    ]
    ports = ("admin", "admin.port.grpc", "filer", "filer.port.grpc", "master", "master.port.grpc")
    ports += ("volume", "volume.port.grpc", "s3.port.grpc", "s3.port.iceberg", "s3.port.lance")
    chosen = {name: processes.free_port() for name in ports}
    argv += [f"-{name if '.port' in name else f'{name}.port'}={port}" for name, port in chosen.items()]
    if pair:
        argv += [f"-s3.port.https={store.tls_port}", f"-s3.cert.file={pair.certificate}"]
        argv.append(f"-s3.key.file={pair.key}")
    # One that was started seconds ago sometimes ignores SIGTERM.
    log, end = directory / "weed.log", signal.SIGKILL
    with processes.running(argv, log=log, ready=lambda: _serves(store.port), end=end):
        for bucket in (BUCKET, "public"):
            store.client().create_bucket(Bucket=bucket)
        yield store
    # Sockets beside its ports: some stay when it is stopped.
    for port in chosen.values():
        for path in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def rclone(directory: Path) -> Iterator[Store]:
    """Serve directories as buckets by rclone, which answers a range with 200 and ignores If-Match."""
    store = Store(processes.free_port())
    (directory / BUCKET).mkdir()
    argv: list[str | Path] = [_program("rclone"), "serve", "s3", "--addr", f"127.0.0.1:{store.port}"]
    argv += ["--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--vfs-cache-mode", "off"]
    argv += ["--config", directory / "rclone.conf", "--cache-dir", directory / "cache", directory]
    with processes.running(argv, log=directory / "rclone.log", ready=lambda: _serves(store.port)):
        yield store


@dataclasses.dataclass
class Service:
    """A web service for tests: ``bodies`` has the bodies of the POSTs it received.

    ``disk``: the URL of an object behind it.
    """

    url: str
    bodies: list[str]
    disk: str = ""


@contextlib.contextmanager
def token_service(keys: tuple[str, str]) -> Iterator[Service]:
    """Serve as Amazon's token service: give these keys to every client that assumes a role."""
    with post_service(_ASSUMED.format(key=keys[0], secret=keys[1]), "text/xml") as service:
        yield service


@contextlib.contextmanager
def with_bearer_token(emulator: Emulator, token: str) -> Iterator[Service]:
    """Run a proxy before the emulator that requires a bearer token, and gives it to every POST."""
    answer = {"access_token": token, "token_type": "Bearer", "expires_in": 3600}
    answer["issued_token_type"] = "urn:ietf:params:oauth:token-type:access_token"
    with post_service(
        json.dumps(answer), "application/json", behind=(emulator.port, f"Bearer {token}")
    ) as service:
        yield service


@contextlib.contextmanager
def post_service(
    text: str | bytes,
    content_type: str,
    *,
    status: int = 200,
    headers: dict[str, str] | None = None,
    behind: tuple[int, str] = (0, ""),
    pair: tls.KeyPair | None = None,
) -> Iterator[Service]:
    """Answer every POST with the text; forward GETs to the port ``behind`` if they are authorized."""
    bodies: list[str] = []
    port, authorization = behind

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            body = text.encode() if isinstance(text, str) else text
            self.answer(status, {"Content-Type": content_type, **(headers or {})}, body)

        def do_GET(self) -> None:
            if self.headers["Authorization"] != authorization:
                denial = {"error": {"code": 401, "message": "Anonymous caller does not have access"}}
                self.answer(401, {"Content-Type": "application/json"}, json.dumps(denial).encode())
                return
            connection = http.client.HTTPConnection("127.0.0.1", port)
            with contextlib.closing(connection):
                connection.request("GET", self.path, headers={"Range": self.headers["Range"] or ""})
                answer = connection.getresponse()
                self.answer(answer.status, dict(answer.getheaders()), answer.read())

        def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
            self.send_response_only(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Log nothing; ``bodies`` has the requests."""

    listening = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with threaded.Threaded(listening, pair) as server:
        yield Service(f"http{'s' if pair else ''}://127.0.0.1:{server.port}", bodies)


_ASSUMED = """\
<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
  <AssumeRoleWithWebIdentityResult><Credentials>
    <AccessKeyId>{key}</AccessKeyId><SecretAccessKey>{secret}</SecretAccessKey>
    <SessionToken>a-session</SessionToken><Expiration>2099-01-01T00:00:00Z</Expiration>
  </Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>
"""


def _identity(name: str, keys: tuple[str, str] | None, *actions: str) -> dict[str, Any]:
    credentials = [{"accessKey": keys[0], "secretKey": keys[1]}] if keys else []
    return {"name": name, "credentials": credentials, "actions": list(actions)}


def _serves(port: int) -> bool:
    """Report whether a web server on the port answers with anything but a server error."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
        connection.request("GET", "/")
        return connection.getresponse().status < 500
    return False


def _program(name: str) -> Path:
    """Return a program installed by a Python package."""
    return Path(sysconfig.get_path("scripts"), name)


@dataclasses.dataclass(frozen=True)
class Emulator:
    """Google's API as the emulator implements it: no credentials, generations or digests of ranges.

    ``folder``: as of a ``Store``.
    """

    port: int
    folder: str = ""

    @property
    def host(self) -> str:
        """Return the value for STORAGE_EMULATOR_HOST."""
        return f"http://127.0.0.1:{self.port}"

    def url(self, name: str, *, host: str = "") -> str:
        """Return the endpoint of an object; ``host``: of a proxy before the emulator."""
        return f"{host or self.host}/{BUCKET}/{self.folder}{name}"

    def uri(self, name: str) -> str:
        """Return the address of an object that is independent of the server."""
        return f"gs://{BUCKET}/{self.folder}{name}"

    def put(self, name: str, data: bytes, *, encoding: str | None = None) -> None:
        """Store an object, with a Content-Encoding if given."""
        metadata = json.dumps(
            {"name": self.folder + name, **({"contentEncoding": encoding} if encoding else {})}
        )
        head = f"--part\r\nContent-Type: application/json\r\n\r\n{metadata}\r\n"
        head += "--part\r\nContent-Type: application/octet-stream\r\n\r\n"
        requests.post(
            f"{self.host}/upload/storage/v1/b/{BUCKET}/o?uploadType=multipart",
            head.encode() + data + b"\r\n--part--",
            headers={"Content-Type": "multipart/related; boundary=part"},
            timeout=60,
        ).raise_for_status()


@contextlib.contextmanager
def emulator(directory: Path) -> Iterator[Emulator]:
    """Run the emulator with one bucket, in memory."""
    server = Emulator(processes.free_port())
    argv = [
        _program("gcp-storage-emulator"),
        "start",
        "--host=127.0.0.1",
        f"--port={server.port}",
        "--in-memory",
    ]
    argv += [f"--default-bucket={BUCKET}", "--quiet"]
    with processes.running(argv, log=directory / "emulator.log", ready=lambda: _serves(server.port)):
        yield server
