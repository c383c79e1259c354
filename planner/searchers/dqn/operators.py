"""Decisions about operators: which groups of parameter dims each axis of a mesh splits.

One decision per group of linked dims (without linkage: per parameter dim) and axis: 0 leaves the
dims whole, 1 splits them. What follows for all other tensors is derived: ops, activations and
conversions take the cheapest layout that keeps to the decisions. The reward comes with the last
decision: the log of the reference, the step with all parameters whole, over the simulated step. The
plan around it is given, or is one stage on all devices. Decisions of which only one option is left
are taken by themselves.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from math import log2, prod

import numpy as np

from meshwright.costmodel.memory.memory import training_state
from meshwright.forms.copied import copied
from meshwright.ir.errors import PlanError
from meshwright.ir.layout.layout import Shard
from meshwright.ir.plan.plan import BlockLayout, ModelMesh
from meshwright.planner.across.mesh_variants import MeshVariant
from meshwright.planner.inside.mesh_problem import NodeKey
from meshwright.planner.problem.candidates import Choice, StageChoice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import USUAL
from meshwright.planner.problem.space import microbatch_counts
from meshwright.planner.searchers.dqn.decisions import WORST, Floats, Offered, Pruning, nothing
from meshwright.planner.searchers.dqn.judge import Judge, Verdict, reward
from meshwright.planner.searchers.dqn.layouts import Completer
from meshwright.planner.searchers.dqn.linkage import Bools, Linkage, trained


@dataclass(frozen=True, slots=True)
class Partition:
    """What was decided, and what came of it."""

    bits: tuple[int, ...]
    """Per group: split or not."""
    variant: str
    verdict: Verdict


@dataclass(slots=True)
class _Episode:
    left: tuple[Bools, ...]
    bits: list[int] = field(default_factory=list)


class Operators:
    """Of one mesh; see the module."""

    context_names: tuple[str, ...] = (
        "log2 ranks of the axis / 4", "axis / 2", "axes / 3", "groups decided, share",
        "groups split, share", "groups / 16, at most 4", "bytes of parameters split, share",
        "log2 replicas / 6", "dims of the group / 16", "least state, of the room, at most 2",
    )  # fmt: skip
    option_names: tuple[str, ...] = (
        "split", "bytes of the group, share, if split", "dims of the group / 16, if split",
        "log of how much the linear price rises", "legal",
    )  # fmt: skip
    context_size, option_size, most_options = len(context_names), len(option_names), 2

    def __init__(
        self,
        problem: Problem,
        model: ModelMesh,
        judge: Judge,
        pruning: Pruning,
        base: Choice | None = None,
    ) -> None:
        self.problem, self.model, self.judge, self.pruning = problem, model, judge, pruning
        self.base = base or self._usual()
        stage = next(stage for stage in self.base.stages if stage.model == model)
        self.replicas, self.stage = stage.dp, stage
        samples = max(1, problem.batch // self.base.num_microbatches // stage.dp)
        self.complete = Completer.of(problem, model, samples)
        kinds = {name: tensor.kind for name, tensor in problem.graph.tensors.items()}
        names = trained(self.complete.space, kinds)
        self.linkage = Linkage.of(self.complete.space, names, pruning.linkage)
        self.room = min(problem.room_bytes(stage.devices) for stage in self.base.stages)
        self.bytes = {
            name: problem.graph.tensors[name].nbytes * self._copies(name) for name in names
        }
        self.found: dict[tuple[int, ...], Partition] = {}
        self._solved: dict[tuple[int, ...], Partition] = {}
        """Of this and all that are made from it."""
        self._prices: dict[tuple[int, int], float] = {}
        self.states: set[tuple[int, ...]] = set()
        """All that was ever decided, whole or in part."""
        self._episode = _Episode(self.linkage.everything())
        whole = (0,) * len(self.linkage.groups)
        self.reference = self.judged(whole).verdict.value
        self.restart()

    def _usual(self) -> Choice:
        """One stage on all devices, with as few micro-batches as leave replicas a sample each."""
        replicas = self.problem.cluster.num_devices // prod(n for _, n in self.model)
        legal = [n for n in microbatch_counts(self.problem) if self.problem.batch // n >= replicas]
        if not (replicas and legal):
            raise PlanError(
                f"mesh {dict(self.model)} on {self.problem.cluster.num_devices} devices: no legal "
                "number of micro-batches leaves each replica a sample; nearest is a smaller mesh"
            )
        stage = StageChoice(
            start=0, stop=len(self.problem.graph.blocks), model=self.model, dp_replicate=replicas,
            devices=tuple(range(replicas * prod(n for _, n in self.model))),
        )  # fmt: skip
        return Choice(stages=(stage,), num_microbatches=min(legal), schedule=USUAL, num_ranks=1)

    def restart(self) -> None:
        self._episode = _Episode(self.linkage.everything())
        self._settle()

    def offered(self) -> Offered:
        at = len(self._episode.bits)
        if at == len(self.linkage.groups):
            return nothing(self)
        legal = np.isin(range(2), self._legal())
        options = np.stack([self._features(at, option) for option in range(2)])
        return Offered(self._context(at), options, legal)

    def take(self, option: int) -> tuple[float, bool]:
        if not self._decide(option):
            return WORST, True
        self._settle()
        if len(self._episode.bits) < len(self.linkage.groups):
            return 0.0, False
        return reward(self.judged(tuple(self._episode.bits)).verdict, self.reference), True

    def _decide(self, option: int) -> bool:
        """Whether that broke no rule."""
        at, episode = len(self._episode.bits), self._episode
        episode.left = self.linkage.after(episode.left, at, bool(option))
        episode.bits.append(option)
        self.states.add(tuple(episode.bits))
        return self.linkage.is_possible(episode.left, at)

    def _settle(self) -> None:
        """Takes what has one option only."""
        if not self.pruning.linkage:
            return
        while len(self._episode.bits) < len(self.linkage.groups):
            legal = self._legal()
            if len(legal) != 1:
                return
            self._decide(legal[0])

    def _legal(self) -> list[int]:
        """Options that break no rule and may fit; if none may, those that break no rule."""
        possible = [option for option in range(2) if self._is_possible(option)]
        return [option for option in possible if self._may_fit(option)] or possible

    def _is_possible(self, option: int) -> bool:
        left = self._after(option)
        return not self.pruning.linkage or self.linkage.is_possible(left, len(self._episode.bits))

    def _may_fit(self, option: int) -> bool:
        if not self.pruning.memory or option == 1:
            return True
        return self._least_bytes(self._after(option)) <= self.room

    def _after(self, option: int) -> tuple[Bools, ...]:
        episode = self._episode
        return self.linkage.after(episode.left, len(episode.bits), bool(option))

    def _least_bytes(self, left: tuple[Bools, ...]) -> float:
        """Of parameters with their state on the fullest rank, whatever is still decided."""
        if any(stage.model != self.model for stage in self.base.stages):
            return 0.0
        total = frozen = 0.0
        for name, keep in zip(self.linkage.params, left, strict=True):
            parts = self._parts(name)[keep]
            own = self.bytes[name] * float(parts.min()) if len(parts) else 0.0
            total += own
            frozen += own * (name in self.problem.tables.frozen)
        stored, still = (int(n / len(self.base.stages)) for n in (total, frozen))
        state = training_state(
            stored, stored - still, optimizer=self.problem.optimizer,
            exchange=copied(self.stage.exchange, self.problem.tables.numbers),
            dp_shard=self.stage.dp_shard, frozen_bytes=still,
        )  # fmt: skip
        return state.parameters_bytes + state.gradients_bytes + state.optimizer_bytes

    def _copies(self, name: str) -> int:
        """Parameters like this one."""
        return self.complete.mesh.repeats[NodeKey("param", name)]

    def _parts(self, name: str) -> Floats:
        """Per place: what part of a parameter a rank holds, about."""
        sizes = [n for _, n in self.model]
        places = self.complete.space.params[name]
        return np.array([
            prod(1 / n for p, n in zip(place, sizes, strict=True) if str(p).startswith("S"))
            for place in places
        ], np.float32)  # fmt: skip

    def is_legal(self, bits: tuple[int, ...]) -> bool:
        """Whether rules and memory admit all these decisions together."""
        left = self.linkage.everything()
        for group, bit in enumerate(bits):
            left = self.linkage.after(left, group, bool(bit))
            if not self.linkage.is_possible(left, group):
                return False
        return not self.pruning.memory or self._least_bytes(left) <= self.room

    # What comes of it -----------------------------------------------------------------------------

    def judged(self, bits: tuple[int, ...]) -> Partition:
        """The simulated step of decisions; each once."""
        if bits not in self._solved:
            variant = "split " + "".join(map(str, bits))
            self.problem.keep_layouts(self.model, variant, self.layouts(bits, variant))
            self._solved[bits] = Partition(bits, variant, self.judge(self.on(variant)))
        return self.found.setdefault(bits, self._solved[bits])

    def afresh(self) -> "Operators":
        """The same decisions, as if nothing had been tried; what is known is not solved again."""
        other = copy(self)
        other.found, other.states = {}, set()
        other.judged((0,) * len(self.linkage.groups))
        other.restart()
        return other

    def unlinked(self) -> "Operators":
        """A decision for each dim of each parameter. Tried at first: what the best linked decisions
        split, and what the linear price splits if nothing is decided."""
        other = copy(self)
        other.pruning = replace(self.pruning, linkage=False)
        other.linkage = Linkage.of(self.complete.space, self.linkage.params, linked=False)
        other.found, other._solved, other._prices, other.states = {}, {}, {}, set()
        best = min(self.found.values(), key=lambda found: (found.verdict, found.bits))
        for left in (self._left(best.bits), self.linkage.everything()):
            other.judged(other.decided(left))
        other.restart()
        return other

    def decided(self, left: Sequence[Bools]) -> tuple[int, ...]:
        """Per group: whether the cheapest layout of what is left splits it."""
        places = self.complete.places(dict(zip(self.linkage.params, left, strict=True)))
        return tuple(
            int(any(places[name][group.axis] == Shard(dim) for name, dim in group.dims))
            for group in self.linkage.groups
        )

    def on(self, variant: str) -> Choice:
        """The plan in which layouts are tried, with one of them."""
        return replace(self.base, stages=tuple(
            replace(stage, variant=variant) if stage.model == self.model else stage
            for stage in self.base.stages
        ))  # fmt: skip

    def known(self, ways: Sequence[MeshVariant]) -> Verdict:
        """The best of the layouts that there are without these decisions."""
        found = [self.judge(self.on(way.variant)) for way in ways if way.model == self.model]
        return min(found, default=Verdict(float("inf"), float("inf")))

    def _left(self, bits: Sequence[int]) -> tuple[Bools, ...]:
        """Places of parameters that decisions leave."""
        left = self.linkage.everything()
        for group, bit in enumerate(bits):
            left = self.linkage.after(left, group, bool(bit))
        return left

    def layouts(self, bits: tuple[int, ...], variant: str) -> tuple[BlockLayout, ...]:
        left = self._left(bits)
        kept = dict(zip(self.linkage.params, left, strict=True))
        return self.complete.layouts(self.complete.chosen(kept), variant)

    # What an agent sees ---------------------------------------------------------------------------

    def _features(self, at: int, option: int) -> Floats:
        group = self.linkage.groups[at]
        total = sum(self.problem.graph.tensors[n].nbytes for n in self.linkage.params) or 1
        own = sum(self.problem.graph.tensors[n].nbytes for n in {n for n, _ in group.dims})
        return np.array([
            float(option), own / total * option, len(group.dims) / 16 * option,
            self._regret(at, option), float(option in self._legal()),
        ], np.float32)  # fmt: skip

    def _context(self, at: int) -> Floats:
        groups, bits = len(self.linkage.groups), self._episode.bits
        group = self.linkage.groups[at]
        axis_size = self.model[group.axis][1]
        total = sum(self.problem.graph.tensors[n].nbytes for n in self.linkage.params) or 1
        taken = {
            name for bit, own in zip(bits, self.linkage.groups, strict=False) if bit
            for name, _ in own.dims
        }  # fmt: skip
        return np.array([
            log2(axis_size) / 4, group.axis / 2, len(self.model) / 3, at / groups,
            sum(bits) / groups, min(groups, 64) / 16,
            sum(self.problem.graph.tensors[n].nbytes for n in taken) / total,
            log2(self.replicas) / 6, len(group.dims) / 16,
            min(2.0, self._least_bytes(self._episode.left) / self.room),
        ], np.float32)  # fmt: skip

    def _regret(self, at: int, option: int) -> float:
        """By how much the linear price rises if this alone is decided: log of the ratio."""
        if not self._prices:
            self._price_all()
        return self._prices[at, option]

    def _price_all(self) -> None:
        everything = self.linkage.everything()
        least = self._price(everything)
        for group in range(len(self.linkage.groups)):
            for option in range(2):
                left = self.linkage.after(everything, group, bool(option))
                possible = self.linkage.is_possible(left, group)
                cost = self._price(left) if possible else np.inf
                self._prices[group, option] = float(min(4.0, np.log(cost / least)))

    def _price(self, left: tuple[Bools, ...]) -> float:
        return max(
            1.0, self.complete.chosen(dict(zip(self.linkage.params, left, strict=True))).cost
        )
