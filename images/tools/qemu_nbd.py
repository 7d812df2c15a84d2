"""Run qemu-nbd, which serves a disk of any format on a unix socket."""

from __future__ import annotations

import contextlib
import pathlib
from collections.abc import Iterator
from typing import Final

from cdi_worker import errors
from cdi_worker.images.engine import cancelling
from cdi_worker.images.tools import process, qemu_img, workspace

#: Bytes of address space: 16 requests of 32 MiB, and threads with stacks of 8 MiB.
_ADDRESS_SPACE: Final = 3 << 30
#: Seconds between two looks whether it listens.
_LOOK: Final = 0.01
#: Seconds for it to open the disk, in which it reads tables but no data.
_OPEN: Final = 180.0


@contextlib.contextmanager
def serve(
    node: qemu_img.Node,
    *,
    patience: float = _OPEN,
    cancel: cancelling.Cancel = cancelling.NEVER,
) -> Iterator[str]:
    """Serve a disk read-only until the end of the block, over several connections; yield its NBD address.

    Raises ``errors.ToolFailed`` if qemu-nbd cannot open it, ``errors.NoProgress`` if that takes longer than
    ``patience`` seconds.
    """
    with workspace.Workspace() as folder:
        socket = f"{folder}/nbd"
        # Without --shared it serves one connection, without --persistent it ends with its last.
        # It writes the file with its process id when it listens.
        given = (
            "--persistent",
            "--shared=64",
            f"--socket={socket}",
            f"--pid-file={folder}/pid",
            "--read-only",
        )
        argv = ("qemu-nbd", *given, qemu_img.text(node))
        command = process.Command(argv, "qemu-utils", _ADDRESS_SPACE)
        with process.Process(command) as running:
            opening = process.Watch("qemu-nbd", patience)
            while not pathlib.Path(folder, "pid").exists():
                cancel.check()
                opening.check()
                running.ready(None, _LOOK)
                if running.ended:
                    fields = running.failure().fields
                    reason = str(fields["reason"]).replace(f"'{qemu_img.text(node)}'", qemu_img.name(node))
                    raise errors.ToolFailed(**{**fields, "reason": reason})
            yield f"nbd+unix:///?socket={socket}"
