"""What `Stage.overlap` hides of a block's collectives, and what working in halves costs.

It follows `codegen.collectives.products` and `codegen.passes.halves`: the same patterns, phases and
turns, played with the collectives of model axes on a channel of their own.
"""

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product, zip_longest
from math import ceil
from typing import NamedTuple

from meshwright.costmodel.block.price_ops import PricedMove, PricedOp, Walk
from meshwright.costmodel.ops.compute import OpTime
from meshwright.costmodel.ops.formulas import kernel_s
from meshwright.costmodel.ops.kernel_work import forward_work
from meshwright.costmodel.ops.op_classes import op_name
from meshwright.costmodel.ops.overheads import CPU_TURNS
from meshwright.costmodel.stage.program import IDLE, Do, Overlap, Step, play, run
from meshwright.ir.cluster.device import DeviceType
from meshwright.ir.graph.graph import Block, Graph, Kind
from meshwright.ir.layout.conversions import COMMUNICATES, Primitive
from meshwright.ir.layout.layout import parse_placement
from meshwright.ir.layout.op_messages import Leg
from meshwright.ir.layout.samples import halved_dim
from meshwright.ir.plan.plan import BlockLayout
from meshwright.ir.plan.sampled import sampled_axes
from meshwright.ir.trace.halving import has_apart

_PRODUCTS = frozenset({"linear", "addmm", "mm"})
_INPUT = {"addmm": 1}
"""Where a product's input stands among its tensors, if not first."""


@dataclass(frozen=True, slots=True)
class Hidden:
    """Of one block and micro-batch."""

    forward_s: float = 0.0
    """Of its collectives."""
    backward_s: float = 0.0
    more_forward_s: float = 0.0
    """Computing that is only there because of the halves; below 0 what kernels save of it."""
    more_backward_s: float = 0.0
    uncertain_s: float = 0.0
    """Seconds times relative error, of what kernels save."""
    again_s: float | None = None
    """Of the collectives of a forward that is made again; None: as in the forward."""
    between_forward_s: float = 0.0
    """Of what is hidden, on links between nodes: what else is on its way there waits for it."""
    between_backward_s: float = 0.0

    def unhidden(self) -> "Hidden":
        """The same where nothing hides."""
        again_s = None if self.again_s is None else min(0.0, self.again_s)
        return replace(
            self, forward_s=min(0.0, self.forward_s), backward_s=min(0.0, self.backward_s),
            again_s=again_s, between_forward_s=0.0, between_backward_s=0.0,
        )  # fmt: skip

    @property
    def remade_s(self) -> float:
        """Of the collectives of a forward that is made again."""
        return self.forward_s if self.again_s is None else self.again_s


NOTHING = Hidden()


def beside_weights(walk: Walk, rows: bool) -> Hidden:
    """Sums of gradients beside those of weights; with `rows`, halves of row-parallel products."""
    forward_s = backward_s = more_s = 0.0
    for index, move in enumerate(walk.trail):
        if not isinstance(move, PricedMove) or move.size == 1:
            continue
        if users := columns(walk, index, move):
            weights_s = sum(step.time.backward_weight_s for step in users)
            sent_s = walk.site.primitive_s(move.conversion.backward, move.nbytes, move.axis)
            steps = [_start(0, sent_s), run(weights_s, ""), _wait(0)]
            backward_s += sent_s + weights_s - play(steps, IDLE, slowing(walk, move))[0]
        elif rows and (maker := _row(walk, index, move)):
            halving_s = _halving_s(walk, maker)
            half_s = (maker.time.forward_s + halving_s) / 2
            sent_s = walk.site.primitive_s(Primitive.ALL_REDUCE, move.nbytes // 2, move.axis)
            steps = [run(half_s, ""), _start(0, sent_s), run(half_s, ""), _start(1, sent_s),
                     _wait(1)]  # fmt: skip
            whole_s = walk.site.primitive_s(Primitive.ALL_REDUCE, move.nbytes, move.axis)
            forward_s += 2 * half_s + whole_s - play(steps, IDLE, slowing(walk, move))[0]
            more_s += halving_s
    return Hidden(max(0.0, forward_s), max(0.0, backward_s), more_s)


def _halving_s(walk: Walk, step: PricedOp) -> float:
    """What a product takes more on two halves of its rows: its weight is read twice."""
    work, device = forward_work(step.local), walk.site.device
    weights = sum(operand.nbytes for operand in step.local.inputs if operand.is_param)
    half = replace(
        work, flops=work.flops / 2, nbytes=weights + (work.nbytes - weights) / 2,
        gemms=tuple(replace(gemm, m=ceil(gemm.m / 2)) for gemm in work.gemms),
    )  # fmt: skip
    return max(0.0, 2 * kernel_s(half, device) - kernel_s(work, device))


def columns(walk: Walk, index: int, move: PricedMove) -> list[PricedOp]:
    """The products that read a moved value, if nothing else does, and its gradient is sent."""
    if move.conversion.backward not in COMMUNICATES or not _trained(walk, move.name):
        return []
    users = [step for step in walk.trail[index + 1 :] if reads(step, move)]
    found = [step for step in users if isinstance(step, PricedOp) and _is_product(step, move.name)]
    return found if len(found) == len(users) else []


def _row(walk: Walk, index: int, move: PricedMove) -> PricedOp | None:
    """The product whose result is summed, if its gradient is not."""
    conversion = move.conversion
    if conversion.forward is not Primitive.ALL_REDUCE:
        return None
    if conversion.backward is not Primitive.IDENTITY:
        return None
    makers = [
        s for s in walk.trail[:index] if isinstance(s, PricedOp) and move.name in s.op.outputs
    ]
    return makers[0] if makers and op_name(makers[0].op.target) in _PRODUCTS else None


def reads(step: PricedOp | PricedMove, move: PricedMove) -> bool:
    """Tells whether a step reads a value as a conversion has made it."""
    if isinstance(step, PricedMove):
        return step.name == move.name and step.conversion.source == move.conversion.target != (
            move.conversion.source
        )
    strategy = step.strategies.get(move.axis)
    if strategy is None:
        return False
    wanted = zip(step.op.inputs, strategy.inputs, strict=False)
    return any(n == move.name and p == move.conversion.target for n, p in wanted)


def _is_product(step: PricedOp, name: str) -> bool:
    kind = op_name(step.op.target)
    return kind in _PRODUCTS and step.op.inputs[_INPUT.get(kind, 0)] == name


def _trained(walk: Walk, name: str) -> bool:
    return walk.facts.graph.tensors[name].requires_grad


def _start(job: int, seconds: float) -> Step:
    return Step(Do.START, seconds, job, "tensor")


def _wait(job: int) -> Step:
    return Step(Do.WAIT, 0.0, job, "tensor")


def slowing(walk: Walk, *moves: PricedMove) -> Overlap:
    """By how much computing and the links of the moves' axes slow each other down."""
    slowdowns = [
        level.link.slowdowns(move.nbytes) for move in moves for level in walk.site.levels[move.axis]
    ]
    return Overlap.worst(slowdowns)


# Halves.


class Computing(NamedTuple):
    """Seconds of a block's ops without its collectives, or of dispatching them if that is more."""

    forward_s: float
    backward_s: float


class WalkTurns(NamedTuple):
    """How many collectives, one after the other, come before each op and each conversion of a walk;
    -1 for a conversion for which nobody waits. To experts, their tokens have travelled then."""

    ops: tuple[int, ...]
    moves: tuple[int, ...]
    beside: tuple[bool, ...]
    """Of each op: nothing that is sent after its phase depends on it."""


Turn = list[Step]
"""What is done as far as a collective that is begun, or to the end."""


@dataclass(slots=True)
class PhaseTimes:
    """Seconds of each phase of a half, and of the collectives after it."""

    forward: list[float]
    backward: list[float]
    sent: list[float]
    sent_back: list[float]
    beside: list[float] = field(default_factory=list)
    """What can go on while that is sent."""
    beside_back: list[float] = field(default_factory=list)
    dispatch_s: float = 0.0
    dispatch_back_s: float = 0.0
    between: float = 0.0
    """Share of what is sent that goes between nodes."""
    between_back: float = 0.0

    @property
    def lists(self) -> tuple[list[float], ...]:
        """By phase."""
        return (self.forward, self.backward, self.sent, self.sent_back, self.beside,
                self.beside_back)  # fmt: skip

    @property
    def forward_s(self) -> float:
        """Of kernels."""
        return sum(self.forward) + sum(self.beside)

    @property
    def backward_s(self) -> float:
        """Of kernels."""
        return sum(self.backward) + sum(self.beside_back)

    @property
    def computing(self) -> Computing:
        return Computing(
            max(self.forward_s, self.dispatch_s), max(self.backward_s, self.dispatch_back_s)
        )


def can_halve(graph: Graph, block: Block, layout: BlockLayout) -> bool:
    """Whether a block may run on halves of its samples, as `codegen.passes.piped` decides."""
    own = sampled_axes(layout)
    entries, exits = (
        [halved_dim({axis: parse_placement(text) for axis, text in placed.items()}, own)
         for placed in border] for border in (layout.inputs, layout.outputs)
    )  # fmt: skip
    apart = -1 not in entries and all(dim not in (-1, None) for dim in exits)
    # What is drawn is drawn by the number of a sample, which halves of ranks do not know.
    known = not own or not _has_draws(graph, block)
    return apart and known and has_apart(graph, block)


def _has_draws(graph: Graph, block: Block) -> bool:
    from meshwright.ir.graph.draws import draws  # imports what traces, which few commands need

    return any(map(draws, graph.block_ops(block)))


def in_halves(walk: Walk, halves: Sequence[Walk]) -> Hidden:
    """The block on two halves of its samples, against the whole."""
    return chained([walk], [halves])[0]


def chained(walks: Sequence[Walk], halves: Sequence[Sequence[Walk]]) -> tuple[Hidden, ...]:
    """Per block of a run of them, on two halves that go on from one to the next."""
    # Equal blocks share their walks.
    single = {id(w): w for w in (*walks, *(half for pair in halves for half in pair))}
    known = {key: phases_of(walk) for key, walk in single.items()}
    whole = [known[id(walk)] for walk in walks]
    parts = [[known[id(half)] for half in pair] for pair in halves]
    slow = slowing(walks[0], *(move for walk in single.values() for move in moves_of(walk)))
    lines = [_in_a_row(line) for line in zip(*parts, strict=True)]
    forward_s = _hidden_s(lines, slow, back=False, sent_s=sum(sum(w.sent) for w in whole))
    backward_s = _hidden_s(lines, slow, back=True, sent_s=sum(sum(w.sent_back) for w in whole))
    sent = [sum(sum(w.sent) for w in whole), sum(sum(w.sent_back) for w in whole)]
    device = walks[0].site.device
    found = []
    for one, pair in zip(whole, parts, strict=True):
        own_s = forward_s * _share(sum(one.sent), sent[0])
        back_s = backward_s * _share(sum(one.sent_back), sent[1])
        more_s, more_back_s = in_halves_s(one.computing, [p.computing for p in pair], device)
        found.append(
            Hidden(
                own_s, back_s, more_s, more_back_s, between_forward_s=max(0.0, own_s) * one.between,
                between_backward_s=max(0.0, back_s) * one.between_back,
            )
        )  # fmt: skip
    return tuple(found)


def in_halves_s(
    whole: Computing, halves: Sequence[Computing], device: DeviceType
) -> tuple[float, float]:
    """What a block's computing takes more on halves of its samples, forward and back; below 0
    where it takes less."""
    times = 1.0 + (CPU_TURNS if device.kind == "cpu" else 0.0)
    return (
        sum([half.forward_s for half in halves]) * times - whole.forward_s,
        sum([half.backward_s for half in halves]) * times - whole.backward_s,
    )


def moves_of(walk: Walk) -> list[PricedMove]:
    """Conversions of what is not a parameter."""
    return [m for m in walk.trail if isinstance(m, PricedMove) and not _of_params(walk, m)]


def is_worth(walk: Walk, own: Collection[str] = ()) -> bool:
    """Whether a block waits for collectives of model axes, and for none of `dp`, and nothing but
    tokens is moved on the axes of `own`, whose ranks have samples of their own: as
    `codegen.passes.piped` decides."""
    moved = [
        (move, {move.conversion.forward, move.conversion.backward})
        for move in moves_of(walk)
        if move.size > 1
    ]
    if any(move.axis in own and kinds != {Primitive.IDENTITY} for move, kinds in moved):
        return False
    sent = [move for move, kinds in moved if not COMMUNICATES.isdisjoint(kinds)]
    return bool(sent or walk.travels) and all(move.axis != "dp" for move in sent)


def _hidden_s(lines: Sequence[PhaseTimes], slow: Overlap, *, back: bool, sent_s: float) -> float:
    """Of collectives that take `sent_s` where nothing is beside them."""
    took_s = play(tuple(_turns(lines[::-1] if back else lines, back=back)), IDLE, slow)[0]
    return sent_s - (took_s - sum(p.backward_s if back else p.forward_s for p in lines))


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _in_a_row(parts: Sequence[PhaseTimes]) -> PhaseTimes:
    """The phases of one block after those of another."""
    found = PhaseTimes([], [], [], [])
    for part in parts:
        lists = part.lists
        length = max(map(len, lists))
        for own, more in zip(found.lists, lists, strict=True):
            own += [*more, *[0.0] * (length - len(more))]
    return found


def _of_params(walk: Walk, move: PricedMove) -> bool:
    return walk.facts.graph.tensors[move.name].kind in (Kind.PARAMETER, Kind.BUFFER)


def turns_of(walk: Walk) -> WalkTurns:
    """Before which collectives the ops of a walk come: the same at any number of samples."""
    base: dict[str, int] = {}
    moved: dict[tuple[str, str, object], int] = {}
    ops, moves = [], []
    sends: list[tuple[str, int]] = []
    for entry in walk.trail:
        if isinstance(entry, PricedMove):
            moves.append(_turn_of_move(walk, entry, base, moved))
            sends += [(entry.name, moves[-1])] if moves[-1] >= 0 else []
            continue
        legs = len(walk.travels.get(entry.op.name, ()))
        ops.append(_turn_of_op(entry, base, moved, legs))
        if legs:
            sends += [(name, ops[-1] - legs) for name in entry.op.inputs[:3]]
            sends += [(name, ops[-1]) for name in entry.op.outputs]
    ahead = _ahead(walk, ops, sends)
    last = max(ops, default=0)
    sending = {turn for _, turn in sends}
    beside = (n not in ahead and turn in sending and 0 <= turn <= last
              for n, turn in enumerate(ops))  # fmt: skip
    return WalkTurns(tuple(ops), tuple(moves), tuple(beside))


def _ahead(walk: Walk, turns: Sequence[int], sends: Sequence[tuple[str, int]]) -> set[int]:
    """The ops that what is sent after their own phase depends on."""
    ops = [entry.op for entry in walk.trail if isinstance(entry, PricedOp)]
    maker = {name: number for number, op in enumerate(ops) for name in op.outputs if name}
    found: set[int] = set()
    stack = [(maker[name], turn) for name, turn in sends if name in maker]
    while stack:
        number, turn = stack.pop()
        if turns[number] == turn and number not in found:
            found.add(number)
            stack += [(maker[name], turn) for name in ops[number].inputs if name in maker]
    return found


def _turn_of_move(
    walk: Walk, move: PricedMove, base: dict[str, int], moved: dict[tuple[str, str, object], int]
) -> int:
    sends = not COMMUNICATES.isdisjoint((move.conversion.forward, move.conversion.backward))
    if not sends or _of_params(walk, move):
        return -1
    source = max([base.get(move.name, 0), *(n for key, n in moved.items() if key[0] == move.name
                                            and key[1] != move.axis)])  # fmt: skip
    moved[move.name, move.axis, move.conversion.target] = source + 1
    return source


def _turn_of_op(
    step: PricedOp, base: dict[str, int], moved: dict[tuple[str, str, object], int], legs: int
) -> int:
    """`legs`: on how many axes its tokens travel, out before it and home after it."""
    phase = 0
    for index, name in enumerate(step.op.inputs):
        phase = max(phase, base.get(name, 0))
        for axis, strategy in step.strategies.items():
            if index < len(strategy.inputs):
                phase = max(phase, moved.get((name, axis, strategy.inputs[index]), 0))
    base.update(dict.fromkeys(step.op.outputs, phase + 2 * legs))
    return phase + legs


def computing(times: Sequence[OpTime], turns: WalkTurns) -> Computing:
    """Of the ops of a walk."""
    return _computed(times, turns).computing


def _computed(times: Sequence[OpTime], turns: WalkTurns) -> PhaseTimes:
    """Phases without collectives."""
    count = 1 + max(turns.ops, default=-1)
    forward, backward, beside, beside_back = ([0.0] * count for _ in range(4))
    found = PhaseTimes(forward, backward, [], [], beside, beside_back)
    for time, phase, is_beside in zip(times, turns.ops, turns.beside, strict=True):
        (beside if is_beside else forward)[phase] += time.forward_s
        back_s = time.backward_input_s + time.backward_weight_s
        (beside_back if is_beside else backward)[phase] += back_s
        found.dispatch_s += time.forward_dispatch_s
        found.dispatch_back_s += time.input_dispatch_s + time.weight_dispatch_s
    return found


def phases_of(walk: Walk) -> PhaseTimes:
    """Those of a block on its samples."""
    turns = turns_of(walk)
    found = _computed(walk.times, turns)
    steps = [entry for entry in walk.trail if isinstance(entry, PricedOp)]
    for step, turn in zip(steps, turns.ops, strict=True):
        if step.op.name in walk.travels:
            # Gradients of experts' weights are made while those of tokens are on their way home.
            found.backward[turn] -= step.time.backward_weight_s
            found.beside_back[turn - 1] += step.time.backward_weight_s
    sent = [*_conversions(walk, turns), *_legs(walk, turns)]
    for back, seconds in ((False, found.sent), (True, found.sent_back)):
        for one in sent:
            if one.back == back:
                _at(seconds, one.phase, one.seconds)
    found.between, found.between_back = (
        _share(
            sum(s.seconds for s in sent if s.back == back and len(walk.site.levels[s.axis]) > 1),
            sum(s.seconds for s in sent if s.back == back),
        )
        for back in (False, True)
    )
    return found


class _Sent(NamedTuple):
    """What goes after a phase of a half."""

    axis: str
    phase: int
    seconds: float
    back: bool


def _conversions(walk: Walk, turns: WalkTurns) -> Iterator[_Sent]:
    moves = [entry for entry in walk.trail if isinstance(entry, PricedMove)]
    price = walk.site.primitive_s
    for move, source in zip(moves, turns.moves, strict=True):
        if source >= 0:
            seconds = price(move.conversion.forward, move.nbytes, move.axis)
            yield _Sent(move.axis, source, seconds, back=False)
            if _trained(walk, move.name):
                back_s = price(move.conversion.backward, move.nbytes, move.axis)
                yield _Sent(move.axis, source, back_s, back=True)


def _legs(walk: Walk, turns: WalkTurns) -> Iterator[_Sent]:
    """What tokens take to experts, and home: a leg for each axis, the outermost first and last."""
    ops = [entry.op.name for entry in walk.trail if isinstance(entry, PricedOp)]
    for name, turn in zip(ops, turns.ops, strict=True):
        legs = walk.travels.get(name, [])
        for (number, sent), back in product(enumerate(legs), (False, True)):
            ends: tuple[Leg, Leg] = ("home", "out") if back else ("out", "home")
            out_s, home_s = (sent.leg_s(walk.site, leg, back=back) for leg in ends)
            yield _Sent(sent.axis, turn - len(legs) + number, out_s, back)
            yield _Sent(sent.axis, turn + len(legs) - 1 - number, home_s, back)


def _at(seconds: list[float], phase: int, more_s: float) -> None:
    seconds.extend([0.0] * (phase + 1 - len(seconds)))
    seconds[phase] += more_s


def _turns(parts: Sequence[PhaseTimes], *, back: bool) -> Iterator[Step]:
    """Both halves, each as far as its next collective, in turn."""
    for turn in in_turn([half_steps(part, 10**6 * n, back) for n, part in enumerate(parts)]):
        yield from turn


def in_turn(lines: Iterable[Iterable[Turn]]) -> Iterator[Turn]:
    """Turns of several, one of each at a time as long as there are any."""
    left = [iter(line) for line in lines]
    while left:
        for own in list(left):
            turn = next(own, None)
            if turn is None:
                left.remove(own)
            else:
                yield turn


def half_steps(part: PhaseTimes, job: int, back: bool) -> Iterator[Turn]:
    """What it does, as far as each collective that it begins, and then to its end."""
    if back:
        lists = part.backward, part.sent_back, part.beside_back
    else:
        lists = part.forward, part.sent, part.beside
    phases = list(zip_longest(*lists, fillvalue=0.0))
    steps: list[Step] = []
    for number, (seconds, sent_s, beside_s) in enumerate(phases[::-1] if back else phases, job):
        if not back:
            steps.append(run(seconds, ""))
        if sent_s:
            yield [*steps, _start(number, sent_s)]
            steps = [run(beside_s, ""), _wait(number)]
        else:
            steps.append(run(beside_s, ""))
        if back:
            steps.append(run(seconds, ""))
    yield steps
