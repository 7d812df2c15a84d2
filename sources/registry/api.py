"""The registry API (OCI distribution specification): manifests and blobs."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator

import requests
import requests.auth

from cdi_worker import errors
from cdi_worker.images import image
from cdi_worker.images.engine import retry
from cdi_worker.sources import base, wire
from cdi_worker.sources import reference as oci_reference
from cdi_worker.sources.registry import auth, blobs, documents, locations
from cdi_worker.sources.web import http, pinned, session

log = logging.getLogger(__name__)

#: Size of the first request for a blob, in bytes. Most layers begin with the disk, whose head it contains.
HEAD_SIZE = 1 << 19
DIGEST_HEADER = "Docker-Content-Digest"


class Resource(pinned.Resource):
    """A URL of a registry. Authenticates when the server sends a challenge."""

    def __init__(self, url: str, registry: Registry, cancel: base.Cancel, accept: str) -> None:
        super().__init__(url, registry.access, registry.connection, cancel=cancel)
        self._authorizer = registry.authorizer
        self._accept = accept

    def send(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        headers = {**headers, "Accept": self._accept}
        response = super().send(method, url, headers)
        if response.status_code != 401 or wire.origin(url) != wire.origin(self.url):
            return response
        challenges = response.headers.get("WWW-Authenticate", "")
        refused = str(response.request.headers.get("Authorization", ""))
        try:
            with session.translate_errors(self.name, first=False):
                # The connection can be reused only after the body was read.
                session.body(response, 4096)
        finally:
            self.drop(response)
        if not self._authorizer.renew(challenges, refused, self.name):
            return response
        return super().send(method, url, headers)

    def authorization(self) -> requests.auth.AuthBase:
        return pinned.Header("Authorization", self._authorizer.header)


class Blob(http.HttpSource):
    """A blob. Its digest identifies the bytes: mirrors may differ in ETag and Last-Modified."""

    head_size = HEAD_SIZE

    def _check_coding(self, version: http.Version, head: bytes) -> None:
        """Do nothing: the digest is of the bytes as served, whatever their header says."""

    def _check_version(self, response: requests.Response, size: int | None) -> None:
        known = self._version and self._version.size
        if size is not None and known is not None and size != known:
            super()._check_version(response, size)


class _NotFound(errors.Unreachable):
    """The registry has no such manifest."""


class Registry:
    """One repository of a registry."""

    def __init__(
        self,
        reference: oci_reference.Reference,
        location: locations.Registry,
        cancel: base.Cancel,
        engine: image.Engine,
    ) -> None:
        self.reference = reference
        self.name = str(reference)
        self._cancel = cancel
        self._engine = engine
        login = auth.credentials(location.access, location.credentials_file, reference)
        # Credentials are only sent in response to a challenge.
        self.access = dataclasses.replace(location.access, user="", password="")
        self.connection = session.new_session(self.access, cancel)
        self.authorizer = auth.Authorizer(reference.repository, login, self.access, self.connection)
        self._scheme = ""
        self._resources: list[Resource] = []

    def close(self) -> None:
        """Close all connections."""
        for resource in self._resources:
            resource.close()
        self._resources.clear()
        self.connection.close()

    def root(self) -> bytes:
        data = self._manifest(self.reference.target)
        if self.reference.digest:
            documents.check(data, self.reference.digest, self.name)
        return data

    def manifest(self, descriptor: documents.Descriptor) -> bytes:
        data = retry.patiently(lambda: self._manifest(descriptor.digest), self.access.patience, self._cancel)
        documents.check(data, descriptor.digest, f"{self.name}: manifest")
        return data

    def look_up(self, kind: str, target: str) -> bytes | None:
        """Return a document of the repository that need not exist; None if there is none.

        ``kind``: ``manifests``, with the tag ``target``; or ``referrers``, the index of the artifacts that
        refer to the manifest ``target``. Of that only the first page: a registry that needs a second one has
        hundreds of them.
        """

        def attempt() -> bytes | None:
            try:
                return self._manifest(target, kind)
            except _NotFound:
                return None

        return retry.patiently(attempt, self.access.patience, self._cancel)

    def digest(self) -> str:
        """Return the digest of the manifest or index. Uses HEAD, which registries do not count as a pull."""
        stated = ""
        # Some registries refuse HEAD, or fail. If the cause is another one, GET returns a better message.
        try:
            with self._send(self.reference.target, "HEAD") as response:
                stated = response.headers.get(DIGEST_HEADER, "")
        except (errors.Unreachable, errors.Transient) as err:
            if isinstance(err, errors.Transient) and err.retry_after:
                raise
            log.info("no answer to HEAD url=%r reason=%s", self.name, err.message())
        return stated if oci_reference.is_digest(stated) else documents.digest(self.root())

    def blob(self, descriptor: documents.Descriptor) -> blobs.Verified:
        stop = self._cancel.child()

        def attempt() -> base.Image:
            return Blob(self._resource("blobs", descriptor.digest, stop)).image(base.Opening(self._engine))

        blob = retry.patiently(attempt, self.access.patience, stop)
        return blobs.Verified(descriptor, self.name, blob, stop)

    def _manifest(self, target: str, kind: str = "manifests") -> bytes:
        with self._send(target, kind=kind) as response:
            data = session.body(response, documents.LARGEST_MANIFEST)
        if len(data) > documents.LARGEST_MANIFEST:
            what = f"the manifest is larger than {documents.LARGEST_MANIFEST} bytes"
            raise errors.Unsupported(reason=f"{self.name}: {what}")
        return data

    @contextlib.contextmanager
    def _send(self, target: str, method: str = "GET", kind: str = "manifests") -> Iterator[requests.Response]:
        resource = self._resource(kind, target, self._cancel, documents.ACCEPT)
        response = resource.get(None, method)
        try:
            if response.status_code == 404:
                raise _NotFound(url=self.name, reason="no such repository, tag or digest")
            if response.status_code != 200:
                raise session.status_error(self.name, response)
            with session.translate_errors(self.name, first=False):
                yield response
        finally:
            resource.drop(response)

    def _resource(self, kind: str, target: str, cancel: base.Cancel, accept: str = "*/*") -> Resource:
        self._scheme = self._scheme or self._find_scheme()
        where = f"{self._scheme}://{self.reference.api_host}/v2/{self.reference.repository}"
        resource = Resource(f"{where}/{kind}/{target}", self, cancel, accept)
        self._resources.append(resource)
        return resource

    def _find_scheme(self) -> str:
        """Return ``https``, or ``http`` if insecure is allowed and the registry does not speak https."""
        if self.access.insecure:
            url = f"https://{self.reference.api_host}/v2/"
            resource = pinned.Resource(url, self.access, self.connection, cancel=self._cancel)
            try:
                resource.drop(resource.get(None))
            except (errors.Unreachable, errors.Transient) as err:
                host, reason = self.reference.api_host, err.message()
                log.warning("no https, trying http registry=%r reason=%s", host, reason)
                return "http"
        return "https"
