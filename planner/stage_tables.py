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
from meshwright.costmodel.fragmentation import fragmentation_of
from meshwright.costmodel.memory import OPTIMIZER_COPIES
from meshwright.costmodel.optimizer import optimizer_time
from meshwright.costmodel.overheads import Overheads, overheads_of
from meshwright.costmodel.placement import slowdown
from meshwright.costmodel.tables import Spot
from meshwright.ir.conversions import Primitive
from meshwright.ir.device import Link
from meshwright.planner.candidates import recomputable
from meshwright.planner.problem import Problem
from meshwright.planner.space import Mesh, meshes, recompute_modes
from meshwright.planner.spans import Collectives, Matrix, highest, sums, sums_of_named
from meshwright.planner.stage_sync import StageSync, Trained

_FEW, _MANY = (10, 10**6), (100, 10**9)
"""Tensors and bytes between which the optimizer's time is sampled."""
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
    backward_s: Matrix
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
        self._gathers: dict[tuple[int, Levels, int], tuple[Matrix, Matrix]] = {}
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
            known = self._overheads(spot)
            backward = [c.backward_s - spare * c.comm_backward_s + known.block_s for c in made]
            busy = [
                c.forward_s - spare * c.comm_forward_s + known.block_s + b
                for c, b in zip(made, backward, strict=True)
            ]
            inside = sums([c.saved_bytes for c in made])
            prelude_s, prelude_bytes = self._prelude(spot)
            self._works[spot, again] = _Work(
                sums(busy) + prelude_s + 2 * known.action_s,
                sums(backward),
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

    def _overheads(self, spot: Spot) -> Overheads:
        return overheads_of(self.problem.tables.devices[spot.device])

    def _entry(
        self, case: Case, link: Link | None, num_microbatches: int, runs: _Runs
    ) -> tuple[Matrix, ...]:
        """The five arrays of `Options` for some runs of blocks."""
        work = self._work(case.spot, case.option.recompute)
        state = self._state_at(case.spot, runs)
        sync, trained = self._sync(case), self._trained(case, state, runs)
        backward = runs.of(work.backward_s)
        busy = runs.of(work.busy_s) + sync.per_microbatch_s(trained, backward)
        sent, sends = self._borders(case.spot, link)
        once = sync.once_s(trained, backward) + self._optimizer_s(case, state)
        device = self.problem.tables.devices[case.spot.device]
        holes = fragmentation_of(
            device, self.problem.tables.profile, self.problem.graph.fingerprint
        )
        beyond, held = 1.0 + holes.moving, 1.0 + holes.state
        flight = (runs.of(work.saved_bytes) + sent[runs.stop]) * beyond
        always, begun, beside = sync.gradient_bytes(trained, flight)
        workspace, beside = runs.of(work.workspace_bytes) * beyond, beside * beyond
        begun = begun * held
        static = (self._state_bytes(case, state) + always) * held + sync.unseen_bytes(trained)
        static = static + (workspace + beside if sync.zero == 3 else np.maximum(workspace, beside))
        static = static + 2 * (sent[runs.start] + sent[runs.stop]) * beyond
        if num_microbatches == 1:
            # Gradients come as activations go.
            static, flight = static + np.maximum(begun, flight), np.zeros_like(flight)
        else:
            static = static + begun
        return (
            busy + 2 * sends[runs.stop],
            (num_microbatches - 1) * busy + once,
            busy,
            static,
            flight,
        )

    def _state_bytes(self, case: Case, state: _State) -> Matrix:
        """Parameters, with those of a block that is gathered, and optimizer state."""
        mesh = case.option.mesh
        kept = state.trained / mesh.dp_shard
        copies = OPTIMIZER_COPIES[self.problem.optimizer]
        gathered = mesh.zero == 3 and mesh.dp_shard > 1
        parameters = state.stored - (state.trained - kept - state.largest if gathered else 0)
        found: Matrix = parameters + copies * (kept if mesh.zero else state.trained)
        return found

    def _sync(self, case: Case) -> StageSync:
        return StageSync(
            case.option.mesh, case.spot.dp_levels, case.shard, case.replicate,
            self._overheads(case.spot), self.collective,
        )  # fmt: skip

    def _trained(self, case: Case, state: _State, runs: _Runs) -> Trained:
        if case.option.mesh.zero < 3:
            return Trained(state.trained, state.largest, state.trained * 0, state.trained * 0)
        gathered, scattered = self._gathers_at(case, runs)
        return Trained(state.trained, state.largest, gathered, scattered)

    def _gathers_at(self, case: Case, runs: _Runs) -> tuple[Matrix, Matrix]:
        """ZeRO 3: seconds to gather the parameters block by block, and to scatter gradients."""
        key = (case.spot.tp, case.shard, id(runs))
        if key not in self._gathers:
            self._gathers[key] = (
                runs.of(self._by_block(case, Primitive.ALL_GATHER)),
                runs.of(self._by_block(case, Primitive.REDUCE_SCATTER, but_first=True)),
            )
        return self._gathers[key]

    def _by_block(self, case: Case, primitive: Primitive, *, but_first: bool = False) -> Matrix:
        held = self._trained_per_block(case.spot)
        known: dict[int, float] = {}
        for nbytes in held:
            if nbytes not in known:
                known[nbytes] = collective_time(primitive, nbytes, case.shard) if nbytes else 0.0
        seconds = [known[nbytes] for nbytes in held]
        found = sums(seconds)
        # The scatter of a stage's first block goes on after its backward.
        return found - np.array([*seconds, 0.0])[:, None] if but_first else found

    def _trained_per_block(self, spot: Spot) -> list[int]:
        trained = self.problem.tables.trained
        return [
            sum(n for name, n in zip(block.params, cost.param_bytes, strict=True)
                if name in trained)
            for block, cost in zip(self.blocks, self._block_costs(spot), strict=True)
        ]  # fmt: skip

    def _optimizer_s(self, case: Case, state: _State) -> Matrix:
        """On the line through two points: it is about linear in bytes and tensors."""
        device, mesh = self.problem.tables.devices[case.spot.device], case.option.mesh
        name, profile = self.problem.optimizer, self.problem.tables.profile
        kept = state.trained / (mesh.dp_shard if mesh.zero else 1)
        few, many = _FEW, _MANY
        low = optimizer_time(device, name, *few, profile).seconds
        high = optimizer_time(device, name, *many, profile).seconds
        more = optimizer_time(device, name, many[0], few[1], profile).seconds
        per_byte = (high - more) / (many[1] - few[1])
        per_tensor = (more - low) / (many[0] - few[0])
        found: Matrix = (kept * per_byte + state.tensors * per_tensor) * self.slow
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
