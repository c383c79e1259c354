"""Costs of every run of blocks on one rank, as matrices: computing, memory, parameters, borders."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from meshwright.costmodel.block import BlockCost
from meshwright.costmodel.comm import send_time
from meshwright.costmodel.overheads import Overheads, overheads_of
from meshwright.costmodel.placement import slowdown
from meshwright.costmodel.tables import Spot
from meshwright.ir.device import Link
from meshwright.ir.plan import ModelMesh
from meshwright.planner.candidates import recomputable
from meshwright.planner.problem import Problem
from meshwright.planner.spans import Matrix, highest, sums, sums_of_named


class At(NamedTuple):
    """What the costs of a block depend on: where it runs, and which layouts it has there."""

    spot: Spot
    variant: str


class State(NamedTuple):
    """Parameters of runs of blocks on a rank, in bytes, and the number of trained ones."""

    stored: Matrix
    trained: Matrix
    tensors: Matrix
    largest: Matrix
    """Trained parameters of the largest block."""


class Work(NamedTuple):
    """A micro-batch in runs of blocks."""

    busy_s: Matrix
    backward_s: Matrix
    saved_bytes: Matrix
    workspace_bytes: Matrix


class RunCosts:
    """The matrices of one problem; keeps what it has computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = problem.graph.blocks
        self.slow = slowdown(problem.cluster)
        self._again = frozenset(recomputable(problem.graph, self.blocks))
        self._costs: dict[At, tuple[BlockCost, ...]] = {}
        self._states: dict[tuple[ModelMesh, str], State] = {}
        self._works: dict[tuple[At, bool], Work] = {}
        self._sent: dict[tuple[int, Link | None], tuple[Matrix, Matrix]] = {}

    def overheads(self, at: At) -> Overheads:
        return overheads_of(self.problem.tables.devices[at.spot.device])

    def block_costs(self, at: At) -> tuple[BlockCost, ...]:
        if at not in self._costs:
            layouts = {
                layout.pattern: layout for layout in self.problem.layouts(at.spot.model, at.variant)
            }
            self._costs[at] = tuple(
                self.problem.tables.block(block, layouts[block.pattern], at.spot)
                for block in self.blocks
            )
        return self._costs[at]

    def work(self, at: At, again: bool) -> Work:
        if (at, again) not in self._works:
            made = [
                cost.recomputed() if again and block.pattern in self._again else cost
                for block, cost in zip(self.blocks, self.block_costs(at), strict=True)
            ]
            spare = 1 - 1 / self.slow
            known = self.overheads(at)
            beside = [known.block_of(c.no_grad_s is not None) for c in made]
            backward = [
                c.backward_s - spare * c.comm_backward_s + o
                for c, o in zip(made, beside, strict=True)
            ]
            busy = [
                c.forward_s - spare * c.comm_forward_s + o + b
                for c, b, o in zip(made, backward, beside, strict=True)
            ]
            inside = sums([c.saved_bytes for c in made])
            prelude_s, prelude_bytes = self._prelude(at)
            self._works[at, again] = Work(
                sums(busy) + prelude_s + 2 * known.action_s,
                sums(backward),
                inside + sums_of_named(self._at_borders(made)) + prelude_bytes,
                highest([c.workspace_bytes for c in made]),
            )
        return self._works[at, again]

    def _prelude(self, at: At) -> tuple[float, float]:
        """Seconds and bytes of the whole prelude; a stage that needs only part of it has less."""
        layouts = {
            layout.pattern: layout for layout in self.problem.layouts(at.spot.model, at.variant)
        }
        costs, again = self.block_costs(at), (False,) * len(self.blocks)
        all_of_it = self.problem.tables.stage(self.blocks, layouts, again, at.spot)
        kept = sum(c.saved_bytes for c in costs) + sums_of_named(self._at_borders(costs))[0, -1]
        return (
            all_of_it.forward_s - sum(c.forward_s for c in costs),
            all_of_it.saved_bytes - float(kept),
        )

    def _at_borders(self, costs: Sequence[BlockCost]) -> list[dict[str, float]]:
        """Per block, what is kept of values that enter or leave it."""
        facts = self.problem.tables.facts
        found = []
        for block, cost in zip(self.blocks, costs, strict=True):
            names = chain(block.inputs, block.outputs)
            held: dict[str, float] = {}
            for name, nbytes in zip(names, cost.saved_inputs + cost.saved_outputs, strict=True):
                root = facts.roots[name]
                if root not in facts.prelude_values:
                    held[root] = max(nbytes, held.get(root, 0))
            found.append(held)
        return found

    def state(self, at: At) -> State:
        key = (at.spot.model, at.variant)
        if key not in self._states:
            costs, trained = self.block_costs(at), self.problem.tables.trained
            held = [
                dict(zip(block.params, cost.param_bytes, strict=True))
                for block, cost in zip(self.blocks, costs, strict=True)
            ]
            learned = [{n: b for n, b in sizes.items() if n in trained} for sizes in held]
            self._states[key] = State(
                sums_of_named(held),
                sums_of_named(learned),
                sums_of_named([dict.fromkeys(sizes, 1) for sizes in learned]),
                highest([sum(sizes.values()) for sizes in learned]),
            )
        return self._states[key]

    def trained_per_block(self, at: At) -> list[int]:
        trained = self.problem.tables.trained
        return [
            sum(n for name, n in zip(block.params, cost.param_bytes, strict=True)
                if name in trained)
            for block, cost in zip(self.blocks, self.block_costs(at), strict=True)
        ]  # fmt: skip

    def borders(self, at: At, link: Link | None) -> tuple[Matrix, Matrix]:
        """Bytes and seconds of a micro-batch into block k, per rank; nothing at the two ends."""
        key = (at.spot.samples, link)
        if key in self._sent:
            return self._sent[key]
        size = len(self.blocks)
        sent, seconds = np.zeros(size + 1), np.zeros(size + 1)
        for block in range(1, size):
            whole, fixed = self.problem.tables.border_bytes(block)
            sent[block] = whole * at.spot.samples / self.problem.batch + fixed
            if link is not None:
                seconds[block] = send_time(float(sent[block]), link)
        self._sent[key] = sent, seconds
        return sent, seconds
