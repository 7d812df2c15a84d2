"""The wire of the benchmark: its delay, its rate and its losses."""

from __future__ import annotations

import socket
import threading
import time
from pathlib import Path

import pytest

from tests.bench.wire import Wire
from tests.support import processes

COUNT = 2_000_000


@pytest.mark.parametrize("wire", [Wire(0.1, 10_000_000), Wire(0.1, 10_000_000, 0.01)])
def test_wire_has_a_delay_and_a_rate(tmp_path: Path, wire: Wire) -> None:
    processes.need_root()
    processes.need("unshare", "ip")
    with wire.laid(tmp_path), socket.create_server(("127.0.0.1", 0)) as server:
        began = time.monotonic()
        with socket.create_connection(server.getsockname()) as client:
            connected = time.monotonic() - began
            accepted, _ = server.accept()
            sender = threading.Thread(target=accepted.sendall, args=(bytes(COUNT),))
            sender.start()
            received = 0
            while received < COUNT:
                received += len(client.recv(1 << 20))
            took = time.monotonic() - began - connected
            sender.join()
            accepted.close()
    assert wire.delay <= connected < processes.PATIENCE
    assert wire.seconds(COUNT) * 0.98 <= took < processes.PATIENCE
    # The network of the test again.
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        pass
