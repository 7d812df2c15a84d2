"""Keystone and Glance of Debian on 127.0.0.1: SQLite databases, images in files, TLS by nginx."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import requests
from cryptography import fernet

from tests.support import processes, tls

USER = "admin"
PASSWORD = "secret-of-the-cloud"
PROJECT = "admin"
REGION = "RegionOne"
#: Serves the same images, at 512 KiB/s a connection.
SLOW_REGION = "RegionSlow"
#: Seconds that the services may take to start: each loads some hundred modules.
START = 120.0
#: Seconds that Glance trusts a token before it asks Keystone again.
CACHED = 1
#: Debian's programs, for Debian's Python; nothing of the environment of the tests.
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "PYTHONNOUSERSITE": "1"}
#: The programs of each project, by the names of their configuration files.
PROGRAMS = {"keystone": ("keystone-manage", "uwsgi"), "glance": ("glance-manage", "glance-api")}


@dataclasses.dataclass(frozen=True)
class Cloud:
    """Running services. ``public``: the URL of Keystone with TLS; ``internal``: without.

    The catalog has a public endpoint of the image service with TLS, and an internal one without.
    """

    public: str
    internal: str
    images: str
    directory: Path
    authority: Path

    @property
    def environment(self) -> dict[str, str]:
        """The variables that OpenStack's own clients read."""
        return {
            "OS_USERNAME": USER,
            "OS_PASSWORD": PASSWORD,
            "OS_PROJECT_NAME": PROJECT,
            "OS_USER_DOMAIN_ID": "default",
            "OS_PROJECT_DOMAIN_ID": "default",
        }

    def token(self) -> str:
        """Return a new token of the administrator."""
        domain = {"id": "default"}
        user = {"name": USER, "domain": domain, "password": PASSWORD}
        identity = {"methods": ["password"], "password": {"user": user}}
        scope = {"project": {"name": PROJECT, "domain": domain}}
        body = {"auth": {"identity": identity, "scope": scope}}
        answer = requests.post(f"{self.internal}/v3/auth/tokens", json=body, timeout=30)
        answer.raise_for_status()
        return str(answer.headers["X-Subject-Token"])

    def revoke(self, token: str) -> None:
        """Make a token invalid, and wait until Glance has forgotten it."""
        headers = {"X-Auth-Token": self.token(), "X-Subject-Token": token}
        requests.delete(f"{self.internal}/v3/auth/tokens", headers=headers, timeout=30).raise_for_status()
        # Glance asks Keystone again only after this time.
        time.sleep(CACHED + 0.1)

    def application_credential(self) -> Mapping[str, Any]:
        """Return a new application credential of the administrator, with a name of its own."""
        token = self.token()
        headers = {"X-Auth-Token": token, "X-Subject-Token": token}
        url = f"{self.internal}/v3"
        user = requests.get(f"{url}/auth/tokens", headers=headers, timeout=30).json()["token"]["user"]["id"]
        body = {"application_credential": {"name": os.urandom(8).hex(), "secret": "hush"}}
        answer = requests.post(
            f"{url}/users/{user}/application_credentials", json=body, headers=headers, timeout=30
        )
        answer.raise_for_status()
        return dict(answer.json()["application_credential"])

    def upload(self, image: Path | None, form: str, container: str = "bare") -> str:
        """Store an image, and return its id. None: only its record."""
        headers = {"X-Auth-Token": self.token()}
        record = {"name": form, "disk_format": form, "container_format": container}
        answer = requests.post(f"{self.images}/v2/images", json=record, headers=headers, timeout=30)
        answer.raise_for_status()
        number = str(answer.json()["id"])
        if image is not None:
            with image.open("rb") as stream:
                headers["Content-Type"] = "application/octet-stream"
                url = f"{self.images}/v2/images/{number}/file"
                requests.put(url, data=stream, headers=headers, timeout=60).raise_for_status()
        return number

    def add_images(self, public: str, slow: str) -> None:
        """Add the endpoints of the image service to the catalog."""
        headers = {"X-Auth-Token": self.token()}

        def add(kind: str, **record: str) -> str:
            url = f"{self.internal}/v3/{kind}s"
            answer = requests.post(url, json={kind: record}, headers=headers, timeout=30)
            answer.raise_for_status()
            return str(answer.json()[kind]["id"])

        service = add("service", type="image", name="glance")
        for region, interface, url in (
            (REGION, "public", public),
            (REGION, "internal", self.images),
            (SLOW_REGION, "public", slow),
        ):
            add("endpoint", service_id=service, region=region, interface=interface, url=url)

    def stored(self, number: str) -> Path:
        """Return the file in which Glance stores the bytes of an image."""
        return self.directory / "images" / number


@contextlib.contextmanager
def cloud(directory: Path) -> Iterator[Cloud]:
    """Run Keystone and Glance in ``directory``."""
    processes.need("keystone-manage", "glance-api", "uwsgi", "nginx")
    names = ("keystone", "glance", "keystone_tls", "glance_tls", "glance_slow")
    ports = {name: processes.free_port() for name in names}
    pair_of = tls.Authority(directory / "tls")
    running = Cloud(
        public=f"https://127.0.0.1:{ports['keystone_tls']}",
        internal=f"http://127.0.0.1:{ports['keystone']}",
        images=f"http://127.0.0.1:{ports['glance']}",
        directory=directory,
        authority=pair_of.certificate,
    )
    for name in ("images", "staging", "keys", "credentials"):
        (directory / name).mkdir(mode=0o700)
    _make_home(directory)
    written = {
        ".keystone/keystone.conf": KEYSTONE,
        ".glance/glance.conf": GLANCE,
        ".glance/paste.ini": PASTE,
        "nginx.conf": NGINX,
    }
    pair = pair_of.issue()
    values = {**ports, "directory": directory, "certificate": pair.certificate, "key": pair.key}
    values |= {"user": USER, "password": PASSWORD, "project": PROJECT, "cached": CACHED}
    values |= {"region": REGION, "slow": SLOW_REGION}
    for name, text in written.items():
        (directory / name).write_text(text.format(**values))
    _prepare(running)
    with contextlib.ExitStack() as stack:
        for name, argv in _servers(directory, ports).items():
            env = {**ENVIRONMENT, "HOME": str(directory)}
            log = directory / f"{name}.log"
            stack.enter_context(processes.running(argv, log=log, ready=lambda: True, env=env))
        for name, port in ports.items():
            processes.wait_for(functools.partial(processes.is_listening, port), name, START)
        slow = f"https://127.0.0.1:{ports['glance_slow']}"
        running.add_images(public=f"https://127.0.0.1:{ports['glance_tls']}", slow=slow)
        yield running


def _make_home(directory: Path) -> None:
    """Create every file that the programs look for in their home before they look in /etc.

    Nothing of the machine is then read: /etc/keystone may exist, with files of another release, or not.
    """
    for project, programs in PROGRAMS.items():
        home = directory / f".{project}"
        (home / "policy.d").mkdir(parents=True)
        for name in (project, *programs):
            (home / f"{name}.conf").touch()
            (home / f"{name}.conf.d").mkdir()
        for name in ("policy.yaml", "schema-image.json"):
            (home / name).write_text("{}")


def _prepare(running: Cloud) -> None:
    """Create the databases, the keys of tokens, and the administrator."""
    directory = running.directory
    # As ``fernet_setup`` and ``credential_setup`` make them, which take three seconds each.
    for name in ("keys", "credentials"):
        for number in ("0", "1"):
            (directory / name / number).write_bytes(fernet.Fernet.generate_key())
    bootstrap = {
        "password": PASSWORD,
        "region-id": REGION,
        "public-url": f"{running.public}/v3",
        "internal-url": f"{running.internal}/v3",
    }
    for command in (
        ("keystone-manage", "db_sync"),
        (
            "keystone-manage",
            "bootstrap",
            *(f"--bootstrap-{name}={value}" for name, value in bootstrap.items()),
        ),
        ("glance-manage", "db_sync"),
    ):
        processes.run(*command, timeout=120, env={**ENVIRONMENT, "HOME": str(directory)})


def _servers(directory: Path, ports: Mapping[str, int]) -> dict[str, list[str | Path]]:
    keystone: list[str | Path] = [
        "uwsgi",
        "--plugin=python3",
        "--master",
        "--die-on-term",
        "--enable-threads",
    ]
    keystone += [f"--http-socket=127.0.0.1:{ports['keystone']}", "--add-header=Connection: close"]
    keystone += ["--wsgi-file=/usr/bin/keystone-wsgi-public", "--post-buffering=65536", "--buffer-size=65535"]
    return {
        "keystone": [*keystone, "--need-app"],
        "glance": ["glance-api"],
        "nginx": ["nginx", "-c", directory / "nginx.conf", "-p", directory, "-e", directory / "error.log"],
    }


KEYSTONE = """
[DEFAULT]
log_dir = {directory}
[database]
connection = sqlite:///{directory}/keystone.db
[fernet_tokens]
key_repository = {directory}/keys
[fernet_receipts]
key_repository = {directory}/keys
[credential]
key_repository = {directory}/credentials
[identity]
password_hash_rounds = 4
[cache]
enabled = true
backend = dogpile.cache.memory
[revoke]
caching = false
"""
GLANCE = """
[DEFAULT]
bind_host = 127.0.0.1
bind_port = {glance}
workers = 0
log_file = {directory}/glance-api.log
node_staging_uri = file://{directory}/staging
[database]
connection = sqlite:///{directory}/glance.db
[glance_store]
stores = file
default_store = file
filesystem_store_datadir = {directory}/images
[keystone_authtoken]
www_authenticate_uri = http://127.0.0.1:{keystone}/v3
auth_url = http://127.0.0.1:{keystone}/v3
auth_type = password
username = {user}
password = {password}
project_name = {project}
user_domain_id = default
project_domain_id = default
region_name = {region}
interface = internal
token_cache_time = {cached}
[image_format]
require_image_format_match = false
[paste_deploy]
flavor = keystone
config_file = {directory}/.glance/paste.ini
"""
PASTE = """
[pipeline:glance-api-keystone]
pipeline = versions token context root
[composite:root]
paste.composite_factory = glance.api:root_app_factory
/: versions_list
/v2: v2
[app:versions_list]
paste.app_factory = glance.api.versions:create_resource
[app:v2]
paste.app_factory = glance.api.v2.router:API.factory
[filter:versions]
paste.filter_factory = glance.api.middleware.version_negotiation:VersionNegotiationFilter.factory
[filter:token]
paste.filter_factory = keystonemiddleware.auth_token:filter_factory
delay_auth_decision = true
[filter:context]
paste.filter_factory = glance.api.middleware.context:ContextMiddleware.factory
"""
NGINX = """
daemon off;
master_process off;
pid {directory}/nginx.pid;
events {{ }}
http {{
  access_log off;
  client_body_temp_path {directory}/body;
  proxy_temp_path {directory}/proxy;
  fastcgi_temp_path {directory}/fastcgi;
  uwsgi_temp_path {directory}/uwsgi;
  scgi_temp_path {directory}/scgi;
  ssl_certificate {certificate};
  ssl_certificate_key {key};
  proxy_http_version 1.1;
  proxy_set_header Connection "";
  server {{
    listen 127.0.0.1:{keystone_tls} ssl;
    location / {{ proxy_pass http://127.0.0.1:{keystone}; }}
  }}
  server {{
    listen 127.0.0.1:{glance_tls} ssl;
    location / {{ proxy_pass http://127.0.0.1:{glance}; proxy_buffering off; }}
  }}
  server {{
    listen 127.0.0.1:{glance_slow} ssl;
    location / {{ proxy_pass http://127.0.0.1:{glance}; limit_rate 512k; }}
  }}
}}
"""
