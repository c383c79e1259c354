"""Runs of blocks that cost the same, so that each kind is computed once.

Blocks i to k-1 are equal to blocks j to l-1 if they have the same patterns in the same order, are
wired alike among themselves, and receive and send as much. A model of n equal layers has about 4n
kinds of runs, not n^2 / 2.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshwright.ir.graph import Block
from meshwright.planner.problem import Problem

_Link = tuple[tuple[int, int], ...]
"""How far back each name of a block is used by an earlier one, with its place: (place, blocks)."""


@dataclass(frozen=True, slots=True)
class RunClasses:
    """The kinds of runs; `index[i, k]` is that of blocks i to k-1, -1 where there are none."""

    start: NDArray[np.int64]
    """First block of an example of each kind."""
    stop: NDArray[np.int64]
    index: NDArray[np.int64]

    def spread(self, values: NDArray[np.float64], empty: float = np.inf) -> NDArray[np.float64]:
        """Values per kind as a matrix over [i, k]."""
        found: NDArray[np.float64] = np.append(values, empty)[self.index]
        return found


def run_classes(problem: Problem) -> RunClasses:
    """The kinds of runs of a problem's blocks."""
    blocks = problem.graph.blocks
    kinds = [kind_of_block(problem, block) for block in blocks]
    links = _links(problem, blocks)
    borders = [problem.tables.border_bytes(i) for i in range(len(blocks))] + [(0, 0)]
    borders[0] = (0, 0)
    known: dict[object, int] = {}
    classes: dict[object, int] = {}
    index = np.full((len(blocks) + 1, len(blocks) + 1), -1, dtype=np.int64)
    examples: list[tuple[int, int]] = []
    for start in range(len(blocks)):
        run = -1
        for stop in range(start + 1, len(blocks) + 1):
            within = tuple(link for link in links[stop - 1] if link[1] < stop - start)
            run = known.setdefault((run, kinds[stop - 1], within), len(known))
            ends = start == 0, stop == len(blocks), borders[start], borders[stop]
            index[start, stop] = classes.setdefault((run, ends), len(classes))
            if len(classes) > len(examples):
                examples.append((start, stop))
    starts, stops = np.array(examples, dtype=np.int64).T
    return RunClasses(starts, stops, index)


def kind_of_block(problem: Problem, block: Block) -> tuple[object, ...]:
    """What the cost of a block depends on besides its layout and where it runs."""
    tensors = problem.graph.tensors
    trained = tuple(tensors[name].requires_grad for name in block.inputs)
    prelude = tuple(name in problem.tables.facts.prelude_values for name in block.inputs)
    return block.pattern, trained, prelude


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
