"""Costs of every kind of run of blocks on one rank: computing, memory, parameters, borders."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import inf
from typing import NamedTuple, TypeVar

import numpy as np

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.comm.borders import part_bytes
from meshwright.costmodel.comm.comm import send_time
from meshwright.costmodel.cores import slowdown
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.ops.overheads import Overheads, overheads_of
from meshwright.forms.retention import AGAIN, KEEP
from meshwright.ir.cluster.device import Link
from meshwright.ir.graph.graph import Block
from meshwright.ir.plan.folded import Fold, fold_of
from meshwright.ir.plan.plan import BlockLayout, ModelMesh
from meshwright.planner.across.mode_costs import ModeCosts
from meshwright.planner.across.run_classes import kind_of_block, run_classes
from meshwright.planner.across.spans import Matrix, highest, sums, sums_of_named
from meshwright.planner.problem.candidates import recomputable
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.saved_modes import pinned_policy
from meshwright.planner.problem.space import Mesh

T = TypeVar("T")


class At(NamedTuple):
    """What the costs of a block depend on: where it runs, and which layouts it has there."""

    spot: BlockSpot
    variant: str


class RunState(NamedTuple):
    """Parameters of runs of blocks on a rank, in bytes, and the number of trained ones."""

    stored: Matrix
    trained: Matrix
    frozen: Matrix
    """Parameters without gradients."""
    tensors: Matrix
    largest: Matrix
    """Trained parameters of the largest block."""
    widest: Matrix
    """What the block that reads most reads of its parameters, copies where there are some."""


class RunWork(NamedTuple):
    """A micro-batch in runs of blocks."""

    busy_s: Matrix
    forward_s: Matrix
    backward_s: Matrix
    saved_bytes: Matrix
    workspace_bytes: Matrix
    growing_bytes: Matrix
    """The same where gradients are there from the op that makes each on, and not before."""
    last_bytes: Matrix
    """Of `saved_bytes`, what the last block has: its gradients go when that has gone."""
    leaving_bytes: Matrix
    """Of `saved_bytes`, what leaves the last block: where it is sent on, it is there once."""
    made_bytes: Matrix
    """At least what is sent on and no earlier block has made, each of which may have saved what it
    made; infinite where earlier ones have made nothing of what crosses."""


class RunCosts:
    """Arrays over the kinds of runs of one problem; keeps what it has computed."""

    waits = True
    """Whether blocks wait for their collectives."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = problem.graph.blocks
        self.classes = run_classes(problem)
        self.slow = slowdown(problem.cluster)
        devices = problem.tables.devices.values()
        self.own_s = min(overheads_of(device).step_s for device in devices) * self.slow
        """What the runtime itself takes of any step."""
        self.kinds = tuple(kind_of_block(problem, block) for block in self.blocks)
        known = {kind: number for number, kind in enumerate(dict.fromkeys(self.kinds))}
        self._kind_numbers = tuple(known[kind] for kind in self.kinds)
        self._firsts = tuple(self.kinds.index(kind) for kind in known)
        self._first_of_kind = tuple(self.blocks[number] for number in self._firsts)
        self.first_user = _first_users(self.blocks)
        """Parameter -> the first block that reads it."""
        self.names = frozenset(block.name for block in self.blocks)
        self._first_like = tuple([self._firsts[kind] for kind in self._kind_numbers])
        self._again = frozenset(recomputable(problem.graph, self.blocks))
        self._layouts: dict[tuple[ModelMesh, str], dict[str, BlockLayout]] = {}
        self._alone: dict[tuple[ModelMesh, str], bool] = {}
        self._canonical: dict[At, At] = {}
        self._each: dict[At, tuple[BlockCost, ...]] = {}
        """Of the first block of each kind."""
        self._costs: dict[At, list[BlockCost]] = {}
        """Of all blocks."""
        self._roots: dict[str, tuple[tuple[int, str], ...]] = {}
        self._held: dict[tuple[ModelMesh, str, bool, Fold | None], list[int]] = {}
        self._under: dict[object, BlockCost] = {}
        self._states: dict[tuple[ModelMesh, str, Fold | None], RunState] = {}
        self._foldings: dict[tuple[ModelMesh, str], tuple[dict[str, Fold], ...]] = {}
        self._folds: dict[tuple[ModelMesh, str], tuple[Fold | None, ...]] = {}
        self._works: dict[tuple[At, str], RunWork] = {}
        self._modes = ModeCosts(problem)
        self._sent: dict[object, tuple[Matrix, Matrix]] = {}
        self._crossing: dict[tuple[ModelMesh, str, bool], Matrix] = {}
        self._summed: dict[tuple[ModelMesh, str], tuple[Matrix, ...]] = {}

    def of(self, matrix: Matrix) -> Matrix:
        """The entries of a matrix over [i, k] for each kind of run."""
        found: Matrix = matrix[self.classes.start, self.classes.stop]
        return found

    @property
    def first_like(self) -> tuple[int, ...]:
        """Per block, the first one that costs as much under every layout."""
        return self._first_like

    def firsts_between(self, start: int, stop: int) -> Counter[int]:
        """How many blocks of a run cost as much as which first ones."""
        return Counter(self._first_like[start:stop])

    def may_recompute(self, block: int) -> bool:
        return self.blocks[block].pattern in self._again

    @property
    def again(self) -> Matrix:
        """How many blocks of each kind of run can be recomputed."""
        return self.of(sums([block.pattern in self._again for block in self.blocks]))

    def overheads(self, at: At) -> Overheads:
        return overheads_of(self.problem.tables.devices[at.spot.device])

    def layouts(self, model: ModelMesh, variant: str) -> dict[str, BlockLayout]:
        """By pattern."""
        if (model, variant) not in self._layouts:
            found = {layout.pattern: layout for layout in self.problem.layouts(model, variant)}
            self._layouts[model, variant] = found
        return self._layouts[model, variant]

    def block_costs(self, at: At) -> list[BlockCost]:
        """Of all blocks."""
        at = self.canonical(at)
        if at not in self._costs:
            self._costs[at] = self._for_all(self._kind_costs(at))
        return self._costs[at]

    def bytes_of(self, at: At) -> list[BlockCost]:
        """Of all blocks, where their seconds do not count."""
        return self.block_costs(at)

    def _kind_costs(self, at: At) -> tuple[BlockCost, ...]:
        """Of each kind of block; `at` is canonical."""
        if at not in self._each:
            layouts = self.layouts(at.spot.model, at.variant)
            self._each[at] = tuple(
                [self._block_cost(b, layouts[b.pattern], at.spot) for b in self._first_of_kind]
            )
        return self._each[at]

    def block_s(self, at: At) -> list[float]:
        """Seconds of a micro-batch in each block, forward and back."""
        each = self._kind_costs(self.canonical(at))
        return self._for_all([cost.forward_s + cost.backward_s for cost in each])

    def _for_all(self, each: Sequence[T]) -> list[T]:
        """What each kind of block has, for all blocks."""
        return [each[kind] for kind in self._kind_numbers]

    def _block_cost(self, block: Block, layout: BlockLayout, spot: BlockSpot) -> BlockCost:
        policy = pinned_policy(self.problem, block.pattern) if self._asks(block) else ()
        if not policy:
            return self.problem.tables.block(block, layout, spot)
        cost = self.problem.tables.block(block, layout, spot, policy)
        most = cost.workspace_bytes + cost.remade_bytes
        return replace(cost, workspace_bytes=most, remade_bytes=0)

    def _asks(self, block: Block) -> bool:
        """Whether `saved=` is for it."""
        return block.pattern in self._again

    def canonical(self, at: At) -> At:
        """The same without replicas, where blocks do not communicate with them."""
        if at.spot.dp == 1:
            return at
        found = self._canonical.get(at)
        if found is None:
            found = self._canonical[at] = self._simplest(at)
        return found

    def _simplest(self, at: At) -> At:
        spot = at.spot
        if spot.dp == 1 or self.problem.tables.profile is not None:
            return at  # a profile knows blocks by the ranks that they were measured on
        key = spot.model, at.variant
        if key not in self._alone:
            self._alone[key] = self._is_alone(at)
        if not self._alone[key]:
            return at
        return At(replace(spot, dp=1, dp_levels=(), own_levels=None), at.variant)

    def _is_alone(self, at: At) -> bool:
        layouts = self.layouts(at.spot.model, at.variant)
        known = self.problem.tables.blocks
        return all([
            known.is_apart(block, layouts[block.pattern], at.spot)
            for block in self.problem.graph.distinct_blocks()
        ])  # fmt: skip

    def under(self, block: Block, at: At, mode: str) -> BlockCost:
        """The cost of a block in one of `planner.problem.saved_modes`."""
        key = self.kinds[self.problem.tables.block_index[block.name]], at, mode
        if key not in self._under:
            layout = self.layouts(at.spot.model, at.variant)[block.pattern]
            self._under[key] = self._modes.exact(block, layout, at.spot, mode)
        return self._under[key]

    def in_mode(self, at: At, mode: str) -> list[BlockCost]:
        """About the costs of all blocks: `keep`, `full` or a mode, where they can."""
        return self._for_all(self._in_mode(self.canonical(at), mode))

    def _in_mode(self, at: At, mode: str) -> list[BlockCost]:
        """Of each kind of block."""
        layouts = self.layouts(at.spot.model, at.variant)
        found = []
        for block, cost in zip(self._first_of_kind, self._kind_costs(at), strict=True):
            if mode == KEEP or block.pattern not in self._again:
                found.append(cost)
            elif mode == AGAIN:
                found.append(cost.recomputed())
            else:
                layout = layouts[block.pattern]
                found.append(self._modes.about(block, layout, at.spot, mode, cost))
        return found

    def work(self, at: At, mode: str) -> RunWork:
        at = self.canonical(at)
        if (at, mode) not in self._works:
            self._works[at, mode] = self._work(at, mode)
        return self._works[at, mode]

    def _work(self, at: At, mode: str) -> RunWork:
        made = self._in_mode(at, mode)
        spare = 1 - 1 / self.slow
        known = self.overheads(at)
        beside = [known.block_of(c.no_grad_s is not None) for c in made]
        backward = [
            c.backward_s - spare * c.comm_backward_s + o for c, o in zip(made, beside, strict=True)
        ]
        forward = [
            c.forward_s - spare * c.comm_forward_s + o for c, o in zip(made, beside, strict=True)
        ]
        every = self._for_all(made)
        inside = sums([c.saved_bytes for c in every]) + sums_of_named(
            self._at_borders(every, self.blocks)
        )
        prelude_s, prelude_bytes = self._prelude(at)
        forward_s = self.of(sums(self._for_all(forward))) + prelude_s + known.action_s
        backward_s = self.of(sums(self._for_all(backward)))
        return RunWork(
            forward_s + backward_s + known.action_s,
            forward_s,
            backward_s,
            self.of(inside) + prelude_bytes,
            self.of(highest([c.backward_bytes for c in every])),
            self.of(_growing(every)),
            self.of(_last([c.saved_bytes for c in every])),
            self.of(_last([c.kept_outputs for c in every])),
            self.of(_last([
                inf if alone else sum(c.output_bytes)
                for c, alone in zip(every, self._makes_all, strict=True)
            ])),
        )  # fmt: skip

    @cached_property
    def _makes_all(self) -> Sequence[bool]:
        """Of each block, whether all that crosses after it is what it has made."""
        crossing = map(self.problem.tables.crossing, range(1, len(self.blocks) + 1))
        return [
            {*names} <= {*own.outputs} for names, own in zip(crossing, self.blocks, strict=True)
        ]

    def _prelude(self, at: At) -> tuple[float, float]:
        """Seconds and bytes of the whole prelude; a stage that needs only part of it has less."""
        layouts, costs = self.layouts(at.spot.model, at.variant), self.block_costs(at)
        # Equal blocks need the same of it.
        few = tuple(self.problem.graph.distinct_blocks())
        own = [costs[self.problem.tables.block_index[block.name]] for block in few]
        with_it = self.problem.tables.stage(few, layouts, (False,) * len(few), at.spot)
        kept = sum(c.saved_bytes for c in own) + sums_of_named(self._at_borders(own, few))[0, -1]
        return (
            with_it.forward_s - sum(c.forward_s for c in own),
            with_it.saved_bytes - float(kept),
        )

    def _at_borders(
        self, costs: Sequence[BlockCost], blocks: Sequence[Block]
    ) -> list[dict[str, float]]:
        """Per block, what is kept of values that enter or leave it."""
        found = []
        for block, cost in zip(blocks, costs, strict=True):
            if block.name not in self._roots:
                self._roots[block.name] = self._roots_of(block)
            sizes = cost.saved_inputs + cost.saved_outputs
            held: dict[str, float] = {}
            for place, root in self._roots[block.name]:
                if root not in held or sizes[place] > held[root]:
                    held[root] = sizes[place]
            found.append(held)
        return found

    def _roots_of(self, block: Block) -> tuple[tuple[int, str], ...]:
        """Places of the block's inputs and outputs that are no part of the prelude, with whose
        memory they are."""
        facts = self.problem.tables.facts
        roots = [facts.roots[name] for name in (*block.inputs, *block.outputs)]
        return tuple([(i, r) for i, r in enumerate(roots) if r not in facts.prelude_values])

    def foldings(self, at: At) -> tuple[dict[str, Fold], ...]:
        """Per block, the axes that are folded for each of its parameters."""
        key = at.spot.model, at.variant
        if key not in self._foldings:
            self._foldings[key] = tuple([
                {
                    name: fold_of(at.spot.model, over)
                    for name, over in zip(block.params, cost.summed_over, strict=True)
                }
                for block, cost in zip(self.blocks, self.bytes_of(at), strict=True)
            ])  # fmt: skip
        return self._foldings[key]

    def folds(self, at: At, mesh: Mesh) -> tuple[Fold | None, ...]:
        """The foldings that there are on a mesh; None alone: nothing is folded."""
        if len(mesh.folds) < 2:
            return (None,)
        key = at.spot.model, at.variant
        if key not in self._folds:
            found = {fold for own in self.foldings(at) for fold in own.values()}
            self._folds[key] = tuple(sorted(found)) if found else (None,)
        return self._folds[key]

    def state(self, at: At, fold: Fold | None = None) -> RunState:
        """Of all parameters, or those for which the axes of `fold` are folded."""
        key = (at.spot.model, at.variant, fold)
        if key not in self._states:
            costs, trained = self.block_costs(at), self.problem.tables.trained
            frozen = self.problem.tables.frozen
            held = [
                dict(zip(block.params, cost.param_bytes, strict=True))
                for block, cost in zip(self.blocks, costs, strict=True)
            ]
            if fold is not None:
                folds = self.foldings(at)
                held = [
                    {n: b for n, b in sizes.items() if own[n] == fold}
                    for sizes, own in zip(held, folds, strict=True)
                ]
            learned = [{n: b for n, b in sizes.items() if n in trained} for sizes in held]
            still = [{n: b for n, b in sizes.items() if n in frozen} for sizes in held]
            self._states[key] = RunState(
                self.of(sums_of_named(held)),
                self.of(sums_of_named(learned)),
                self.of(sums_of_named(still)),
                self.of(sums_of_named([dict.fromkeys(sizes, 1) for sizes in learned])),
                self.of(highest([sum(sizes.values()) for sizes in learned])),
                self.of(highest(self.read_per_block(at, fold))),
            )
        return self._states[key]

    def trained_per_block(self, at: At, fold: Fold | None = None) -> list[int]:
        return self._per_block(at, self.problem.tables.trained, fold)

    def read_per_block(self, at: At, fold: Fold | None = None) -> list[float]:
        """Bytes of each block's parameters as it reads them, trained or not."""
        tables = self.problem.tables
        read = tables.numbers.copied or 1.0
        pairs = zip(
            self._per_block(at, tables.trained, fold),
            self._per_block(at, tables.frozen, fold),
            strict=True,
        )
        return [read * trained + frozen for trained, frozen in pairs]

    def _per_block(self, at: At, names: frozenset[str], fold: Fold | None) -> list[int]:
        key = (at.spot.model, at.variant, names is self.problem.tables.trained, fold)
        if key not in self._held:
            folds = self.foldings(at)
            self._held[key] = [
                sum([n for name, n in zip(block.params, cost.param_bytes, strict=True)
                     if name in names and (fold is None or own[name] == fold)])
                for block, cost, own in zip(self.blocks, self.block_costs(at), folds, strict=True)
            ]  # fmt: skip
        return self._held[key]

    def borders(self, at: At, link: Link | None, *, back: bool = False) -> tuple[Matrix, Matrix]:
        """Bytes and seconds of a micro-batch into block k, per rank; nothing at the two ends. The
        stage on the other side is taken to have the same layouts. Of a stack that sends parts of
        what ranks have alike, no less than the parts. `back`: of the gradients of that."""
        key = (at.spot.model, at.variant, at.spot.samples, link, back)
        if key not in self._sent:
            parts = self._parts(at, back)
            sent = parts[:, 0] * at.spot.samples / self.problem.batch + parts[:, 1]
            ranks = dict(at.spot.model).get("tp", 1)
            parted = ranks if self.problem.tables.run_as.parts_borders else 1
            known = {
                n: send_time(n / parted, link) if link and n else 0.0 for n in set(sent.tolist())
            }
            self._sent[key] = sent, np.array([known[n] for n in sent.tolist()])
        return self._sent[key]

    def _parts(self, at: At, back: bool) -> Matrix:
        """(bytes of a global batch, bytes that do not depend on it) into block k on one rank."""
        key = (at.spot.model, at.variant, back)
        if key not in self._crossing:
            found = part_bytes(self.problem.tables, self.layouts(*key[:2]), back=back)
            self._crossing[key] = np.array([(0, 0), *found[1:], (0, 0)], dtype=float)
        return self._crossing[key]

    def summed(self, at: At) -> tuple[Matrix, ...]:
        """Per model axis, bytes of parameters whose gradients are summed over it, where that is not
        folded."""
        key = (at.spot.model, at.variant)
        if key not in self._summed:
            costs = self.block_costs(at)
            self._summed[key] = tuple(
                self.of(sums_of_named([_summed_over(b, c, axis) for b, c in zip(
                    self.blocks, costs, strict=True)]))
                for axis, _ in at.spot.model
            )  # fmt: skip
        return self._summed[key]


def _growing(costs: Sequence[BlockCost]) -> Matrix:
    """Most beside what all blocks of a run saved, of which those behind a block are gone when its
    backward runs; at first it has what it was given."""
    saved = np.cumsum([0, *(cost.saved_bytes for cost in costs)])
    alone = [max(c.backward_bytes - c.late_bytes, c.given_bytes) for c in costs]
    most = [own + n for own, n in zip(alone, saved[1:], strict=True)]
    found: Matrix = np.maximum(0.0, highest(most) - saved)
    return found


def _last(figures: Sequence[float]) -> Matrix:
    """Of each run, the figure of its last block."""
    size = len(figures) + 1
    found: Matrix = np.triu(np.broadcast_to([0.0, *figures], (size, size)), 1)
    return found


def _summed_over(block: Block, cost: BlockCost, axis: str) -> dict[str, int]:
    names = zip(block.params, cost.param_bytes, cost.summed_over, strict=True)
    return {name: nbytes for name, nbytes, over in names if axis in over}


def _first_users(blocks: Sequence[Block]) -> dict[str, int]:
    found: dict[str, int] = {}
    for number, block in enumerate(blocks):
        for name in block.params:
            found.setdefault(name, number)
    return found
