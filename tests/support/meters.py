"""A progress that remembers, for the sources whose progress nobody showed before."""

from __future__ import annotations

from cdi_worker import progress


class Percents(progress.Meter):
    """Remembers how far it was each time, and checks that this never falls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = [0.0]

    def changed(self, *, new_phase: bool) -> None:
        assert self.percent >= self.seen[-1]
        self.seen.append(self.percent)

    @property
    def between(self) -> set[float]:
        """The percentages that were neither the start nor the end."""
        return {percent for percent in self.seen if 1 < percent < 99}
