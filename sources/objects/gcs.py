"""Google Cloud Storage: one generation of an object, read like an HTTP source."""

from __future__ import annotations

import base64
import dataclasses
import logging
import types
import urllib.parse
from typing import Any

import requests
import requests.auth

from cdi_worker import errors, masking
from cdi_worker.formats import coding, readers, smalljson
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, wire
from cdi_worker.sources.objects import buckets, gcp, locations
from cdi_worker.sources.objects.coverage import Coverage
from cdi_worker.sources.web import http, pinned, session

with gcp.import_libraries():
    from google.auth import credentials
    from google.cloud import storage

log = logging.getLogger(__name__)

SERVER = "https://storage.googleapis.com"
#: Reasons of a 403 worth a retry (cloud.google.com/storage/docs/json_api/v1/status-codes).
TRANSIENT = frozenset({"rateLimitExceeded", "userRateLimitExceeded"})
#: In bytes. Google's own are a few KiB, custom metadata at most 8 KiB (cloud.google.com/storage/quotas).
LARGEST_METADATA = 1 << 20


@dataclasses.dataclass(frozen=True)
class Metadata:
    """Metadata of one generation. ``crc32c``: base64 of four bytes, big-endian; may be empty."""

    generation: int
    size: int
    crc32c: str
    crc: int | None


def parse(endpoint: str) -> buckets.Name:
    """Parse ``gs://bucket/object`` or ``http(s)://host/bucket/object``."""
    found = buckets.parse(endpoint, "gs", "signed URL")
    return found._replace(server=found.server or SERVER)


class GcsSource(http.HttpSource):
    """An object in a bucket, pinned to the generation of the first response.

    Without a credentials file the first request is anonymous; ambient credentials are searched only when it
    is refused. The CRC-32C of the bytes is compared with the stored one if all of them were read.
    """

    def __init__(self, location: locations.Gcs, cancel: cancelling.Cancel) -> None:
        self._object = _Object(location, cancel)
        super().__init__(self._object)

    def open(self, opening: base.Opening) -> base.Facts:
        self._stored = metadata = self._object.describe()
        # An attempt before this one may have read bytes of another generation.
        self._coverage = Coverage(metadata.size)
        version, head = self._first_answer(opening, metadata.size)
        if self.ranges is not None:
            # The head is not read again.
            self._coverage.add(0, memoryview(head))
        return self._facts(
            version,
            head,
            identity=f"generation {metadata.generation} crc32c {metadata.crc32c} size {metadata.size}",
            weak=False,
            digest=f"generation:{metadata.generation}",
        )

    def stream(self, offset: int = 0) -> base.Reader:
        reader = super().stream(offset)
        if not offset:
            # From here on the stream's bytes are written, not those read before.
            self._coverage = Coverage(self._stored.size)
        return self._covering(reader, offset)

    def open_range(self, start: int, end: int, /) -> base.Reader:
        return self._covering(super().open_range(start, end), start)

    def _covering(self, reader: base.Reader, at: int) -> base.Reader:
        """Add the bytes that are read, from ``at``, to the coverage of now: a stream may replace it."""
        coverage = self._coverage

        def see(data: memoryview) -> None:
            nonlocal at
            coverage.add(at, data)
            at += len(data)

        return readers.WatchedReader(reader, see)

    def verify(self) -> None:
        """Compare the CRC of the object with the stored one, if all of it was read."""
        stored = self._stored.crc
        calculated = self._coverage.value()
        if stored is None or calculated is None:
            log.info("not verified url=%r: not all bytes were read", self.name)
        elif calculated != stored:
            raise errors.ChecksumMismatch(
                algorithm="crc32c", expected=f"{stored:08x}", calculated=f"{calculated:08x}"
            )
        else:
            log.info("verified url=%r crc32c=%08x", self.name, calculated)


class _Object(pinned.Resource):
    """URL, credentials and errors of the object."""

    def __init__(self, location: locations.Gcs, cancel: cancelling.Cancel) -> None:
        self._address = parse(location.address)
        self._keys = gcp.Keys(location, cancel)
        if self._keys:
            gcp.refuse_plaintext(self._address.server, location.access)
        self._generation: int | None = None
        self._encoding = "identity"
        bucket, name = (urllib.parse.quote(item, safe="") for item in self._address[1:])
        self._media = f"{self._address.server}/download/storage/v1/b/{bucket}/o/{name}?alt=media"
        super().__init__(self._media, location.access, cancel=cancel)
        self.name = wire.safe_url(location.address)

    def describe(self) -> Metadata:
        """Return the object's metadata, and pin later requests to its generation."""
        client = storage.Client(
            project="-",
            credentials=credentials.AnonymousCredentials(),
            client_options={"api_endpoint": self._address.server},
            # A transport with our connections, CAs and credentials.
            _http=types.SimpleNamespace(request=self._request),
        )
        blob = client.bucket(self._address.bucket).blob(self._address.key)
        try:
            self._load(blob)
            # Objects with a content encoding are decompressed by the server unless the client accepts it.
            self._encoding = coding.normal(str(blob.content_encoding or ""))
            stored = str(blob.crc32c or "")
            crc = base64.b64decode(stored, validate=True)
            if stored and len(crc) != 4:
                raise ValueError("a CRC-32C has four bytes")
            number = int.from_bytes(crc) if stored else None
            metadata = Metadata(int(blob.generation), int(blob.size), stored, number)
        except (ValueError, TypeError, AttributeError) as err:
            reason = "the response is not object metadata"
            advice = "check that the URL is a Google Cloud Storage server"
            raise errors.Unreachable(url=self.name, reason=f"{reason}; {advice}") from err
        self._generation = metadata.generation
        self.url = f"{self._media}&generation={metadata.generation}"
        self.unpin()
        return metadata

    def _request(self, *, method: str, url: str, **_: object) -> types.SimpleNamespace:
        data = self.body(self.send(method, url, {}), LARGEST_METADATA)
        return types.SimpleNamespace(content=data, status_code=200, json=lambda: smalljson.parse(data))

    def _load(self, blob: Any) -> None:
        while True:
            try:
                blob.reload(retry=None)
                return
            except errors.Unreachable as err:
                refused = err.fields.get("status") in {401, 403}
                # A server that is not Google's must not receive this machine's ambient tokens.
                if not refused or not gcp.is_google(self._media) or not self._keys.find_ambient():
                    raise

    def send(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        response = super().send(method, url, {**headers, "Accept-Encoding": self._encoding})
        # The ETag changes with the metadata; the generation identifies the bytes.
        generation = response.headers.pop("x-goog-generation", None)
        response.headers.pop("Last-Modified", None)
        response.headers.pop("ETag", None)
        if generation:
            response.headers["ETag"] = f'"{generation}"'
        return response

    def close(self) -> None:
        super().close()
        self._keys.close()

    def authorization(self) -> pinned.Authorization:
        return self._keys.authorization()

    def failure(self, response: requests.Response) -> errors.Error:
        text = session.error_text(response)
        self.drop(response)
        message, reasons = _error_details(text)
        plain = session.status_error(self.name, response, text)
        if isinstance(plain, errors.Transient):
            return plain
        if reasons & TRANSIENT:
            return errors.Transient(url=self.name, reason=message)
        status = response.status_code
        if self._generation is not None and status in {404, 412}:
            return errors.SourceChanged(
                url=self.name, what="generation", before=self._generation, now="replaced or deleted"
            )
        if self._generation is not None and status == 401 and self._keys.renew():
            return errors.Transient(url=self.name, reason="the token is no longer accepted")
        bucket, key = self._address.bucket, self._address.key
        if status == 404 and "bucket does not exist" in message:
            reason = f"no such bucket {bucket!r}"
        elif status == 404:
            reason = f"no such object {key!r} in bucket {bucket!r}"
        elif status in {401, 403}:
            reason = f"access denied{'' if self._keys else ' without credentials'}: {message}"
        else:
            reason = f"{plain.fields['reason']}: {message}"
        return errors.Unreachable(url=self.name, reason=reason.rstrip(": "), status=status)


def _error_details(text: str) -> tuple[str, set[str]]:
    """Return message and reasons of an error response: JSON for metadata, plain text for downloads."""
    try:
        error = smalljson.parse(text)["error"]
        reasons = {str(item.get("reason")) for item in error.get("errors", [])}
        return masking.quoted(str(error.get("message", ""))), reasons
    except (ValueError, TypeError, KeyError, AttributeError):
        return masking.quoted("" if "<" in text else text), set()
