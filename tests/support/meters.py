"""Progress meters that record what they are given."""

from __future__ import annotations

from cdi_worker import progress


class Percents(progress.Meter):
    """Record every percentage reported, and check that it never falls."""

    def __init__(self) -> None:
        super().__init__()
        self.percents = [0.0]

    def changed(self, *, new_phase: bool) -> None:
        """Record the percentage."""
        assert self.percent >= self.percents[-1]
        self.percents.append(self.percent)

    @property
    def between(self) -> set[float]:
        """Return the percentages that were neither the start nor the end."""
        return {percent for percent in self.percents if 1 < percent < 99}
