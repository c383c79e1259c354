"""Prices a run of ops at one rank's local shapes: their time, conversions, what is saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import NamedTuple

from meshwright.costmodel.block.clock import BlockSums, Tape
from meshwright.costmodel.block.reprice import MoveStep, OpStep, PricedInput, SavedKey, Target
from meshwright.costmodel.block.sent import NEEDED, InnerSent, MoveSent, Needed
from meshwright.costmodel.block.site import USUAL
from meshwright.costmodel.block.site import StageSite as StageSite
from meshwright.costmodel.block.value_placements import GraphFacts as GraphFacts
from meshwright.costmodel.block.value_placements import Trace
from meshwright.costmodel.ops.compute import (
    OpTime,
    gradient_sum,
    kept_inside_bytes,
    moving,
    op_time,
)
from meshwright.costmodel.ops.expert_passes import as_multiplied_by, passes_beside
from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.costmodel.ops.inner_work import inner_work
from meshwright.costmodel.ops.kernel_work import gradients_inside, inside_bytes
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.local_values import LocalValues, Shape
from meshwright.costmodel.ops.local_values import Where as Where
from meshwright.costmodel.ops.narrow_tokens import casting
from meshwright.costmodel.ops.routing import (
    RoutedTokens,
    axes_outside,
    is_routed,
    on_busiest,
    parts_outside,
    routed,
)
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Kind, Op
from meshwright.ir.graph.inner_traffic import inner_passes, inner_traffic, kept_apart
from meshwright.ir.graph.op_facts import CallHalves, CallPart
from meshwright.ir.graph.routed_graph import evenly_routed
from meshwright.ir.graph.rules import input_shapes
from meshwright.ir.graph.temporaries import is_sum, temporaries
from meshwright.ir.layout.conversions import Conversion, Primitive
from meshwright.ir.layout.layout import R, Replicate, Shard, Strategy
from meshwright.ir.layout.op_messages import Inner, LocalOperand
from meshwright.ir.ops import facts
from meshwright.ir.precision import product_bytes


@dataclass(frozen=True, slots=True)
class PricedOp:
    """An op as it was priced."""

    op: Op
    local: LocalOp
    strategies: Mapping[str, Strategy]
    time: OpTime


@dataclass(frozen=True, slots=True)
class PricedMove:
    """A conversion as it was priced."""

    name: str
    axis: str
    conversion: Conversion
    size: int
    """Ranks of the axis."""
    nbytes: int
    """Of the value as if whole on the axis."""


class OpRoom(NamedTuple):
    """Bytes that the backward of an op has at once."""

    beside: int = 0
    """Beside its operands, results and their gradients."""
    least: int = 0
    """In all, at least."""
    before: int = 0
    """As `beside`, before there are gradients of its parameters; 0: never more."""
    ahead: int = 0
    """Inside of its forward, beside all that this keeps."""
    alone: int = 0
    """Inside of its forward, beside its operands and results."""
    adding: int | None = None
    """As `beside`, with gradients of its parameters of which each is added to another as it is
    made; None: all are made before."""
    halves: CallHalves | None = None
    """What it has where its backward is split; None: as where it is not."""
    gathered: int = 0
    """Of `beside`, gradients of parameters that were gathered for it, as they are before they are
    scattered again."""


@dataclass
class Walk(Trace):
    """Prices ops one after the other, keeping track of where values lie."""

    saved: dict[SavedKey, int] = field(default_factory=dict)
    apart: dict[tuple[str, str], int] = field(default_factory=dict)
    """(op, memory of an operand) -> bytes of the copy that the op keeps in its place."""
    clock: BlockSums = field(default_factory=BlockSums)
    tape: Tape = field(default_factory=list)
    """What the clock was told, in order: the same wherever links are others."""
    workspace: int = 0
    to_end: int = 0
    """Of it, in the forward of ops that have something inside until they end."""
    in_backward: int = 0
    """The same with what is there inside backwards alone."""
    logits: int = 0
    """Most that a loss reads."""
    turned: dict[str, int] = field(default_factory=dict)
    """What a recurrent layer reads as it lies -> bytes of the copy that it keeps of what lies
    otherwise."""
    rooms: list[OpRoom] = field(default_factory=list)
    """Of each op."""
    flops: float = 0.0
    trail: list["PricedOp | PricedMove"] = field(default_factory=list)
    """All ops and conversions that were priced, in order."""
    sent: list[tuple[str, Inner]] = field(default_factory=list)
    """Axis, and messages of ops on it."""
    regathered: dict[str, int] = field(default_factory=dict)
    """Values that the stack gathers again in the backward, and over how many ranks."""
    routes: list[RoutedTokens] = field(default_factory=list)
    """Tokens that travel, priced as torch's operators route them."""
    travels: dict[str, list[InnerSent]] = field(default_factory=dict)
    """Op -> what it sends where its tokens travel, on the outermost axis first."""

    def communicates(self, axis: str) -> bool:
        """Whether anything has moved, or is cut or padded, on an axis."""
        moved = (
            {entry.conversion.forward, entry.conversion.backward} != {Primitive.IDENTITY}
            for entry in self.trail
            if isinstance(entry, PricedMove) and entry.axis == axis
        )
        return any(moved) or any(on == axis for on, _ in self.sent)

    @property
    def times(self) -> list[OpTime]:
        """Of its ops, in order."""
        return [entry.time for entry in self.trail if isinstance(entry, PricedOp)]

    def again(self, site: StageSite, samples: int) -> "Walk":
        """The same walk where each replica has so many samples."""
        new = Walk(
            self.facts, site, self.timer, self.placed, self.converted, self.storage, self.used,
            self.script,
        )  # fmt: skip
        new.local = LocalValues.of(self.local.values, site, samples)
        for step in self.script:
            if isinstance(step, MoveStep):
                new._pay(step)
            else:
                new._price(step)
        return new

    def shape(self, name: str, where: Where) -> Shape:
        return self.local.shapes[self.local.number(name, where)]

    def nbytes(self, name: str, where: Where, dtype: str = "") -> int:
        width = DTYPE_BYTES[dtype or self.facts.dtypes[name]]
        return self.local.elements[self.local.number(name, where)] * width

    def _pay(self, step: MoveStep) -> None:
        """The price of a conversion, for one micro-batch."""
        axis, conversion, line = step.axis, step.conversion, self.site.axes[step.axis]
        whole = self.local.elements[step.whole] * DTYPE_BYTES[self.facts.dtypes[step.name]]
        if line.shares and step.splits:
            whole = whole * sum(line.shares) // line.whole
        self.trail.append(PricedMove(step.name, axis, conversion, line.size, whole))
        if self.site.run_as.regathers and conversion.forward is Primitive.ALL_GATHER:
            self.regathered[step.name] = line.size
        self._send(MoveSent(axis, whole, conversion, step.has_gradient))

    def _send(self, sent: MoveSent | InnerSent | Needed) -> None:
        self.tape.append(sent)
        sent.tell(self.clock, self.site)

    def _compute(self, time: OpTime) -> None:
        self.tape.append(time)
        self.clock.add(time)

    def _price(self, step: OpStep) -> None:
        share, elements = self._share(step), self.local.elements
        kept = self._inside_kept(step, share)
        local = self._local(step, share, kept)
        multiplied = as_multiplied_by(local, step.op, self.site.run_as, self.facts.precision)
        time = op_time(multiplied, self.site.device, self.timer)
        if step.op.routing and step.op.routing.source and step.busiest:
            time = on_busiest(time, step.busiest, step.op.routing)
        if self.site.run_as.fused_softmax and step.op.name in self.facts.before_softmax:
            time = OpTime(0.0, 0.0, 0.0, time.source, time.band)
        time = self._loss_of_stack(local, time)
        self.trail.append(PricedOp(step.op, local, step.strategies, time))
        stops = self.site.run_as.stops_early
        if stops and step.kept:
            self._send(NEEDED)
        self._compute(time)
        if passes := passes_beside(multiplied, time, self.site.device, self.site.run_as):
            self._compute(passes)
        ranks = {axis: self.site.axes[axis].size for axis in step.strategies}
        if not any([is_routed(step.op, s, ranks[axis]) for axis, s in step.strategies.items()]):
            self._cast_tokens(step, local, None)
        if step.sends:
            self._inside(step, local, time)
        for index in step.read_again:
            self._compute(gradient_sum(local.inputs[index].nbytes, self.site.device))
        if stops and self._keeps_results(step):
            self._send(NEEDED)
        self.flops += local.flops
        beside, least, later, before, ahead, own, alone = 0, 0, 0, 0, 0, None, 0
        # In backward the gradients of gathered parameters take the same room.
        gathered = sum([elements[value] * width for value, width in step.gathered])
        if step.op_class is not OpClass.VIEW:
            operands = self._operand_bytes(step, local)
            beside = inside_bytes(local, at_once=True)
            early, late = self._inside_backward(step, local, kept)
            own = self._own_bytes(step, local)
            beside += own[1] if own else 0
            least = self._loss_bytes(step, local)
            at_once = operands + gathered + beside + max(early, late) + local.output_bytes
            ahead = self._inside_forward(step, local)
            alone = gathered + beside + ahead
            self.workspace = max(self.workspace, at_once + ahead, least)
            later = self._temporaries(step, local) + late
            before = self._temporaries_before(step, local) + early
            later += gathered
            in_backward = operands + beside + max(later, before) + local.output_bytes
            self.in_backward = max(self.in_backward, in_backward, least)
        beside_all = facts(step.op.target).inside_to_end or self._shared(step) is not None
        inside = ahead * beside_all
        adding, halves = self._in_pieces(step, local)
        self.rooms.append(OpRoom(
            beside + later, least, before and beside + before, inside, alone, adding, halves,
            gathered,
        ))  # fmt: skip
        self._save(step, local, kept, own and own[0])
        if ahead and facts(step.op.target).inside_to_end:  # beside all that is kept so far
            there = sum(self.saved.values()) + self._unsaved_results(step)
            self.workspace = max(self.workspace, there + ahead)
            self.to_end = max(self.to_end, there + ahead)

    def _share(self, step: OpStep) -> float:
        """What this rank's micro-batch has of the op's work."""
        found = 1.0
        for value, dim, size in step.parts:
            found *= self.local.shapes[value][dim] / size
        return found

    def _operand_bytes(self, step: OpStep, local: LocalOp) -> int:
        """Of what an op reads, what counts nowhere else: parameters are there at any time, and so
        is the batch, where the op reads it as it was given."""
        found, (places, _) = 0, step.places
        for name, where, operand, given in zip(
            step.op.inputs, places, step.inputs, local.inputs, strict=True
        ):
            is_moved = self.normal(where) != self.normal(self.placed.get(name, {}))
            is_batch = self._tensor(name).kind is Kind.INPUT and not (is_moved or operand.is_cast)
            found += given.nbytes * (not given.is_param and not is_batch)
        return found

    def _own_bytes(self, step: OpStep, local: LocalOp) -> tuple[int, int] | None:
        """What our way of computing the op keeps in place of its results, and has at once beside
        that; None where it is torch's."""
        count = facts(step.op.target).own_bytes
        if count is None or not step.has_gradient or not self.site.run_as.memory.draws_again:
            return None
        shapes = [given.shape for given in local.inputs]
        return count(step.op, shapes, product_bytes(local.dtype), self.site.device.kind)

    def _inside_backward(self, step: OpStep, local: LocalOp, kept: int) -> tuple[int, int]:
        """What the backward of experts makes beside gradients of its operands: before it makes
        those of weights, and as it does. Where tokens travel, a row of them, and of gradients of
        results, for each that has come is there, too."""
        op, travel = step.op, step.op.name in self.travels
        count = facts(op.target).backward_inside
        if count is None or not step.has_gradient:
            return 0, 0
        width, shapes = product_bytes(local.dtype), [i.shape for i in local.inputs]
        come = self.apart.get((op.name, self.facts.roots[op.inputs[0]]), 0) * travel
        own_width = step.inputs[0].own_width
        if come:
            rows = come // own_width // shapes[0][1]
            shapes[:2] = (rows, shapes[0][1]), (rows, shapes[1][1])
        if self.site.run_as.fused_experts:  # gradients of the first product and of the gate
            first, last, *more = (prod(shape) for shape in shapes if len(shape) == 3)
            early = late = round(kept * (1 + last / (first + sum(more))))
        else:
            some = travel or shapes[3][0] != self.facts.graph.tensors[op.inputs[3]].shape[0]
            casts = own_width > width
            early, late = count(op, shapes, kept, width, self.site.device.kind, some, casts)
        # The gradient of this rank's own tokens comes when all that is over.
        beside = come and 2 * come - local.inputs[0].nbytes
        return beside + early, beside + late

    def _inside_forward(self, step: OpStep, local: LocalOp) -> int:
        """Of an operator that torch's forward writes as several kernels."""
        if shared := self._shared(step):
            return shared[0]
        count = facts(local.target).forward_inside
        if count is None or self.site.run_as is not USUAL:
            return 0
        return count(step.op, self._part(step, local))

    def _part(self, step: OpStep, local: LocalOp) -> CallPart:
        return CallPart(
            tuple([given.shape for given in local.inputs]),
            tuple([given.requires_grad for given in step.inputs]),
            step.inputs[0].width,
            local.output_bytes,
            self.site.device.kind,
            max([given.own_width for given in step.inputs if given.is_param], default=0),
            step.dtype,
            round(step.op.saved_extra_bytes * self._share(step)),
        )

    def _temporaries(self, step: OpStep, local: LocalOp) -> int:
        """Of an operator as torch has it; other stacks have kernels of their own for some."""
        if self.site.run_as is not USUAL or not step.has_gradient:
            return 0
        elements, width = self.local.elements, product_bytes(local.dtype)
        if shared := self._shared(step):
            return shared[1]
        largest = max(elements[value] for value, _ in step.outputs)
        wanted = [given.requires_grad for given in step.inputs]
        if count := facts(step.op.target).temporaries:
            return count(step.op, self._part(step, local))
        spread = any(i.requires_grad and elements[i.value] < largest for i in step.inputs)
        values, flags = temporaries(step.op.target, wanted, spread)
        wide = self._cast_back_bytes(step)
        if not values and not flags:
            return wide
        return wide + max(largest, elements[step.inputs[0].value]) * (values * width + flags)

    def _cast_back_bytes(self, step: OpStep) -> int:
        """Gradients of operands that are narrower than what the op makes of them are as wide as
        that, until all of the op's are made and they are cast; a sum hands on what it is given."""
        ((value, width), *_) = step.outputs
        if step.op_class is not OpClass.ELEMENTWISE or len(step.inputs) < 2 or is_sum(step.op):
            return 0
        narrow = [i for i in step.inputs if i.requires_grad and i.width < width and not i.is_cast]
        return len(narrow) * self.local.elements[value] * width

    def _unsaved_results(self, step: OpStep) -> int:
        """Bytes of what the op makes and nothing keeps so far."""
        kept = {(name, target) for name, _, target in self.saved}
        return sum(
            [
                self.local.elements[value] * width
                for name, (value, width) in zip(
                    [name for name in step.op.outputs if name], step.outputs, strict=True
                )
                if self.stored(name, self.placed[name]) not in kept
            ]
        )

    def _temporaries_before(self, step: OpStep, local: LocalOp) -> int:
        """Of these, what there is before gradients of parameters; 0: never more."""
        count = facts(step.op.target).temporaries_before
        if count is None or self.site.run_as is not USUAL or not step.has_gradient:
            return 0
        return count(step.op, self._part(step, local))

    def _in_pieces(self, step: OpStep, local: LocalOp) -> tuple[int | None, CallHalves | None]:
        """`OpRoom.adding` and `halves` of torch's own backward of the op."""
        known = facts(step.op.target)
        if self.site.run_as is not USUAL or not step.has_gradient:
            return None, None
        adding = known.temporaries_adding
        part = self._part(step, local) if adding or known.halves else None
        return (
            adding(step.op, part) if adding and part else None,
            known.halves(step.op, part) if known.halves and part else None,
        )

    def _shared(self, step: OpStep) -> tuple[int, int] | None:
        """Bytes that our way of computing the op has inside its forward, and inside its backward,
        where ranks share the batch that its results depend on; None: it is torch's."""
        count = facts(step.op.target).shared
        if count is None or not step.has_gradient or self.site.run_as is not USUAL:
            return None
        if dict(step.op.args).get("training") is not True:
            return None
        places = {axis: strategy.inputs[0] for axis, strategy in step.strategies.items()}
        if not any(
            isinstance(place, Shard) and place.dim != 1 and self.site.axes[axis].size > 1
            for axis, place in places.items()
        ):
            return None
        shapes = tuple([self.local.shapes[given.value] for given in step.inputs])
        wanted = tuple([given.requires_grad for given in step.inputs])
        width = step.inputs[0].width
        return count(step.op, CallPart(shapes, wanted, width, 0, self.site.device.kind))

    def _loss_of_stack(self, local: LocalOp, time: OpTime) -> OpTime:
        """With what a stack's own loss moves beside PyTorch's; other ops as they are."""
        more = self.site.run_as.loss_bytes
        if not more or not gradients_inside(local):
            return time
        logits = local.inputs[0].nbytes // DTYPE_BYTES[local.dtype]
        device = self.site.device
        curve = curve_of(OpClass.ELEMENTWISE, device)
        seconds = memory_s(more * logits, curve, device)
        return replace(time, forward_s=time.forward_s + seconds)

    def _loss_bytes(self, step: OpStep, local: LocalOp) -> int:
        """Gradients that are there at once in the backward of a loss; 0 for other ops."""
        found, of_stack = gradients_inside(local), self.site.run_as.memory.split_loss_bytes
        if not found:
            return 0
        logits = local.inputs[0].nbytes // DTYPE_BYTES[local.dtype]
        self.logits = max(self.logits, logits)
        if not of_stack:
            return found
        placed = [strategy.inputs[0] for strategy in step.strategies.values()]
        if any([isinstance(p, Shard) and p.dim == 1 for p in placed]):
            return max(found, of_stack * logits)
        return found

    def _inside(self, step: OpStep, local: LocalOp, time: OpTime) -> None:
        """Price what the op sends by itself. What it sends while it computes takes the longer."""
        op, places = step.op, step.places
        for axis, strategy in step.strategies.items():
            ranks = self.site.axes[axis].size
            outside: tuple[str, ...] = ()
            if is_routed(op, strategy, ranks):
                outside = axes_outside(step.strategies, axis)
                routing = op.routing or evenly_routed(op, self.facts.graph)
                tokens = RoutedTokens(op.key, local, routing, ranks, parts_outside(strategy))
                self.routes.append(tokens)
                self._compute(routed(tokens, self.site.device, False))
                self._cast_tokens(step, local, tokens.sent)
            inputs = self._operands(op, op.inputs, places[0], axis)
            outputs = self._operands(op, op.outputs, places[1], axis)
            found = inner_traffic(op, strategy, ranks, inputs, outputs)
            passes = inner_passes(op, strategy, ranks, inputs, outputs)
            if passes and self.site.run_as.packs_rings:
                self._compute(moving(passes, local.differentiable, self.site.device))
            for i, nbytes in kept_apart(op, strategy, ranks, inputs, outputs).items():
                key = op.name, self.facts.roots[op.inputs[i]]
                self.apart[key] = max(nbytes, self.apart.get(key, 0))
            forward = tuple(m for m in found if not m.backward)
            backward = tuple(m for m in found if m.backward and self._has_gradient(op))
            self.sent += [(axis, message) for message in (*forward, *backward)]
            most = max((m.nbytes for m in found), default=0)
            sent = InnerSent(axis, most, forward, backward, time, outside)
            self._send(sent)
            if is_routed(op, strategy, ranks):
                self.travels.setdefault(op.name, []).append(sent)
                self.travels[op.name].sort(key=lambda one: len(one.outside))

    def _cast_tokens(self, step: OpStep, local: LocalOp, sent: float | None) -> None:
        if time := casting(step.op, local, self.site.device, sent):
            self._compute(time)

    def _operands(
        self, op: Op, names: Sequence[str], places: Sequence[Where], axis: str
    ) -> list[LocalOperand]:
        """Values as they would be on the rank if they were whole on the axis."""
        whole = [{**where, axis: R} for where in places]
        return [
            LocalOperand(self.shape(n, w), self.nbytes(n, w, self.facts.read_as(op, n)))
            if n else LocalOperand((), 0)
            for n, w in zip(names, whole, strict=True)
        ]  # fmt: skip

    def _local(self, step: OpStep, share: float, kept: int) -> LocalOp:
        op, busiest = step.op, step.busiest
        shapes, elements = self.local.shapes, self.local.elements
        backward = sum([elements[value] * width for value, width in step.backward])
        return LocalOp(
            op.target,
            step.op_class,
            step.dtype,
            op.flops * share * self._seen(step),
            tuple([self._local_input(operand) for operand in step.inputs]),
            tuple([shapes[value] for value, _ in step.outputs]),
            sum([elements[value] * width for value, width in step.outputs]),
            step.has_gradient,
            backward + kept,
            step.is_causal and not busiest,
            step.channels_last,
            step.comes_cast,
            inner_work(op, self.facts.graph, share),
        )

    def _seen(self, step: OpStep) -> float:
        """What the busiest rank does over the mean; of causal attention over all scores, of which
        queries see half in the mean."""
        if not step.busiest:
            return 1.0
        if not step.is_causal:
            return step.busiest
        return 0.5 if self.site.run_as.balanced else step.busiest / 2

    def _local_input(self, operand: PricedInput) -> LocalInput:
        shape, elements = self.local.shapes[operand.value], self.local.elements[operand.value]
        nbytes = elements * operand.width
        return LocalInput(
            shape, nbytes, operand.requires_grad, operand.is_param,
            elements * operand.own_width + nbytes if operand.is_cast else 0, operand.channels_last,
        )  # fmt: skip

    def _parts_kept(self, memory: tuple[str, Target]) -> int:
        """In how many parts a value lies over ranks until it is gathered again."""
        parts = self.regathered.get(memory[0], 1) if self.regathered else 1
        return parts if any(isinstance(place, Replicate) for place in memory[1]) else 1

    def _inside_bytes(self, op: Op) -> int:
        draws_again, tensors = self.site.run_as.memory.draws_again, self.facts.graph.tensors
        found = kept_inside_bytes(op, tensors, self.site.device, draws_again)
        narrows, narrow = facts(op.target).narrows, self.facts.precision.autocast
        if narrows and found == op.saved_extra_bytes and self.facts.is_narrow(op):
            width = DTYPE_BYTES[tensors[op.inputs[0]].dtype]
            follow = narrows(input_shapes(op, self.facts.graph), found, width)
            found += follow * DTYPE_BYTES[narrow] // width - follow
        if not (found and draws_again and facts(op.target).redrawn):
            return found
        # Masks on CPUs are as wide as what they multiply, which autocast may have made narrower.
        made = op.outputs[0]
        return found * DTYPE_BYTES[self.facts.dtypes[made]] // DTYPE_BYTES[tensors[made].dtype]

    def _inside_kept(self, step: OpStep, share: float) -> int:
        """Of these, the busiest rank's, which has `share` of what is split."""
        inside, busiest = self._inside_bytes(step.op), step.busiest
        if not inside:
            return 0
        if count := facts(step.op.target).kept:
            shapes = input_shapes(step.op, self.facts.graph)
            split = self.site.split_of(step.strategies)
            most = count(step.op, shapes, split, busiest, self.site.device.kind)
        else:
            most = 1.0 if step.is_causal else busiest or 1.0
        return round(inside * share * most)

    def _by_cpu(self, step: OpStep) -> int | None:
        """Bytes that torch's kernel on CPUs keeps inside, where no trace could ask it."""
        count = facts(step.op.target).cpu_keeps
        if count is None or not step.has_gradient or self.site.device.kind != "cpu":
            return None
        found = count(step.op, [self.local.shapes[i.value] for i in step.inputs], step.dtype)
        name, (places, _) = step.op.inputs[0], step.places
        stays = self.normal(places[0]) == self.normal(self.placed.get(name, {}))
        if found is None or not stays or name not in self.facts.turned:
            return found
        if (turns := facts(step.op.target).turned) is None or not turns(step.op):
            return found
        # It is turned for the kernel, and lies so already: no copy is made of it.
        copy = self.local.elements[step.inputs[0].value] * DTYPE_BYTES[step.dtype]
        self.turned[name] = copy
        return found - copy

    def _cast_inside(self, step: OpStep, local: LocalOp, inside: int) -> int:
        """Of `inside` bytes that the op keeps as it was traced, those that it keeps as it runs."""
        count = facts(step.op.target).cpu_casts
        if count is None or self.site.device.kind != "cpu" or not self.facts.is_narrow(step.op):
            return inside
        return count(step.op, self._part(step, local), inside)

    def _widened(self, step: OpStep, local: LocalOp) -> int:
        """Bytes of the copy in float32 that the op keeps of a value which was wide as it was traced
        and is not."""
        if not facts(step.op.target).widens or self.site.device.kind != "cpu":
            return 0
        traced = DTYPE_BYTES[self._tensor(step.op.inputs[0]).dtype]
        return self.local.elements[step.inputs[0].value] * traced * (step.inputs[0].width < traced)

    def _save_result(self, op: Op) -> None:
        """An op keeps its first result."""
        name = op.outputs[0]
        storage, target = self.stored(name, self.placed[name])
        dtype = self.facts.dtypes[storage]
        self.saved[storage, dtype, target] = self.nbytes(storage, self.placed[name])

    def _keeps_results(self, step: OpStep) -> bool:
        """Whether the backward of an op needs what it makes, not only what it reads."""
        if not step.has_gradient:
            return False
        roots = self.facts.roots
        read = {roots[name] for name in step.op.inputs if name}
        made = any(roots[kept.name] not in read for kept in step.kept)
        return made or self._inside_bytes(step.op) > 0

    def _save(self, step: OpStep, local: LocalOp, inside: int, own: int | None) -> None:
        """Note what autograd keeps of this op, each storage once; `inside`: bytes that it keeps
        inside of it; `own`: bytes of its own in place of its results."""
        op = step.op
        widened = self._widened(step, local)
        for kept in step.kept:
            if own is not None and kept.name in op.outputs:
                continue
            if widened and kept.name == op.inputs[0]:
                continue
            if nbytes := self.apart.get((op.name, self.facts.roots[kept.name])):
                self.saved[op.name, kept.name, ()] = nbytes
            elif kept.key:
                nbytes = self.local.elements[kept.value] * kept.width
                self.saved[kept.key] = nbytes // self._parts_kept(kept.memory)
        by_cpu = self._by_cpu(step)
        if own is not None:
            self.saved[op.name, "extra", ()] = own
        elif by_cpu is not None:
            self.saved[op.name, "extra", ()] = by_cpu
            self._save_result(op)
        elif (inside or widened) and step.has_gradient:
            self.saved[op.name, "extra", ()] = self._cast_inside(step, local, inside) + widened
        if step.op_class is OpClass.ATTENTION and self.site.run_as.memory.keeps_packed:
            query, keys, values = [self._local_input(x) for x in step.inputs[:3]]
            if step.has_gradient and query.nbytes == keys.nbytes:
                self.saved[op.name, "packed", ()] = keys.nbytes + values.nbytes
