"""What a target has finished is noted, whatever other threads do meanwhile."""

from __future__ import annotations

from cdi_worker.images.sinks import base, delivery
from cdi_worker.scratch import journal

LENGTH = 4096


class Nowhere(base.Sink):
    def write(self, offset: int, data: memoryview, /) -> None: ...
    def zero(self, offset: int, length: int, /) -> None: ...


def test_hole_is_noted_that_comes_while_others_are() -> None:
    """One that is not noted is not compared with the disk when that is read back."""
    noted = journal.Journal.in_memory(2 * LENGTH)
    sink = delivery.DeliverySink(Nowhere(), journals=(noted,))

    class Interrupted(int):
        """An offset whose thread is interrupted while it adds its hole."""

        def __add__(self, other: int) -> int:
            sink.moved(1)
            return int(self) + other

    sink.zero(0, LENGTH)
    sink.zero(Interrupted(LENGTH), LENGTH)
    sink.note_holes()
    assert noted.covered == 2 * LENGTH
