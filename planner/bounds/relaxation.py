"""Step times that no plan can beat: a relaxation of the whole problem, frame by frame.

A frame fixes the pipeline ranks and the micro-batches; all else is free in each block by itself.
With ranks r = 1..P of equal size, blocks b, ways o (mesh, layouts, ZeRO, recomputed or not):

    step >= (M busy + once) of any rank,  sum over its blocks of bytes <= room
    step >= M busy_r + sum of before_s over the ranks s before r

where `before` is the work of a stage that must lie before or after that of the next one: all of it,
or its forward where backwards may be in halves. And a micro-batch goes through all blocks and back.
With several stages per rank, at least r blocks lie before those of rank r. Memory is relaxed with a
price: each byte costs mu seconds and each rank is given mu x room, so blocks choose alone; the
bound holds for every mu, and the best of some is taken.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import NamedTuple

import numpy as np

from meshwright.costmodel.cores import step_cores
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.forms.exchange_rows import Kind
from meshwright.ir.deadline import check_time
from meshwright.planner.across.block_ways import (
    BlockWays,
    Totals,
    both_waits,
    knots,
    weighed,
    weights,
)
from meshwright.planner.across.places import Places
from meshwright.planner.across.run_costs import At, RunCosts
from meshwright.planner.across.spans import Matrix
from meshwright.planner.across.stage_tables import Case, StageTables
from meshwright.planner.bounds.families import PLAIN, families_of, most_stages, step_s
from meshwright.planner.bounds.frames import Frame, group_sizes
from meshwright.planner.bounds.rates import BlockRates, Rates, Steady
from meshwright.planner.inside.variants import sample_ranks_of
from meshwright.planner.problem.space import (
    Mesh,
    divisors,
    meshes,
    ways,
)

PRICES = (0.0, 0.1, 0.3, 0.6, 0.9, 1.0, 1.1, 1.5, 2.5, 6.0, 20.0)
"""Prices of memory that are tried, as multiples of what recomputing pays for a byte."""
BISECTIONS, SAME = 8, 1.005
"""Steps in which a bound is narrowed, and the factor at which that ends."""
HELD: tuple[Kind, ...] = ("parameters", "gradients", "optimizer")
"""What a rank may hold only its part of."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Of one frame: seconds per step, and of each mesh of an even group on all ranks."""

    seconds: float
    meshes: tuple[tuple[float, Mesh], ...]
    """Best first; empty where groups differ."""
    plain_s: float = 0.0
    """Where ranks have one stage each, and backwards are not in halves; zero if not known."""
    busy_s: float = 0.0
    """Of micro-batches alone, without what goes on once per step; zero if not known."""

    def later(self, seconds: float) -> "Bound":
        """The same for steps that take so much longer; each mesh's own number stays."""
        return replace(
            self, seconds=self.seconds + seconds,
            plain_s=self.plain_s + seconds, busy_s=self.busy_s + seconds,
        )  # fmt: skip


class _Least(NamedTuple):
    """Bounds with blocks' memory at prices: of a frame, of each mesh alone, of plain schedules, and
    without what goes on once per step."""

    together_s: float
    alone_s: Matrix
    plain_s: float
    busy_s: float


class Relaxation:
    """Bounds of one problem's frames."""

    def __init__(self, runs: RunCosts, places: Sequence[Places]) -> None:
        self.problem, self.places = runs.problem, places
        self.rates = BlockRates(runs)
        self.tables = StageTables(runs, places[0])
        self.slow, self.own_s = runs.slow, runs.own_s
        self._alike: dict[tuple[int, str], bool] = {}
        self._bounds: dict[tuple[Frame, str], Bound] = {}
        self._most: dict[object, int] = {}
        self._fit: dict[object, list[Case]] = {}
        self._steady: dict[object, Steady] = {}
        self._sums: dict[object, tuple[tuple[Mesh, ...], Rates]] = {}

    def under(self, runs: RunCosts) -> "Relaxation":
        """The same where blocks of equal bytes cost something else; what depends on bytes alone is
        shared."""
        found = copy(self)
        found.rates, found._bounds, found._sums = self.rates.under(runs), {}, {}
        return found

    def bound(self, frame: Frame, sync: str = "") -> Bound:
        """Of one frame; infinite where it has no plan at all. `sync`: replicas agree by that form
        wherever it goes with their mesh."""
        sizes = group_sizes(self.problem, frame.num_ranks)
        # Of uneven groups, what goes on once per step counts for nothing, and so the form.
        key = frame, sync if self._is_even(sizes) else ""
        if key not in self._bounds:
            check_time()
            self._bounds[key] = self._bound(frame, sizes, key[1]).later(self.own_s)
        return self._bounds[key]

    def _bound(self, frame: Frame, sizes: tuple[int, ...], sync: str) -> Bound:
        if not sizes:
            return Bound(np.inf, ())
        if self._is_even(sizes):
            return self._even(frame, sizes[0], sync)
        return Bound(self._uneven(frame, sizes), ())

    def _is_even(self, sizes: tuple[int, ...]) -> bool:
        return len(sizes) == 1 and self.places[0].period > 0

    def quick_s(self, frame: Frame, sync: str = "") -> float:
        """What the bound of a frame, or with a form its `floor_s`, is not below: with all memory
        that is wanted, and nothing to wait for."""
        check_time()
        (size, *others) = group_sizes(self.problem, frame.num_ranks) or (0,)
        if not size or not self._is_even((size, *others)):
            return 0.0
        if sync and not self._holds_as_much(size, sync):
            return 0.0
        found, rates = self._meshes(frame, size, 0)
        if not found:
            return np.inf
        whole_s, busy_s = self._busiest_s(frame, rates)
        families = families_of(self.problem, frame.num_ranks)
        # Where stages recompute ahead, that of a frame may do without what goes on once per step.
        once = not sync and not any(family.early for family in families)
        each = rates.busy_s + rates.once_s / frame.num_microbatches if once else rates.busy_s
        even_s = float(each.min(axis=(0, 1)) @ self.rates.counts) / frame.num_ranks
        return self.own_s + max(busy_s if sync else whole_s, frame.num_microbatches * even_s)

    def floor_s(self, frame: Frame, sync: str) -> float:
        """What the bound of a frame with a form is not below: quickly known, unless a rank holds
        less, so that other ways may fit."""
        found = self.bound(frame)
        (size, *others) = group_sizes(self.problem, frame.num_ranks) or (0,)
        if not size or others:
            return found.seconds
        if not self._holds_as_much(size, sync):
            return 0.0
        return found.busy_s if np.isfinite(found.seconds) else np.inf

    def _holds_as_much(self, size: int, sync: str) -> bool:
        key = size, sync
        if key not in self._alike:
            found = meshes(self.problem, size, self.problem.batch)
            pairs = {(mesh.exchange, mesh.under(sync).exchange) for mesh in found}
            self._alike[key] = not any(
                of_form.is_split(kind) and not usual.is_split(kind)
                for usual, of_form in pairs
                for kind in HELD
            )
        return self._alike[key]

    def _meshes(
        self, frame: Frame, size: int, start: int, sync: str = ""
    ) -> tuple[tuple[Mesh, ...], Rates]:
        key = (frame.num_microbatches, size, self.places[0].like(start, size), sync)
        if key not in self._sums:
            cases = self._cases(frame, size, start)
            if sync:
                held = [(case, case.mesh.under(sync)) for case in cases]
                cases = [c if c.mesh is mesh else replace(c, mesh=mesh) for c, mesh in held]
            found = tuple(case.mesh for case in cases)
            if cases and key not in self._steady:
                self._steady[key] = self.rates.steady(cases, frame.num_microbatches)
            rates = (
                self.rates.of(cases, self._steady[key], frame.num_microbatches) if cases else None
            )
            self._sums[key] = found, rates  # type: ignore[assignment]
        return self._sums[key]

    def _cases(self, frame: Frame, size: int, start: int) -> list[Case]:
        """Of all meshes on which each op fits."""
        key = (frame.num_microbatches, size, self.places[0].like(start, size))
        if key not in self._fit:
            samples = self.problem.batch // frame.num_microbatches
            self._fit[key] = [
                case
                for mesh in meshes(self.problem, size, samples)
                for case in [self.tables.case(start, mesh, frame.num_microbatches)]
                if not self._is_too_much(case, start, size)
            ]
        return self._fit[key]

    def _is_too_much(self, case: Case, start: int, size: int) -> bool:
        """Whether one op of some block does not fit; more samples need no less."""
        at = self.rates.runs.canonical(case.at)
        key = (at.spot.model, at.variant, at.spot.device, self.places[0].room_bytes(start, size))
        most = self._most.get(key)
        if most is not None and at.spot.samples >= most:
            return True
        if self.rates.workspace_bytes(at) <= key[3]:
            return False
        self._most[key] = at.spot.samples
        return True

    # Equal groups of equal devices ----------------------------------------------------------------

    def _even(self, frame: Frame, size: int, sync: str) -> Bound:
        found, rates = self._meshes(frame, size, 0, sync)
        if not found:
            return Bound(np.inf, ())
        ways = self._block_ways(frame, rates, self.places[0].room_bytes(0, size))
        if not np.isfinite(ways.busy_s.min(axis=(0, 1))).all():
            return Bound(np.inf, ())  # some block fits under no mesh
        ahead = self._ahead_s(frame, ways)
        least = self._relaxed(frame, ways, np.ones(len(ways.blocks)), ahead)
        together, alone = least.together_s, least.alone_s
        if frame.num_ranks > 1:
            together, alone = self._with_flights(frame, ways, least, ahead)
        order = np.argsort(alone, kind="stable")
        ranked = tuple((float(alone[i]), found[i]) for i in order if np.isfinite(alone[i]))
        busiest, alone_s = self._busiest_s(frame, rates)
        seconds = max(0.0, together, busiest) if ranked else np.inf
        return Bound(seconds, ranked, max(least.plain_s, busiest), max(least.busy_s, alone_s))

    def _busiest_s(self, frame: Frame, rates: Rates) -> tuple[float, float]:
        """Blocks are not divided: of each kind some rank has its share, rounded up. Also without
        what goes on once per step."""
        each = rates.busy_s + rates.once_s / frame.num_microbatches
        most = np.ceil(self.rates.counts / frame.num_ranks)
        whole, busy = ((found.min(axis=(0, 1)) * most).max() for found in (each, rates.busy_s))
        return frame.num_microbatches * float(whole), frame.num_microbatches * float(busy)

    def _block_ways(self, frame: Frame, rates: Rates, room: float) -> BlockWays:
        """Of [mesh, mode, kind of block]; infinite where a single block does not fit."""
        # Where something must be recomputed, other blocks may keep all.
        both = [0, 1] if True in self.tables.modes else [0]
        free = [name for name in self.rates.free if self._may_pay(rates, name)]
        both += [2 + self.rates.free.index(name) for name in free]
        moved = self.rates.moved
        memory = rates.state_bytes[:, None, :] + rates.flight_bytes
        busy = np.where(memory <= room, rates.busy_s, np.inf)[:, both]
        load = busy + rates.once_s[:, both] / frame.num_microbatches
        return BlockWays(
            self.rates.counts, busy, load, rates.state_bytes[:, None], rates.flight_bytes[:, both],
            room, self._prices(rates), rates.input_s[:, both], rates.forward_s,
            self._forward_share(rates), rates.copy_s,
            len(both) - len(free) + free.index(moved) if moved in free else -1,
            self._spared_s(rates, moved in free), rates.busy_s[:, 0],
        )  # fmt: skip

    def _forward_share(self, rates: Rates) -> Matrix:
        if not self.rates.runs.waits:
            return np.ones(len(rates.busy_s))  # blocks hide more of one direction than another
        share: Matrix = (rates.forward_s / np.maximum(rates.busy_s[:, 0], 1e-12)).max(axis=1)
        return np.clip(share, 1e-6, 1.0)

    def _spared_s(self, rates: Rates, moves: bool) -> Matrix:
        """Beside blocks that are longer than the others."""
        if not moves:
            return np.zeros(len(rates.busy_s))
        at = 2 + self.rates.free.index(self.rates.moved)
        waits = rates.busy_s[:, at] - rates.busy_s[:, 0]
        found: Matrix = self.rates.others * waits.max(axis=1)
        return found

    def _may_pay(self, rates: Rates, mode: str) -> bool:
        """Whether some block takes less time in a mode than recomputed."""
        at = 2 + self.rates.free.index(mode)
        shorter = rates.busy_s[:, at] < rates.busy_s[:, 1]
        return True not in self.tables.modes or bool((shorter & (self.rates.treated > 0)).any())

    def _relaxed(
        self, frame: Frame, ways: BlockWays, flights: Matrix, ahead: tuple[float, float]
    ) -> _Least:
        """The bound, and that of each mesh alone; `flights`: micro-batches that blocks hold."""
        together, alone, plain, busy = zip(
            *(self._priced(frame, waits, flights, ahead) for waits in both_waits(ways)),
            strict=True,
        )
        return _Least(max(together), reduce(np.maximum, alone), max(plain), max(busy))

    def _priced(
        self, frame: Frame, ways: BlockWays, flights: Matrix, ahead: tuple[float, float]
    ) -> _Least:
        """The best over prices of memory."""
        memory, tried = ways.state_bytes + ways.flight_bytes * flights, weights(ways, flights)
        copies = tried.copies[:, None] * ways.copy_s.max(axis=1)
        stages = frame.num_ranks * most_stages(self.problem, frame.num_ranks)
        rest = 2 * stages * copies + ways.spared_s
        beside = tried.prices[:, None] * frame.num_ranks * ways.room
        unmoved = tried._replace(copies=0.0 * tried.copies)
        costs = (
            (weighed(ways, ways.busy_s, memory, tried), rest),
            (weighed(ways, ways.load_s, memory, tried), rest),
            (weighed(ways, ways.input_s, memory, unmoved), 0.0 * rest),
        )
        busy, load, path = (cost @ ways.blocks - beside - spared for cost, spared in costs)
        first = ways.forward_s @ ways.blocks, ways.forward_share, ways.kept_s @ ways.blocks
        own = Totals(busy, load, path, *first)
        busy, load, path = (
            (cost.min(axis=1) @ ways.blocks)[:, None] - beside - spared.max(axis=1)[:, None]
            for cost, spared in costs
        )
        least = ways.forward_s.min(axis=0)[None] @ ways.blocks
        kept = ways.kept_s.min(axis=0)[None] @ ways.blocks
        best = Totals(busy, load, path, least, ways.forward_share.max(keepdims=True), kept)
        families = families_of(self.problem, frame.num_ranks)
        alone = step_s(frame, own, ahead, families).max(axis=0)
        if frame.num_ranks == 1:
            busy = step_s(frame, own._replace(load_s=own.busy_s), ahead, families)
            whole_s, busy_s = float(alone.min()), float(busy.max(axis=0).min())
            return _Least(whole_s, alone, whole_s, busy_s)
        together, plain_s, busy_s = (
            float(step_s(frame, work, ahead, given).max())
            for work, given in (
                (best, families), (best, PLAIN), (best._replace(load_s=best.busy_s), families)
            )
        )  # fmt: skip
        return _Least(together, alone, plain_s, busy_s)

    def _with_flights(
        self, frame: Frame, ways: BlockWays, least: _Least, ahead: tuple[float, float]
    ) -> tuple[float, Matrix]:
        """The bound where blocks hold what a step of that length makes them hold.

        Activations of a block wait for all blocks behind it, forward and back. In a step of V
        seconds it holds M x that time / V micro-batches on average, and a rank's peak is at least
        its average. A V for which that gives a longer step is impossible.
        """
        each = ways.input_s.min(axis=(0, 1))[self.rates.kind_of]
        kinds, behind, blocks = knots(
            self.rates.kind_of, np.cumsum(each[::-1])[::-1] * frame.num_microbatches
        )
        ways = ways.of(kinds, blocks)
        low, alone = least.together_s, least.alone_s
        high = max(low, self._relaxed(frame, ways, behind / low, ahead).together_s)
        for _ in range(BISECTIONS):
            if high <= low * SAME:
                break
            check_time()
            middle = (low + high) / 2
            longer = self._relaxed(frame, ways, behind / middle, ahead)
            if longer.together_s > middle:
                low, alone = middle, np.maximum(alone, longer.alone_s)
            else:
                high = middle
        return low, alone

    def _prices(self, rates: Rates) -> tuple[float, ...]:
        """Seconds per byte."""
        seconds = rates.busy_s[:, 1] - rates.busy_s[:, 0]
        saved = rates.flight_bytes[:, 0] - rates.flight_bytes[:, 1]
        used = saved > 0
        unit = float(np.median(seconds[used] / saved[used])) if used.any() else 0.0
        return tuple(price * unit for price in PRICES) if unit else (0.0,)

    def _ahead_s(self, frame: Frame, ways: BlockWays) -> tuple[float, float]:
        """What lies before the first block of a rank, on average over ranks; and with what lies
        after its last."""
        found, first = [], self.rates.kind_of[: frame.num_ranks]
        for least in (ways.forward_s.min(axis=0), ways.busy_s.min(axis=(0, 1))):
            each = least[first]
            found.append(float((np.cumsum(each) - each).mean()))
        return found[0], found[1]

    # Any groups, any devices ----------------------------------------------------------------------

    def _uneven(self, frame: Frame, sizes: tuple[int, ...]) -> float:
        """Device-seconds of the best group for each block, and one micro-batch all alone."""
        if len(set(self.problem.tables.device_names)) > 1:
            return self._mixed(frame)
        work = compute = path = np.full(len(self.rates.kinds), np.inf)
        for size, start in self._groups(sizes):
            found, rates = self._meshes(frame, size, start)
            if not found:
                continue
            devices = np.array([float(mesh.size) for mesh in found])[:, None]
            work = np.minimum(work, (rates.busy_s.min(axis=1) * devices).min(axis=0))
            compute = np.minimum(compute, (rates.compute_s.min(axis=1) * devices).min(axis=0))
            path = np.minimum(path, self._path_s(rates, frame.num_ranks).min(axis=0))
        totals = [float(held @ self.rates.counts) for held in (work, compute, path)]
        if not np.isfinite(totals).all():
            return float("inf")
        spent = totals[0] / self.problem.cluster.num_devices
        shared = totals[1] / step_cores(self.problem.cluster)
        return max(frame.num_microbatches * max(spent, shared), totals[2])

    def _path_s(self, rates: Rates, ranks: int) -> Matrix:
        """[mesh, kind]: what lies on the way of one micro-batch, alone, through the whole model."""
        found = []
        for family in families_of(self.problem, ranks):
            whole = rates.input_s if family.halves else rates.busy_s
            if family.early:
                whole = rates.forward_s[:, None] if family.halves else rates.busy_s[:, :1]
            found.append(whole.min(axis=1))
        least: Matrix = reduce(np.minimum, found)
        return least

    def _groups(self, sizes: tuple[int, ...]) -> list[tuple[int, int]]:
        """(size, start) of all groups that differ."""
        devices = self.problem.cluster.num_devices
        found: dict[tuple[int, int], None] = {}
        for size in sizes:
            for start in range(0, devices - size + 1):
                found[size, self.places[0].like(start, size)] = None
        return list(found)

    def _mixed(self, frame: Frame) -> float:
        """Each sample on the devices and beside as many others as suits it best, without any
        communication; as many devices work as there are, or as many as have a core."""
        samples = self.problem.batch // frame.num_microbatches
        work = {
            name: self._device_seconds(name, samples)
            for name in dict.fromkeys(self.problem.tables.device_names)
        }
        rate = 0.0
        for node in self.problem.cluster.nodes:
            running = min(len(node.devices), node.cores or len(node.devices))
            rate += sum(sorted(1 / work[name] for name in node.devices)[-running:])
        return frame.num_microbatches / rate if rate else np.inf  # samples suit no way

    def _device_seconds(self, device: str, samples: int) -> float:
        """Of one micro-batch; infinite where so few samples go with no way of the mesh."""
        best = np.full(len(self.rates.kinds), np.inf)
        for model, variant in ways(self.problem):
            width, unit = prod(size for _, size in model), sample_ranks_of(model, variant)
            for share in [n for n in divisors(samples) if n % unit == 0]:
                spot = BlockSpot(share, 1, model, device, (), ((),) * len(model))
                spent = self.rates.compute_of(At(spot, variant)) * width * samples / share
                best = np.minimum(best, spent)
        return max(1e-12, float(best @ self.rates.counts))
