"""Every run of blocks as a stage, for every way to lay it out on a group of devices, as matrices.

Entry [i, k] of a matrix is about the stage of blocks i to k-1; entries with k <= i are infinite.
The numbers are those of `costmodel.estimate` but for what depends on the stages beside it; they
rank choices, and `estimate` judges those that come out best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.block import BlockCost
from meshwright.costmodel.comm import Levels, collective_time, send_time
from meshwright.costmodel.memory import OPTIMIZER_COPIES, optimizer_traffic
from meshwright.costmodel.placement import BUCKET_BYTES, slowdown
from meshwright.costmodel.tables import Spot
from meshwright.ir.conversions import Primitive
from meshwright.ir.device import Link, OpClass
from meshwright.planner.candidates import recomputable
from meshwright.planner.problem import Problem
from meshwright.planner.space import Mesh, meshes, recompute_modes
from meshwright.planner.spans import Collectives, Matrix, highest, sums, sums_of_named

SLACK = 1.002
"""An option must be better by so much somewhere to be kept."""


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a stage on a group."""

    mesh: Mesh
    recompute: bool


@dataclass(frozen=True, slots=True)
class Options:
    """All ways to run a stage on a group of devices: arrays of [option, i, k]."""

    options: tuple[Option, ...]
    path_s: Matrix
    """One micro-batch through the stage and back, with messages both ways."""
    load_s: Matrix
    """What the stage adds to a step per micro-batch but the first, and once per step."""
    busy_s: Matrix
    """Forward and backward of one micro-batch."""
    static_bytes: Matrix
    flight_bytes: Matrix
    """Memory besides, per micro-batch in flight."""


class Case(NamedTuple):
    """An option with all that its numbers depend on."""

    option: Option
    spot: Spot
    shard: Levels
    replicate: Levels


class _State(NamedTuple):
    """Parameters of runs of blocks on a rank, in bytes, and the number of trained ones."""

    stored: Matrix
    trained: Matrix
    tensors: Matrix
    largest: Matrix
    """Trained parameters of the largest block."""


class _Work(NamedTuple):
    """A micro-batch in runs of blocks."""

    busy_s: Matrix
    saved_bytes: Matrix
    workspace_bytes: Matrix


class _Runs(NamedTuple):
    """Which entries are computed: first block and end."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]

    def of(self, matrix: Matrix) -> Matrix:
        found: Matrix = matrix[self.start, self.stop]
        return found


class StageTables:
    """The matrices of one problem; keeps what it has computed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.blocks = problem.graph.blocks
        self.slow = slowdown(problem.cluster)
        self.collective = Collectives()
        self._again = frozenset(recomputable(problem.graph, self.blocks))
        self._asked: dict[tuple[int, int, int, int], Options] = {}
        self._made: dict[object, Options] = {}
        self._costs: dict[Spot, tuple[BlockCost, ...]] = {}
        self._states: dict[int, _State] = {}
        self._works: dict[tuple[Spot, bool], _Work] = {}
        self._sent: dict[tuple[int, Link | None], tuple[Matrix, Matrix]] = {}
        self._gathers: dict[tuple[int, Levels, int], Matrix] = {}
        self._state_of: dict[tuple[int, int], _State] = {}
        size = len(self.blocks)
        half = (size + 1) // 2
        edge = np.arange(size + 1, dtype=np.int64)
        self._all = _Runs(edge[:, None], edge[None, :])
        self._probes = _Runs(
            np.array([0, size - 1, half - 1, 0, size - half, 0]),
            np.array([1, size, half, half, size, size]),
        )

    def options(self, start: int, size: int, num_microbatches: int, next_rank: int) -> Options:
        """Ways to run a stage on the `size` devices from rank `start`."""
        asked = (start, size, num_microbatches, next_rank)
        if asked not in self._asked:
            self._asked[asked] = self._options(*asked)
        return self._asked[asked]

    def _options(self, start: int, size: int, num_microbatches: int, next_rank: int) -> Options:
        cluster = self.problem.cluster
        samples = self.problem.batch // num_microbatches
        cases = [
            self.case(start, Option(mesh, mode), num_microbatches)
            for mesh in meshes(self.problem, size, samples)
            for mode in recompute_modes(self.problem)
        ]
        link = None
        if next_rank < cluster.num_devices:
            link = cluster.link(start + size - 1, next_rank)
        key = (num_microbatches, link, tuple(cases))
        if key not in self._made:
            kept = self._undominated(cases, link, num_microbatches)
            entries = [self.entry(case, link, num_microbatches) for case in kept]
            self._made[key] = _stack([case.option for case in kept], entries, len(self.blocks))
        return self._made[key]

    def case(self, start: int, option: Option, num_microbatches: int) -> Case:
        """An option on the devices from rank `start`."""
        samples = self.problem.batch // num_microbatches
        return Case(option, *self._site(start, option.mesh, samples))

    def entry(self, case: Case, link: Link | None, num_microbatches: int) -> tuple[Matrix, ...]:
        """The arrays of `Options` for one case; `link` leads to the next stage."""
        return self._entry(case, link, num_microbatches, self._all)

    def _site(self, start: int, mesh: Mesh, samples: int) -> tuple[Spot, Levels, Levels]:
        tables, tp = self.problem.tables, mesh.tp
        ranks = range(start, start + mesh.size)
        names = {tables.device_names[rank] for rank in ranks}
        slowest = min(sorted(names), key=lambda name: tables.devices[name].peak("bfloat16"))
        spot = Spot(
            ceil(samples / mesh.dp), mesh.dp, tp, slowest,
            tables.levels(ranks[::tp]), tables.levels(ranks[:tp]),
        )  # fmt: skip
        shard = tables.levels(ranks[: mesh.dp_shard * tp : tp])
        return spot, shard, tables.levels(ranks[:: mesh.dp_shard * tp])

    def _undominated(
        self, cases: Sequence[Case], link: Link | None, num_microbatches: int
    ) -> list[Case]:
        """Those that no other beats in time and memory on all probed runs of blocks."""
        kept: list[tuple[Case, Matrix]] = []
        for case in cases:
            probe = np.array(self._entry(case, link, num_microbatches, self._probes))
            if any(bool((other <= SLACK * probe).all()) for _, other in kept):
                continue
            kept = [(c, other) for c, other in kept if not bool((probe <= other).all())]
            kept.append((case, probe))
        return [case for case, _ in kept]

    def _block_costs(self, spot: Spot) -> tuple[BlockCost, ...]:
        if spot not in self._costs:
            layouts = {layout.pattern: layout for layout in self.problem.layouts(spot.tp)}
            self._costs[spot] = tuple(
                self.problem.tables.block(block, layouts[block.pattern], spot)
                for block in self.blocks
            )
        return self._costs[spot]

    def _work(self, spot: Spot, again: bool) -> _Work:
        if (spot, again) not in self._works:
            made = [
                cost.recomputed() if again and block.pattern in self._again else cost
                for block, cost in zip(self.blocks, self._block_costs(spot), strict=True)
            ]
            spare = 1 - 1 / self.slow
            busy = [
                c.forward_s + c.backward_s - spare * (c.comm_forward_s + c.comm_backward_s)
                for c in made
            ]
            inside = sums([c.saved_bytes for c in made])
            prelude_s, prelude_bytes = self._prelude(spot)
            self._works[spot, again] = _Work(
                sums(busy) + prelude_s,
                inside + sums_of_named(self._at_borders(made)) + prelude_bytes,
                highest([c.workspace_bytes for c in made]),
            )
        return self._works[spot, again]

    def _prelude(self, spot: Spot) -> tuple[float, float]:
        """Seconds and bytes of the whole prelude; a stage that needs only part of it has less."""
        layouts = {layout.pattern: layout for layout in self.problem.layouts(spot.tp)}
        costs, again = self._block_costs(spot), (False,) * len(self.blocks)
        all_of_it = self.problem.tables.stage(self.blocks, layouts, again, spot)
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

    def _state(self, spot: Spot) -> _State:
        if spot.tp not in self._states:
            costs, trained = self._block_costs(spot), self.problem.tables.trained
            held = [
                dict(zip(block.params, cost.param_bytes, strict=True))
                for block, cost in zip(self.blocks, costs, strict=True)
            ]
            learned = [{n: b for n, b in sizes.items() if n in trained} for sizes in held]
            self._states[spot.tp] = _State(
                sums_of_named(held),
                sums_of_named(learned),
                sums_of_named([dict.fromkeys(sizes, 1) for sizes in learned]),
                highest([sum(sizes.values()) for sizes in learned]),
            )
        return self._states[spot.tp]

    def _state_at(self, spot: Spot, runs: _Runs) -> _State:
        key = (spot.tp, id(runs))
        if key not in self._state_of:
            self._state_of[key] = _State(*map(runs.of, self._state(spot)))
        return self._state_of[key]

    def _entry(
        self, case: Case, link: Link | None, num_microbatches: int, runs: _Runs
    ) -> tuple[Matrix, ...]:
        """The five arrays of `Options` for some runs of blocks."""
        mesh, work = case.option.mesh, self._work(case.spot, case.option.recompute)
        state = self._state_at(case.spot, runs)
        busy = runs.of(work.busy_s) + self._zero_per_microbatch(case, state, runs)
        sent, sends = self._borders(case.spot, link)
        kept = state.trained / mesh.dp_shard
        copies = OPTIMIZER_COPIES[self.problem.optimizer]
        static = (
            state.stored - (state.trained - kept if mesh.zero == 3 else 0)
            + (kept if mesh.zero >= 2 else state.trained)
            + copies * (kept if mesh.zero >= 1 else state.trained)
            + (state.trained if mesh.zero in (1, 2) else 0)
            + (state.largest if mesh.zero == 3 else 0)
            + runs.of(work.workspace_bytes)
            + 2 * (sent[runs.start] + sent[runs.stop])
        )  # fmt: skip
        once = self._once(case, state)
        return (
            busy + 2 * sends[runs.stop],
            (num_microbatches - 1) * busy + once,
            busy,
            static,
            runs.of(work.saved_bytes) + sent[runs.stop],
        )

    def _zero_per_microbatch(self, case: Case, state: _State, runs: _Runs) -> Matrix | float:
        if case.option.mesh.zero < 2:
            return 0.0
        if case.option.mesh.zero == 2:
            count = np.maximum(1.0, np.ceil(state.trained / BUCKET_BYTES))
            return count * self.collective(
                Primitive.REDUCE_SCATTER, state.trained / count, case.shard
            )
        key = (case.spot.tp, case.shard, id(runs))
        if key not in self._gathers:
            self._gathers[key] = self._gather(case, runs)
        return self._gathers[key]

    def _gather(self, case: Case, runs: _Runs) -> Matrix:
        """ZeRO 3: parameters gathered block by block, twice, and gradients scattered."""
        seconds: dict[str, float] = {}
        held = self._trained_per_block(case.spot)
        for block, nbytes in zip(self.blocks, held, strict=True):
            if block.pattern in seconds:
                continue
            gather = collective_time(Primitive.ALL_GATHER, nbytes, case.shard)
            scatter = collective_time(Primitive.REDUCE_SCATTER, nbytes, case.shard)
            seconds[block.pattern] = 2 * gather + scatter if nbytes else 0.0
        return runs.of(sums([seconds[block.pattern] for block in self.blocks]))

    def _trained_per_block(self, spot: Spot) -> list[int]:
        trained = self.problem.tables.trained
        return [
            sum(n for name, n in zip(block.params, cost.param_bytes, strict=True)
                if name in trained)
            for block, cost in zip(self.blocks, self._block_costs(spot), strict=True)
        ]  # fmt: skip

    def _once(self, case: Case, state: _State) -> Matrix:
        """Gradient synchronisation and optimizer."""
        mesh, trained = case.option.mesh, state.trained
        if mesh.zero == 0:
            seconds = self.collective(Primitive.ALL_REDUCE, trained, case.spot.dp_levels)
        else:
            part = trained / mesh.dp_shard
            seconds = self.collective(Primitive.ALL_REDUCE, part, case.replicate)
            if mesh.zero == 1:
                seconds += self.collective(Primitive.REDUCE_SCATTER, trained, case.shard)
            if mesh.zero < 3:
                seconds += self.collective(Primitive.ALL_GATHER, trained, case.shard)
        device = self.problem.tables.devices[case.spot.device]
        share = device.efficiency.get(OpClass.ELEMENTWISE, 1.0)
        traffic = optimizer_traffic(
            10**9, self.problem.optimizer, zero=mesh.zero, dp_shard=mesh.dp_shard
        )
        per_byte = traffic / 1e9 / (device.memory_bandwidth_bytes_per_s * share)
        update = trained * per_byte + state.tensors * device.overhead_s
        found: Matrix = seconds + update * self.slow
        return found

    def _borders(self, spot: Spot, link: Link | None) -> tuple[Matrix, Matrix]:
        """Bytes and seconds of a micro-batch into block k, per rank; nothing at the two ends."""
        key = (spot.samples, link)
        if key in self._sent:
            return self._sent[key]
        size = len(self.blocks)
        sent, seconds = np.zeros(size + 1), np.zeros(size + 1)
        for block in range(1, size):
            whole, fixed = self.problem.tables.border_bytes(block)
            sent[block] = whole * spot.samples / self.problem.batch + fixed
            if link is not None:
                seconds[block] = send_time(float(sent[block]), link)
        self._sent[key] = sent, seconds
        return sent, seconds


def _stack(options: Sequence[Option], entries: Sequence[tuple[Matrix, ...]], size: int) -> Options:
    """The arrays, with runs of no blocks made impossible."""
    empty = np.tril(np.full((size + 1, size + 1), np.inf))
    arrays = [
        np.stack([entry[i] + (empty if i < 3 else 0.0) for entry in entries])
        if entries else np.empty((0, size + 1, size + 1))
        for i in range(5)
    ]  # fmt: skip
    return Options(tuple(options), *arrays)
