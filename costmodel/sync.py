"""What a stage does with its parameters and gradients, as `runtime.gradsync` does it by ZeRO level.

Levels 0 and 1 reduce buckets as blocks finish in the last backward of a step, levels 2 and 3 after
each backward; level 3 gathers a block's parameters before it runs, and `prefetch` blocks ahead.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from meshwright.costmodel.comm import Levels, collective_time
from meshwright.costmodel.overheads import Overheads
from meshwright.costmodel.program import SCATTER, Do, Overlap, Program, Step, run, talk
from meshwright.costmodel.table import LAST, B, F, I, W
from meshwright.ir.conversions import Primitive

BUCKET_BYTES = 25 * 2**20
"""Gradients that the runtime reduces together."""


@dataclass(frozen=True, slots=True)
class Held:
    """A trained or frozen parameter of a stage on one rank."""

    users: tuple[int, ...]
    """Indices of the blocks that read it, ascending."""
    nbytes: int
    dtype: str
    trained: bool

    @property
    def owner(self) -> int:
        """The block whose backward is the last to add to its gradient."""
        return self.users[0]


def gathered_bytes(held: Sequence[Held], num_blocks: int) -> tuple[int, ...]:
    """What level 3 gathers for each block: what it reads, and all that is kept with that."""
    kept = [0] * num_blocks
    owners: list[set[int]] = [set() for _ in range(num_blocks)]
    for h in held:
        owner = h.owner
        kept[owner] += h.nbytes
        for user in h.users:
            owners[user].add(owner)
    return tuple(sum(kept[owner] for owner in found) for found in owners)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that move together."""

    owner: int
    nbytes: int
    tensors: int


def buckets(held: Sequence[Held], limit_bytes: int) -> tuple[Bucket, ...]:
    """As `runtime.gradsync.base.buckets` makes them; `limit_bytes` 0: one for each owner."""
    found: list[list[Held]] = []
    for one in sorted((h for h in held if h.trained), key=lambda h: -h.owner):
        last = found[-1] if found else []
        joins = last and last[-1].dtype == one.dtype and (
            last[-1].owner == one.owner or sum(h.nbytes for h in last) < limit_bytes
        )  # fmt: skip
        if joins:
            last.append(one)
        else:
            found.append([one])
    return tuple(Bucket(min(h.owner for h in b), sum(h.nbytes for h in b), len(b)) for b in found)


@dataclass(frozen=True, slots=True)
class BlockTimes:
    """One block: computing, and collectives on its way, in each direction."""

    forward_s: float
    tensor_forward_s: float
    again_s: float
    """Its forward within the backward; 0 unless it is recomputed."""
    input_s: float
    weight_s: float
    accumulate_s: float
    """Of `weight_s`: adding to gradients that are there already."""
    split_s: float
    """What a backward in two halves takes more."""
    tensor_backward_s: float
    gathered_bytes: int
    overhead_s: float = 0.0
    """Of the runtime, where its times do not have it."""
    leaves_s: float = 0.0
    """Waits after its forward, for what goes to the host."""
    returns_s: float = 0.0
    """Waits before its backward, for what comes back."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """A stage and how it synchronises."""

    zero: int
    prefetch: int
    shard: int
    """Ranks among which it shards."""
    blocks: tuple[BlockTimes, ...]
    buckets: tuple[Bucket, ...]
    prelude_s: float
    dp: Levels
    shard_levels: Levels
    replicate_levels: Levels
    overheads: Overheads
    passage_forward_s: float = 0.0
    """Collectives between blocks and at the stage's borders."""
    passage_backward_s: float = 0.0
    tensor_overlapped: bool = False
    """Collectives of tensor parallelism beside the computing of their block."""
    packs: bool = False
    """A kernel packs buckets: nobody clears them before."""
    updates: bool = False
    """A kernel steps the optimizer, and writes what is gathered where it is gathered from."""
    side_by_side: bool = False
    """Collectives of a group do not wait for each other, as Gloo's; NCCL's go in order."""

    @cached_property
    def trained_bytes(self) -> int:
        return sum(bucket.nbytes for bucket in self.buckets)

    @cached_property
    def overlap(self) -> Overlap:
        """By how much gradients on their way and computing slow each other down."""
        levels = self.shard_levels if self.zero else self.dp
        slowdowns = [level.link.slowdowns(self._message_bytes) for level in levels]
        compute, channel = zip((1.0, 1.0), *slowdowns, strict=True)
        return Overlap(max(compute), max(channel))

    @property
    def _message_bytes(self) -> float:
        """That a byte on its way goes with, on average."""
        sizes = [bucket.nbytes for bucket in self.buckets]
        if self.zero >= 3:
            sizes += [block.gathered_bytes for block in self.blocks]
        return sum(n * n for n in sizes) / sum(sizes) if any(sizes) else 0.0

    def programs(self) -> Mapping[int, Program]:
        """Kind of action -> what it does."""
        steps: dict[int, _Steps] = {
            F: self._forward, I: partial(self._backward, inputs=True, weights=False)
        }  # fmt: skip
        for last in (0, LAST):
            steps[B + last] = partial(self._backward, inputs=True, weights=True, last=bool(last))
            steps[W + last] = partial(self._backward, inputs=False, weights=True, last=bool(last))
        return _Programs(steps)

    def _forward(self) -> Iterator[Step]:
        yield run(self.overheads.action_s, "overhead")
        yield run(self.prelude_s, "forward")
        yield talk(self.passage_forward_s, "tensor")
        order = range(len(self.blocks))
        for place, index in enumerate(order):
            yield from self._gather(order, place)
            block = self.blocks[index]
            yield run(block.overhead_s, "overhead")
            yield from self._tensor(block.tensor_forward_s, block.forward_s, "forward")
            yield run(block.leaves_s, "offload")

    def _backward(self, *, inputs: bool, weights: bool, last: bool = False) -> Iterator[Step]:
        yield run(self.overheads.action_s, "overhead")
        yield talk(self.passage_backward_s if inputs else 0.0, "tensor")
        order = range(len(self.blocks) - 1, -1, -1)
        for place, index in enumerate(order):
            yield from self._gather(order, place)
            block = self.blocks[index]
            yield run(block.overhead_s, "overhead")
            if inputs:
                yield run(block.returns_s, "offload")
                yield run(block.again_s, "recompute")
                yield from self._tensor(block.tensor_backward_s, block.input_s, "backward")
            if weights:
                split_s = 0.0 if inputs else block.split_s
                yield run(block.weight_s + split_s - self._unadded_s(block, last), "backward")
                yield from self._after(index, last)

    def _unadded_s(self, block: BlockTimes, last: bool) -> float:
        """What is not added to a gradient that is there: at levels 2 and 3 there never is one, and
        else none before the first backward, unless they are summed in flat buckets of zeros. The
        last backward stands for the first: a step has one of each."""
        if self.zero >= 2:
            return block.accumulate_s
        return block.accumulate_s if last and (self.zero or not self.buckets) else 0.0

    def _tensor(self, tensor_s: float, compute_s: float, what: str) -> Iterator[Step]:
        """A block's computing and its collectives."""
        if self.tensor_overlapped and tensor_s:
            job = -2
            yield Step(Do.START, tensor_s, job, "tensor")
            yield run(compute_s, what)
            yield Step(Do.WAIT, 0.0, job, "tensor")
        else:
            yield run(compute_s, what)
            yield talk(tensor_s, "tensor")

    def _gather(self, order: Sequence[int], place: int) -> Iterator[Step]:
        """Make the parameters of a block whole, and then begin with those after it."""
        if self.zero < 3:
            return
        own = order[place]
        if self.side_by_side and not self.prefetch:
            yield talk(self.gathering(own).seconds, "gather")
        else:
            if place == 0 or not self.prefetch:
                yield self.gathering(own)
            yield Step(Do.WAIT, 0.0, own, "gather")
        yield run(self.overheads.copy_s(2 * self.blocks[own].gathered_bytes), "gather")
        farthest = min(place + self.prefetch, len(order) - 1)
        for ahead in range(place + 1 if place == 0 else place + self.prefetch, farthest + 1):
            if ahead > place:
                yield self.gathering(order[ahead])

    def gathering(self, index: int) -> Step:
        """Begins to make a block's parameters whole."""
        nbytes = self.blocks[index].gathered_bytes
        seconds = self._collective_s(Primitive.ALL_GATHER, nbytes, self.shard_levels)
        return Step(Do.START, seconds if nbytes else 0.0, index, "gather")

    def _collective_s(self, primitive: Primitive, nbytes: int, levels: Levels) -> float:
        """Equal blocks send equal bytes: each time is looked up once."""
        key = primitive, nbytes
        if key not in self._known_s:
            self._known_s[key] = collective_time(primitive, nbytes, levels)
        return self._known_s[key]

    @cached_property
    def _known_s(self) -> dict[tuple[Primitive, int], float]:
        return {}

    def _after(self, index: int, last: bool) -> Iterator[Step]:
        """What happens to gradients once a block's have been added."""
        if last or self.zero >= 2:
            for bucket in self.owned.get(index, ()):
                yield from self._reduce(bucket)

    @cached_property
    def owned(self) -> dict[int, list[Bucket]]:
        """Block -> buckets that are complete after its backward."""
        found: dict[int, list[Bucket]] = {}
        for bucket in self.buckets:
            found.setdefault(bucket.owner, []).append(bucket)
        return found

    def _reduce(self, bucket: Bucket) -> Iterator[Step]:
        n, overheads = bucket.nbytes, self.overheads
        if self.zero == 0:
            seconds = self._collective_s(Primitive.ALL_REDUCE, n, self.dp)
            yield Step(Do.START, seconds, SCATTER, "gradients")
            return
        seconds = self._collective_s(Primitive.REDUCE_SCATTER, n, self.shard_levels)
        if self.zero >= 2:  # add up what has come of the bucket before the last
            yield Step(Do.WAIT_SCATTER, 0.0, SCATTER, "gradients")
            yield run(overheads.copy_s(3 * n / self.shard), "gradients")
        yield run(overheads.copy_s(self._packed(n)), "gradients")
        yield Step(Do.START, seconds, SCATTER, "gradients")

    def _packed(self, nbytes: float) -> float:
        """Bytes that move for it: zeros, unless a kernel packs, then every shard in its place."""
        return (2 if self.packs else 3) * nbytes

    def finish(self, summed: Sequence[tuple[int, Levels]]) -> Iterator[Step]:
        """From the end of the schedule to complete gradients; tied parameters left out.

        `summed`: bytes of gradients that are summands on a model axis, and its links.
        """
        yield Step(Do.WAIT_ALL, 0.0, 0, "gradients")
        for bucket in self.buckets if self.zero else ():
            part = bucket.nbytes / self.shard
            yield talk(self._replicas_s(part), "gradients")
        for nbytes, levels in summed:
            held = nbytes / (self.shard if self.zero else 1)
            if held:
                yield talk(collective_time(Primitive.ALL_REDUCE, held, levels), "gradients")
                yield run(self.overheads.copy_s(4 * held), "gradients")

    def _replicas_s(self, nbytes: float) -> float:
        levels = self.replicate_levels
        return collective_time(Primitive.ALL_REDUCE, nbytes, levels) if levels else 0.0

    def publish(self) -> Iterator[Step]:
        """From the optimizer's step to the next forward."""
        for bucket in self.buckets:
            n = bucket.nbytes
            if self.zero in (1, 2):
                own = n / self.shard
                packed = own if self.updates else self._packed(own)
                yield run(self.overheads.copy_s(packed), "gather")
                seconds = self._collective_s(Primitive.ALL_GATHER, n, self.shard_levels)
                yield talk(seconds, "gather")
                yield run(self.overheads.copy_s(2 * n), "gather")
            elif self.zero == 0 and self.dp:
                yield run(self.overheads.copy_s(n), "gradients")  # zeros to add to


_Steps = Callable[[], Iterator[Step]]


class _Programs(Mapping[int, Program]):
    """Each is worked out when it is first asked for: most schedules have few kinds of actions."""

    def __init__(self, steps: Mapping[int, _Steps]) -> None:
        self._steps = steps
        self._made: dict[int, Program] = {}

    def __getitem__(self, kind: int) -> Program:
        if kind not in self._made:
            self._made[kind] = Program(merged(tuple(self._steps[kind]())))
        return self._made[kind]

    def __contains__(self, kind: object) -> bool:
        return kind in self._steps

    def __iter__(self) -> Iterator[int]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)


def merged(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The same with steps of one kind put together, and empty ones left out.

    Beside a channel only neighbours are; without one the order makes no difference.
    """
    found: list[Step] = []
    alone = all(step.do <= Do.TALK for step in steps)
    for step in steps:
        if step.do > Do.TALK:
            found.append(step)
            continue
        if not step.seconds:
            continue
        last = range(len(found)) if alone else range(len(found))[-1:]
        for index in last:
            if (found[index].do, found[index].what) == (step.do, step.what):
                found[index] = found[index]._replace(seconds=found[index].seconds + step.seconds)
                break
        else:
            found.append(step)
    return tuple(found)
