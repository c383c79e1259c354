"""Which blocks of a stage are recomputed: not all or nothing, but as many as memory asks for."""

from collections.abc import Sequence
from itertools import product
from math import prod

from meshwright.costmodel.tables import Spot
from meshwright.ir.graph import Block
from meshwright.planner.candidates import recomputable
from meshwright.planner.problem import Problem
from meshwright.planner.space import recompute_modes

FEW = 8
"""Up to so many sets of a stage all are tried: so many of each pattern."""


class RecomputeSets:
    """The sets of one problem's stages; what is recomputed is named by pattern where it is all."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.modes = recompute_modes(problem)
        self._held: dict[tuple[int, int], tuple[tuple[str, ...], ...]] = {}
        self._costs: dict[str, tuple[float, float]] = {}

    def of(self, start: int, stop: int) -> tuple[tuple[str, ...], ...]:
        """Sets of the blocks `start` to `stop`, none first and all last."""
        if (start, stop) not in self._held:
            self._held[start, stop] = self._sets(self.problem.graph.blocks[start:stop])
        return self._held[start, stop]

    def blocks(self, start: int, stop: int, names: Sequence[str]) -> tuple[Block, ...]:
        """The blocks that a set means."""
        blocks = self.problem.graph.blocks[start:stop]
        return tuple(b for b in blocks if b.name in names or b.pattern in names)

    def _sets(self, blocks: Sequence[Block]) -> tuple[tuple[str, ...], ...]:
        patterns = recomputable(self.problem.graph, blocks)
        groups = [[b for b in blocks if b.pattern == pattern] for pattern in patterns]
        found = [named(groups, counts) for counts in self._counts(groups)]
        allowed = [names for names in found if bool(names) in self.modes]
        return tuple(allowed or found[:1])

    def _counts(self, groups: Sequence[Sequence[Block]]) -> Sequence[tuple[int, ...]]:
        """How many blocks of each pattern: all ways, or the best value for memory first."""
        if prod(len(group) + 1 for group in groups) <= FEW:
            return sorted(product(*(range(len(g) + 1) for g in groups)), key=lambda c: (sum(c), c))
        order = sorted(range(len(groups)), key=lambda i: (-self._value(groups[i][0]), i))
        counts = [0] * len(groups)
        found = [tuple(counts)]
        for index in order:
            for _ in groups[index]:
                counts[index] += 1
                found.append(tuple(counts))
        return found

    def _value(self, block: Block) -> float:
        """Bytes that recomputing saves, per second that it takes."""
        return self.saved_bytes(block) / max(self.again_s(block), 1e-12)

    def saved_bytes(self, block: Block) -> float:
        """Activations inside the block, of one sample."""
        return self._cost(block)[0]

    def again_s(self, block: Block) -> float:
        return self._cost(block)[1]

    def _cost(self, block: Block) -> tuple[float, float]:
        if block.pattern not in self._costs:
            layout = next(x for x in self.problem.layouts(()) if x.pattern == block.pattern)
            spot = Spot(1, 1, (), self.problem.tables.device_names[0], (), ())
            cost = self.problem.tables.block(block, layout, spot)
            self._costs[block.pattern] = cost.saved_bytes, cost.forward_s
        return self._costs[block.pattern]


def named(groups: Sequence[Sequence[Block]], counts: Sequence[int]) -> tuple[str, ...]:
    """The first so many blocks of each group; a pattern where that is all of them."""
    found: list[str] = []
    for group, count in zip(groups, counts, strict=True):
        whole = count == len(group)
        found += [group[0].pattern] if whole else [block.name for block in group[:count]]
    return tuple(found)
