"""S3: one object, read like an HTTP source with signed requests."""

from __future__ import annotations

import html
import logging
import re
import urllib.parse
from datetime import UTC, datetime

import requests
import requests.auth

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, wire
from cdi_worker.sources.objects import aws, buckets, locations
from cdi_worker.sources.web import http, pinned, session

log = logging.getLogger(__name__)

DEFAULT_REGION = "us-east-1"
AWS_HOST = re.compile(r"s3[.-](?:dualstack\.)?([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?$")
ELEMENT = re.compile(r"<(Code|Message|Region|ServerTime)>([^<]{1,500})</\1>")
#: Error codes worth a retry with any HTTP status
#: (docs.aws.amazon.com/AmazonS3/latest/API/ErrorResponses.html).
TRANSIENT = frozenset(
    {"SlowDown", "ServiceUnavailable", "InternalError", "RequestTimeout", "RequestLimitExceeded"}
)
WRONG_REGION = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect", "TemporaryRedirect"})
CAUSES = {
    "NoSuchBucket": "no such bucket {bucket!r}",
    "NoSuchKey": "no such key {key!r} in bucket {bucket!r}",
    "AccessDenied": "access denied{anonymously}; check that the key exists and the credentials may read it",
    "InvalidAccessKeyId": "unknown access key; check it, and the session token of temporary keys",
    "SignatureDoesNotMatch": "wrong signature; check the secret key",
    "RequestTimeTooSkewed": "clock skew: this machine's clock is {skew} off the server's; set the clock",
    "ExpiredToken": "the session token has expired",
    "InvalidToken": "the session token is not valid",
    "InvalidObjectState": "the object is archived; restore it first",
}


class Address(buckets.Name):
    """An object. ``server`` empty: AWS."""

    def url(self, region: str) -> str:
        """Return the object's path-style URL."""
        suffix = ".cn" if region.startswith("cn-") else ""
        server = self.server or f"https://s3.{region}.amazonaws.com{suffix}"
        # Servers compute the signature over this encoding.
        return f"{server}/{urllib.parse.quote(self.bucket, safe='')}/{urllib.parse.quote(self.key, safe='/')}"


def parse(endpoint: str) -> Address:
    """Parse ``s3://bucket/key`` or ``http(s)://host/bucket/key``."""
    found = Address(*buckets.parse(endpoint, "s3", "presigned URL"))
    buckets.check_segments(wire.safe_url(endpoint), *found.key.split("/"))
    return found


def region_of(server: str) -> str:
    """Return the region in the host name of a server (contract, Sources)."""
    host = urllib.parse.urlsplit(server).hostname or ""
    if host == "s3.amazonaws.com":
        return DEFAULT_REGION
    found = AWS_HOST.search(host)
    return found[1] if found else host.partition(".")[0]


class S3Source(http.HttpSource):
    """An object in a bucket.

    Without keys the first request is unsigned; ambient credentials are searched only when it is refused,
    which saves the search for public objects.
    """

    def __init__(self, location: locations.S3, cancel: cancelling.Cancel) -> None:
        self._object = _Object(location, cancel)
        super().__init__(self._object)

    def open(self, opening: base.Opening) -> base.Facts:
        while True:
            try:
                facts = super().open(opening)
                break
            except errors.Unreachable as err:
                if not self._object.learn(err):
                    raise
        if self._version and self._version.etag and not self._version.etag.startswith("W/"):
            self._object.etag = self._version.etag
        return facts


class _Object(pinned.Resource):
    """URL, credentials, region and errors of the object."""

    def __init__(self, location: locations.S3, cancel: cancelling.Cancel) -> None:
        access = location.access
        self._address = parse(location.address)
        self._keys = aws.Keys(access, cancel)
        region = location.region
        if not region and location.endpoint.startswith("s3://"):
            region = location.default_region or self._keys.default_region() or DEFAULT_REGION
        self._region = region or region_of(self._address.server)
        self._redirected = False
        #: Sent as If-Match once known.
        self.etag: str | None = None
        super().__init__(self._address.url(self._region), access, cancel=cancel)
        self.name = wire.safe_url(location.address)

    def send(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        if self.etag:
            headers = {**headers, "If-Match": self.etag}
        response = super().send(method, url, headers)
        found = http.CONTENT_RANGE.fullmatch(response.headers.get("Content-Range", ""))
        if found and response.status_code == 200:
            # rclone's server answers a range request with 200 and the right body.
            count = int(found[2]) - int(found[1]) + 1
            response.status_code = 206 if response.headers.get("Content-Length") == str(count) else 200
        if response.status_code in pinned.REDIRECTS and "x-amz-bucket-region" in response.headers:
            # The new URL needs another signature: the caller retries in the right region.
            raise self.failure(response)
        return response

    def authorization(self) -> pinned.Authorization:
        return self._keys.signature(self._region)

    def learn(self, refusal: errors.Unreachable) -> bool:
        """Change region or credentials for another attempt. Return False if there is nothing to change."""
        region = refusal.fields.get("region")
        if region and not self._redirected and region != self._region:
            log.info("region url=%r ours=%r theirs=%r", self.name, self._region, region)
            self._redirected = True
            self._region = str(region)
            self.url = self._address.url(self._region)
            self.unpin()
            return True
        if refusal.fields.get("status") in {400, 401, 403}:
            return self._keys.find_ambient()
        return False

    def failure(self, response: requests.Response) -> errors.Error:
        text = session.error_text(response)
        self.drop(response)
        # Without an XML parser: the document is hostile.
        details = {name: masking.quoted(html.unescape(value)) for name, value in ELEMENT.findall(text)}
        plain = session.status_error(self.name, response, text)
        code = details.get("Code", "")
        if code in TRANSIENT and not isinstance(plain, errors.Transient):
            return errors.Transient(url=self.name, reason=code)
        if isinstance(plain, errors.Transient):
            reason = f"{plain.fields['reason']} ({code})" if code else plain.fields["reason"]
            return errors.Transient(url=self.name, reason=reason, retry_after=plain.retry_after)
        if response.status_code == 412:
            return errors.SourceChanged(url=self.name, what="etag", before=self.etag, now="another")
        region = details.get("Region") or response.headers.get("x-amz-bucket-region")
        if code in WRONG_REGION or (response.status_code in pinned.REDIRECTS and region):
            known = region if region and re.fullmatch(r"[a-z0-9-]{2,40}", region) else None
            reason = f"wrong region {self._region!r}" + (f": the bucket is in {known!r}" if known else "")
            # On a given server only the signature can use another region; on AWS the URL changes as well.
            usable = known if code == "AuthorizationHeaderMalformed" or not self._address.server else None
            return errors.Unreachable(url=self.name, reason=reason, region=usable)
        if code in CAUSES:
            reason = CAUSES[code].format(
                bucket=self._address.bucket,
                key=self._address.key,
                anonymously="" if self._keys else " without credentials",
                skew=_skew(details.get("ServerTime", "")),
            )
        else:
            reason = f"{code}: {details.get('Message', '')}" if code else str(plain.fields["reason"])
            reason += "" if self._keys else "; no keys were given"
        return errors.Unreachable(url=self.name, reason=reason, status=response.status_code)


def _skew(server_time: str) -> str:
    try:
        theirs = datetime.fromisoformat(server_time)
        return f"{abs((datetime.now(UTC) - theirs).total_seconds()):.0f} s"
    except (ValueError, TypeError):
        return "far"
