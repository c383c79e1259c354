"""Every kind of run of blocks as a stage, for every mesh of a group of devices, as arrays.

The numbers are those of `costmodel.estimate` but for what depends on the stages beside it; they
rank choices, and `estimate` judges those that come out best.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import ceil
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from meshwright.costmodel.comm.comm import Levels, collective_time
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.memory.fragmentation import fragmentation_of
from meshwright.costmodel.ops.optimizer import casting_s, optimizer_time
from meshwright.costmodel.stage.offload import copy_s
from meshwright.costmodel.stage.replica_lines import ReplicaLines
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Event
from meshwright.forms.retention import KEEP
from meshwright.forms.updates import update
from meshwright.ir.cluster.device import Link
from meshwright.ir.cluster.host import host_of
from meshwright.ir.deadline import check_time
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan.folded import Fold, folds_of
from meshwright.planner.across.places import Places
from meshwright.planner.across.run_costs import At, RunCosts, RunState, RunWork
from meshwright.planner.across.spans import Collectives, Matrix, sums, together
from meshwright.planner.across.stage_options import Figures, StageOptions, steps
from meshwright.planner.across.stage_sync import StageSync, Trained
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.problem.space import Mesh

_BACKWARDS = (Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD, Event.AFTER_LAST)
_FEW, _MANY = (10, 10**6), (100, 10**9)
"""Tensors and bytes between which the optimizer's time is sampled."""
SLACK = 1.002
"""A mesh must be better by so much somewhere to be kept."""


@dataclass(frozen=True, slots=True)
class Case:
    """A mesh with all that its numbers depend on."""

    mesh: Mesh
    spot: BlockSpot
    lines: Mapping[Fold, ReplicaLines]
    """By folding."""
    at: At
    """What its blocks cost depends on."""
    _hash: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        # Figures are looked up by case very often, and tiers are long.
        object.__setattr__(self, "_hash", hash((self.mesh, self.spot)))

    def __hash__(self) -> int:
        return self._hash


class _FoldedGroup(NamedTuple):
    """Parameters for which the same axes are folded."""

    sync: StageSync
    trained: Trained
    share: Matrix
    """Of all trained bytes: what hides their messages is shared out so."""

    @property
    def exchange(self) -> Exchange:
        return self.sync.exchange


class _Fixed(NamedTuple):
    """What does not depend on what is done with the activations of a case."""

    groups: tuple[_FoldedGroup, ...]
    once_s: Matrix
    """Optimizer, and gradients that are summed over model axes."""
    held_bytes: Matrix
    """Parameters, optimizer and what is not seen."""


_Tiers = tuple[str, Levels, tuple[Levels, ...], Mapping[Fold, ReplicaLines], Levels | None]


class StageTables:
    """The arrays of one problem and one order of devices; keeps what it has computed."""

    def __init__(self, runs: RunCosts, places: Places, sets: Treatments | None = None) -> None:
        self.problem, self.runs, self.places = runs.problem, runs, places
        self.sets = sets or Treatments(runs.problem)
        self.blocks = self.problem.graph.blocks
        self.collective = Collectives()
        self.modes = self.sets.modes
        self._made: dict[object, StageOptions] = {}
        self._cases: dict[object, Case] = {}
        self._sites: dict[object, _Tiers] = {}
        self._spots: dict[tuple[int, int, str], tuple[BlockSpot, At]] = {}
        self._entries: dict[object, Figures] = {}
        self._fixed: dict[Case, _Fixed] = {}
        self._gathers: dict[object, tuple[Matrix, Matrix]] = {}
        self._steps: dict[tuple[str, bool, float], tuple[float, float]] = {}
        """Of the optimizer on each type of device, and on its host."""

    def options(
        self, start: int, size: int, num_microbatches: int, meshes: Sequence[Mesh]
    ) -> StageOptions:
        """Ways to run a stage on the `size` devices from place `start`."""
        link = self.places.link(start, size)
        cases = [self.case(start, mesh, num_microbatches) for mesh in meshes]
        key = (num_microbatches, link, tuple(cases))
        if key not in self._made:
            self._made[key] = self._options(cases, link, num_microbatches)
        return self._made[key]

    def _options(
        self, cases: Sequence[Case], link: Link | None, num_microbatches: int
    ) -> StageOptions:
        kept = [self.entry(c, KEEP, link, num_microbatches) for c in cases]
        chosen = _undominated(kept)
        keep, held = _stack([kept[i] for i in chosen]), [cases[i] for i in chosen]
        layers = np.broadcast_to(self.runs.again, keep.path_s.shape)

        def in_mode(mode: str) -> Figures:
            return _stack([self.entry(c, mode, link, num_microbatches) for c in held])

        def more() -> tuple[Figures, ...]:
            return steps(keep, layers, self.sets, in_mode)

        return StageOptions(tuple(c.mesh for c in held), keep, cache(more), layers, self.modes)

    def case(self, start: int, mesh: Mesh, num_microbatches: int) -> Case:
        """A mesh on the devices from place `start`."""
        samples = self.problem.batch // num_microbatches
        like = self.places.like(start, mesh.size)
        key = (like, mesh, samples)
        if key not in self._cases:
            self._cases[key] = self._case(like, mesh, samples)
        return self._cases[key]

    def _case(self, start: int, mesh: Mesh, samples: int) -> Case:
        tiers = self._tiers(start, mesh)
        slowest, replicas, model, lines, own = tiers
        key = id(tiers), ceil(samples / mesh.dp), mesh.variant  # the table keeps its tiers
        if key not in self._spots:
            spot = BlockSpot(key[1], mesh.dp, mesh.model, slowest, replicas, model, own_levels=own)
            self._spots[key] = spot, self.runs.canonical(At(spot, mesh.variant))
        spot, at = self._spots[key]
        return Case(mesh, spot, lines, at)

    def _tiers(self, start: int, mesh: Mesh) -> _Tiers:
        """The slowest device type; tiers of replicas and model axes, lines by folding, and tiers
        within a replica that trains alone."""
        key = start, mesh.dp_replicate, mesh.dp_shard, mesh.model, mesh.dp_inside, mesh.sync
        if key not in self._sites:
            tables, width = self.problem.tables, mesh.model_size
            ranks = self.places.ranks(start, mesh.size, mesh)
            names = self.places.types(start, mesh.size)
            slowest = min(names, key=lambda name: tables.devices[name].peak("bfloat16"))
            self._sites[key] = (
                slowest, tables.levels(ranks[::width]),
                tables.model_levels(ranks[:width], mesh.model),
                {fold: mesh.lines(tables, ranks, fold) for fold in folds_of(mesh.model)},
                mesh.own_levels(tables, ranks),
            )  # fmt: skip
        return self._sites[key]

    def entry(self, case: Case, mode: str, link: Link | None, num_microbatches: int) -> Figures:
        """The figures of one case; `link` leads to the next stage."""
        key = (case, mode, link, num_microbatches)
        if key not in self._entries:
            self._entries[key] = self._entry(*key)
        return self._entries[key]

    def _entry(self, case: Case, mode: str, link: Link | None, num_microbatches: int) -> Figures:
        check_time()
        work = self.runs.work(case.at, mode)
        groups, fixed_s, _ = self._fixed_of(case)
        more = sum([
            own.sync.per_microbatch_s(
                own.trained, own.share * work.busy_s, own.share * work.backward_s
            )
            for own in groups
        ])  # fmt: skip
        hides = 1.0 if self.runs.slow <= 1.0 else 0.0  # processes that share cores hide nothing
        once_s = sum([
            own.sync.once_s(
                own.trained, own.share * work.backward_s, hides * own.share * work.forward_s,
                hides * own.share * num_microbatches * work.busy_s,
            )
            for own in groups
        ])  # fmt: skip
        busy = work.busy_s + more
        ends = self.runs.classes.stop
        sends_s, backs_s = (self.runs.borders(case.at, link, back=b)[1] for b in (False, True))
        path = busy + (sends_s + backs_s)[ends]
        load = (num_microbatches - 1) * busy + (once_s + fixed_s)
        if case.mesh.exchange.host_copies:
            load = load + self._copied_s(case, groups[0].trained, work, num_microbatches)
        memory = self._memory(case, work, num_microbatches)
        return Figures(path, load, busy, *memory)

    def _fixed_of(self, case: Case) -> _Fixed:
        if case not in self._fixed:
            folds = self.runs.folds(case.at, case.mesh)
            states = [(fold or (), self.runs.state(case.at, fold)) for fold in folds]
            total = np.maximum(1.0, sum([state.trained for _, state in states]))
            groups = tuple(
                _FoldedGroup(
                    self._sync(case, fold), self._trained(case, fold, state), state.trained / total
                )
                for fold, state in states
            )
            own = zip(
                case.spot.model, self.runs.summed(case.at), case.spot.model_levels, strict=True
            )
            summed = sum([
                groups[0].sync.summed_s(nbytes, levels) for (axis, _), nbytes, levels in own
                if axis not in case.mesh.folds[-1]
            ])  # fmt: skip
            held = [(case.mesh.folded(fold), state) for fold, state in states]
            self._fixed[case] = _Fixed(
                groups, summed + together(self._optimizer_s(case, *one) for one in held),
                together(self._state_bytes(case, *one) for one in held),
            )  # fmt: skip
        return self._fixed[case]

    def _memory(
        self, case: Case, work: RunWork, num_microbatches: int
    ) -> tuple[Matrix, Matrix, Matrix]:
        """(always, per micro-batch in flight, workspace)."""
        groups, _, held = self._fixed_of(case)
        sent, answered = (self.runs.borders(case.at, None, back=b)[0] for b in (False, True))
        starts, ends = self.runs.classes.start, self.runs.classes.stop
        leaves, messages = sent[ends], sent[starts] + answered[starts] + answered[ends]
        device = self.problem.tables.devices[case.spot.device]
        holes = fragmentation_of(
            device, self.problem.tables.profile, self.problem.graph.fingerprint
        )
        beyond = 1.0 + holes.moving
        apart = np.maximum(0.0, np.minimum(leaves, work.made_bytes) - work.leaving_bytes)
        flight = (work.saved_bytes + apart) * beyond
        exchanges = [own.exchange for own in groups]
        reduces = any([one.reduces_blocks for one in exchanges])
        grows = all([one.every_backward and one.made == 1.0 for one in exchanges])
        workspace = (work.growing_bytes if grows else work.workspace_bytes) * beyond
        gradients = [own.sync.gradient_bytes(own.trained) for own in groups]
        always, begun, packed, flat = (sum(column) for column in zip(*gradients, strict=True))
        beside = packed + flat
        if device.kind == "cpu":
            # A heap does not use the place of activations for flat ones. Where those are more, it
            # is they that leave holes.
            moving = beside if reduces else flat
            beside = beside + holes.moving * np.maximum(0.0, moving - (flight + workspace) / beyond)
        elif not reduces:
            beside = np.maximum(0.0, beside - flight)
        if grows and reduces:
            beside = np.maximum(0.0, beside - work.last_bytes * beyond)
        exchange, trained = groups[0].exchange, groups[0].trained  # with a host there is no other
        if exchange.gradients_leave_each and device.is_apart:
            blocks = 2 if exchange.comes_from_host else 3
            begun = exchange.read * np.minimum(trained.whole, blocks * trained.largest)
        elif exchange.gradients_are_freed and num_microbatches == 1 and device.is_apart:
            begun = np.minimum(begun, 3 * trained.largest)  # two blocks' are on their way
        begun = begun * (1.0 + holes.gradients)
        static = held + always
        every = any([own.exchange.every_backward for own in groups])
        adds = reduces or (device.kind == "cpu" and not every)
        static = static + (workspace + beside if adds else np.maximum(workspace, beside))
        # Where it holds most (`costmodel.memory.under_way`): room for what comes next, a gradient
        # that has gone, and room for one; what has been sent is in `flight` where it is not saved,
        # and the last of that is not there yet.
        static = static + (messages - apart) * beyond
        packs = any([own.exchange.packs for own in groups])
        if num_microbatches > 1:
            return static + begun, flight, workspace
        most = np.maximum(begun, flight)  # gradients come as activations go
        if packs and device.kind == "cpu":
            # A heap does not use the holes for flat ones: those of a block that goes are there
            # beside its activations, and when all have come and go, the heap still has the place.
            flats = packed + flat * beyond
            late = flight / beyond + flats - beside - workspace
            most = begun + flight if reduces else np.maximum(most, begun + late)
        return static + most, np.zeros_like(flight), workspace

    def _state_bytes(self, case: Case, mesh: Mesh, state: RunState) -> Matrix:
        """Parameters, with those of blocks that are gathered, and optimizer state."""
        kept = state.trained / mesh.dp_shard
        copies = update(self.problem.optimizer).copies
        held = mesh.exchange.parameter_bytes(1.0, mesh.dp_shard) * state.trained
        shares = mesh.exchange.parts("parameters", mesh.dp_shard)
        frozen = state.frozen / shares
        parameters = state.stored - state.trained - state.frozen + frozen + held
        device = self.problem.tables.devices[case.spot.device]
        gone = mesh.exchange.hosted if device.is_apart else frozenset()
        if "parameters" in gone:
            parameters = np.minimum(state.stored, state.widest * (1 + mesh.prefetch))
        elif mesh.exchange.is_split("parameters"):
            read = mesh.exchange.read
            others = read * (state.trained - kept) + state.frozen - frozen
            parameters += np.minimum(others, state.widest * (1 + mesh.prefetch))
        found: Matrix = parameters + copies * (
            kept if mesh.exchange.is_split("optimizer") else state.trained
        ) * ("optimizer" not in gone)
        return found

    def _copied_s(self, case: Case, trained: Trained, work: RunWork, count: int) -> Matrix:
        """What copies to the host and back, of so many micro-batches, take that computing does not
        hide."""
        tables, exchange = self.problem.tables, case.mesh.exchange
        device, nbytes = tables.devices[case.spot.device], 10**9
        slope = copy_s(device, nbytes, tables.profile) / nbytes
        part = exchange.parts("optimizer", case.mesh.dp_shard)
        found = np.zeros_like(trained.whole)
        for copy in exchange.host_copies:
            moving = slope * copy.times * trained.whole / (1 if copy.every else part)
            beside = work.backward_s if copy.at in _BACKWARDS else work.busy_s - work.backward_s
            shown = np.maximum(0.0, moving - beside) if device.is_apart else moving
            found = found + shown * (count if copy.every else 1)
        return found

    def _sync(self, case: Case, fold: Fold) -> StageSync:
        return StageSync(
            case.mesh.folded(fold), case.lines[fold],
            self.runs.overheads(case.at), self.collective, self.problem.tables.bucket_bytes,
        )  # fmt: skip

    def _trained(self, case: Case, fold: Fold, state: RunState) -> Trained:
        none = np.zeros_like(state.trained)
        fetches = case.mesh.folded(fold).exchange.fetches
        if not fetches:
            return Trained(state.trained, state.largest, none, none, none)
        gathered, scattered = self._gathers_at(case, fold)
        first = self.collective(fetches[0].primitive, state.widest, case.lines[fold].shard)
        return Trained(state.trained, state.largest, gathered, scattered, first)

    def _gathers_at(self, case: Case, fold: Fold) -> tuple[Matrix, Matrix]:
        """Seconds to gather the parameters block by block, and to send gradients after each
        backward."""
        exchange, shard = case.mesh.folded(fold).exchange, case.lines[fold].shard
        alike = fold if len(case.mesh.folds) > 1 else None
        fetch, *sends = exchange.fetches[0], *exchange.every_backward
        primitives = (fetch.primitive, *(send.primitive for send in sends))
        key = (case.spot.model, case.mesh.variant, shard, primitives, alike)
        if key not in self._gathers:
            read = self.runs.read_per_block(case.at, alike)
            gathered = self.runs.of(self._by_block(shard, fetch.primitive, read))
            scattered = np.zeros_like(gathered)
            for send in sends:
                own = self.runs.trained_per_block(case.at, alike)
                blocks = self._by_block(shard, send.primitive, own, but_first=True)
                scattered = self.runs.of(blocks)
            self._gathers[key] = gathered, scattered
        return self._gathers[key]

    def _by_block(
        self, shard: Levels, primitive: Primitive, held: Sequence[float], *, but_first: bool = False
    ) -> Matrix:
        known: dict[float, float] = {}
        for nbytes in held:
            if nbytes not in known:
                known[nbytes] = collective_time(primitive, nbytes, shard) if nbytes else 0.0
        seconds = [known[nbytes] for nbytes in held]
        found = sums(seconds)
        # The scatter of a stage's first block goes on after its backward.
        return found - np.array([*seconds, 0.0])[:, None] if but_first else found

    def _optimizer_s(self, case: Case, mesh: Mesh, state: RunState) -> Matrix:
        device = case.spot.device
        kept = state.trained / mesh.exchange.parts("optimizer", mesh.dp_shard)
        copied = mesh.exchange.copied if mesh.exchange.copies_on_host else 0.0
        key = device, "optimizer" in mesh.exchange.hosted, copied
        if key not in self._steps:
            self._steps[key] = self._optimizer_line(*key)
        per_byte, per_tensor = self._steps[key]
        found: Matrix = (kept * per_byte + state.tensors * per_tensor) * self.runs.slow
        return found

    def _optimizer_line(self, device: str, on_host: bool, copied: float) -> tuple[float, float]:
        """Seconds per byte and per tensor: on the line through two points, as it is about linear
        in both. `copied`: bytes of the copies that the host makes, per byte."""
        tables, name = self.problem.tables, self.problem.optimizer
        few, many = _FEW, _MANY
        host = host_of(tables.cluster, tables.devices[device]) if on_host else None
        low, high, more = (
            optimizer_time(tables.devices[device], name, *size, tables.profile, host).seconds
            for size in (few, many, (many[0], few[1]))
        )
        per_byte = (high - more) / (many[1] - few[1])
        if copied:
            per_byte += casting_s(tables.devices[device], host, many[1], copied) / many[1]
        return per_byte, (more - low) / (many[0] - few[0])


def _undominated(entries: Sequence[Figures]) -> list[int]:
    """Those that no other beats in time and memory in all runs of blocks."""
    kept: list[tuple[int, NDArray[np.float64], float]] = []
    for index, entry in enumerate(entries):
        mine = np.array(entry[:5])
        beaten = SLACK * mine
        total, beaten_total = float(mine.sum()), float(beaten.sum())
        # What is less everywhere is less in sum, which is quick to see.
        if any(t <= beaten_total and bool((x <= beaten).all()) for _, x, t in kept):
            continue
        kept = [k for k in kept if not (total <= k[2] and bool((mine <= k[1]).all()))]
        kept.append((index, mine, total))
    return [index for index, _, _ in kept]


def _stack(entries: Sequence[Figures]) -> Figures:
    return Figures(*(np.stack(rows) for rows in zip(*entries, strict=True)))
