"""Every way to give a credential to a source, with a server that repeats it: the rows of ``test_doors``.

A row is for one source and one kind of credential. ``covers`` names the settings that it gives, so that a
test can find the settings without a row. The module is long, because it is one table.
"""

from __future__ import annotations

import base64
import dataclasses
import json
import urllib.parse
from collections.abc import Callable, Mapping
from pathlib import Path

from cdi_worker.sources import kind
from tests.support import echo, tls

#: With what is encoded in addresses, HTML and JSON. Each secret contains it, and no text of ours does.
MARK = "hunter2"
PASSWORD = f"pa/s w\u00f6rd+&\"'<{MARK}"
TOKEN = f"tok-{MARK}.abc_DEF"


@dataclasses.dataclass
class Run:
    """What to run: a pod with ``env``, and a command.

    ``secrets``: what the server repeats. ``headers``: secret headers. ``command``: the arguments; None: those
    of an import from ``endpoint``. ``contacts``: whether a request reaches the server; ``is_sent``: with a
    secret in it.
    """

    secrets: tuple[str, ...]
    source: str = ""
    endpoint: str = ""
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)
    options: tuple[str, ...] = ()
    headers: Mapping[str, str] = dataclasses.field(default_factory=dict)
    command: tuple[str, ...] | None = None
    is_sent: bool = True
    contacts: bool = True
    has_pod: bool = True
    has_library: bool = True

    @property
    def variables(self) -> dict[str, str]:
        """The environment of a pod."""
        return {
            "IMPORTER_SOURCE": self.source,
            "IMPORTER_ENDPOINT": self.endpoint,
            "INSECURE_TLS": "true",
            "AWS_EC2_METADATA_DISABLED": "true",
            "NO_GCE_CHECK": "true",
            **self.env,
        }

    def arguments(self, kinds: Mapping[str, kind.Kind], target: str) -> list[str]:
        """Return those of ``import``, or of another command; ``inspect`` has no target."""
        if self.command is not None:
            return list(self.command)
        found = [*self.options, "--source", self.source, "--insecure"]
        for field, _ in kinds[self.source].table.values():
            if field.option and not field.ambient and self.env.get(field.env):
                found += [field.option, self.env[field.env]]
        return [*found, "--", self.endpoint, *([target] if target else [])]


#: The places of a row that contacts no server, or of one that waits.
ONE_PLACE = ("failure",)
Build = Callable[[echo.Echo, Path], Run]


@dataclasses.dataclass(frozen=True)
class Row:
    """A source, a kind of credential, and what makes a run of it. ``is_tls``: the server has a certificate.
    ``places``: where the server repeats it (``echo.WHERE``).
    """

    source: str
    credential: str
    covers: tuple[str, ...]
    is_tls: bool
    build: Build
    words: Callable[[str], str]
    places: tuple[str, ...]

    @property
    def name(self) -> str:
        """The name in the report of the tests."""
        return f"{self.source}: {self.credential}"


ROWS: list[Row] = []


def _row(
    source: str,
    credential: str,
    *covers: str,
    is_tls: bool = False,
    words: Callable[[str], str] = str,
    places: tuple[str, ...] = echo.WHERE,
) -> Callable[[Build], Build]:
    """Return a decorator that adds a row. ``words``: makes the protocol's form of an error of a text."""

    def add(build: Build) -> Build:
        ROWS.append(Row(source, credential, covers, is_tls, build, words, places))
        return build

    return add


def _quoted(text: str) -> str:
    return urllib.parse.quote(text, safe="")


def _file(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


LOGIN = {"IMPORTER_ACCESS_KEY_ID": "me", "IMPORTER_SECRET_KEY": PASSWORD}


# -- http -----------------------------------------------------------------------------------------


@_row("http", "user and password", "access.user", "access.password")
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((PASSWORD,), "http", f"{server.url}/disk.img", LOGIN)


@_row("http", "user and password in the address", "endpoint")
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((PASSWORD,), "http", f"http://me:{_quoted(PASSWORD)}@{server.at}/disk.img")


@_row("http", "secret header", "access.headers")
def _(server: echo.Echo, _folder: Path) -> Run:
    headers = {"Authorization": f"Bearer {TOKEN}", "X-Key": f"key {MARK}"}
    return Run((TOKEN, headers["X-Key"]), "http", f"{server.url}/disk.img", headers=headers)


@_row("http", "presigned address", "endpoint")
def _(server: echo.Echo, _folder: Path) -> Run:
    query = f"X-Amz-Credential={_quoted(PASSWORD)}&X-Amz-Signature=1f{MARK}&token={_quoted(TOKEN)}"
    return Run((PASSWORD, f"1f{MARK}", TOKEN), "http", f"{server.url}/disk.img?{query}")


@_row("http", "proxy", "access.http_proxy")
def _(server: echo.Echo, _folder: Path) -> Run:
    server.status = 407
    env = {"http_proxy": f"http://me:{_quoted(PASSWORD)}@{server.at}"}
    return Run((PASSWORD,), "http", "http://example.invalid/disk.img", env)


@_row("http", "proxy for TLS", "access.https_proxy")
def _(server: echo.Echo, _folder: Path) -> Run:
    server.status = 407
    env = {"https_proxy": f"http://me:{_quoted(PASSWORD)}@{server.at}"}
    return Run((PASSWORD,), "http", "https://example.invalid/disk.img", env)


@_row("http", "checksum file", "demand.checksum_file")
def _(server: echo.Echo, _folder: Path) -> Run:
    server.pages["/disk.img"] = lambda _: (200, {}, echo.DISK)
    sums = f"http://me:{_quoted(PASSWORD)}@{server.at}/SUMS?token={_quoted(TOKEN)}"
    env = {"CDI_WORKER_CHECKSUM_FILE": sums}
    return Run((PASSWORD, TOKEN), "http", f"{server.url}/disk.img", env, has_library=False)


@_row("http", "layer")
def _(server: echo.Echo, _folder: Path) -> Run:
    server.pages["/disk.img"] = lambda _: (200, {}, echo.DISK)
    layer = f"{server.url}/layer?token={_quoted(TOKEN)}"
    return Run((TOKEN,), "http", f"{server.url}/disk.img", {"CDI_WORKER_LAYER": layer}, has_library=False)


# -- object stores --------------------------------------------------------------------------------

KEYS = {"IMPORTER_ACCESS_KEY_ID": "AKID", "IMPORTER_SECRET_KEY": PASSWORD}


def _signed(server: echo.Echo) -> None:
    """Refuse what is not signed: without keys that are given, the first request is not."""
    is_signed = "authorization: aws4"
    server.pages["/b/"] = lambda request: (0 if is_signed in request.text.lower() else 403, {}, b"")


def _s3_error(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f"<Error><Code>AccessDenied</Code><Message>{text}</Message></Error>"


@_row("s3", "access key and secret key", "access.user", "access.password", words=_s3_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((PASSWORD,), "s3", f"{server.url}/b/disk.img", KEYS, is_sent=False)


@_row("s3", "session token", "access.session_token", words=_s3_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    env = {**KEYS, "IMPORTER_SESSION_TOKEN": TOKEN}
    return Run((TOKEN,), "s3", f"{server.url}/b/disk.img", env)


@_row("s3", "secret header", words=_s3_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "s3", f"{server.url}/b/disk.img", KEYS, headers={"X-Key": TOKEN})


@_row("s3", "keys in the address", places=ONE_PLACE)
def _(_server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "s3", f"s3://AKID:{TOKEN}@bucket/disk.img", contacts=False)


@_row("s3", "profile", words=_s3_error)
def _(server: echo.Echo, folder: Path) -> Run:
    _signed(server)
    text = f"[default]\naws_access_key_id = AKID\naws_secret_access_key = {TOKEN}\n"
    text += f"aws_session_token = s{TOKEN}\n"
    env = {"AWS_SHARED_CREDENTIALS_FILE": _file(folder / "aws", text)}
    return Run((TOKEN, f"s{TOKEN}"), "s3", f"{server.url}/b/disk.img", env)


@_row("s3", "keys of the environment", words=_s3_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    _signed(server)
    env = {"AWS_ACCESS_KEY_ID": "AKID", "AWS_SECRET_ACCESS_KEY": TOKEN, "AWS_SESSION_TOKEN": f"s{TOKEN}"}
    return Run((TOKEN, f"s{TOKEN}"), "s3", f"{server.url}/b/disk.img", env)


@_row("s3", "web identity")
def _(server: echo.Echo, folder: Path) -> Run:
    server.page("/b/", "", 403)
    env = {
        "AWS_ROLE_ARN": "arn:aws:iam::123456789012:role/importer",
        "AWS_WEB_IDENTITY_TOKEN_FILE": _file(folder / "token", TOKEN),
        "AWS_ENDPOINT_URL_STS": f"{server.url}/sts",
        "AWS_REGION": "us-east-1",
    }
    return Run((TOKEN,), "s3", f"{server.url}/b/disk.img", env)


# botocore repeats its request, with a pause.
@_row("s3", "container credentials", places=ONE_PLACE)
def _(server: echo.Echo, _folder: Path) -> Run:
    server.page("/b/", "", 403)
    env = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{server.url}/credentials",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN": TOKEN,
    }
    return Run((TOKEN,), "s3", f"{server.url}/b/disk.img", env)


@_row("s3", "keys of the container's service", words=_s3_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    _signed(server)
    keys = {"AccessKeyId": "AKID", "SecretAccessKey": TOKEN, "Token": f"s{TOKEN}"}
    server.page("/credentials", {**keys, "Expiration": "2099-01-01T00:00:00Z"})
    env = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{server.url}/credentials"}
    return Run((TOKEN, f"s{TOKEN}"), "s3", f"{server.url}/b/disk.img", env)


def _gcs_error(text: str) -> str:
    return json.dumps({"error": {"code": 403, "message": text, "errors": [{"message": text}]}})


def _token_error(text: str) -> str:
    return json.dumps({"error": "invalid_grant", "error_description": text})


def private_key() -> str:
    """Return a key as the file of a service account has it."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    return (
        rsa.generate_private_key(65537, 2048)
        .private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        .decode()
    )


def _service_account(server: echo.Echo, folder: Path) -> tuple[str, Mapping[str, str]]:
    key = private_key()
    fields = {"type": "service_account", "client_email": "i@p.iam.gserviceaccount.com", "private_key": key}
    fields |= {"private_key_id": "1", "token_uri": f"{server.url}/token"}
    return key, {"GOOGLE_APPLICATION_CREDENTIALS": _file(folder / "google.json", json.dumps(fields))}


@_row("gcs", "service account, at the token server", "Gcs.credentials_file", words=_token_error)
def _(server: echo.Echo, folder: Path) -> Run:
    key, env = _service_account(server, folder)
    server.status = 400
    return Run((key.splitlines()[5],), "gcs", f"{server.url}/b/disk.img", env, is_sent=False)


@_row("gcs", "service account, at the store", "Gcs.credentials_file", words=_gcs_error)
def _(server: echo.Echo, folder: Path) -> Run:
    _, env = _service_account(server, folder)
    server.page("/token", {"access_token": TOKEN, "expires_in": 3600, "token_type": "Bearer"})
    return Run((TOKEN,), "gcs", f"{server.url}/b/disk.img", env)


@_row("gcs", "refresh token of a user", "Gcs.credentials_file", words=_token_error)
def _(server: echo.Echo, folder: Path) -> Run:
    fields = {"type": "authorized_user", "client_id": "id", "client_secret": f"c-{MARK}"}
    fields |= {"refresh_token": TOKEN, "token_uri": f"{server.url}/token"}
    env = {"GOOGLE_APPLICATION_CREDENTIALS": _file(folder / "google.json", json.dumps(fields))}
    server.status = 400
    # The library ignores the file's token server: only what does not pass Google is answered.
    env["https_proxy"] = f"http://me:{TOKEN}@{server.at}"
    return Run((TOKEN, f"c-{MARK}"), "gcs", f"{server.url}/b/disk.img", env)


@_row("gcs", "secret header", words=_gcs_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "gcs", f"{server.url}/b/disk.img", headers={"X-Key": TOKEN})


@_row("gcs", "keys in the address", places=ONE_PLACE)
def _(_server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "gcs", f"gs://AKID:{TOKEN}@bucket/disk.img", contacts=False)


# -- registry -------------------------------------------------------------------------------------


def _registry_error(text: str) -> str:
    return json.dumps({"errors": [{"code": "DENIED", "message": text, "detail": text}]})


def _challenge(server: echo.Echo, what: str) -> None:
    """Demand credentials for the API; what is sent with them is repeated."""

    def page(request: echo.Request) -> tuple[int, Mapping[str, str], bytes]:
        is_sent = "authorization: " in request.text.lower()
        return 0 if is_sent else 401, {"WWW-Authenticate": what}, b"{}"

    server.pages["/v2/"] = page


def _image(server: echo.Echo) -> str:
    return f"docker://{server.at}/r"


@_row("registry", "user and password", "access.user", "access.password", words=_registry_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    _challenge(server, 'Basic realm="r"')
    return Run((PASSWORD,), "registry", _image(server), LOGIN)


@_row("registry", "user and password, at the token server", words=_registry_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    _challenge(server, f'Bearer realm="{server.url}/token",service="s"')
    return Run((PASSWORD,), "registry", _image(server), LOGIN)


@_row("registry", "docker's file", "Registry.auth_file", words=_registry_error)
def _(server: echo.Echo, folder: Path) -> Run:
    _challenge(server, f'Bearer realm="{server.url}/token",service="s"')
    packed = base64.b64encode(f"me:{PASSWORD}".encode()).decode()
    file = _file(folder / "auth.json", json.dumps({"auths": {server.at: {"auth": packed}}}))
    return Run((PASSWORD,), "registry", _image(server), {"REGISTRY_AUTH_FILE": file})


@_row("registry", "identity token", "Registry.docker_config", words=_registry_error)
def _(server: echo.Echo, folder: Path) -> Run:
    _challenge(server, f'Bearer realm="{server.url}/token",service="s"')
    _file(folder / "config.json", json.dumps({"auths": {server.at: {"identitytoken": TOKEN}}}))
    return Run((TOKEN,), "registry", _image(server), {"DOCKER_CONFIG": str(folder)})


@_row("registry", "token of the token server", words=_registry_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    _challenge(server, f'Bearer realm="{server.url}/token",service="s"')
    server.page("/token", {"token": TOKEN})
    return Run((TOKEN,), "registry", _image(server), LOGIN)


@_row("registry", "secret header", words=_registry_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "registry", _image(server), headers={"X-Key": TOKEN})


@_row("registry", "proxy", words=_registry_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    server.status = 407
    proxy = f"http://me:{_quoted(PASSWORD)}@{server.at}"
    env = {"http_proxy": proxy, "https_proxy": proxy}
    return Run((PASSWORD,), "registry", "docker://example.invalid/r", env)


# -- OpenStack ------------------------------------------------------------------------------------


def _keystone_error(text: str) -> str:
    return json.dumps({"error": {"code": 403, "message": text, "title": "Forbidden"}})


def _keystone(server: echo.Echo) -> str:
    """Answer the discovery; return the URL."""
    link = {"links": [{"rel": "self", "href": f"{server.url}/v3/"}], "id": "v3.14", "status": "stable"}
    server.pages["/v3"] = lambda request: (
        (200, {"Content-Type": "application/json"}, json.dumps({"version": link}).encode())
        if request.method == "GET" and "/images" not in request.path
        else (0, {}, b"")
    )
    return f"{server.url}/v3"


def _glance(server: echo.Echo, secret: str, env: Mapping[str, str]) -> Run:
    url = _keystone(server)
    found = {"IMPORTER_IMAGE_ID": "7b1c0a2e", "OS_AUTH_URL": url, "OS_PROJECT_NAME": "p"}
    return Run((secret,), "glance", url, {**found, "OS_DEFAULT_DOMAIN": "default", **env})


@_row("glance", "password", "Glance.user_password", words=_keystone_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    return _glance(server, PASSWORD, {"OS_USERNAME": "me", "OS_PASSWORD": PASSWORD})


@_row("glance", "user and password", "access.user", "access.password", words=_keystone_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    return _glance(server, PASSWORD, LOGIN)


@_row("glance", "token", "Glance.token", words=_keystone_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    return _glance(server, TOKEN, {"OS_TOKEN": TOKEN})


@_row("glance", "application credential", "Glance.application_secret", words=_keystone_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    env = {"OS_APPLICATION_CREDENTIAL_ID": "id", "OS_APPLICATION_CREDENTIAL_SECRET": PASSWORD}
    return _glance(server, PASSWORD, {**env, "OS_PROJECT_NAME": ""})


@_row("glance", "token of Keystone, at the image service", words=_keystone_error)
def _(server: echo.Echo, _folder: Path) -> Run:
    run = _glance(server, TOKEN, {"OS_USERNAME": "me", "OS_PASSWORD": PASSWORD})
    discovery = server.pages["/v3"]
    endpoint = {"interface": "public", "region": "r", "region_id": "r", "id": "e", "url": server.url}
    token = {
        "methods": ["password"],
        "expires_at": "2099-01-01T00:00:00.000000Z",
        "issued_at": "2026-01-01T00:00:00.000000Z",
        "user": {"id": "u", "name": "me", "domain": {"id": "default", "name": "Default"}},
        "project": {"id": "p", "name": "p", "domain": {"id": "default", "name": "Default"}},
        "catalog": [{"type": "image", "name": "glance", "id": "g", "endpoints": [endpoint]}],
    }
    made = (201, {"X-Subject-Token": TOKEN}, json.dumps({"token": token}).encode())
    server.pages["/v3"] = lambda request: made if request.method == "POST" else discovery(request)
    return run


# -- oVirt ----------------------------------------------------------------------------------------

API = "/ovirt-engine/api"
SSO = "/ovirt-engine/sso/oauth/token"


def _sso_error(text: str) -> str:
    return json.dumps({"error_code": "access_denied", "error": text})


def _fault(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    return f"<fault><reason>Operation Failed</reason><detail>[{text}]</detail></fault>"


def _imageio(server: echo.Echo, secret: str) -> Run:
    env = {**LOGIN, "IMPORTER_DISK_ID": "disk-1"}
    return Run((secret,), "imageio", f"{server.url}{API}", env)


@_row(
    "imageio",
    "password, at the engine's login",
    "access.user",
    "access.password",
    is_tls=True,
    words=_sso_error,
)
def _(server: echo.Echo, _folder: Path) -> Run:
    return _imageio(server, PASSWORD)


def _logged_in(server: echo.Echo, token: str) -> None:
    found = {"access_token": token, "scope": "ovirt-app-api", "token_type": "bearer", "exp": "9999999999999"}
    server.page(SSO, found, Content_Type="application/json")
    server.page("/ovirt-engine/services/sso-logout", {}, Content_Type="application/json")


@_row("imageio", "token of the engine", is_tls=True, words=_fault)
def _(server: echo.Echo, _folder: Path) -> Run:
    _logged_in(server, TOKEN)
    return _imageio(server, TOKEN)


# The source waits for the engine to end the transfer.
@_row("imageio", "ticket, at the data server", is_tls=True, words=_gcs_error, places=ONE_PLACE)
def _(server: echo.Echo, _folder: Path) -> Run:
    _logged_in(server, "a-token")
    ticket = f"0b1c-{MARK}-4d5e"
    url = f"{server.url}/images/{ticket}"
    xml = {"Content_Type": "application/xml"}
    disk = '<disk id="disk-1"><status>ok</status><format>raw</format><total_size>65536</total_size>'
    disk += "<provisioned_size>65536</provisioned_size><actual_size>65536</actual_size></disk>"
    transfer = (
        '<image_transfer id="t-1"><direction>download</direction><format>raw</format>'
        f"<phase>transferring</phase><transfer_url>{url}</transfer_url><proxy_url>{url}</proxy_url>"
        "</image_transfer>"
    )
    ended = transfer.replace("transferring", "finished_failure")
    state = {"ended": False}

    def transfers(request: echo.Request) -> tuple[int, Mapping[str, str], bytes]:
        if request.path.endswith(("/cancel", "/finalize")):
            state["ended"] = True
            body = "<action><status>complete</status></action>"
        else:
            body = ended if state["ended"] else transfer
        if request.path.endswith("/imagetransfers"):
            state["ended"] = False
            return 201, {"Content-Type": "application/xml"}, transfer.encode()
        return 200, {"Content-Type": "application/xml"}, body.encode()

    server.page(f"{API}/disks/disk-1", disk, **xml)
    server.pages[f"{API}/imagetransfers"] = transfers
    return dataclasses.replace(_imageio(server, ticket), has_library=False)


# -- VMware ---------------------------------------------------------------------------------------


def _soap(body: str) -> str:
    return (
        '<?xml version="1.0" encoding="UTF-8"?><soapenv:Envelope '
        'xmlns:soapenv="http://schemas.xmlsoap.org/soap/envelope/" '
        'xmlns:xsd="http://www.w3.org/2001/XMLSchema" '
        f'xmlns:xsi="http://www.w3.org/2001/XMLSchema-instance"><soapenv:Body>{body}</soapenv:Body>'
        "</soapenv:Envelope>"
    )


def _soap_fault(text: str) -> str:
    text = text.replace("&", "&amp;").replace("<", "&lt;")
    detail = '<RuntimeFaultFault xmlns="urn:vim25" xsi:type="RuntimeFault"></RuntimeFaultFault>'
    fault = (
        f"<faultcode>ServerFaultCode</faultcode><faultstring>{text}</faultstring><detail>{detail}</detail>"
    )
    return _soap(f"<soapenv:Fault>{fault}</soapenv:Fault>")


def _vddk(server: echo.Echo, secret: str, folder: Path) -> Run:
    server.status = 500
    env = {**LOGIN, "IMPORTER_UUID": "4219c3b1", "IMPORTER_BACKING_FILE": "[d] a/b.vmdk"}
    assert server.pair is not None
    thumbprint = server.pair.thumbprint
    (folder / "vddk/lib64").mkdir(parents=True)
    _file(folder / "vddk/lib64/libvixDiskLib.so.8", "")
    options = ("--vddk-libdir", str(folder / "vddk"))
    env["IMPORTER_THUMBPRINT"] = thumbprint
    return Run((secret,), "vddk", server.url, env, options, has_library=False)


def _vsphere(server: echo.Echo, *, logs_in: bool) -> None:
    """Answer RetrieveServiceContent, and Login with a cookie."""
    about = "".join(
        f"<{name}>{value}</{name}>"
        for name, value in {
            "name": "VMware vCenter Server",
            "fullName": "VMware vCenter Server 8.0",
            "vendor": "VMware, Inc.",
            "version": "8.0.0",
            "build": "1",
            "osType": "linux-x64",
            "productLineId": "vpx",
            "apiType": "VirtualCenter",
            "apiVersion": "8.0.0.0",
        }.items()
    )
    content = (
        '<RetrieveServiceContentResponse xmlns="urn:vim25"><returnval>'
        '<rootFolder type="Folder">group-d1</rootFolder>'
        '<propertyCollector type="PropertyCollector">propertyCollector</propertyCollector>'
        f"<about>{about}</about>"
        '<sessionManager type="SessionManager">SessionManager</sessionManager>'
        '<searchIndex type="SearchIndex">SearchIndex</searchIndex>'
        "</returnval></RetrieveServiceContentResponse>"
    )
    session = (
        '<LoginResponse xmlns="urn:vim25"><returnval><key>k</key><userName>me</userName>'
        "<fullName>me</fullName><loginTime>2026-01-01T00:00:00Z</loginTime>"
        "<lastActiveTime>2026-01-01T00:00:00Z</lastActiveTime><locale>en</locale>"
        "<messageLocale>en</messageLocale></returnval></LoginResponse>"
    )

    def page(request: echo.Request) -> tuple[int, Mapping[str, str], bytes]:
        if "RetrieveServiceContent" in request.text:
            cookie = {"Set-Cookie": f'vmware_soap_session="{TOKEN}"; Path=/; HttpOnly'} if logs_in else {}
            return 200, cookie, _soap(content).encode()
        if logs_in and "<Login " in request.text:
            return 200, {}, _soap(session).encode()
        return 0, {}, b""

    server.pages["/sdk"] = page


def _machine(server: echo.Echo, secret: str) -> Run:
    server.status = 500
    assert server.pair is not None
    env = {**LOGIN, "IMPORTER_UUID": "4219c3b1", "IMPORTER_THUMBPRINT": server.pair.thumbprint}
    return Run((secret,), "vsphere", server.url, env)


@_row("vsphere", "password, at the login", "access.user", "access.password", is_tls=True, words=_soap_fault)
def _(server: echo.Echo, _folder: Path) -> Run:
    _vsphere(server, logs_in=False)
    return _machine(server, PASSWORD)


@_row("vsphere", "cookie of the session", is_tls=True, words=_soap_fault)
def _(server: echo.Echo, _folder: Path) -> Run:
    _vsphere(server, logs_in=True)
    return _machine(server, TOKEN)


@_row("vddk", "password, at the login", "access.user", "access.password", is_tls=True, words=_soap_fault)
def _(server: echo.Echo, folder: Path) -> Run:
    _vsphere(server, logs_in=False)
    return _vddk(server, PASSWORD, folder)


@_row("vddk", "cookie of the session", is_tls=True, words=_soap_fault)
def _(server: echo.Echo, folder: Path) -> Run:
    _vsphere(server, logs_in=True)
    return _vddk(server, TOKEN, folder)


# -- KubeVirt -------------------------------------------------------------------------------------

EXPORT = "/volumes/v/disk.img"


@_row("kubevirt", "token", "KubeVirt.token", is_tls=True)
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "kubevirt", f"{server.url}{EXPORT}", {"IMPORTER_EXPORT_TOKEN": TOKEN})


@_row("kubevirt", "token in a file", "KubeVirt.token_file", is_tls=True)
def _(server: echo.Echo, folder: Path) -> Run:
    options = ("--export-token-file", _file(folder / "token", TOKEN))
    return Run((TOKEN,), "kubevirt", f"{server.url}{EXPORT}", options=options, has_library=False)


@_row("kubevirt", "token in the address", "endpoint", is_tls=True)
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "kubevirt", f"{server.url}{EXPORT}?x-kubevirt-export-token={TOKEN}")


@_row("kubevirt", "token in a header", "access.headers", is_tls=True)
def _(server: echo.Echo, _folder: Path) -> Run:
    headers = {"x-kubevirt-export-token": TOKEN}
    return Run((TOKEN,), "kubevirt", f"{server.url}{EXPORT}", headers=headers)


@_row("kubevirt", "token of a backup's map", is_tls=True)
def _(server: echo.Echo, _folder: Path) -> Run:
    url = f"{server.url}/volumes/v/map"
    env = {"IMPORTER_EXPORT_TOKEN": TOKEN}
    return Run((TOKEN,), "kubevirt", url, env)


# -- NBD ------------------------------------------------------------------------------------------


@_row("nbd", "user and password in the address", "endpoint", places=ONE_PLACE)
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "nbd", f"nbd://user:{TOKEN}@{server.at}/x", contacts=False)


@_row("nbd", "user and password before a slash", "endpoint", places=ONE_PLACE)
def _(server: echo.Echo, _folder: Path) -> Run:
    return Run((TOKEN,), "nbd", f"nbd://user:{TOKEN}/x@{server.at}", contacts=False)


@_row("nbd", "client key", "Nbd.key", places=ONE_PLACE)
def _(server: echo.Echo, folder: Path) -> Run:
    pair = tls.Authority(folder / "ca").issue(client=True)
    key = pair.key.read_text().splitlines()[1]
    options = ("--cert", str(pair.certificate), "--key", str(pair.key))
    run = Run((key,), "nbd", f"nbds://{server.at}/x", options=options, has_library=False)
    return dataclasses.replace(run, contacts=False)


# -- local ----------------------------------------------------------------------------------------


@_row("local", "name that looks like a login", "endpoint", places=ONE_PLACE)
def _(_server: echo.Echo, folder: Path) -> Run:
    # Shown as it is: a path has no secrets.
    return Run((), "local", f"{folder}/none/me:word@host", contacts=False, has_library=False)


# -- uploads, clones, cluster ---------------------------------------------------------------------


def _disk(folder: Path) -> str:
    (folder / "upload.img").write_bytes(echo.DISK)
    return str(folder / "upload.img")


@_row("upload", "token", "--token-file")
def _(server: echo.Echo, folder: Path) -> Run:
    token = ("--token-file", _file(folder / "token", TOKEN), "--stall-timeout", "1")
    command = ("upload", "--json", *token, _disk(folder), f"{server.url}/v1beta1/upload")
    return Run((TOKEN,), command=command, has_pod=False, has_library=False)


@_row("upload", "user and password in the address")
def _(server: echo.Echo, folder: Path) -> Run:
    url = f"http://me:{_quoted(PASSWORD)}@{server.at}/v1beta1/upload?token={_quoted(TOKEN)}"
    command = ("upload", "--stall-timeout", "1", _disk(folder), url)
    return Run((PASSWORD, TOKEN), command=command, is_sent=False, has_pod=False, has_library=False)


@_row("cloner", "client key", "CLIENT_KEY", is_tls=True)
def _(server: echo.Echo, folder: Path) -> Run:
    pair = tls.Authority(folder / "ca").issue(client=True)
    assert server.pair is not None
    env = {
        "IMPORTER_SOURCE": "",
        "UPLOAD_URL": f"https://me:{TOKEN}@localhost:{server.port}/v1beta1/upload",
        "VOLUME_MODE": "filesystem",
        "MOUNT_POINT": str(Path(_disk(folder)).parent),
        "CLIENT_KEY": pair.key.read_text(),
        "CLIENT_CERT": pair.certificate.read_text(),
        "SERVER_CA_CERT": (server.pair.certificate.parent / "ca.pem").read_text(),
    }
    secrets = (pair.key.read_text().splitlines()[1], TOKEN)
    return Run(secrets, env=env, command=(), is_sent=False, has_library=False)


@_row("cron", "token of the service account", is_tls=True)
def _(server: echo.Echo, folder: Path) -> Run:
    assert server.pair is not None
    _file(folder / "token", TOKEN)
    _file(folder / "ca.crt", (server.pair.certificate.parent / "ca.pem").read_text())
    disk = folder / "disk.img"
    disk.write_bytes(echo.DISK)
    sums = _file(folder / "SUMS", f"{'0' * 64}  disk.img\n")
    command = ("cdi-source-update-poller", "-ns", "n", "-cron", "c", "-url", f"file://{disk}")
    command += ("--checksum-file", sums, "--account", str(folder))
    env = {"KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(server.port)}
    return Run((TOKEN,), env=env, command=command, has_pod=False, has_library=False)


@_row("openstack-populator", "password of the Secret", "password", words=_keystone_error)
def _(server: echo.Echo, folder: Path) -> Run:
    env = {"username": "me", "password": PASSWORD, "projectName": "p", "defaultDomain": "default"}
    command = (
        "--stall-timeout=1",
        "openstack-populator",
        "--endpoint",
        _keystone(server),
        "--image-id",
        "7b1c0a2e",
        "--metrics-port=0",
    )
    command += ("--volume-path", str(folder / "disk.img"), "--pvc-size", "65536")
    return Run((PASSWORD,), env=env, command=command, has_pod=False, has_library=False)


@_row("ovirt-populator", "password of the Secret", "password", is_tls=True, words=_sso_error)
def _(server: echo.Echo, folder: Path) -> Run:
    env = {"user": "me", "password": PASSWORD, "insecureSkipVerify": "true"}
    command = (
        "--stall-timeout=1",
        "ovirt-populator",
        "--engine-url",
        f"{server.url}{API}",
        "--disk-id",
        "d",
        "--metrics-port=0",
    )
    command += ("--volume-path", str(folder / "disk.img"), "--pvc-size", "65536")
    return Run((PASSWORD,), env=env, command=command, has_pod=False, has_library=False)
