"""What the answers of the upload server have in common."""

from __future__ import annotations

from aiohttp import web

from importer import errors

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
TOO_LARGE = "effective image size is larger than the reported available storage"


def failed(failure: errors.Error) -> web.Response:
    """Return the answer that tells a client what went wrong."""
    said = f"{TOO_LARGE}: {failure}" if isinstance(failure, errors.TooLarge) else str(failure)
    is_clients = isinstance(failure, errors.TooLarge | errors.RequestError)
    return web.Response(status=400 if is_clients else 500, text=f"Saving stream failed: {said}")


async def say_continue(request: web.Request) -> None:
    """Ask a client that waits for it (RFC 9110, 10.1.1) to send the body."""
    if request.headers.get("Expect", "").lower() == "100-continue" and request.version >= (1, 1):
        assert request.transport is not None  # noqa: S101  (a request has one until it is answered)
        request.transport.write(CONTINUE)


async def expect(request: web.Request) -> None:
    # The handler says it once the upload is admitted: nobody sends 100 GB to be refused.
    if request.headers.get("Expect", "").lower() != "100-continue":
        raise web.HTTPExpectationFailed
