"""What becomes of the activations of a stage's blocks: as much is saved as memory asks for.

Each block keeps them, makes some again (`selective`), moves them to the host (`offload`) or is
recomputed whole. For few blocks every way is tried. Else there is one ladder, by what a byte costs:
first as many blocks are moved as the computing of the others hides, evenly spread; then blocks make
again what is cheap; then they are recomputed whole.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import product
from math import comb, floor, prod
from typing import NamedTuple

from meshwright.costmodel.block.block import BlockCost
from meshwright.costmodel.cost_cache import BlockSpot
from meshwright.costmodel.stage.offload import copy_s
from meshwright.forms.retention import AGAIN, KEEP, moves
from meshwright.ir.deadline import check_time
from meshwright.ir.graph.graph import Block
from meshwright.planner.across.ladder import (
    PLAIN,
    Groups,
    Ladder,
    Modes,
    Step,
    Treatment,
    evenly,
    named,
    spread_out,
)
from meshwright.planner.problem.candidates import recomputable
from meshwright.planner.problem.problem import Problem
from meshwright.planner.problem.saved_modes import free_modes, policy_of
from meshwright.planner.problem.space import recompute_modes

FEW = 9
"""Up to so many ways of a stage all are tried: so many blocks of each pattern in each mode."""
_NEAR = 0.999


class Saving(NamedTuple):
    """Of one block in one mode, about: bytes of activations that are not held, seconds more."""

    nbytes: float
    seconds: float


class Treatments:
    """The treatments of one problem's stages."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.modes = recompute_modes(problem)
        self._held: dict[tuple[int, int], Ladder] = {}
        self._steps: dict[tuple[str, ...], tuple[Step, ...]] = {}
        """Of the ladder of blocks of these patterns."""
        self._savings: dict[str, Mapping[str, Saving]] = {}
        self._copies: dict[tuple[str, str], float] = {}
        """By pattern and mode."""
        self._costs: dict[tuple[str, str], BlockCost] = {}
        self._totals: dict[tuple[str, ...], tuple[Saving, ...]] = {}
        """Of all treatments of blocks of these patterns."""

    def of(self, start: int, stop: int) -> Ladder:
        """Of the blocks `start` to `stop`: nothing first, what holds least last."""
        if (start, stop) not in self._held:
            self._held[start, stop] = self._of(start, stop)
        return self._held[start, stop]

    def near(self, start: int, stop: int, now: Treatment, change: int) -> Treatment:
        """The treatment so many steps further."""
        if now.is_plain and change <= 0:
            return now
        known = self.of(start, stop)
        return known[min(len(known) - 1, max(0, known.place(now) + change))]

    def before(self, known: Ladder, step: int) -> int | None:
        """A step that takes no longer than this one: of a ladder the one below, else the first,
        which keeps all."""
        if len(known) > FEW:
            return step - 1
        return 0 if known[0].is_plain else None

    def that_saves(self, start: int, stop: int, share: float) -> Treatment:
        """The least time for that share of what recomputing all would save."""
        if share <= 0 and False in self.modes:
            return PLAIN
        known = self.of(start, stop)
        if share >= 1:
            return known[-1]
        totals = self._of_all(start, stop)
        wanted = share * totals[-1].nbytes * _NEAR
        found = [
            (saved.seconds, number) for number, saved in enumerate(totals) if saved.nbytes >= wanted
        ]
        return known[min(found)[1]] if found else known[-1]

    def _of_all(self, start: int, stop: int) -> tuple[Saving, ...]:
        """What each treatment saves; the same for all stages of equal blocks."""
        patterns = self._patterns(start, stop)
        if patterns not in self._totals:
            known = self.of(start, stop)
            self._totals[patterns] = tuple(
                [self._total(known.groups, step) for step in known.steps]
            )
        return self._totals[patterns]

    def _patterns(self, start: int, stop: int) -> tuple[str, ...]:
        return tuple([block.pattern for block in self.problem.graph.blocks[start:stop]])

    def saving(self, block: Block, mode: str) -> Saving:
        """Of one block."""
        return self._known(block).get(mode, Saving(0.0, 0.0))

    @cached_property
    def usual(self) -> tuple[float, str]:
        """Of the layers of which there are most: the share whose values move unseen, and the mode
        in which something cheap is made again; empty if there is none."""
        blocks = self._treated(self.problem.graph.blocks)
        if not blocks:
            return 0.0, ""
        pattern = Counter(block.pattern for block in blocks).most_common(1)[0][0]
        block = next(b for b in blocks if b.pattern == pattern)
        return self.hidden(block), next(iter(self._cheap(block)), "")

    # One block ------------------------------------------------------------------------------------

    @cached_property
    def spot(self) -> BlockSpot:
        """Where blocks are compared, so that plans stay readable: the same for all stages."""
        problem = self.problem
        samples = max(1, problem.batch // problem.cluster.num_devices)
        return BlockSpot(samples, 1, (), problem.tables.device_names[0], (), ())

    def _known(self, block: Block) -> Mapping[str, Saving]:
        """Modes of a pattern, each worth its bytes beside the next one."""
        if block.pattern not in self._savings:
            self._savings[block.pattern] = dict(self._of_block(block))
        return self._savings[block.pattern]

    def _of_block(self, block: Block) -> Iterator[tuple[str, Saving]]:
        kept = self._cost(block, KEEP)
        again = Saving(max(1.0, _held(kept) - _held(kept.recomputed())), kept.forward_s)
        yield AGAIN, again
        for name in free_modes(self.problem):
            cost = self._cost(block, name)
            more_s = cost.backward_s - kept.backward_s + (cost.forward_s - kept.forward_s)
            if moves(name):
                more_s = self._waits_s(block, name, cost)
            saving = Saving(_held(kept) - _held(cost), more_s)
            if saving.nbytes > 0 and self._is_worth(saving, again):
                yield name, saving

    def _moving(self, block: Block) -> str:
        """The mode in which values are moved; empty if there is none."""
        return next(filter(moves, self._known(block)), "")

    def _cheap(self, block: Block) -> tuple[str, ...]:
        """Modes in which part of a block is made again."""
        return tuple(name for name in self._known(block) if name != AGAIN and not moves(name))

    def _waits_s(self, block: Block, mode: str, cost: BlockCost) -> float:
        """What comes back is asked for as the block before begins its backward."""
        tables = self.problem.tables
        copies = copy_s(tables.devices[self.spot.device], cost.moved_bytes, tables.profile)
        self._copies[block.pattern, mode] = copies
        return max(0.0, copies - cost.backward_s)

    def _is_worth(self, saving: Saving, again: Saving) -> bool:
        """Whether a byte costs less than by recomputing the whole block."""
        if True not in self.modes:
            return True
        return saving.seconds * again.nbytes < again.seconds * saving.nbytes

    def _cost(self, block: Block, mode: str) -> BlockCost:
        key = block.pattern, mode
        if key not in self._costs:
            self._costs[key] = self._priced(block, mode)
        return self._costs[key]

    def _priced(self, block: Block, mode: str) -> BlockCost:
        layout = next(x for x in self.problem.layouts(()) if x.pattern == block.pattern)
        policy = policy_of(self.problem, block.pattern, mode) if mode != KEEP else ()
        return self.problem.tables.block(block, layout, self.spot, policy or False)

    def hidden(self, block: Block) -> float:
        """The share of equal blocks whose values move while the others are computed."""
        if not (mode := self._moving(block)):
            return 0.0
        copies = self._copies[block.pattern, mode]
        return min(1.0, self._cost(block, KEEP).forward_s / max(1e-12, copies))

    # Stages ---------------------------------------------------------------------------------------

    def _treated(self, blocks: Sequence[Block]) -> list[Block]:
        patterns = recomputable(self.problem.graph, blocks)
        return [block for block in blocks if block.pattern in patterns]

    def _total(self, groups: Groups, step: Step) -> Saving:
        seconds = nbytes = 0.0
        for group, modes in zip(groups, step, strict=True):
            known = self._known(group[0])
            for mode, count in Counter(modes).items():
                if mode not in known:
                    continue
                own = known[mode]
                seconds, nbytes = seconds + count * own.seconds, nbytes + count * own.nbytes
                if moves(mode):
                    computing = len(group) * self._cost(group[0], KEEP).forward_s
                    copies = self._copies[group[0].pattern, mode]
                    seconds += max(0.0, count * copies - computing)
        return Saving(nbytes, seconds)

    def _of(self, start: int, stop: int) -> Ladder:
        treated = self._treated(self.problem.graph.blocks[start:stop])
        groups = [
            [b for b in treated if b.pattern == p]
            for p in dict.fromkeys(b.pattern for b in treated)
        ]
        ways = prod(comb(len(g) + len(self._offered(g[0])), len(g)) for g in groups)
        if ways <= FEW:
            found = dict.fromkeys(self._all(groups))
            return self._allowed(groups, sorted(found, key=lambda step: self._rank(groups, step)))
        patterns = self._patterns(start, stop)
        if patterns not in self._steps:
            steps = list(dict.fromkeys(self._ladder(groups)))
            self._steps[patterns] = self._allowed(groups, steps).steps
        return Ladder(groups, self._steps[patterns])

    def _allowed(self, groups: Groups, steps: Sequence[Step]) -> Ladder:
        """Those that recompute as pins leave it, or the first."""
        left = [s for s in steps if any(AGAIN in modes for modes in s) in self.modes]
        return Ladder(groups, tuple(left or steps[:1]))

    def _offered(self, block: Block) -> tuple[str, ...]:
        """Modes of a block besides keeping all."""
        full = (AGAIN,) if True in self.modes else ()
        return (*full, *(name for name in self._known(block) if name != AGAIN))

    def _rank(self, groups: Groups, step: Step) -> tuple[object, ...]:
        saved, treatment = self._total(groups, step), named(groups, step)
        return (
            not treatment.is_plain,
            saved.nbytes,
            saved.seconds,
            treatment.recompute,
            treatment.saved,
        )

    def _all(self, groups: Groups) -> Iterator[Step]:
        yield from product(*(spread_out(len(g), self._offered(g[0])) for g in groups))

    def _ladder(self, groups: Groups) -> Iterator[Step]:
        check_time()
        numbers = range(len(groups))
        order = sorted(numbers, key=lambda n: (-self._value(groups[n][0]), groups[n][0].name))
        now: list[Modes] = [("",) * len(group) for group in groups]
        yield tuple(now)
        for n in order:
            size = len(groups[n])
            for count in range(1, floor(self.hidden(groups[n][0]) * size) + 1):
                now[n] = evenly(size, count, self._moving(groups[n][0]))
                yield tuple(now)
        cheap = dict.fromkeys(name for group in groups for name in self._cheap(group[0]))
        for wanted in (*cheap, AGAIN):
            for n in order:
                if wanted not in self._offered(groups[n][0]):
                    continue
                for at, mode in enumerate(now[n]):
                    if not moves(mode):
                        now[n] = (*now[n][:at], wanted, *now[n][at + 1 :])
                        yield tuple(now)
        for n in order:
            last = AGAIN if True in self.modes else self._moving(groups[n][0])
            if last in self._offered(groups[n][0]):
                now[n] = (last,) * len(groups[n])
        yield tuple(now)

    def _value(self, block: Block) -> float:
        """Bytes that recomputing saves, per second that it takes."""
        full = self.saving(block, AGAIN)
        return full.nbytes / max(full.seconds, 1e-12)


def _held(cost: BlockCost) -> float:
    """Activations of a block, what enters it apart."""
    return cost.saved_bytes + sum(cost.saved_outputs)
