"""Real servers on 127.0.0.1, ready when their block begins and stopped by pid after it."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support import processes, tls


@dataclasses.dataclass(frozen=True)
class Web:
    """A running nginx."""

    scheme: str
    port: int
    directory: Path
    root: Path

    def url(self, name: str | Path, *, host: str = "127.0.0.1") -> str:
        """Return the URL of a file below the root, given by its absolute or relative path."""
        path = Path(name)
        name = path.relative_to(self.root) if path.is_absolute() else path
        return f"{self.scheme}://{host}:{self.port}/{name}"

    def requests(self) -> list[dict[str, str]]:
        """Return the finished requests of all: method, path, status, range, bytes, agent, authorization.

        nginx logs a request after its response has ended, so a client may be a moment ahead of the log.
        """
        return [json.loads(line) for line in (self.directory / "access.log").read_text().splitlines()]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of an nginx. ``limit_rate``: bytes per second and connection.

    ``redirects``: path to target. ``password``: user and password for all paths. ``chunked``: bodies have no
    length, nor ranges.
    """

    ranges: bool = True
    chunked: bool = False
    head: bool = True
    password: tuple[str, str] | None = None
    limit_rate: int = 0
    pair: tls.KeyPair | None = None
    redirects: Mapping[str, str] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def nginx(directory: Path, root: Path, settings: Settings | None = None) -> Iterator[Web]:
    """Serve the files below ``root`` by nginx; ``directory`` is for nginx's own files."""
    processes.need("nginx")
    settings = settings or Settings()
    web = Web("https" if settings.pair else "http", processes.free_port(), directory, root)
    configuration = directory / "nginx.conf"
    configuration.write_text(_configuration(web, settings))
    argv: list[str | Path] = ["nginx", "-c", configuration, "-p", directory, "-e", directory / "error.log"]
    log = directory / "output.log"
    with processes.running(argv, log=log, ready=lambda: processes.is_listening(web.port)):
        yield web


def _configuration(web: Web, settings: Settings) -> str:
    rules = [f"listen 127.0.0.1:{web.port}{' ssl' if settings.pair else ''};", f"root {web.root};"]
    if settings.pair:
        rules += [
            f"ssl_certificate {settings.pair.certificate};",
            f"ssl_certificate_key {settings.pair.key};",
        ]
    if not settings.ranges or settings.chunked:
        rules.append("max_ranges 0;")
    if settings.chunked:
        # What may be followed by another document has no length.
        rules += ["addition_types *;", "add_after_body /nothing;", "location = /nothing { return 200; }"]
    if not settings.head:
        rules.append("if ($request_method = HEAD) { return 405; }")
    if settings.limit_rate:
        rules.append(f"limit_rate {settings.limit_rate};")
    if settings.password:
        user, password = settings.password
        (web.directory / "htpasswd").write_text(f"{user}:{{PLAIN}}{password}\n")
        rules += ["auth_basic private;", f"auth_basic_user_file {web.directory}/htpasswd;"]
    rules += [f"location = {path} {{ return 302 {to}; }}" for path, to in settings.redirects.items()]
    server = "\n        ".join(rules)
    return _NGINX.format(directory=web.directory, server=server)


_NGINX = """\
daemon off;
user root;
worker_processes 2;
pid {directory}/nginx.pid;
events {{ worker_connections 1024; }}
http {{
    log_format json escape=json '{{"method":"$request_method","path":"$uri","status":"$status",'
        '"range":"$http_range","bytes":"$body_bytes_sent","agent":"$http_user_agent",'
        '"authorization":"$http_authorization"}}';
    access_log {directory}/access.log json;
    client_body_temp_path {directory}/temp;
    proxy_temp_path {directory}/temp;
    fastcgi_temp_path {directory}/temp;
    uwsgi_temp_path {directory}/temp;
    scgi_temp_path {directory}/temp;
    default_type application/octet-stream;
    sendfile on;
    server {{
        {server}
    }}
}}
"""
