"""Every choice of one frame, in a fixed order: what is enumerated where a space is small."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise, product
from math import prod

from meshwright.ir.deadline import check_time
from meshwright.planner.across.ladder import Ladder, Treatment
from meshwright.planner.across.places import Places, orders
from meshwright.planner.across.shares import balanced_shares
from meshwright.planner.across.treatments import Treatments
from meshwright.planner.bounds.frames import Frame, group_sizes
from meshwright.planner.problem.candidates import Choice, StageChoice
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.schedule_tools import fits, make_schedule
from meshwright.planner.problem.space import Mesh, compositions, cuts, meshes, schedules


@dataclass(frozen=True, slots=True)
class DeviceGroup:
    """Devices of one pipeline rank with their mesh."""

    devices: tuple[int, ...]
    mesh: Mesh


class ChoiceSpace:
    """The choices of one problem."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.places = [Places(problem, order) for order in orders(problem)]
        self.sets = Treatments(problem)
        self.fits: set[Choice] = set()
        """What those who ask for choices have found to fit: where they do, the same is not tried
        with activations recomputed or moved that may as well be kept."""
        self._meshes: dict[tuple[int, int], tuple[Mesh, ...]] = {}

    def count(self, frame: Frame, most: int) -> int:
        """How many choices a frame has, shares apart; stops soon after `most`."""
        groups = 0
        for sizes in self._sizes(frame):
            check_time()
            groups += prod(len(self._of(frame, size)) for size in sizes) * len(self.places)
            if groups > most:
                return groups
        total = 0
        for _, chunks in schedules(self.problem, frame.num_ranks) if groups else ():
            for bounds in cuts(self.problem, frame.num_ranks * chunks):
                check_time()
                ends = pairwise(bounds)
                total += groups * prod(len(self.sets.of(a, b)) for a, b in ends)
                if total > most:
                    return total
        return total

    def of(self, frame: Frame) -> Iterator[Choice]:
        """Every choice, but those that save memory where `fits` says that there is enough."""
        seen: set[tuple[DeviceGroup, ...]] = set()
        for places in self.places:
            for sizes in self._sizes(frame):
                for held in product(*(self._of(frame, size) for size in sizes)):
                    groups = _groups(places, held)
                    if groups in seen:
                        continue
                    seen.add(groups)
                    for schedule, chunks in schedules(self.problem, frame.num_ranks):
                        yield from self._cut(frame, groups, schedule, chunks)

    def _sizes(self, frame: Frame) -> Iterator[tuple[int, ...]]:
        known = group_sizes(self.problem, frame.num_ranks)
        if len(known) == 1:
            yield known * frame.num_ranks
            return
        step = min(known, default=1)  # all sizes are multiples of the least one
        for sizes in compositions(self.problem.cluster.num_devices // step, frame.num_ranks):
            yield tuple([step * size for size in sizes])

    def _of(self, frame: Frame, size: int) -> tuple[Mesh, ...]:
        key = (frame.num_microbatches, size)
        if key not in self._meshes:
            samples = self.problem.batch // frame.num_microbatches
            self._meshes[key] = tuple(meshes(self.problem, size, samples))
        return self._meshes[key]

    def _cut(
        self, frame: Frame, groups: tuple[DeviceGroup, ...], schedule: str, chunks: int
    ) -> Iterator[Choice]:
        num_stages = frame.num_ranks * chunks
        if not fits(schedule, num_stages, frame.num_microbatches, frame.num_ranks):
            return
        table = make_schedule(schedule, num_stages, frame.num_microbatches, frame.num_ranks)
        held = [groups[table.rank_of(stage)] for stage in range(num_stages)]
        for bounds in cuts(self.problem, num_stages):
            ends = list(pairwise(bounds))
            enough: set[tuple[int, ...]] = set()
            known = [self.sets.of(a, b) for a, b in ends]
            for steps in product(*(range(len(found)) for found in known)):
                if any(less in enough for less in self._less(steps, known)):
                    enough.add(steps)
                    continue
                stages = tuple(
                    stage_on(group, a, b, found[step])
                    for group, (a, b), found, step in zip(held, ends, known, steps, strict=True)
                )
                choice = Choice(
                    stages=stages, num_microbatches=frame.num_microbatches, schedule=schedule,
                    num_ranks=frame.num_ranks,
                )  # fmt: skip
                each = list(with_shares(self.problem, choice))
                yield from each
                if self.fits.issuperset(each):
                    enough.add(steps)

    def _less(self, steps: tuple[int, ...], known: Sequence[Ladder]) -> Iterator[tuple[int, ...]]:
        """The same with one stage that is treated less, for less time."""
        if self.problem.objective == "memory":
            return
        for stage, step in enumerate(steps):
            before = self.sets.before(known[stage], step)
            if step and before is not None:
                yield (*steps[:stage], before, *steps[stage + 1 :])


def _groups(places: Places, held: tuple[Mesh, ...]) -> tuple[DeviceGroup, ...]:
    ends = accumulate(mesh.size for mesh in held)
    return tuple(
        DeviceGroup(places.ranks(end - mesh.size, mesh.size, mesh), mesh)
        for mesh, end in zip(held, ends, strict=True)
    )


def stage_on(group: DeviceGroup, start: int, stop: int, treatment: Treatment) -> StageChoice:
    """Blocks `start` to `stop` on a group."""
    mesh = group.mesh
    return StageChoice(
        start=start, stop=stop, devices=group.devices, dp_replicate=mesh.dp_replicate,
        dp_shard=mesh.dp_shard, model=mesh.model, variant=mesh.variant, zero=mesh.zero,
        prefetch=mesh.prefetch, recompute=treatment.recompute, saved=treatment.saved,
    )  # fmt: skip


def with_shares(problem: Problem, choice: Choice) -> Iterator[Choice]:
    """The choice with the shares that it has, even ones if none, and with balanced ones where
    replicas differ."""
    yield choice
    if len(problem.tables.devices) == 1:
        return
    held = range(len(choice.stages))
    in_flight = [min(choice.num_microbatches, max(1, choice.num_ranks - i)) for i in held]
    stages = tuple(
        replace(stage, shares=balanced_shares(problem, stage, choice.num_microbatches, k))
        for stage, k in zip(choice.stages, in_flight, strict=True)
    )
    if stages != choice.stages:
        yield replace(choice, stages=stages)
