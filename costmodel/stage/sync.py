"""What a stage does with its parameters and gradients over a step, from its exchange's table.

Buckets go as blocks finish, in the last backward of a step or in each; what is gathered before a
block runs may go `prefetch` blocks ahead.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

from meshwright.costmodel.comm.comm import Levels, collective_time, ranks_of
from meshwright.costmodel.ops.overheads import Overheads
from meshwright.costmodel.simulate.compiled_schedule import LAST, B, F, I, W
from meshwright.costmodel.stage.buckets import Bucket
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.gathers import UNPACKED, Gathers
from meshwright.costmodel.stage.merging import Programs, Steps, with_neighbours
from meshwright.costmodel.stage.program import (
    BESIDE,
    SCATTER,
    Do,
    Overlap,
    Program,
    Step,
    run,
    talk,
)
from meshwright.costmodel.stage.sent_forward import begun_forward
from meshwright.costmodel.stage.times import NO_WAITS, BlockTimes, HostWaits
from meshwright.forms.exchange_rows import Event, Rewrite, Send
from meshwright.ir.layout.conversions import Primitive

PACKED, PACKED_BY_KERNEL = 3, 2
"""Bytes that move per byte of a flat tensor: zeros, unless a kernel packs, then every shard in its
place."""
ADDED = 3
"""The same for adding one tensor to another."""


@dataclass(frozen=True, kw_only=True)
class Sync:
    """A stage and how it synchronises."""

    groups: tuple[FormGroup, ...]
    """Its parameters, by the form that they have."""
    prefetch: int
    blocks: tuple[BlockTimes, ...]
    prelude_s: float
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
    check_s: float = 0.0
    """What comparing a collective takes before it starts, per further rank of its group."""
    chain_hop_s: float = 0.0
    """Least of a hop where new parameters go in chains, owner by owner; 0: they are gathered."""
    side_by_side: bool = False
    """Collectives of a group do not wait for each other, as Gloo's; NCCL's go in order."""
    host: HostWaits = NO_WAITS
    """Copies to the host and back in a step."""
    free: frozenset[tuple[int, Send]] = frozenset()
    """Messages, by group, that are taken to need no time: what they cost is what that saves."""

    @cached_property
    def trained_bytes(self) -> int:
        return sum([bucket.nbytes for group in self.groups for bucket in group.buckets])

    @cached_property
    def overlap(self) -> Overlap:
        """By how much gradients on their way and computing slow each other down."""
        levels = [
            level for group in self.groups for level in group.lines.levels(group.exchange.axis)
        ]
        return Overlap.worst([level.link.slowdowns(self._message_bytes) for level in levels])

    @property
    def _message_bytes(self) -> float:
        """That a byte on its way goes with, on average."""
        sizes = [nbytes for group in self.groups for nbytes in group.message_bytes]
        return sum([n * n for n in sizes]) / sum(sizes) if any(sizes) else 0.0

    def programs(self) -> Mapping[int, Program]:
        """Kind of action -> what it does."""
        steps: dict[int, Steps] = {
            F: self._forward, I: partial(self._backward, inputs=True, weights=False)
        }  # fmt: skip
        for last in (0, LAST):
            steps[B + last] = partial(self._backward, inputs=True, weights=True, last=bool(last))
            steps[W + last] = partial(self._backward, inputs=False, weights=True, last=bool(last))
        return Programs(steps)

    def _forward(self) -> list[Step]:
        found = [
            run(self.overheads.action_s, "overhead"), run(self.prelude_s, "forward"),
            talk(self.passage_forward_s, "tensor"),
        ]  # fmt: skip
        made: dict[int, list[Step]] = {}
        gathers = [own.steps(1) for own in self.gathers if own.forward]
        for index, block in enumerate(self.blocks):
            for own in gathers:
                found += own[index]
            if id(block) not in made:
                made[id(block)] = with_neighbours(self.block_forward(block))
            found += made[id(block)]
        return found

    def block_forward(self, block: BlockTimes) -> list[Step]:
        return [
            run(block.overhead_s, "overhead"),
            run(block.fetched_s, "offload"),
            *_beside(block.beside_forward_s * self._gathers_forward),
            *self._tensor(block.tensor_forward_s, block.forward_s, "forward"),
            run(block.leaves_s, "offload"),
        ]

    def _backward(self, *, inputs: bool, weights: bool, last: bool = False) -> list[Step]:
        found = [
            run(self.overheads.action_s, "overhead"),
            talk(self.passage_backward_s if inputs else 0.0, "tensor"),
        ]
        reduces = [
            (group, sends)
            for group in (self.groups if weights else ())
            if (sends := group.exchange.every_backward + group.exchange.last_backward * last)
        ]
        if last and weights:
            found += begun_forward(self)
        made: dict[object, list[Step]] = {}
        reduced: dict[object, list[Step]] = {}
        gathers = [own.steps(-1) for own in self.gathers if own.backward]
        alike = self._unadded(0, last) if len(self.groups) == 1 else None
        for index in range(len(self.blocks) - 1, -1, -1):
            for own in gathers:
                found += own[index]
            block = self.blocks[index]
            unadded = self._unadded(index, last) if alike is None else alike
            if (id(block), unadded) not in made:
                made[id(block), unadded] = with_neighbours(
                    self._block_backward(
                        block, inputs, weights, unadded, shared=bool(gathers or reduces)
                    )
                )
            found += made[id(block), unadded]
            if self.host.each_s:
                found.append(run(self.host.each_s[index], "offload"))
            if last and self.host.leaves_s:
                found.append(run(self.host.leaves_s[index], "offload"))
            for group, sends in reduces:
                for bucket in group.owned.get(index, ()):
                    key = id(group), bucket.nbytes, bucket.tensors
                    if key not in reduced:
                        reduced[key] = with_neighbours(self._reduce(group, sends, bucket))
                    found += reduced[key]
        return found

    def _block_backward(
        self, block: BlockTimes, inputs: bool, weights: bool, unadded: float, *, shared: bool
    ) -> list[Step]:
        """`shared`: other messages are on their way meanwhile."""
        found = [run(block.overhead_s, "overhead")]
        if inputs:
            found += [run(block.returns_s, "offload"), run(block.again_s, "recompute")]
            found += _beside(block.beside_backward_s * shared)
            found += self._tensor(block.tensor_backward_s, block.input_s, "backward")
        if weights:
            split_s = 0.0 if inputs else block.split_s
            found.append(run(block.weight_s + split_s - unadded * block.accumulate_s, "backward"))
        return found

    def _unadded(self, index: int, last: bool) -> float:
        """Share of a block's gradients that are added to none."""
        if len(self.groups) == 1:
            return float(self.groups[0].adds_to_none(last=last))
        whole = sum([group.trained[index] for group in self.groups])
        alone = sum([g.trained[index] for g in self.groups if g.adds_to_none(last=last)])
        return alone / whole if whole else 0.0

    def _tensor(self, tensor_s: float, compute_s: float, what: str) -> list[Step]:
        """A block's computing and its collectives."""
        if self.tensor_overlapped and tensor_s:
            job = -2
            return [
                Step(Do.START, tensor_s, job, "tensor"), run(compute_s, what),
                Step(Do.WAIT, 0.0, job, "tensor"),
            ]  # fmt: skip
        return [run(compute_s, what), talk(tensor_s, "tensor")]

    @cached_property
    def gathers(self) -> tuple[Gathers, ...]:
        """What makes parameters whole before a block runs, group by group."""
        return tuple(
            Gathers(self, group, number * len(self.blocks))
            for number, group in enumerate(self.groups) if group.exchange.fetches
        )  # fmt: skip

    @cached_property
    def _gathers_forward(self) -> bool:
        """Whether parameters are on their way beside a forward."""
        return any(own.forward for own in self.gathers)

    def remade(self, index: int) -> tuple[Step, ...]:
        """What makes a block's parameters whole when its forward runs once more."""
        return tuple(step for own in self.gathers if own.forward for step in own.alone(index))

    def send_s(self, group: FormGroup, send: Send, nbytes: float) -> float:
        """Of a unit of so many bytes; of what goes in some steps only, and is waited for in these,
        what it takes on average."""
        if self.free and any(self.groups[i] is group and own == send for i, own in self.free):
            return 0.0
        sent = self.sent(group, send, nbytes)
        seconds = self.collective_s(send.primitive, sent, group.lines.levels(send.axis))
        return seconds if send.lag else seconds / send.every

    def sent(self, group: FormGroup, send: Send, nbytes: float) -> float:
        """Bytes by which a message of a unit of so many bytes takes its time."""
        ranks = ranks_of(group.lines.levels(send.axis)) if send.by_rank else 1
        return group.exchange.sent(send, nbytes, ranks) * group.exchange.load(send)

    def collective_s(self, primitive: Primitive, nbytes: float, levels: Levels) -> float:
        """Equal blocks send equal bytes: each time is looked up once."""
        key = primitive, nbytes, id(levels)  # groups hold their levels
        if key not in self._known_s:
            checked_s = self.check_s * max(0, ranks_of(levels) - 1)
            self._known_s[key] = collective_time(primitive, nbytes, levels) + checked_s
        return self._known_s[key]

    @cached_property
    def _known_s(self) -> dict[tuple[Primitive, float, int], float]:
        return {}

    def copy_s(self, nbytes: float) -> float:
        """Equal blocks copy equal bytes, too."""
        if nbytes not in self._copies_s:
            self._copies_s[nbytes] = self.overheads.copy_s(nbytes)
        return self._copies_s[nbytes]

    @cached_property
    def _copies_s(self) -> dict[float, float]:
        return {}

    def work(self, works: Sequence[Rewrite], bucket: Bucket, what: str) -> list[Step]:
        """What is done with a bucket beside messages."""
        n, tensors = bucket.nbytes, bucket.tensors
        return [
            run(
                self.overheads.work_s(w.moved * n, w.flops * n, w.calls * tensors, thin=w.thin),
                what,
            )
            for w in works
        ]  # fmt: skip

    def _reduce(self, group: FormGroup, sends: Sequence[Send], bucket: Bucket) -> list[Step]:
        """What happens to the gradients of a bucket once all have been added."""
        n, found = bucket.nbytes, list[Step]()
        if any([send.at is Event.AFTER_LAST for send in sends]):
            found += self.work(group.exchange.worked_last, bucket, "gradients")
        for send in sends:
            if send.of_part:
                found.append(self.sending(group, send, group.part_of(send, n)))
                continue
            if send.adds:  # what has come of the bucket before the last
                found.append(Step(Do.WAIT_SCATTER, 0.0, SCATTER, "gradients"))
                found.append(run(self.copy_s(ADDED * send.times * n / group.shards), "gradients"))
            if send.packs:
                packing_s = self.packed_s(send.times * n, bucket.tensors * group.shards)
                found.append(run(packing_s, "gradients"))
            found.append(self.sending(group, send, n))
        return found

    def sending(self, group: FormGroup, send: Send, nbytes: float) -> Step:
        """Begins a message of gradients, or what comes with them; owners on CPUs receive what they
        sum when they wait for it (`ir.comm.p2p_collectives`)."""
        seconds = self.send_s(group, send, nbytes)
        summed = send.primitive is Primitive.REDUCE_SCATTER
        if group.exchange.owns_whole and summed and self.side_by_side:
            return talk(seconds, "gradients")
        return Step(Do.START, seconds, SCATTER, "gradients")

    def packed_s(self, nbytes: float, pieces: int) -> float:
        """To pack so many bytes, which are so many pieces of tensors."""
        return self.copy_s(self.packed_bytes(nbytes)) + self.piece_s * pieces

    @cached_property
    def piece_s(self) -> float:
        """Beside the copying, of one tensor's piece for one rank."""
        return 0.0 if self.packs else self.overheads.piece_s

    def packed_bytes(self, nbytes: float) -> float:
        """Bytes that move for it."""
        return (PACKED_BY_KERNEL if self.packs else PACKED) * nbytes

    def finish(self, summed: Sequence[tuple[str, Sequence[int], Levels]]) -> Iterator[Step]:
        """From the end of the schedule to complete gradients; tied parameters left out.

        `summed`: a model axis, bytes of gradients that are summands on it, group by group, and its
        links.
        """
        yield Step(Do.WAIT_ALL, 0.0, 0, "gradients")
        for group in self.groups:
            yield from self._ended(group)
        yield from self._together([group.exchange.at_end for group in self.groups], "gradients")
        for _, sizes, levels in summed:
            held = sum([
                nbytes / group.exchange.parts("optimizer", group.shards)
                for nbytes, group in zip(sizes, self.groups, strict=True)
            ])  # fmt: skip
            if held:
                yield talk(collective_time(Primitive.ALL_REDUCE, held, levels), "gradients")
                yield run(self.overheads.copy_s(4 * held), "gradients")
        if self.host.tail_s:
            yield run(self.host.tail_s, "gradients")

    def _ended(self, group: FormGroup) -> Iterator[Step]:
        ends = group.exchange.at_end
        ended = [(send, group.lines.levels(send.axis)) for send in ends if not send.joint]
        work = group.exchange.worked_at_end
        for bucket in group.buckets if ended or work else ():
            if work:
                yield from self.work(work, bucket, "gradients")
            for send, levels in ended:
                if levels:
                    nbytes = group.part_of(send, bucket.nbytes)
                    yield talk(self.send_s(group, send, nbytes), "gradients")

    def publish(self) -> Iterator[Step]:
        """From the optimizer's step to the next forward; for what goes under it see `late`."""
        if self.host.brings_s:
            yield run(self.host.brings_s, "gather")
        for number, group in enumerate(self.groups):
            yield from self._published_ahead(group, number)
            known: dict[tuple[int, int], list[Step]] = {}
            for bucket in group.buckets:
                key = bucket.nbytes, bucket.tensors
                if key not in known:
                    known[key] = self._published(group, bucket)
                yield from known[key]
        yield from self._together([group.exchange.published for group in self.groups], "gather")

    def _packed(self, group: FormGroup, send: Send, bucket: Bucket) -> Iterator[Step]:
        """What is published becomes one flat tensor."""
        if send.packs:
            own = bucket.nbytes / group.shards if send.packs == "part" else bucket.nbytes
            pieces = bucket.tensors * (1 if send.packs == "part" else group.shards)
            packing_s = self.copy_s(own) if self.updates else self.packed_s(own, pieces)
            yield run(packing_s, "gather")

    def _unpacked(self, group: FormGroup, send: Send, bucket: Bucket) -> Iterator[Step]:
        """What has come goes to whole tensors."""
        if send.unpacks:
            pieces_s = self.piece_s * bucket.tensors * group.shards
            moved = UNPACKED * send.times * bucket.nbytes
            yield run(self.copy_s(moved) + pieces_s, "gather")

    def _together(self, sends: Sequence[Sequence[Send]], what: str) -> Iterator[Step]:
        """Messages that buckets of several groups of a form go in; `sends`: of each group."""
        found: dict[object, tuple[Send, Levels, float]] = {}
        for index, (group, own) in enumerate(zip(self.groups, sends, strict=True)):
            for send in own:
                if send.joint and (levels := group.lines.levels(send.axis)):
                    way = send.what, send.primitive, send.axis, send.share
                    key = group.exchange.form, way, group.lines
                    units = sum([bucket.nbytes for bucket in group.buckets])
                    nbytes = 0.0 if (index, send) in self.free else self.sent(group, send, units)
                    found[key] = send, levels, found.get(key, (send, levels, 0.0))[2] + nbytes
        for send, levels, nbytes in found.values():
            if nbytes:
                yield talk(self.collective_s(send.primitive, nbytes, levels), what)

    def _published_ahead(self, group: FormGroup, number: int) -> Iterator[Step]:
        """Buckets of which each is packed and sent while the one before it is under way. `number`:
        of the group."""
        for send in [s for s in group.exchange.published if s.ahead and not s.joint]:
            landed: list[Step] = []
            for index, bucket in enumerate(group.buckets):
                job = -((number << 20) + index) - 3
                yield from self._packed(group, send, bucket)
                seconds = self.send_s(group, send, group.part_of(send, bucket.nbytes))
                yield Step(Do.START, seconds, job, "gather")
                yield from landed
                landed = [Step(Do.WAIT, 0.0, job, "gather"), *self._unpacked(group, send, bucket)]
            yield from landed
            if self.chain_hop_s:
                yield talk(self._chains_s(group, send), "gather")

    def _chains_s(self, group: FormGroup, send: Send) -> float:
        """Until what each owner broadcasts has come to the last rank of its chain."""
        levels = group.lines.levels(send.axis)
        owners = min(ranks_of(levels), sum([bucket.tensors for bucket in group.buckets]))
        hops_s, outer = 0.0, ranks_of(levels)
        for level in levels:
            outer //= level.size
            hops_s += (level.size - 1) * outer * max(self.chain_hop_s, level.link.step_s)
        return owners * hops_s

    def _published(self, group: FormGroup, bucket: Bucket) -> list[Step]:
        """Of a bucket that goes alone."""
        found = list[Step]()
        for send in [s for s in group.exchange.published if not s.joint and not s.ahead]:
            found += self._packed(group, send, bucket)
            found.append(
                talk(self.send_s(group, send, group.part_of(send, bucket.nbytes)), "gather")
            )
            found += self._unpacked(group, send, bucket)
        for work in group.exchange.cleared:
            found += self.work((work,), bucket, work.what)
        return found


def _beside(seconds: float) -> list[Step]:
    """What has the links between nodes to itself for so long, while nobody waits for it."""
    return [Step(Do.START, seconds, BESIDE, "tensor")] if seconds else []
