"""Processes share a server: one starts it, and stops it when the last has ended."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

from tests.support import processes, shared


class Servers:
    """Counts the starts, and knows what runs."""

    def __init__(self) -> None:
        self.starts = 0
        self.running: list[str] = []

    @contextlib.contextmanager
    def start(self, directory: Path) -> Iterator[tuple[str, Path]]:
        self.starts += 1
        self.running.append(directory.name)
        yield directory.name, directory
        self.running.remove(directory.name)


def test_first_process_starts_the_server(tmp_path: Path) -> None:
    servers = Servers()
    first, second = shared.Shared(tmp_path), shared.Shared(tmp_path)
    assert first.get("web", servers.start) == second.get("web", servers.start) == ("web", tmp_path / "web")
    assert first.get("other", servers.start) == ("other", tmp_path / "other")
    assert (servers.starts, servers.running) == (2, ["web", "other"])
    second.close()
    assert servers.running == ["web", "other"]
    first.close()
    assert servers.running == []


def test_server_is_stopped_after_its_last_user(tmp_path: Path) -> None:
    """Each of the two has started what the other uses."""
    servers = Servers()
    both = [shared.Shared(tmp_path), shared.Shared(tmp_path)]
    for one, names in zip(both, ("ab", "ba"), strict=True):
        for name in names:
            one.get(name, servers.start)
    both[1].get("c", servers.start)
    both[0].get("c", servers.start)
    ending = threading.Thread(target=both[0].close)
    ending.start()
    # ``ExitStack`` has no public name for what is left to close.
    processes.wait_for(lambda: not both[0]._used._exit_callbacks, "the end of its own use")  # type: ignore[attr-defined]
    assert servers.running == ["a", "b", "c"]
    both[1].close()
    ending.join(processes.PATIENCE)
    assert servers.running == []
