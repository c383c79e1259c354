"""What becomes of the activations of a stage's blocks: as much is saved as memory asks for.

Each block keeps them, makes some again (`selective`), moves them to the host (`offload`) or is
recomputed whole. For few blocks every way is tried. Else there is one ladder, by what a byte costs:
first as many blocks are moved as the computing of the others hides, evenly spread; then blocks make
again what is cheap; then they are recomputed whole.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import comb, floor, prod
from typing import NamedTuple

from meshwright.costmodel.block import BlockCost
from meshwright.costmodel.offload import copy_s
from meshwright.costmodel.tables import Spot
from meshwright.ir.graph import Block
from meshwright.planner.candidates import StageChoice, recomputable
from meshwright.planner.problem import Problem
from meshwright.planner.saved_modes import free_modes, policy_of
from meshwright.planner.space import recompute_modes

FEW = 9
"""Up to so many ways of a stage all are tried: so many blocks of each pattern in each mode."""
_NEAR = 0.999


@dataclass(frozen=True, slots=True)
class Treatment:
    """Patterns where all blocks of a stage are meant, else names of blocks."""

    recompute: tuple[str, ...] = ()
    saved: tuple[tuple[str, str], ...] = ()
    """(pattern or name, mode)."""

    @classmethod
    def of(cls, stage: StageChoice) -> "Treatment":
        return cls(stage.recompute, stage.saved)

    @property
    def is_plain(self) -> bool:
        """Whether all is kept."""
        return not (self.recompute or self.saved)


PLAIN = Treatment()


class Saving(NamedTuple):
    """Of one block in one mode, about: bytes of activations that are not held, seconds more."""

    nbytes: float
    seconds: float


class Treatments:
    """The treatments of one problem's stages."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.modes = recompute_modes(problem)
        self._held: dict[tuple[int, int], tuple[Treatment, ...]] = {}
        self._savings: dict[str, Mapping[str, Saving]] = {}
        self._copies: dict[str, float] = {}
        self._totals: dict[tuple[str, ...], tuple[Saving, ...]] = {}
        """Of all treatments of blocks of these patterns."""

    def of(self, start: int, stop: int) -> tuple[Treatment, ...]:
        """Of the blocks `start` to `stop`: nothing first, what holds least last."""
        if (start, stop) not in self._held:
            self._held[start, stop] = self._of(self.problem.graph.blocks[start:stop])
        return self._held[start, stop]

    def near(self, start: int, stop: int, now: Treatment, change: int) -> Treatment:
        """The treatment so many steps further."""
        if now.is_plain and change <= 0:
            return now
        known = self.of(start, stop)
        at = known.index(now) if now in known else 0
        return known[min(len(known) - 1, max(0, at + change))]

    def before(self, known: Sequence[Treatment], step: int) -> int | None:
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
        blocks = self.problem.graph.blocks[start:stop]
        patterns = tuple(block.pattern for block in blocks)
        if patterns not in self._totals:
            known = self.of(start, stop)
            self._totals[patterns] = tuple(self._total(blocks, treatment) for treatment in known)
        return self._totals[patterns]

    def saving(self, block: Block, mode: str) -> Saving:
        """Of one block."""
        return self._known(block).get(mode, Saving(0.0, 0.0))

    @cached_property
    def usual(self) -> tuple[float, bool]:
        """Of the layers of which there are most: the share whose values move unseen, and whether
        something is cheap to make again."""
        blocks = self._treated(self.problem.graph.blocks)
        if not blocks:
            return 0.0, False
        pattern = Counter(block.pattern for block in blocks).most_common(1)[0][0]
        block = next(b for b in blocks if b.pattern == pattern)
        return self.hidden(block), "selective" in self._known(block)

    # One block ------------------------------------------------------------------------------------

    @cached_property
    def spot(self) -> Spot:
        """Where blocks are compared, so that plans stay readable: the same for all stages."""
        problem = self.problem
        samples = max(1, problem.batch // problem.cluster.num_devices)
        return Spot(samples, 1, (), problem.tables.device_names[0], (), ())

    def _known(self, block: Block) -> Mapping[str, Saving]:
        """Modes of a pattern, each worth its bytes beside the next one."""
        if block.pattern not in self._savings:
            self._savings[block.pattern] = dict(self._of_block(block))
        return self._savings[block.pattern]

    def _of_block(self, block: Block) -> Iterator[tuple[str, Saving]]:
        kept = self._cost(block, "keep")
        again = Saving(max(1.0, _held(kept) - _held(kept.recomputed())), kept.forward_s)
        yield "full", again
        for name in free_modes(self.problem):
            cost = self._cost(block, name)
            more_s = cost.backward_s - kept.backward_s
            if name == "offload":
                more_s = self._waits_s(block, cost)
            saving = Saving(_held(kept) - _held(cost), more_s)
            if saving.nbytes > 0 and self._is_worth(saving, again):
                yield name, saving

    def _waits_s(self, block: Block, cost: BlockCost) -> float:
        """What comes back is asked for as the block before begins its backward."""
        tables = self.problem.tables
        copies = copy_s(tables.devices[self.spot.device], cost.moved_bytes, tables.profile)
        self._copies[block.pattern] = copies
        return max(0.0, copies - cost.backward_s)

    def _is_worth(self, saving: Saving, again: Saving) -> bool:
        """Whether a byte costs less than by recomputing the whole block."""
        if True not in self.modes:
            return True
        return saving.seconds * again.nbytes < again.seconds * saving.nbytes

    def _cost(self, block: Block, mode: str) -> BlockCost:
        layout = next(x for x in self.problem.layouts(()) if x.pattern == block.pattern)
        policy = policy_of(self.problem, block.pattern, mode) if mode != "keep" else ()
        return self.problem.tables.block(block, layout, self.spot, policy or False)

    def hidden(self, block: Block) -> float:
        """The share of equal blocks whose values move while the others are computed."""
        if "offload" not in self._known(block):
            return 0.0
        return min(
            1.0, self._cost(block, "keep").forward_s / max(1e-12, self._copies[block.pattern])
        )

    # Stages ---------------------------------------------------------------------------------------

    def _treated(self, blocks: Sequence[Block]) -> list[Block]:
        patterns = recomputable(self.problem.graph, blocks)
        return [block for block in blocks if block.pattern in patterns]

    def _total(self, blocks: Sequence[Block], treatment: Treatment) -> Saving:
        firsts = {block.pattern: block for block in reversed(blocks)}
        alike = Counter(block.pattern for block in blocks)
        seconds = nbytes = 0.0
        for (pattern, mode), count in Counter(_modes(blocks, treatment)).items():
            own = self.saving(firsts[pattern], mode)
            seconds, nbytes = seconds + count * own.seconds, nbytes + count * own.nbytes
            if mode == "offload":
                computing = alike[pattern] * self._cost(firsts[pattern], "keep").forward_s
                seconds += max(0.0, count * self._copies[pattern] - computing)
        return Saving(nbytes, seconds)

    def _of(self, blocks: Sequence[Block]) -> tuple[Treatment, ...]:
        treated = self._treated(blocks)
        groups = [
            [b for b in treated if b.pattern == p]
            for p in dict.fromkeys(b.pattern for b in treated)
        ]
        ways = prod(comb(len(g) + len(self._offered(g[0])), len(g)) for g in groups)
        if ways <= FEW:
            found = sorted(dict.fromkeys(self._all(groups)), key=lambda t: self._rank(blocks, t))
        else:
            found = list(dict.fromkeys(self._ladder(groups)))
        allowed = [t for t in found if bool(t.recompute) in self.modes]
        return tuple(allowed or found[:1])

    def _offered(self, block: Block) -> tuple[str, ...]:
        """Modes of a block besides keeping all."""
        full = ("full",) if True in self.modes else ()
        return (*full, *(name for name in self._known(block) if name != "full"))

    def _rank(self, blocks: Sequence[Block], treatment: Treatment) -> tuple[object, ...]:
        saved = self._total(blocks, treatment)
        return (
            not treatment.is_plain,
            saved.nbytes,
            saved.seconds,
            treatment.recompute,
            treatment.saved,
        )

    def _all(self, groups: Sequence[Sequence[Block]]) -> Iterator[Treatment]:
        each = [list(_spread_out(group, self._offered(group[0]))) for group in groups]
        for held in product(*each):
            yield named(groups, {name: mode for modes in held for name, mode in modes.items()})

    def _ladder(self, groups: Sequence[Sequence[Block]]) -> Iterator[Treatment]:
        order = sorted(groups, key=lambda g: (-self._value(g[0]), g[0].name))
        modes: dict[str, str] = {}
        yield named(groups, modes)
        for group in order:
            for count in range(1, floor(self.hidden(group[0]) * len(group)) + 1):
                modes = {n: m for n, m in modes.items() if n not in {b.name for b in group}}
                modes |= {block.name: "offload" for block in _evenly(group, count)}
                yield named(groups, modes)
        for wanted in ("selective", "full"):
            for block in (b for group in order for b in group if modes.get(b.name) != "offload"):
                if wanted in self._offered(block):
                    modes[block.name] = wanted
                    yield named(groups, modes)
        last = "full" if True in self.modes else "offload"
        for group in order:
            if last in self._offered(group[0]):
                modes |= {block.name: last for block in group}
        yield named(groups, modes)

    def _value(self, block: Block) -> float:
        """Bytes that recomputing saves, per second that it takes."""
        full = self.saving(block, "full")
        return full.nbytes / max(full.seconds, 1e-12)


def _modes(blocks: Sequence[Block], treatment: Treatment) -> Iterator[tuple[str, str]]:
    """(pattern, mode) of each block; the mode is empty where it keeps all."""
    saved, again = dict(treatment.saved), frozenset(treatment.recompute)
    for block in blocks:
        if block.name in again or block.pattern in again:
            yield block.pattern, "full"
        else:
            yield block.pattern, saved.get(block.name, saved.get(block.pattern, ""))


def _held(cost: BlockCost) -> float:
    """Activations of a block, what enters it apart."""
    return cost.saved_bytes + sum(cost.saved_outputs)


def _evenly(group: Sequence[Block], count: int) -> list[Block]:
    """So many of the blocks, as far from each other as can be."""
    size = len(group)
    return [b for i, b in enumerate(group) if (i + 1) * count // size > i * count // size]


def _spread_out(group: Sequence[Block], modes: Sequence[str]) -> Iterator[dict[str, str]]:
    """All numbers of blocks in each mode, in order of the modes."""
    for counts in product(*(range(len(group) + 1) for _ in modes)):
        if sum(counts) <= len(group):
            said = [mode for mode, n in zip(modes, counts, strict=True) for _ in range(n)]
            yield {block.name: mode for block, mode in zip(group, said, strict=False)}


def named(groups: Sequence[Sequence[Block]], modes: Mapping[str, str]) -> Treatment:
    """The treatment that gives blocks their modes; a pattern where all of its blocks have one."""
    recompute: list[str] = []
    saved: list[tuple[str, str]] = []
    for group in groups:
        said = [modes.get(block.name, "") for block in group]
        alike = len(set(said)) == 1
        for block, mode in [(group[0], said[0])] if alike else zip(group, said, strict=True):
            name = block.pattern if alike else block.name
            if mode == "full":
                recompute.append(name)
            elif mode:
                saved.append((name, mode))
    return Treatment(tuple(recompute), tuple(saved))
