"""Node pull: the disk is in another container of the pod, which serves it on loopback."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path

from cdi_worker import errors
from cdi_worker.formats import smalljson
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, labels
from cdi_worker.sources.web import http, locations, pinned, session

log = logging.getLogger(__name__)

#: Limit for the node's pull of the image, in seconds. Large images take many minutes.
READY_PATIENCE = 3600.0
DISK = "disk.img"
#: Most characters of the name in the ready file: PATH_MAX of Linux.
LONGEST_NAME = 4096


def _read(path: Path) -> str:
    """Return the ready file, which another container writes. Raises ``OSError``, ``UnicodeDecodeError``."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(fd, encoding="utf-8") as stream:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return stream.read(LONGEST_NAME)


class NodePullSource(http.HttpSource):
    """An HTTP source that waits up to ``patience`` seconds for its server, and stops it at the end."""

    def __init__(
        self, location: locations.Http, cancel: base.Cancel, patience: float = READY_PATIENCE
    ) -> None:
        self._location = location
        self._cancel = cancel
        self._patience = patience
        super().__init__(pinned.Resource(location.endpoint, location.access, cancel=cancel))

    def open(self, opening: base.Opening) -> base.Facts:
        name = self._wait()
        endpoint = self._location.endpoint
        if endpoint.endswith(DISK):
            endpoint = endpoint.removesuffix(DISK) + urllib.parse.quote(name)
        super().__init__(pinned.Resource(endpoint, self._location.access, cancel=self._cancel))
        return super().open(opening)

    def finish(self) -> base.Provenance:
        """Fetch the labels in the environment of the serving container, then create the done file.

        The server exits on it.
        """
        found = self._ask_labels()
        try:
            # The volume is shared with a container of a foreign image, which may create links.
            flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            os.close(os.open(self._location.done_file, flags, 0o666))
        except OSError as err:
            raise errors.target_error(self._location.done_file, err, "create") from err
        return base.Provenance(labels=found)

    def _ask_labels(self) -> Mapping[str, str]:
        """Return the labels from ``GET /info``. A failure is logged: the disk is usable without labels."""
        url = urllib.parse.urljoin(self._location.endpoint, "/info")
        try:
            with (
                session.new_session(self._location.access, self._cancel) as fresh,
                session.translate_errors(url, first=False),
            ):
                answer, text = session.exchange(fresh, self._location.access, "GET", url)
            if answer.status_code != 200:
                log.warning("no labels url=%r status=%d", url, answer.status_code)
                return {}
            info = smalljson.parse(text)
        except (errors.Error, ValueError) as err:
            log.warning("no labels url=%r error=%s", url, type(err).__name__)
            return {}
        return labels.from_environment(info.get("env") if isinstance(info, dict) else None)

    def _wait(self) -> str:
        """Wait for the ready file and return its content, the name of the disk."""
        path = Path(self._location.ready_file)
        log.info("waiting for the disk's server ready_file=%r", str(path))
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            try:
                # The file is empty at first if the server does not write it atomically.
                if name := _read(path).strip():
                    return name
            except FileNotFoundError:
                pass
            except (OSError, UnicodeDecodeError) as err:
                raise errors.Unreachable(url=str(path), reason="cannot read the ready file") from err
            # Writes of another container to the shared volume send no event: poll.
            self._cancel.pause(cancelling.TURN)
        raise errors.Unreachable(url=str(path), reason=f"no ready file within {self._patience:.0f} s")


def source(location: locations.Http, cancel: base.Cancel) -> base.Source:
    """Return the source for ``IMPORTER_SOURCE=http``: a web server, or node pull."""
    if location.pull_method == "node":
        return NodePullSource(location, cancel)
    return http.HttpSource(pinned.Resource(location.endpoint, location.access, cancel=cancel))
