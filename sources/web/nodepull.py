"""A disk in another container of the same pod, pulled by the node and served on loopback."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.sources import base, labels, wire
from cdi_worker.sources.web import http, locations, session

log = logging.getLogger(__name__)

#: Pulling a large image takes the node minutes, sometimes many; in seconds.
READY_PATIENCE = 3600.0
DISK = "disk.img"
LARGEST_INFO = 1 << 20


class NodePullSource(http.HttpSource):
    """An HTTP source that waits for its server, ``patience`` seconds, and tells it when it may go."""

    def __init__(
        self, location: locations.Http, cancel: base.Cancel, patience: float = READY_PATIENCE
    ) -> None:
        # Between the containers of a pod there is no proxy, whatever the cluster's settings name.
        access = dataclasses.replace(location.access, http_proxy="", https_proxy="")
        self._location = dataclasses.replace(location, access=access)
        self._cancel = cancel
        self._patience = patience
        self._labels: Mapping[str, str] = {}
        super().__init__(location.endpoint, access, cancel=cancel)

    def __enter__(self) -> Self:
        name = self._wait()
        endpoint = self._location.endpoint
        if endpoint.endswith(DISK):
            endpoint = endpoint.removesuffix(DISK) + urllib.parse.quote(name)
        super().__init__(endpoint, self._location.access, cancel=self._cancel)
        return super().__enter__()

    def finish(self) -> None:
        """Ask for what is still wanted, then make the done file, on which the server ends."""
        self._labels = self._ask_labels()
        try:
            Path(self._location.done_file).touch()
        except OSError as err:
            raise errors.target_error(self._location.done_file, err, "create") from err

    def labels(self) -> Mapping[str, str]:
        """Return the labels in the environment of the serving container, once finished."""
        return self._labels

    def _ask_labels(self) -> Mapping[str, str]:
        """Return what ``GET /info`` tells; a disk is worth more than its labels."""
        url = urllib.parse.urljoin(self._location.endpoint, "/info")
        try:
            with (
                session.new_session(self._location.access, self._cancel) as fresh,
                session.translated(url, first=False),
            ):
                answer = fresh.get(url, timeout=wire.TIMEOUT, allow_redirects=False, stream=True)
                if answer.status_code != 200:
                    log.warning("no labels url=%r status=%d", url, answer.status_code)
                    return {}
                text = session.body(answer, LARGEST_INFO)
            info = json.loads(text) if len(text) <= LARGEST_INFO else {}
        except (errors.Error, ValueError, RecursionError) as err:
            log.warning("no labels url=%r error=%s", url, type(err).__name__)
            return {}
        variables = info.get("env") if isinstance(info, dict) else None
        return labels.from_environment(variables if isinstance(variables, list) else [])

    def _wait(self) -> str:
        """Return the disk's name from the ready file, once that is there."""
        path = Path(self._location.ready_file)
        log.info("waiting for the disk's server ready_file=%r", str(path))
        deadline = time.monotonic() + self._patience
        while time.monotonic() < deadline:
            try:
                # A server that does not write it in one step shows it empty first.
                if name := path.read_text(encoding="utf-8").strip():
                    return name
            except FileNotFoundError:
                pass
            except (OSError, UnicodeDecodeError) as err:
                raise errors.Unreachable(url=str(path), reason="unreadable ready file") from err
            # What another container writes into a shared volume wakes nobody here.
            self._cancel.pause(cancelling.TURN)
        raise errors.Unreachable(url=str(path), reason=f"no ready file within {self._patience:.0f} s")
