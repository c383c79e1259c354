"""Runs of blocks that cost the same, so that each kind is computed once.

Blocks i to k-1 are equal to blocks j to l-1 if they have the same patterns in the same order, are
wired alike among themselves, and receive and send as much. A model of n equal layers has about 4n
kinds of runs, not n^2 / 2. Where the layers of a model are too many and all differ, only runs
between some of its blocks count: those where little is sent, evenly spaced in time.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.ir.deadline import check_time
from meshwright.ir.graph.graph import Block
from meshwright.planner.problem.problem import Problem

DEEP = 2000
"""Blocks up to which there are tables over all runs of them: these grow with the square."""
KINDS, CUTS = 2500, 64
"""Kinds of runs at most; beyond that, at most so many places to cut."""
_Link = tuple[tuple[int, int], ...]
"""How far back each name of a block is used by an earlier one, with its place: (place, blocks)."""


@dataclass(frozen=True)
class RunClasses:
    """The kinds of runs; `index[i, k]` is that of blocks i to k-1, -1 where there are none."""

    start: NDArray[np.int64]
    """First block of an example of each kind."""
    stop: NDArray[np.int64]
    index: NDArray[np.int64]

    @cached_property
    def places(self) -> NDArray[np.int64]:
        """Where runs begin and stop."""
        known = self.index >= 0
        return np.flatnonzero(known.any(axis=0) | known.any(axis=1))

    @cached_property
    def _between(self) -> NDArray[np.int64]:
        return self.index[np.ix_(self.places, self.places)]

    def spread(self, values: NDArray[np.float64], empty: float = np.inf) -> NDArray[np.float64]:
        """Values per kind as a matrix over the places."""
        found: NDArray[np.float64] = np.append(values, empty)[self._between]
        return found


def run_classes(problem: Problem) -> RunClasses:
    """The kinds of runs of a problem's blocks."""
    everywhere = range(len(problem.graph.blocks) + 1)
    found = _classes(problem, everywhere)
    if len(found.start) <= KINDS or problem.stage_of_block:
        return found
    return _classes(problem, cuts(problem))


def cuts(problem: Problem) -> tuple[int, ...]:
    """Of each of as many equal parts of the model's time, the border that sends least; and the two
    ends."""
    count = len(problem.graph.blocks)
    ends = [0.0, *accumulate(_seconds(problem))]
    sent = [problem.tables.border_bytes(i)[0] for i in range(count)]
    best: dict[int, int] = {}
    for border in range(1, count):
        part = int(CUTS * ends[border] / ends[-1])
        if part not in best or sent[border] < sent[best[part]]:
            best[part] = border
    return (0, *best.values(), count)


def _seconds(problem: Problem) -> list[float]:
    """Of each block for one sample, all its parameters whole."""
    tables = problem.tables
    layouts = {layout.pattern: layout for layout in problem.layouts(())}
    spot = BlockSpot(1, 1, (), tables.device_names[0], (), ())
    costs = [tables.block(b, layouts[b.pattern], spot) for b in problem.graph.blocks]
    return [cost.forward_s + cost.backward_s for cost in costs]


def _classes(problem: Problem, places: Sequence[int]) -> RunClasses:
    """Of runs from one of these places to another."""
    may_stop = frozenset(places)
    blocks = problem.graph.blocks
    numbers: dict[object, int] = {}
    kinds = [numbers.setdefault(kind_of_block(problem, b), len(numbers)) for b in blocks]
    links = _links(problem, blocks)
    farthest = [max([back for _, back in own], default=0) for own in links]
    borders: list[tuple[int, ...]] = [(0,) * 4 for _ in range(len(blocks) + 1)]
    for i in range(1, len(blocks)):
        ahead, back = (problem.tables.border_bytes(i, back=b) for b in (False, True))
        borders[i] = ahead + back
    known: dict[object, int] = {}
    classes: dict[object, int] = {}
    index = np.full((len(blocks) + 1, len(blocks) + 1), -1, dtype=np.int64)
    examples: list[tuple[int, int]] = []
    count = len(blocks)
    for start in places[:-1]:
        check_time()
        run = -1
        for stop in range(start + 1, count + 1):
            within = links[stop - 1]
            if farthest[stop - 1] >= stop - start:
                within = tuple([link for link in within if link[1] < stop - start])
            key = run, kinds[stop - 1], within
            if key not in known:
                known[key] = len(known)
            run = known[key]
            if stop not in may_stop:
                continue
            made = run, start == 0, stop == count, borders[start], borders[stop]
            if made not in classes:
                classes[made] = len(classes)
                examples.append((start, stop))
            index[start, stop] = classes[made]
    starts, stops = np.array(examples, dtype=np.int64).T
    return RunClasses(starts, stops, index)


def kind_of_block(problem: Problem, block: Block) -> tuple[object, ...]:
    """What the cost of a block depends on besides its layout and where it runs."""
    facts = problem.tables.facts
    prelude = tuple(name in facts.prelude_values for name in block.inputs)
    return block.pattern, facts.fed(block), prelude


def _links(problem: Problem, blocks: tuple[Block, ...]) -> list[_Link]:
    """Per block, which of its names an earlier block has, and how far back that is."""
    roots = problem.tables.facts.roots
    last: dict[str, int] = {}
    found: list[_Link] = []
    for number, block in enumerate(blocks):
        names = [roots[n] for n in (*block.inputs, *block.outputs)] + list(block.params)
        found.append(tuple((place, number - last[n]) for place, n in enumerate(names) if n in last))
        last.update(dict.fromkeys(names, number))
    return found
