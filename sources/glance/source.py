"""An image of OpenStack's image service, Glance (Image API v2), read like an HTTP source."""

from __future__ import annotations

import dataclasses
import logging
import threading
import urllib.parse
from collections.abc import Mapping
from typing import ClassVar, Final

import requests
import requests.auth

from cdi_worker import errors, masking
from cdi_worker.formats import checksum, smalljson
from cdi_worker.sources import base, wire
from cdi_worker.sources.glance import keystone, locations
from cdi_worker.sources.web import http, pinned

log = logging.getLogger(__name__)

#: In bytes. Glance limits the properties of an image to about 128 of at most 64 KiB each, most have three.
LARGEST_METADATA: Final = 1 << 20
#: Glance's disk formats that are imported, and our names of them.
FORMATS: Final = {
    "raw": "raw",
    "iso": "raw",
    "qcow2": "qcow2",
    "vmdk": "vmdk",
    "vdi": "vdi",
    "vhd": "vhd",
    "vhdx": "vhdx",
}
#: Renewed tokens in a row that the image service refuses, after which the refusal is final.
MOST_RENEWALS: Final = 3


@dataclasses.dataclass(frozen=True)
class Metadata:
    """An image as Glance describes it. ``size``: in bytes. ``checksum``: as ``checksum.parse`` reads it."""

    size: int
    format: str
    checksum: str


def parse(data: bytes, name: str) -> Metadata:
    """Return the metadata in a response about the image ``name`` (Image API v2, "Show image").

    Raises ``Unreachable`` if it is not about an image that can be read, and ``Unsupported``.
    """
    try:
        image = smalljson.parse(data)
        status, size = image["status"], image["size"]
        # os_hash_algo is the operator's choice; images older than Glance 17 have only ``checksum``, an MD5.
        algorithm, value, md5 = (image.get(key) for key in ("os_hash_algo", "os_hash_value", "checksum"))
        form, container = image.get("disk_format"), image.get("container_format")
        is_known = form in FORMATS and container in {"bare", None}
        if status == "active" and (not isinstance(size, int) or size < 0):
            raise ValueError("size")
        stated = [f"{algorithm}:{value}"] if algorithm in checksum.ALGORITHMS and value else []
        stated += [f"md5:{md5}"] if md5 else []
        promised = str(checksum.parse(",".join(stated))) if stated else ""
    except (ValueError, KeyError, TypeError, AttributeError, errors.RequestError) as err:
        reason = "the answer does not describe an image; check that this is an image service (Glance)"
        raise errors.Unreachable(url=name, reason=reason) from err
    if status != "active":
        raise errors.Unreachable(url=name, reason=f"the image is {masking.quoted(str(status))}, not active")
    if not is_known:
        form, container = (masking.quoted(str(each)) for each in (form, container))
        reason = f"an image of disk format {form} in the container {container}; supported: bare, with "
        raise errors.Unsupported(reason=reason + ", ".join(FORMATS))
    if not promised:
        log.warning("not verified: the image service states no checksum that is known here")
    return Metadata(size, FORMATS[form], promised)


class GlanceSource(http.HttpSource):
    """An image in Glance: its bytes never change once it is active.

    The disk is read in the format that Glance states: a guest can write any header to its raw disk.
    """

    def __init__(self, location: locations.Glance, cancel: base.Cancel) -> None:
        self._image = _Image(location, cancel)
        super().__init__(self._image)

    def open(self, opening: base.Opening) -> base.Facts:
        metadata = self._image.describe()
        return self._facts(
            *self._first_answer(opening, metadata.size),
            format=metadata.format,
            checksum=metadata.checksum,
            # The bytes of an image never change; without a checksum, its id tells them from those of others.
            digest=metadata.checksum.partition(",")[0] or f"image:{self._image.image_id}",
            identity=f"image {self._image.image_id} {metadata.checksum} size {metadata.size}",
        )


class _Image(pinned.Resource):
    """URL, token and errors of the image."""

    reasons: ClassVar[Mapping[int, str]] = {
        401: "the image service refuses the token",
        403: "access denied; check the project, and that the image is not deactivated",
        404: "no such image, or the project may not see it",
    }

    def __init__(self, location: locations.Glance, cancel: base.Cancel) -> None:
        access = dataclasses.replace(location.access, user="", password="")
        super().__init__(location.endpoint, access, cancel=cancel)
        self.image_id = location.image_id
        self.name = f"{wire.safe_url(location.endpoint)} image {location.image_id}"
        self._keystone = keystone.Keystone(location, cancel)
        self._token = ""
        self._renewals = 0
        self._renewing = threading.Lock()

    def describe(self) -> Metadata:
        """Log in, find the image and direct later requests to its bytes."""
        self._token = self._keystone.token()
        quoted = urllib.parse.quote(self.image_id, safe="")
        self.url = f"{self._keystone.image_service()}/v2/images/{quoted}"
        self.unpin()
        metadata = parse(self.body(self.get(None), LARGEST_METADATA), self.name)
        self.url += "/file"
        self.unpin()
        what = (self.image_id, metadata.format, metadata.size, metadata.checksum)
        log.info("image id=%r format=%r size=%d checksum=%r", *what)
        return metadata

    def authorization(self) -> requests.auth.AuthBase:
        return pinned.Header("X-Auth-Token", self._token)

    def send(self, method: str, url: str, headers: dict[str, str]) -> requests.Response:
        response = super().send(method, url, headers)
        if response.status_code < 300:
            self._renewals = 0
        return response

    def close(self) -> None:
        super().close()
        self._keystone.close()

    def renew(self, refused: requests.Response) -> bool:
        token = str(refused.request.headers.get("X-Auth-Token"))
        with self._renewing:
            if self._token != token:
                return True
            if self._renewals == MOST_RENEWALS or not self._keystone.renew(token):
                return False
            self._renewals += 1
            self._token = self._keystone.token()
            return True
