"""Decisions of several problems in turn, for agents that are to be good at all of them."""

from collections.abc import Sequence

from meshwright.ir.errors import PlanError
from meshwright.planner.searchers.dqn.decisions import Decisions, Offered


class Several:
    """An episode of each, one after the other."""

    def __init__(self, held: Sequence[Decisions]) -> None:
        shapes = {(d.context_size, d.option_size, d.most_options) for d in held}
        if len(shapes) != 1:
            raise PlanError(f"an agent learns on decisions of one form, given are {len(shapes)}")
        ((self.context_size, self.option_size, self.most_options),) = shapes
        self.context_names, self.option_names = held[0].context_names, held[0].option_names
        self.held, self.at = tuple(held), -1

    def restart(self) -> None:
        self.at = (self.at + 1) % len(self.held)
        self.held[self.at].restart()

    def offered(self) -> Offered:
        return self.held[self.at].offered()

    def take(self, option: int) -> tuple[float, bool]:
        return self.held[self.at].take(option)
