"""Every run of blocks as a stage, for every way to lay it out on a group of devices, as matrices.

Entry [i, k] of a matrix is about the stage of blocks i to k-1; entries with k <= i are infinite.
The numbers are those of `costmodel.estimate` but for what depends on the stages beside it; they
rank choices, and `estimate` judges those that come out best.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.comm import Levels, collective_time
from meshwright.costmodel.fragmentation import fragmentation_of
from meshwright.costmodel.memory import OPTIMIZER_COPIES
from meshwright.costmodel.optimizer import optimizer_time
from meshwright.costmodel.tables import Spot
from meshwright.ir.conversions import Primitive
from meshwright.ir.device import Link
from meshwright.planner.problem import Problem
from meshwright.planner.run_costs import At, RunCosts, State
from meshwright.planner.space import Mesh, meshes, recompute_modes
from meshwright.planner.spans import Collectives, Matrix, sums
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

    @property
    def at(self) -> At:
        return At(self.spot, self.option.mesh.variant)


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
        self.runs = RunCosts(problem)
        self.blocks = problem.graph.blocks
        self.collective = Collectives()
        self._asked: dict[tuple[int, int, int, int], Options] = {}
        self._made: dict[object, Options] = {}
        self._gathers: dict[object, tuple[Matrix, Matrix]] = {}
        self._state_of: dict[object, State] = {}
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
        tables, width = self.problem.tables, mesh.model_size
        ranks = range(start, start + mesh.size)
        names = {tables.device_names[rank] for rank in ranks}
        slowest = min(sorted(names), key=lambda name: tables.devices[name].peak("bfloat16"))
        spot = Spot(
            ceil(samples / mesh.dp), mesh.dp, mesh.model, slowest,
            tables.levels(ranks[::width]), tables.model_levels(ranks[:width], mesh.model),
        )  # fmt: skip
        shard = tables.levels(ranks[: mesh.dp_shard * width : width])
        return spot, shard, tables.levels(ranks[:: mesh.dp_shard * width])

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

    def _state_at(self, at: At, runs: _Runs) -> State:
        key = (at.spot.model, at.variant, id(runs))
        if key not in self._state_of:
            self._state_of[key] = State(*map(runs.of, self.runs.state(at)))
        return self._state_of[key]

    def _entry(
        self, case: Case, link: Link | None, num_microbatches: int, runs: _Runs
    ) -> tuple[Matrix, ...]:
        """The five arrays of `Options` for some runs of blocks."""
        work = self.runs.work(case.at, case.option.recompute)
        state = self._state_at(case.at, runs)
        sync, trained = self._sync(case), self._trained(case, state, runs)
        backward = runs.of(work.backward_s)
        busy = runs.of(work.busy_s) + sync.per_microbatch_s(trained, backward)
        sent, sends = self.runs.borders(case.at, link)
        once = sync.once_s(trained, backward) + self._optimizer_s(case, state)
        device = self.problem.tables.devices[case.spot.device]
        holes = fragmentation_of(
            device, self.problem.tables.profile, self.problem.graph.fingerprint
        )
        beyond = 1.0 + holes.moving
        flight = (runs.of(work.saved_bytes) + sent[runs.stop]) * beyond
        always, begun, beside = sync.gradient_bytes(trained, flight)
        workspace = runs.of(work.workspace_bytes) * beyond
        begun = begun * (1.0 + holes.gradients)
        static = self._state_bytes(case, state) + always + sync.unseen_bytes(trained)
        apart = sync.zero == 3 or device.kind == "cpu"
        static = static + (workspace + beside if apart else np.maximum(workspace, beside))
        static = static + 2 * (sent[runs.start] + sent[runs.stop]) * beyond
        if num_microbatches == 1 and not (sync.zero and device.kind == "cpu"):
            # Gradients come as activations go; a heap does not use the holes for flat ones.
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

    def _state_bytes(self, case: Case, state: State) -> Matrix:
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
            self.runs.overheads(case.at), self.collective,
        )  # fmt: skip

    def _trained(self, case: Case, state: State, runs: _Runs) -> Trained:
        if case.option.mesh.zero < 3:
            return Trained(state.trained, state.largest, state.trained * 0, state.trained * 0)
        gathered, scattered = self._gathers_at(case, runs)
        return Trained(state.trained, state.largest, gathered, scattered)

    def _gathers_at(self, case: Case, runs: _Runs) -> tuple[Matrix, Matrix]:
        """ZeRO 3: seconds to gather the parameters block by block, and to scatter gradients."""
        key = (case.at.spot.model, case.at.variant, case.shard, id(runs))
        if key not in self._gathers:
            self._gathers[key] = (
                runs.of(self._by_block(case, Primitive.ALL_GATHER)),
                runs.of(self._by_block(case, Primitive.REDUCE_SCATTER, but_first=True)),
            )
        return self._gathers[key]

    def _by_block(self, case: Case, primitive: Primitive, *, but_first: bool = False) -> Matrix:
        held = self.runs.trained_per_block(case.at)
        known: dict[int, float] = {}
        for nbytes in held:
            if nbytes not in known:
                known[nbytes] = collective_time(primitive, nbytes, case.shard) if nbytes else 0.0
        seconds = [known[nbytes] for nbytes in held]
        found = sums(seconds)
        # The scatter of a stage's first block goes on after its backward.
        return found - np.array([*seconds, 0.0])[:, None] if but_first else found

    def _optimizer_s(self, case: Case, state: State) -> Matrix:
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
        found: Matrix = (kept * per_byte + state.tensors * per_tensor) * self.runs.slow
        return found


def _stack(options: Sequence[Option], entries: Sequence[tuple[Matrix, ...]], size: int) -> Options:
    """The arrays, with runs of no blocks made impossible."""
    empty = np.tril(np.full((size + 1, size + 1), np.inf))
    arrays = [
        np.stack([entry[i] + (empty if i < 3 else 0.0) for entry in entries])
        if entries else np.empty((0, size + 1, size + 1))
        for i in range(5)
    ]  # fmt: skip
    return Options(tuple(options), *arrays)
