"""Who occurs least often by counts that were made before leaves first (Fang et al. 2022,
arXiv 2208.05321)."""

from meshwright.forms.cache.policies import Floats, Ints

NEEDS_COUNTS = True


class ByCounts:
    """Rows by how often they occur."""

    def __init__(self, counts: Floats) -> None:
        self._counts = counts

    def used(self, rows: Ints, at: Ints, times: Ints) -> None:
        """Counts stay as they are."""

    def placed(self, rows: Ints, at: Ints) -> None:
        """Counts stay as they are."""

    def worth(self, rows: Ints, at: Ints) -> Floats:
        """As often as it occurs."""
        return self._counts[rows]

    def cleared(self) -> None:
        """Counts stay as they are."""

    def grown(self, slots: int) -> None:
        """Counts are of rows."""


def make(rows: int, slots: int, counts: Floats | None) -> ByCounts:
    """Returns the policy, which asks for counts."""
    assert counts is not None
    return ByCounts(counts)
