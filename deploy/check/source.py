"""Make the images of the check, and serve them: over HTTP, over HTTPS, and as a registry.

source.py DIRECTORY NAME HTTP_PORT HTTPS_PORT: DIRECTORY/ca.pem is the certificate for NAME. Needs qemu-img
and openssl, and nothing from the network. The disk is the same on every machine; not so its qcow2.
"""

import contextlib
import functools
import gzip
import hashlib
import http.server
import io
import json
import lzma
import random
import re
import signal
import socket
import ssl
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

MIB = 1 << 20
#: The disk: random data with holes, and its last sector.
SIZE = 32 * MIB
DATA = {0: 3 * MIB, 9 * MIB + 4096: MIB, 20 * MIB: 12345, SIZE - 512: 512}
OCI = "application/vnd.oci.image"


def disk() -> bytes:
    content = bytearray(SIZE)
    dice = random.Random(17)
    for offset, length in DATA.items():
        content[offset : offset + length] = dice.randbytes(length)
    content[510:512] = b"\x55\xaa"  # a boot sector: otherwise the worker warns that this may be no disk
    return bytes(content)


def tar(name: str, content: bytes) -> bytes:
    """Return an archive as `tar -C FOLDER .` makes it, which begins with an entry for the folder itself."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as archive:
        for path in (".", *(f"./{each}" for each in reversed(Path(name).parents) if each.name)):
            entry = tarfile.TarInfo(path)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(entry)
        entry = tarfile.TarInfo(f"./{name}")
        entry.size = len(content)
        archive.addfile(entry, io.BytesIO(content))
    return made.getvalue()


def make(folder: Path, name: str) -> dict[str, str]:
    """Write the images and the certificate; return the media types of the registry's documents, by path."""
    raw = disk()
    (folder / "disk.raw").write_bytes(raw)
    (folder / "zeros.raw").write_bytes(bytes(MIB))
    for form in ("qcow2", "vmdk"):
        run("qemu-img", "convert", "-f", "raw", "-O", form, folder / "disk.raw", folder / f"disk.{form}")
    run("qemu-img", "create", "-q", "-f", "qcow2", folder / "huge.qcow2", "1T")
    (folder / "disk.raw.gz").write_bytes(gzip.compress(raw, 1))
    (folder / "disk.raw.xz").write_bytes(lzma.compress(raw, preset=0))
    (folder / "disk.tar").write_bytes(tar("disk.img", raw))
    run(
        *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "7", "-subj", "/CN=cdi-check"),
        *("-addext", f"subjectAltName=DNS:{name}"),
        *("-addext", "keyUsage=critical,digitalSignature,keyCertSign"),
        *("-keyout", folder / "key.pem", "-out", folder / "ca.pem"),
    )
    return image(folder, tar("disk/disk.qcow2", (folder / "disk.qcow2").read_bytes()))


def image(folder: Path, layer: bytes) -> dict[str, str]:
    """Write an image with one layer, named disk:1, where a registry's clients look for it."""
    config = {"os": "linux", "config": {}, "rootfs": {"type": "layers", "diff_ids": [digest_of(layer)]}}
    blobs = {f"{OCI}.config.v1+json": json.dumps(config).encode(), f"{OCI}.layer.v1.tar": layer}
    files, parts = {"v2/index.html": b"{}"}, []
    for kind, blob in blobs.items():
        parts.append({"mediaType": kind, "digest": digest_of(blob), "size": len(blob)})
        files[f"v2/disk/blobs/{digest_of(blob)}"] = blob
    kind = f"{OCI}.manifest.v1+json"
    document = {"schemaVersion": 2, "mediaType": kind, "config": parts[0], "layers": parts[1:]}
    manifest = json.dumps(document).encode()
    manifests = dict.fromkeys((f"v2/disk/manifests/{tag}" for tag in ("1", digest_of(manifest))), manifest)
    for path, content in (files | manifests).items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_bytes(content)
    return dict.fromkeys((f"/{path}" for path in manifests), kind)


def digest_of(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def run(*command: object) -> None:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{command[0]}: {done.stderr}")


class Handler(http.server.SimpleHTTPRequestHandler):
    """The files of a folder, by ranges too. ``types``: the media types of some paths."""

    protocol_version = "HTTP/1.1"
    types: dict[str, str]

    def do_GET(self) -> None:
        with contextlib.suppress(ConnectionError):  # a client may stop reading
            self._send(has_body=True)

    def do_HEAD(self) -> None:
        self._send(has_body=False)

    def _send(self, *, has_body: bool) -> None:
        path = Path(self.translate_path(self.path))
        path = path / "index.html" if self.path.endswith("/") else path
        if not path.is_file() or path.name == "key.pem":
            return self.send_error(404)
        size, tag = path.stat().st_size, f'"{path.stat().st_mtime_ns:x}"'
        first, last = 0, size - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and self.headers.get("If-Range", tag) == tag:
            first, last = int(asked[1]), min(last, int(asked[2] or last))
            if first > last:
                return self.send_error(416)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        else:
            self.send_response(200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("ETag", tag)
        self.send_header("Content-Type", self.types.get(self.path, "application/octet-stream"))
        self.send_header("Content-Length", str(last + 1 - first))
        self.end_headers()
        if has_body:
            with path.open("rb") as file:
                self.connection.sendfile(file, first, last + 1 - first)
        return None


class Server(http.server.ThreadingHTTPServer):
    """A server for IPv4 and IPv6: a cluster may have either."""

    address_family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET

    def server_bind(self) -> None:
        with contextlib.suppress(OSError):
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()


def main(folder: str, name: str, plain: str, secure: str) -> None:
    """Serve until SIGTERM, which the first process of a container would ignore."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    Handler.types = make(Path(folder), name)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(Path(folder, "ca.pem"), Path(folder, "key.pem"))
    for port in (plain, secure):
        server = Server(("", int(port)), functools.partial(Handler, directory=folder))
        if port == secure:
            # A thread for each client, not the one that accepts, waits for the handshake.
            server.socket = context.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


main(*sys.argv[1:])
