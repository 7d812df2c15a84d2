"""AWS credentials, explicit or ambient, and request signing."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import re
import types
from collections.abc import Iterator, Mapping
from typing import Any, Final

import requests

from cdi_worker import errors, masking
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, wire
from cdi_worker.sources.objects import buckets
from cdi_worker.sources.web import pinned, session

with errors.optional("the s3 source", package="boto3", extra="s3"):
    from botocore import auth, awsrequest, credentials, exceptions

#: Secrets in the XML of a token service, and in the JSON of metadata services.
_ISSUED: Final = re.compile(rb'(?:SecretAccessKey|SessionToken|Token)(?:>|"\s*:\s*")([^<"]+)')


class Keys(buckets.Keys):
    """AWS credentials. ``cancel`` aborts the search for ambient ones."""

    def __init__(self, access: base.Access, cancel: cancelling.Cancel) -> None:
        self._cancel = cancel
        self._access = access
        super().__init__(None)
        if bool(access.user) != bool(access.password):
            raise errors.RequestError("only one of access key and secret key is given; set both or none")
        if access.user:
            token = access.session_token or None
            self._keys = credentials.Credentials(access.user, access.password, token)

    def _find(self) -> Any:
        """Return the credentials of the environment, a profile, a web identity or the machine, or None."""
        with _translate_errors():
            return cancelling.run_apart(lambda: self._session().get_credentials(), self._cancel)

    def default_region(self) -> str | None:
        """Return the region set in the environment or the profile."""
        with _translate_errors():
            region: str | None = self._session().region_name
        return region

    def _session(self) -> Any:
        """Return a boto3 session. Its import takes 50 ms; explicit keys do not need it.

        Its requests to token services go through our connections: the same proxies, CAs and limits.
        """
        with errors.optional("the s3 source", package="boto3", extra="s3"):
            import boto3
        # The names of its cache entries, which a policy without SHA-1 for security would forbid.
        credentials.sha1 = functools.partial(hashlib.sha1, usedforsecurity=False)
        made = boto3.Session()
        made.events.register("before-send", self._send)
        made.events.register("provide-client-params.sts", self._hold_parameters)
        # The token for the service of the container's credentials, which botocore sends by itself.
        with contextlib.suppress(Exception):
            providers = made._session.get_component("credential_provider")  # noqa: SLF001
            headers = providers.get_provider("container-role")._build_headers()  # noqa: SLF001
            masking.register(self, *masking.headers((headers or {}).items()))
        return made

    def _hold_parameters(self, params: Mapping[str, Any], **_: object) -> None:
        """Mask what identifies this machine to a token service: at debug level botocore logs it."""
        masking.register(self, str(params.get("WebIdentityToken", "")))

    def _send(self, request: Any, **_: object) -> Any:
        """Send a request of botocore, and return its response."""
        where = wire.safe_url(request.url)
        with (
            session.translate_errors(where, first=False),
            session.new_session(self._access, self._cancel) as fresh,
        ):
            what = (fresh, self._access, request.method, request.url)
            headers = dict(request.headers.items())
            answer, data = session.exchange(*what, data=request.body, headers=headers, auth=pinned.NO_AUTH)
        # At debug level botocore logs the response.
        masking.register(self, *(found.decode("utf-8", "replace") for found in _ISSUED.findall(data)))
        body = types.SimpleNamespace(stream=lambda: iter([data]))
        return awsrequest.AWSResponse(request.url, answer.status_code, answer.headers, body)

    def signature(self, region: str) -> pinned.Authorization:
        """Return a signer of requests to S3 in ``region``."""
        return functools.partial(self._sign, region) if self else pinned.NO_AUTH

    def _sign(self, region: str, request: requests.PreparedRequest) -> requests.PreparedRequest:
        """Sign a request (AWS Signature Version 4). Temporary keys are renewed by botocore."""
        # S3 requires these to be signed; a proxy may change the others.
        fixed = {name: text for name, text in request.headers.items() if name.lower().startswith("x-amz-")}
        signed = awsrequest.AWSRequest(request.method, request.url, headers=fixed)
        with _translate_errors():
            keys = cancelling.run_apart(self._keys.get_frozen_credentials, self._cancel)
        masking.register(self, keys.secret_key or "", keys.token or "")
        auth.S3SigV4Auth(keys, "s3", region).add_auth(signed)
        request.headers.update(dict(signed.headers.items()))
        return request


@contextlib.contextmanager
def _translate_errors() -> Iterator[None]:
    try:
        yield
    except errors.Error:
        raise
    except Exception as err:
        # botocore trusts the shape of answers: others raise KeyError, RuntimeError, its parsers' own errors.
        is_known = isinstance(err, (exceptions.BotoCoreError, exceptions.ClientError, RuntimeError))
        reason = str(err) if is_known else f"unexpected response of the token service ({type(err).__name__})"
        raise errors.Unreachable(url="ambient AWS credentials", reason=reason) from err
