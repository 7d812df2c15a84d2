"""Everything that an import could leave behind is counted."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

from tests.proofs.soak import usage
from tests.support import devices


def test_what_is_left_behind_is_counted(tmp_path: Path) -> None:
    over = threading.Event()
    before = usage.Usage.now(tmp_path)
    with devices.loop(tmp_path, 1 << 20), subprocess.Popen(["sleep", "60"]) as child:
        descriptor = os.open(tmp_path, os.O_RDONLY)
        thread = threading.Thread(target=over.wait)
        thread.start()
        found = usage.Usage.now(tmp_path).above(before)
        over.set()
        thread.join()
        os.close(descriptor)
        child.kill()
    assert found == {"threads": 1, "descriptors": 1, "children": 1, "loops": 1, "files": 1}
    assert not usage.Usage.settled(tmp_path, before).above(before)
