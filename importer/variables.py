"""The environment variables that the worker reads, for the documentation. A test compares them with the code.

Variables of one kind of source are declared by its location (``sources.fields``) and are not repeated here.
"""

from __future__ import annotations

from typing import NamedTuple

IMPORTER = "importer"
UPLOAD_SERVER = "uploadserver"
CLONER = "cloner"
COMMANDS = "commands"
POPULATORS = "populators"
POLLER = "poller"


class Variable(NamedTuple):
    """An environment variable. ``roles``: who reads it. ``meaning``: Markdown for a cell of a table."""

    name: str
    roles: tuple[str, ...]
    meaning: str
    default: str = ""


_SIZED = (IMPORTER, UPLOAD_SERVER)
_CREDENTIALS = (IMPORTER, COMMANDS)
_PROXIED = (IMPORTER, COMMANDS, POPULATORS, POLLER)

VARIABLES = (
    Variable("IMPORTER_SOURCE", (IMPORTER,), "kind of source; it selects the role of importer"),
    Variable("IMPORTER_ENDPOINT", (IMPORTER,), "address of the disk; see the page of the source"),
    Variable(
        "IMPORTER_CONTENTTYPE",
        (IMPORTER,),
        "`kubevirt`: a disk; `archive`: a tar archive, unpacked into a file system",
        "kubevirt",
    ),
    Variable(
        "IMPORTER_IMAGE_SIZE",
        (IMPORTER,),
        "requested size as a Kubernetes quantity: `10Gi`, `500M`, `1e9`",
        "size of the image",
    ),
    Variable(
        "IMPORTER_CHECKSUM",
        (IMPORTER,),
        "`md5`, `sha1`, `sha256` or `sha512`, a colon, and the checksum of the bytes as served",
    ),
    Variable(
        "CDI_WORKER_DISK",
        (IMPORTER,),
        "disk of an OVA (file name, id or number) or OCI archive (name or title)",
        "the only one",
    ),
    Variable("IMPORTER_ACCESS_KEY_ID", _CREDENTIALS, "user, or access key"),
    Variable("IMPORTER_SECRET_KEY", _CREDENTIALS, "password, or secret key"),
    Variable("IMPORTER_SESSION_TOKEN", _CREDENTIALS, "session token of temporary S3 keys"),
    Variable("IMPORTER_EXTRA_HEADER_<n>", (IMPORTER,), "extra HTTP header, `Name: value`"),
    Variable(
        "IMPORTER_CERT_DIR",
        (IMPORTER, POLLER),
        "directory with additional CA certificates (PEM; for registries only `*.crt` and `*.pem`)",
    ),
    Variable(
        "IMPORTER_PROXY_CERT_DIR", (IMPORTER,), "directory with CA certificates of a proxy, trusted likewise"
    ),
    Variable("INSECURE_TLS", (IMPORTER, POLLER), "`true`: do not verify certificates", "false"),
    Variable("CACHE_MODE", (IMPORTER,), "`TRYNONE`: bypass the page cache (O_DIRECT)"),
    Variable(
        "OWNER_UID",
        (IMPORTER, CLONER),
        "label of the metrics; a resumed import must have the same one",
    ),
    Variable("UPLOAD_IMAGE_SIZE", (UPLOAD_SERVER,), "requested size, as `IMPORTER_IMAGE_SIZE`"),
    Variable("FILESYSTEM_OVERHEAD", _SIZED, "fraction of the file system to leave free, such as `0.06`", "0"),
    Variable(
        "PREALLOCATION",
        (*_SIZED, CLONER),
        "`true`: allocate every byte of the disk; for a clone source: send holes as data",
        "false",
    ),
    Variable(
        "DESTINATION",
        (UPLOAD_SERVER,),
        "file or device to write",
        "`/dev/cdi-block-volume` if it exists, else `/data/disk.img`",
    ),
    Variable("LISTEN_ADDRESS", (UPLOAD_SERVER,), "address to listen on", "all, IPv4 and IPv6"),
    Variable("LISTEN_PORT", (UPLOAD_SERVER,), "port to listen on", "8443"),
    Variable("TLS_CERT_FILE", (UPLOAD_SERVER,), "certificate of the server (PEM); it selects this role"),
    Variable("TLS_KEY_FILE", (UPLOAD_SERVER,), "key of the server (PEM)"),
    Variable("TLS_MIN_VERSION", (UPLOAD_SERVER,), "`VersionTLS10` to `VersionTLS13`", "VersionTLS12"),
    Variable("TLS_CIPHERS", (UPLOAD_SERVER,), "OpenSSL or Go names, separated by commas; not for TLS 1.3"),
    Variable("CLIENT_CERT_FILE", (UPLOAD_SERVER,), "CA that signs the certificates of clients (PEM)"),
    Variable("CLIENT_NAME", (UPLOAD_SERVER,), "common name that clients must have; it selects this role"),
    Variable(
        "DEADLINE", (UPLOAD_SERVER,), "time (RFC 3339) after which a server without an upload exits", "none"
    ),
    Variable("UPLOAD_URL", (CLONER,), "`https://…/v1beta1/upload` of the target; it selects this role"),
    Variable("VOLUME_MODE", (CLONER,), "`block` or `filesystem`"),
    Variable("MOUNT_POINT", (CLONER,), "device or directory to send"),
    Variable("CLIENT_KEY", (CLONER,), "key of the client (PEM text)"),
    Variable("CLIENT_CERT", (CLONER,), "certificate of the client (PEM text)"),
    Variable("SERVER_CA_CERT", (CLONER,), "CA of the upload server (PEM text)"),
    Variable("XDG_CONFIG_HOME", (COMMANDS,), "directory of the configuration file", "`.config` in `HOME`"),
    Variable("XDG_CONFIG_DIRS", _CREDENTIALS, "directories of the configuration file", "/etc/xdg"),
    Variable("HOME", (COMMANDS,), "see `XDG_CONFIG_HOME`"),
    Variable("AWS_CA_BUNDLE", (COMMANDS,), "s3: file with CA certificates"),
    Variable("OS_CACERT", (COMMANDS,), "glance: file with CA certificates"),
    Variable("OVIRT_USERNAME", (COMMANDS,), "imageio: user"),
    Variable("OVIRT_PASSWORD", (COMMANDS,), "imageio: password"),
    Variable("OVIRT_CAFILE", (COMMANDS,), "imageio: file with CA certificates"),
    Variable("GOVC_USERNAME", (COMMANDS,), "vddk: user"),
    Variable("GOVC_PASSWORD", (COMMANDS,), "vddk: password"),
    Variable("GOVC_TLS_CA_CERTS", (COMMANDS,), "vddk: files with CA certificates, separated by colons"),
    Variable("http_proxy", _PROXIED, "proxy for `http` URLs; also in upper case"),
    Variable("https_proxy", _PROXIED, "proxy for `https` URLs; also in upper case"),
    Variable("no_proxy", _PROXIED, "hosts and networks without a proxy; also in upper case"),
    Variable("KUBERNETES_SERVICE_HOST", (POLLER,), "address of the cluster's API server"),
    Variable("KUBERNETES_SERVICE_PORT", (POLLER,), "its port", "443"),
    Variable("username", (POPULATORS,), "user of OpenStack"),
    Variable("user", (POPULATORS,), "user of oVirt"),
    Variable("password", (POPULATORS,), "password"),
    Variable("cacert", (POPULATORS,), "CA certificates (PEM text)"),
    Variable("insecureSkipVerify", (POPULATORS,), "`true`: do not verify certificates", "false"),
)
