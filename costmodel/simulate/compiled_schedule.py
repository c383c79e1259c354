"""A schedule in the form that the simulator reads: actions in an order that respects all needs."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.schedule import Action, Schedule, Work

WORKS = (Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT)
F, B, I, W = range(4)  # noqa: E741
HELD = 4
"""Added to F where it keeps all, and to B or I where all that they need is there."""
K, R = F + HELD, W + HELD
LAST = 8
"""Added to B or W where no later action of the stage adds to its gradients."""
NUM_KINDS = 16
WORK_OF = (*WORKS, Work.FORWARD_KEEPING, *WORKS[1:3], Work.RECOMPUTE)
"""By kind without LAST."""
_CODE = {work: code for code, work in enumerate(WORKS)}
_CODE |= {Work.FORWARD_KEEPING: K, Work.RECOMPUTE: R}


class Item(NamedTuple):
    """One action."""

    rank: int
    """Pipeline rank."""
    stage: int
    kind: int
    """F, B, I, W, K, R; B and W with LAST, B and I with HELD."""
    microbatch: int
    source: int
    """Position of the action of another rank whose message it needs; -1 if there is none."""
    lane: int
    """The way of that message: twice the stage before the border that it crosses, and 1 more for a
    gradient, which goes back."""
    pair: int
    """Number of the ordered pair of ranks that the message goes between."""


Turn = tuple[int, int, bool, int, int]
"""An action: its position, NUM_KINDS * stage + kind, whether it needs a message, the next action of
the rank if that needs one, and the action that needs this one's; -1 if there is none."""


@dataclass(frozen=True, eq=False)
class Table:
    """All actions of a schedule. Positions are those in `items`."""

    schedule: Schedule
    items: tuple[Item, ...]
    rows: tuple[tuple[int, ...], ...]
    """Positions of each pipeline rank's actions, in order."""
    pairs: tuple[tuple[int, int], ...]
    """(source rank, target rank)."""
    owners: tuple[int, ...]
    """Stage -> pipeline rank."""
    together: frozenset[int] = frozenset()
    """Positions of actions that run together with the next one of their rank."""

    @cached_property
    def units(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """`rows`, with those together that run together."""
        return tuple(
            tuple((p, p + 1) if p in self.together else (p,)
                  for p in row if p - 1 not in self.together)
            for row in self.rows
        )  # fmt: skip

    @cached_property
    def routes(self) -> tuple[tuple[int, int, int], ...]:
        """Of the message that each action needs: its source and target rank, and the way."""
        return tuple([
            (self.pairs[item.pair][0] if item.pair >= 0 else -1, item.rank, item.lane)
            for item in self.items
        ])  # fmt: skip

    @cached_property
    def receivers(self) -> tuple[int, ...]:
        """Position of an action -> that of the action of another rank that needs its message."""
        found = [-1] * len(self.items)
        for position, item in enumerate(self.items):
            if item.source >= 0:
                found[item.source] = position
        return tuple(found)

    @cached_property
    def turns(self) -> tuple[tuple[Turn, ...], ...]:
        """`rows` with what a rank needs to know at each turn."""
        items, receivers = self.items, self.receivers
        found = []
        for row in self.rows:
            ahead = [p if items[p].source >= 0 else -1 for p in row[1:]]
            found.append(tuple(
                (p, NUM_KINDS * items[p].stage + items[p].kind, items[p].source >= 0, a,
                 receivers[p])
                for p, a in zip(row, [*ahead, -1], strict=True)
            ))  # fmt: skip
        return tuple(found)

    @cached_property
    def kinds(self) -> tuple[frozenset[int], ...]:
        """The kinds of actions of each stage."""
        found: list[set[int]] = [set() for _ in self.owners]
        for item in self.items:
            found[item.stage].add(item.kind)
        return tuple(map(frozenset, found))

    @cached_property
    def early(self) -> bool:
        """Whether the schedule says where all is kept, or made again ahead of the backward."""
        return any(item.kind & HELD for item in self.items)

    def action(self, position: int) -> Action:
        item = self.items[position]
        return Action(item.stage, WORK_OF[item.kind & (LAST - 1)], item.microbatch)


_KEPT: dict[tuple[int, frozenset[int]], Table] = {}
_MOST = 128


def table_of(schedule: Schedule, silent: frozenset[int] = frozenset()) -> Table:
    """The table of a schedule. The last ones asked for are kept. `silent`: stages that send to the
    next one what has no gradient: their backwards wait for none."""
    key = id(schedule), silent
    found = _KEPT.get(key)
    if found is None:
        while len(_KEPT) >= _MOST:
            del _KEPT[next(iter(_KEPT))]
        # The table holds its schedule, so that nothing else can get its id meanwhile.
        found = _KEPT[key] = _compile(schedule, silent)
    return found


def _compile(schedule: Schedule, silent: frozenset[int]) -> Table:
    num_stages, count = schedule.num_stages, schedule.num_microbatches
    owners = [0] * num_stages
    rows: list[list[tuple[int, int, int]]] = []
    for rank, row in enumerate(schedule.ranks):
        coded = [(a.stage, _CODE[a.work], a.microbatch) for a in row]
        for stage, _, _ in coded:
            owners[stage] = rank
        rows.append(_marked(coded))
    return _Compiler(schedule, rows, owners, count, silent).table()


def _marked(row: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The row with the last action that adds to each stage's gradients marked, and the backwards
    that find all that they need."""
    there = {(stage, m) for stage, kind, m in row if kind in (K, R)}
    if there:
        row = [
            (stage, kind + HELD if kind in (B, I) and (stage, m) in there else kind, m)
            for stage, kind, m in row
        ]
    seen: set[int] = set()
    for index in range(len(row) - 1, -1, -1):
        stage, kind, microbatch = row[index]
        if kind in (B, W, B + HELD) and stage not in seen:
            seen.add(stage)
            row[index] = (stage, kind + LAST, microbatch)
    return row


class _Compiler:
    """Takes actions rank by rank as far as they can go."""

    def __init__(
        self,
        schedule: Schedule,
        rows: list[list[tuple[int, int, int]]],
        owners: list[int],
        count: int,
        silent: frozenset[int],
    ) -> None:
        self.schedule, self.rows, self.owners, self.count = schedule, rows, owners, count
        self.silent = silent
        self.last = len(owners) - 1
        self.heads = [0] * len(rows)
        self.items: list[Item] = []
        self.positions: list[list[int]] = [[] for _ in rows]
        self.made: dict[int, int] = {}
        """Key of a need -> position of the action that meets it."""
        self.waiting: dict[int, int] = {}
        self.pairs: dict[tuple[int, int], int] = {}
        self.paired = {
            (rank, head)
            for rank, row in enumerate(schedule.ranks if schedule.pairs else ())
            for head in range(len(row)) if row[head : head + 2] in schedule.pairs
        }  # fmt: skip
        self.together: set[int] = set()

    def table(self) -> Table:
        ready = list(range(len(self.rows) - 1, -1, -1))
        while ready:
            self._advance(ready.pop(), ready)
        stuck = [
            f"rank {rank} at {Action(row[h][0], WORK_OF[row[h][1] & (LAST - 1)], row[h][2])}"
            for rank, (row, h) in enumerate(zip(self.rows, self.heads, strict=True))
            if h < len(row)
        ]
        if stuck:
            raise PlanError(f"the schedule deadlocks: {', '.join(stuck)}")
        return Table(
            self.schedule,
            tuple(self.items),
            tuple(map(tuple, self.positions)),
            tuple(self.pairs),
            tuple(self.owners),
            frozenset(self.together),
        )

    def _advance(self, rank: int, ready: list[int]) -> None:
        """All actions of the rank up to one that must wait."""
        row, head = self.rows[rank], self.heads[rank]
        positions, items, made = self.positions[rank], self.items, self.made
        while head < len(row):
            stage, kind, microbatch = row[head]
            source, lane, pair = -1, -1, -1
            if (rank, head) in self.paired:
                if not self._can_begin(rank, head):
                    break
                self.together.add(len(items))
            # The order of its own row covers the rest (`check_schedule`).
            backward = kind & 3 in (B, I)
            forward = kind in (F, K)
            if (forward and stage) or (backward and self._gets_gradients(stage)):
                need = 2 * (stage * self.count + microbatch) + backward
                found = made.get(need, -1)
                if found < 0:
                    self.waiting[need] = rank
                    break
                lane = 2 * stage + 1 if backward else 2 * (stage - 1)
                sender = self.owners[stage + 1 if backward else stage - 1]
                if sender != rank:
                    source = found
                    pair = self.pairs.setdefault((sender, rank), len(self.pairs))
            if forward or backward:
                target = stage + 1 if forward else stage - 1
                met = 2 * (target * self.count + microbatch) + backward
                made[met] = len(items)
                if met in self.waiting:
                    ready.append(self.waiting.pop(met))
            positions.append(len(items))
            items.append(Item(rank, stage, kind, microbatch, source, lane, pair))
            head += 1
        self.heads[rank] = head

    def _gets_gradients(self, stage: int) -> bool:
        return stage < self.last and stage not in self.silent

    def _can_begin(self, rank: int, head: int) -> bool:
        """Whether both actions of a pair have what they need; else the rank waits for that."""
        for stage, kind, microbatch in self.rows[rank][head : head + 2]:
            backward = kind & 3 in (B, I)
            if self._gets_gradients(stage) if backward else stage:
                need = 2 * (stage * self.count + microbatch) + backward
                if need not in self.made:
                    self.waiting[need] = rank
                    return False
        return True
