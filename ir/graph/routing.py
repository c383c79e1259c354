"""Where tokens of a layer of experts go: how many ranks each reaches, and how much the busiest rank
has over the mean. Spread evenly unless somebody has counted, or assumed, something else.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import isfinite, prod

from meshwright.ir.errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Of experts that are cut into equal runs, one run a rank: what is known for some counts of
    ranks; between these it is taken in proportion."""

    experts: int
    picked: int
    """Experts that each token picks, all different."""
    weightless: int = 0
    """Beside these, experts that tokens pick as well, and that are on no rank."""
    source: str = ""
    """`counted` or `assumed`; empty: every choice of so many experts is equally likely."""
    band: float = 0.0
    """Relative error to expect of what the busiest rank has."""
    ranks: tuple[int, ...] = ()
    """Ascending, from 1 to as many as there are experts; empty where tokens are spread evenly."""
    reached: tuple[float, ...] = ()
    """Ranks that a token goes to, on average."""
    arrived: tuple[float, ...] = ()
    """Tokens that come to the busiest rank, over the mean rank's."""
    worked: tuple[float, ...] = ()
    """Pairs of a token and an expert on the busiest rank, over the mean of a rank if all that are
    picked were on one: none dropped, none without weights."""

    def __post_init__(self) -> None:
        if self.experts < 1 or self.weightless < 0 or not 1 <= self.picked <= self._choices:
            raise PlanError(
                f"routing: tokens pick {self.picked} of {self.experts} experts, and of "
                f"{self.weightless} without weights; from 1 to as many as there are"
            )
        columns = (self.reached, self.arrived, self.worked)
        if any(len(column) != len(self.ranks) for column in columns):
            raise PlanError("routing: ranks, reached, arrived and worked must be equally long")
        ends = (*self.ranks[:1], *self.ranks[-1:])
        if list(self.ranks) != sorted(set(self.ranks)) or ends not in ((), (1, self.experts)):
            raise PlanError(f"routing: ranks ascend from 1 to {self.experts}, not {self.ranks}")
        if not (isfinite(self.band) and 0.0 <= self.band <= 2**20):
            raise PlanError(f"routing: band is {self.band}; it must be from 0 to 1,048,576")
        for n, reached, arrived, worked in zip(self.ranks, *columns, strict=True):
            # No token at all, or less on the busiest rank than on the mean one, cannot be.
            if not (0 < reached <= n and 1 <= arrived <= n and 0 < worked <= n):
                raise PlanError(
                    f"routing: of {n} ranks tokens reach {reached} and the busiest has {arrived} "
                    f"and {worked} times the mean; above 0, from 1 and above 0, up to {n}"
                )

    @property
    def _choices(self) -> int:
        return self.experts + self.weightless

    @property
    def share(self) -> float:
        """Of pairs of a token and an expert that it picked, those whose expert has weights, if all
        are equally likely."""
        return self.experts / self._choices

    @property
    def drops(self) -> bool:
        """Whether more pairs are without an expert than an even spread leaves, or fewer."""
        return self.load(1) != self.share

    def copies(self, ranks: float) -> float:
        """Returns to how many of so many ranks a token goes, on average."""
        if self.ranks:
            return _between(self.ranks, self.reached, ranks)
        held = self.experts / ranks
        missed = prod(
            max(0.0, self._choices - held - i) / (self._choices - i) for i in range(self.picked)
        )
        return ranks * (1.0 - missed)

    def crowd(self, ranks: float) -> float:
        """Returns the tokens that come to the busiest of so many ranks, over the mean rank's."""
        return _between(self.ranks, self.arrived, ranks) if self.ranks else 1.0

    def load(self, ranks: float) -> float:
        """Returns what the busiest of so many ranks computes, over the mean of a rank if all that
        tokens pick were on one."""
        return _between(self.ranks, self.worked, ranks) if self.ranks else self.share

    def onward(self, outer: int, ranks: int) -> float:
        """Returns to how many of so many ranks a token goes inside each of `outer` parts of the
        experts that it has come to."""
        return self.copies(outer * ranks) / self.copies(outer)


@lru_cache(maxsize=256)
def spread_evenly(experts: int, picked: int, weightless: int = 0) -> Routing:
    """Returns routing in which every choice of so many different experts is equally likely."""
    most = experts + weightless
    return Routing(experts=experts, picked=min(picked, most), weightless=weightless)


def _between(ranks: Sequence[int], figures: Sequence[float], wanted: float) -> float:
    """A figure for a count of ranks, on the line between its neighbours."""
    place = bisect_left(ranks, wanted)
    if place == len(ranks):
        return figures[-1]
    if ranks[place] == wanted or not place:
        return figures[place]
    share = (wanted - ranks[place - 1]) / (ranks[place] - ranks[place - 1])
    return figures[place - 1] + share * (figures[place] - figures[place - 1])
