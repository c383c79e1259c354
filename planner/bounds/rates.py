"""What each block needs at least of a device under a mesh: seconds and bytes, never too much."""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.comm.comm import Levels, collective_time
from meshwright.costmodel.ops.optimizer import optimizer_time
from meshwright.costmodel.stage.offload import copy_s
from meshwright.costmodel.stage.replica_lines import ReplicaLines
from meshwright.forms.exchange_rows import Send
from meshwright.forms.retention import moves, moves_all
from meshwright.forms.updates import update
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.folded import Fold
from meshwright.planner.across.run_costs import At, RunCosts
from meshwright.planner.across.spans import Matrix, together
from meshwright.planner.across.stage_tables import Case
from meshwright.planner.problem.saved_modes import free_modes

_LARGE = 10**10
"""Bytes from which on the time of a collective grows in proportion."""


class Rates(NamedTuple):
    """Per mesh and kind of block, and per mode: all kept, all recomputed, then others there are."""

    busy_s: Matrix
    """[mesh, mode, kind]: one micro-batch forward and backward, with its collectives."""
    compute_s: Matrix
    """[mesh, mode, kind]: of that, without communication."""
    once_s: Matrix
    """[mesh, mode, kind]: per step."""
    state_bytes: Matrix
    """[mesh, kind]"""
    flight_bytes: Matrix
    """[mesh, mode, kind]: activations of one micro-batch."""
    forward_s: Matrix
    """[mesh, kind]: of `busy_s`."""
    input_s: Matrix
    """[mesh, mode, kind]: of `busy_s`, what is not the weight half of a backward."""
    copy_s: Matrix
    """[mesh, kind]: moving all activations inside to the host."""


class Steady(NamedTuple):
    """Per mesh and kind of block, what depends on bytes alone, however long blocks compute."""

    state_bytes: Matrix
    """[mesh, kind]"""
    once_s: Matrix
    """[mesh, kind]: optimizer and parameters on their way after it."""
    gather_s: Matrix
    """[mesh, kind]: per micro-batch, both ways."""
    reduced_s: Matrix
    """[mesh, kind]: gradients that are reduced beside the last backward, and what goes beside the
    next step's first forward."""
    ahead: NDArray[np.bool_]
    """[mesh]: whether gathers run ahead."""


@dataclass(frozen=True, slots=True)
class EqualBlocks:
    """Equal blocks: the first of them, and how many there are."""

    block: int
    count: int


class BlockRates:
    """The rates of one problem; keeps what it has computed."""

    def __init__(self, runs: RunCosts) -> None:
        self.runs, self.problem = runs, runs.problem
        self.kinds = _kinds(runs)
        self.counts = np.array([kind.count for kind in self.kinds], dtype=float)
        self.kind_of = np.array(_numbers(runs, self.kinds))
        """Per block, the number of its kind."""
        self.free = free_modes(self.problem)
        self.moved = next(filter(moves_all, self.free), "")
        """The mode that moves all values; whatever another one moves takes no time here."""
        self._work: dict[At, tuple[Matrix, ...]] = {}
        self._flights: dict[At, tuple[Matrix, Matrix]] = {}
        self._held: dict[object, tuple[Matrix, Matrix]] = {}
        self._rows: dict[object, tuple[Matrix, ...]] = {}
        self._slopes: dict[tuple[Primitive, Levels], float] = {}

    def under(self, runs: RunCosts) -> "BlockRates":
        """The same where blocks of equal bytes cost something else."""
        found = copy(self)
        found.runs, found._work = runs, {}
        return found

    def of(self, cases: Sequence[Case], steady: Steady, num_microbatches: int) -> Rates:
        """Of some meshes, one array each."""
        kinds: dict[At, int] = {}
        which = [kinds.setdefault(case.at, len(kinds)) for case in cases]
        columns = zip(*map(self._work_of, kinds), strict=True)
        busy, compute, flight, forward, inputs, copies = (np.array(c)[which] for c in columns)
        state, *others, ahead = steady
        once, gather, reduced = (held[:, None] for held in others)
        ahead = ahead[:, None, None]
        busy, inputs = (held + np.where(ahead, 0.0, gather) for held in (busy, inputs))
        # Of what runs beside the computing, only that counts for which it is too short.
        beside = num_microbatches * (np.where(ahead, gather, 0.0) - busy)
        once = once + self._if_more(beside) + self._if_more(reduced - busy)
        return Rates(busy, compute, once, state, flight, forward, inputs, copies)

    def steady(self, cases: Sequence[Case], num_microbatches: int) -> Steady:
        """Of some meshes."""
        rows = [self._row(case, num_microbatches) for case in cases]
        ahead = np.array([bool(case.mesh.prefetch) for case in cases])
        state, once, gather, reduced = (np.array(column) for column in zip(*rows, strict=True))
        return Steady(state, once, gather, reduced, ahead)

    def _row(self, case: Case, num_microbatches: int) -> tuple[Matrix, ...]:
        several = num_microbatches > 1
        key = case.mesh, case.spot.device, tuple(case.lines.values()), several
        if key not in self._rows:
            state, _ = self._state_of(case, several=several)
            self._rows[key] = state, *self._once_of(case), self._reduced_s(case)
        return self._rows[key]

    def _if_more(self, seconds: Matrix) -> Matrix:
        """Where the whole model has none left over, blocks have none either."""
        found: Matrix = np.where((seconds @ self.counts > 0)[..., None], seconds, 0.0)
        return found

    def _reduced_s(self, case: Case) -> Matrix:
        found = []
        for fold in self.runs.folds(case.at, case.mesh):
            exchange, lines = case.mesh.folded(fold or ()).exchange, case.lines[fold or ()]
            _, trained = self._held_of(case, fold, several=False)
            sends = exchange.last_backward + exchange.late
            found.append(trained * sum([s.times * self._slope(s, lines) for s in sends]))
        return together(found)

    def _once_of(self, case: Case) -> tuple[Matrix, Matrix]:
        """(optimizer and parameters on their way after it, gathering twice per micro-batch)."""
        each = [self._once(case, fold) for fold in self.runs.folds(case.at, case.mesh)]
        once, gather = zip(*each, strict=True)
        return together(once), together(gather)

    def _once(self, case: Case, fold: Fold | None) -> tuple[Matrix, Matrix]:
        """Of the parameters for which axes are folded."""
        mesh, lines = case.mesh.folded(fold or ()), case.lines[fold or ()]
        exchange = mesh.exchange
        _, trained = self._held_of(case, fold, several=False)
        kept = trained / exchange.parts("optimizer", mesh.dp_shard)
        once = kept * self._optimizer_slope(case)
        for send in exchange.at_end:
            sent = send.times * (trained / mesh.dp_shard if send.of_part else trained)
            once = once + sent * self._slope(send, lines)
        for send in exchange.published:
            once = once + trained * send.times * self._slope(send, lines)
        read = trained * exchange.read  # what is not trained may be whole all the same
        gather = sum([read * self._slope(send, lines) for send in exchange.fetches])
        return once, gather + trained * 0.0

    def _slope(self, send: Send, lines: ReplicaLines) -> float:
        """Seconds per byte of large collectives: smaller ones take no less."""
        levels = lines.levels(send.axis)
        key = (send.primitive, levels)
        if key not in self._slopes:
            low, high = (collective_time(send.primitive, n, levels) for n in (_LARGE, 2 * _LARGE))
            self._slopes[key] = max(0.0, min((high - low) / _LARGE, low / _LARGE))
        return self._slopes[key]

    def _device(self, case: Case) -> DeviceType:
        return self.problem.tables.devices[case.spot.device]

    def _optimizer_slope(self, case: Case) -> float:
        device = self._device(case)
        if "optimizer" in case.mesh.exchange.hosted:
            return 0.0  # the host may be faster, or not
        name, profile = self.problem.optimizer, self.problem.tables.profile
        low, high = (
            optimizer_time(device, name, 1, n, profile).seconds for n in (_LARGE, 2 * _LARGE)
        )
        return max(0.0, min((high - low) / _LARGE, low / _LARGE))

    def _work_of(self, at: At) -> tuple[Matrix, ...]:
        at = self.runs.canonical(at)
        if at not in self._work:
            costs = self.runs.block_costs(at)
            kept = [costs[kind.block] for kind in self.kinds]
            again = [self._recomputed(kind, costs) for kind in self.kinds]
            # Whatever making again costs, it is not shorter than keeping; nor is moving.
            timed = [kept, again] + [kept] * len(self.free)
            flight, copies = self._bytes_of(at, kept, again)
            busy = [[c.forward_s + c.backward_s - c.accumulate_s for c in row] for row in timed]
            talk = [[c.comm_forward_s + c.comm_backward_s for c in row] for row in timed]
            found = np.array(busy)
            forward = np.array(
                [min(a.forward_s, b.forward_s) for a, b in zip(*timed[:2], strict=True)]
            )
            inputs = np.array([[c.forward_s + c.backward_input_s for c in row] for row in timed])
            compute = found - np.array(talk)
            if self.moved and self.runs.waits:
                found[2 + self.free.index(self.moved)] += self._waits_s(timed[1], copies)
            self._work[at] = found, compute, flight, forward, inputs, copies
        return self._work[at]

    def _bytes_of(
        self, at: At, kept: Sequence[BlockCost], again: Sequence[BlockCost]
    ) -> tuple[Matrix, Matrix]:
        """What is held in each mode, and seconds to move it."""
        if at not in self._flights:
            modes = [kept, again, *(self._saving(name, at, kept) for name in self.free)]
            flight = [
                [self._kept(kind, c.saved_bytes, c.saved_inputs) for c, kind in
                 zip(row, self.kinds, strict=True)]
                for row in modes
            ]  # fmt: skip
            copies = np.array([self._copy_s(at, cost) for cost in kept]) * self.treated
            self._flights[at] = np.array(flight), copies
        return self._flights[at]

    def _recomputed(self, kind: EqualBlocks, costs: Sequence[BlockCost]) -> BlockCost:
        cost = costs[kind.block]
        return cost.recomputed() if self.runs.may_recompute(kind.block) else cost

    def _saving(self, mode: str, at: At, kept: Sequence[BlockCost]) -> list[BlockCost]:
        """What is held at least in a mode."""
        if moves(mode):
            return [
                replace(cost, saved_bytes=0) if self.runs.may_recompute(kind.block) else cost
                for cost, kind in zip(kept, self.kinds, strict=True)
            ]
        costs = self.runs.in_mode(at, mode)
        return [costs[kind.block] for kind in self.kinds]

    def _waits_s(self, again: Sequence[BlockCost], copies: Matrix) -> Matrix:
        """What is moved comes back while one other block has its backward, which takes no longer
        than that of the longest of those that can be recomputed; but for a few others' sake. Of
        costs that are the least there are, no such longest is known."""
        longest = max(c.backward_s for c, held in zip(again, self.treated, strict=True) if held)
        found: Matrix = np.maximum(0.0, copies - longest) * self.treated
        return found

    @cached_property
    def treated(self) -> Matrix:
        """1 for the kinds of blocks that can be recomputed or moved, 0 for others."""
        return np.array([float(self.runs.may_recompute(kind.block)) for kind in self.kinds])

    @cached_property
    def others(self) -> float:
        """Blocks that are not."""
        return float(self.counts @ (1 - self.treated))

    def _copy_s(self, at: At, cost: BlockCost) -> float:
        tables = self.problem.tables
        if not self.moved:
            return 0.0
        return copy_s(tables.devices[at.spot.device], cost.saved_bytes, tables.profile)

    def workspace_bytes(self, at: At) -> float:
        """Of the block that needs most, whatever else is done to save memory."""
        costs = self.runs.bytes_of(at)
        return max(costs[kind.block].workspace_bytes for kind in self.kinds)

    def compute_of(self, at: At) -> Matrix:
        """Seconds of each kind of block without communication and recomputing."""
        found: Matrix = self._work_of(at)[1][0]
        return found

    def _kept(self, kind: EqualBlocks, inside: float, entering: tuple[int, ...]) -> float:
        """Activations, counting what two blocks share for the later one."""
        if not kind.block:
            return inside
        blocks, roots = self.runs.blocks, self.problem.tables.facts.roots
        made = {roots[name] for name in blocks[kind.block - 1].outputs}
        held = zip(blocks[kind.block].inputs, entering, strict=True)
        names = {roots[name]: size for name, size in held}
        return inside + sum(size for name, size in names.items() if name in made)

    def _state_of(self, case: Case, *, several: bool) -> tuple[Matrix, Matrix]:
        """(bytes of parameters, gradients and optimizer, trained bytes); tied ones count once."""
        folds = self.runs.folds(case.at, case.mesh)
        each = [self._held_of(case, fold, several=several) for fold in folds]
        state, trained = zip(*each, strict=True)
        return together(state), together(trained)

    def _held_of(self, case: Case, fold: Fold | None, *, several: bool) -> tuple[Matrix, Matrix]:
        """Of the parameters for which axes are folded."""
        mesh = case.mesh.folded(fold or ())
        exchange = mesh.exchange
        key = (
            case.mesh.model,
            fold,
            mesh.variant,
            exchange,
            mesh.dp_shard,
            several,
            self._device(case).is_apart,
        )
        if key not in self._held:
            stored, trained, frozen, wide = self._parameters(case, fold)
            shard = mesh.dp_shard
            copies = update(self.problem.optimizer).copies
            parameters = stored - trained - frozen
            parameters = parameters + exchange.parameter_bytes(1.0, shard) * (trained - wide)
            if wide.any():
                of_wide = mesh.exchange_as_stepped.parameter_bytes(1.0, shard)
                parameters = parameters + of_wide * wide
            parameters = parameters + frozen / exchange.parts("parameters", shard)
            gone = exchange.hosted if self._device(case).is_apart else ()
            parameters = trained * 0.0 if "parameters" in gone else parameters
            kept = trained / exchange.parts("gradients", shard)
            stays = several and not exchange.gradients_leave_each
            gradients = exchange.summed * kept if stays else trained * 0.0
            optimizer = copies * trained / exchange.parts("optimizer", shard)
            optimizer = trained * 0.0 if "optimizer" in gone else optimizer
            self._held[key] = parameters + gradients + optimizer, trained
        return self._held[key]

    def _parameters(self, case: Case, fold: Fold | None) -> tuple[Matrix, ...]:
        """Bytes of all that is stored, of the trained ones and of those that are not; and of
        trained ones that blocks read as they are stepped, beside copies of others."""
        costs, tables = self.runs.bytes_of(case.at), self.problem.tables
        stored, trained, frozen, wide = (np.zeros(len(self.kinds)) for _ in range(4))
        folds = self.runs.foldings(case.at)
        for index, kind in enumerate(self.kinds):
            block = self.runs.blocks[kind.block]
            for name, nbytes in zip(block.params, costs[kind.block].param_bytes, strict=True):
                # A tied parameter counts for the first block that has it.
                meant = fold is None or folds[kind.block][name] == fold
                if meant and self.runs.first_user[name] == kind.block:
                    stored[index] += nbytes
                    trained[index] += nbytes * (name in tables.trained)
                    frozen[index] += nbytes * (name in tables.frozen)
                    wide[index] += nbytes * (name in tables.as_stepped)
        return stored, trained, frozen, wide


def _key_of(runs: RunCosts, number: int) -> object:
    shared = tuple(
        runs.first_user[name] - number
        for name in runs.blocks[number].params
        if runs.first_user[name] != number
    )
    return runs.kinds[number], shared, number == 0


def _kinds(runs: RunCosts) -> list[EqualBlocks]:
    """Blocks of one pattern that start and end alike, and hold parameters of their own."""
    found: dict[object, list[int]] = {}
    for number in range(len(runs.blocks)):
        found.setdefault(_key_of(runs, number), []).append(number)
    return [EqualBlocks(numbers[0], len(numbers)) for numbers in found.values()]


def _numbers(runs: RunCosts, kinds: list[EqualBlocks]) -> list[int]:
    """Per block, the number of its kind."""
    known = {_key_of(runs, kind.block): index for index, kind in enumerate(kinds)}
    return [known[_key_of(runs, number)] for number in range(len(runs.blocks))]
