"""Walks ops at one rank's local shapes: their time, the conversions between them, what is saved."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from meshwright.costmodel.clock import Clock
from meshwright.costmodel.comm import collective_band
from meshwright.costmodel.compute import OpTime, OpTimer, gradient_sum, op_time
from meshwright.costmodel.dtypes import NORMS_AS_GIVEN, is_float, runtime_dtypes, storage_roots
from meshwright.costmodel.local_op import LocalInput, LocalOp
from meshwright.costmodel.op_classes import COMPUTE, classify, op_name
from meshwright.costmodel.site import Site as Site
from meshwright.ir.conversions import Conversion, Primitive
from meshwright.ir.device import OpClass
from meshwright.ir.graph import DTYPE_BYTES, Graph, Kind, Op, Tensor
from meshwright.ir.inside import Inner, Operand, inner_traffic, kept_apart, sends
from meshwright.ir.layout import Placement, R, Replicate, Shard, Strategy, local_shape
from meshwright.ir.paths import path


@dataclass(frozen=True)
class GraphFacts:
    """What the costs of all blocks of a graph share under one precision."""

    graph: Graph
    precision: str
    dtypes: Mapping[str, str]
    roots: Mapping[str, str]
    prelude_values: frozenset[str]

    @classmethod
    def of(cls, graph: Graph, precision: str) -> "GraphFacts":
        values = frozenset(out for op in graph.prelude_ops for out in op.outputs)
        dtypes = runtime_dtypes(graph, precision)
        return cls(graph, precision, dtypes, storage_roots(graph), values)


Where = dict[str, Placement]
_Target = tuple[Placement, ...]
_Storage = tuple[str, _Target]
"""A value that has its own memory, and its placement."""
SavedKey = tuple[str, str, _Target]
"""A value that is kept, its dtype and its placement."""


@dataclass(frozen=True, slots=True)
class Step:
    """An op as it was priced."""

    op: Op
    local: LocalOp
    strategies: Mapping[str, Strategy]


@dataclass(frozen=True, slots=True)
class Move:
    """A conversion as it was priced."""

    name: str
    axis: str
    conversion: Conversion
    size: int
    """Ranks of the axis."""
    nbytes: int
    """Of the value as if whole on the axis."""


@dataclass
class Walk:
    """Prices ops one after the other, keeping track of where values lie."""

    facts: GraphFacts
    site: Site
    timer: OpTimer | None
    placed: dict[str, Where] = field(default_factory=dict)
    converted: set[tuple[str, _Target]] = field(default_factory=set)
    """Values with the placements that they have been brought to."""
    storage: dict[tuple[str, _Target], "_Storage"] = field(default_factory=dict)
    """(value, placement) -> the memory it looks into, which may be another value's."""
    saved: dict[SavedKey, int] = field(default_factory=dict)
    apart: dict[tuple[str, str], int] = field(default_factory=dict)
    """(op, memory of an operand) -> bytes of the copy that the op keeps in its place."""
    shapes: dict[tuple[str, tuple[tuple[str, Placement], ...]], tuple[int, ...]] = field(
        default_factory=dict
    )
    """Local shapes of values that are placed so."""
    clock: Clock = field(default_factory=Clock)
    used: set[str] = field(default_factory=set)
    """Values that an op has read: each further reader adds its gradient to theirs."""
    workspace: int = 0
    flops: float = 0.0
    trail: list["Step | Move"] = field(default_factory=list)
    """All ops and conversions that were priced, in order."""
    sent: list[tuple[str, Inner]] = field(default_factory=list)
    """Axis, and messages of ops on it."""

    def communicates(self, axis: str) -> bool:
        """Whether anything has moved, or is cut or padded, on an axis."""
        moved = (
            {entry.conversion.forward, entry.conversion.backward} != {Primitive.IDENTITY}
            for entry in self.trail
            if isinstance(entry, Move) and entry.axis == axis
        )
        return any(moved) or any(on == axis for on, _ in self.sent)

    def _tensor(self, name: str) -> Tensor:
        return self.facts.graph.tensors[name]

    def shape(self, name: str, where: Where) -> tuple[int, ...]:
        key = name, tuple(where.items())
        found = self.shapes.get(key)
        if found is None:
            site, whole = self.site, self._tensor(name).shape
            found = self.shapes[key] = local_shape(whole, where, site.axes, site.coordinates)
        return found

    def nbytes(self, name: str, where: Where, dtype: str = "") -> int:
        return prod(self.shape(name, where)) * DTYPE_BYTES[dtype or self.facts.dtypes[name]]

    def convert(self, name: str, target: Where) -> None:
        """Price what codegen inserts to have `name` placed as `target`, axis after axis, each
        placement on the way once."""
        now = dict(self.placed.get(name, {}))
        for axis, goal in path(self._tensor(name).shape, now, target, self.site.axes):
            source, now = now.get(axis, R), now | {axis: goal}
            key = (name, self._everywhere(now))
            if self.site.axes[axis].size > 1 and key not in self.converted:
                self.converted.add(key)
                self._move(name, axis, Conversion(source, goal), now)

    def _move(self, name: str, axis: str, conversion: Conversion, where: Where) -> None:
        """One conversion that ends with the value placed as `where`."""
        whole = self._whole_bytes(name, where, axis, conversion)
        self.trail.append(Move(name, axis, conversion, self.site.axes[axis].size, whole))
        forward_s = self.site.primitive_s(conversion.forward, whole, axis)
        backward_s = 0.0
        if self._tensor(name).requires_grad:
            backward_s = self.site.primitive_s(conversion.backward, whole, axis)
        self._communicate(axis, forward_s, backward_s, whole)

    def _communicate(self, axis: str, forward_s: float, backward_s: float, nbytes: int) -> None:
        levels = self.site.levels[axis]
        self.clock.communicate(forward_s, backward_s, collective_band(levels, nbytes))
        if forward_s or backward_s:
            self.clock.sources.update(level.link.source for level in levels)

    def _whole_bytes(self, name: str, where: Where, axis: str, conversion: Conversion) -> int:
        """Size of the value as if replicated on `axis`, for one micro-batch."""
        whole = self.nbytes(name, {**where, axis: R})
        line = self.site.axes[axis]
        split = isinstance(conversion.source, Shard) or isinstance(conversion.target, Shard)
        return whole * sum(line.shares) // line.whole if line.shares and split else whole

    def op(self, op: Op, strategies: Mapping[str, Strategy]) -> None:
        inputs = [self._where(strategies, i, is_input=True) for i in range(len(op.inputs))]
        outputs = [self._where(strategies, i, is_input=False) for i in range(len(op.outputs))]
        for name, where in zip(op.inputs, inputs, strict=True):
            self.convert(name, where)
        for name, where in zip(op.outputs, outputs, strict=True):
            if name:
                self.placed[name] = where
                if self.facts.roots[name] != name:
                    looked_at = self.stored(op.inputs[0], inputs[0])
                    self.storage[name, self.normal(where)] = looked_at
        share = self._share(op, strategies)
        local = self._local(op, inputs, outputs, share)
        self.trail.append(Step(op, local, strategies))
        time = op_time(local, self.site.device, self.timer)
        self.clock.add(time)
        if sends(op):
            self._inside(op, strategies, (inputs, outputs), time)
        self._fan_in(op, local)
        self.flops += local.flops
        operands = sum(i.nbytes for i in local.inputs if not i.is_param)
        operands += sum(self._gathered_bytes(op, inputs))
        if local.op_class is not OpClass.VIEW:
            self.workspace = max(self.workspace, operands + local.output_bytes)
        self._save(op, inputs, outputs, share)

    def _gathered_bytes(self, op: Op, inputs: Sequence[Where]) -> Iterator[int]:
        """Of parameters that are stored in parts and made whole for the op, and of nothing else.
        In backward their gradients take the same room."""
        for name, where in zip(op.inputs, inputs, strict=True):
            kind, stored = self._tensor(name).kind, self.placed.get(name, {})
            if kind is Kind.PARAMETER and self.normal(where) != self.normal(stored):
                yield self.nbytes(name, where)

    def _fan_in(self, op: Op, local: LocalOp) -> None:
        """Price adding up the gradients of values that an earlier op has read as well."""
        for name, operand in zip(op.inputs, local.inputs, strict=True):
            if not operand.requires_grad or operand.is_param or not local.differentiable:
                continue
            if name in self.used:
                self.clock.add(gradient_sum(operand.nbytes, self.site.device))
            self.used.add(name)

    def _inside(
        self,
        op: Op,
        strategies: Mapping[str, Strategy],
        places: tuple[Sequence[Where], Sequence[Where]],
        time: OpTime,
    ) -> None:
        """Price what the op sends by itself. What it sends while it computes takes the longer."""
        for axis, strategy in strategies.items():
            ranks = self.site.axes[axis].size
            inputs = self._operands(op, op.inputs, places[0], axis)
            outputs = self._operands(op, op.outputs, places[1], axis)
            found = inner_traffic(op, strategy, ranks, inputs, outputs)
            for i, nbytes in kept_apart(op, strategy, ranks, inputs, outputs).items():
                self.apart[op.name, self.facts.roots[op.inputs[i]]] = nbytes
            forward = [m for m in found if not m.backward]
            backward = [m for m in found if m.backward and self._has_gradient(op)]
            self.sent += [(axis, message) for message in (*forward, *backward)]
            self._communicate(
                axis,
                self._exposed_s(forward, axis, time.forward_s),
                self._exposed_s(backward, axis, time.backward_input_s),
                max((m.nbytes for m in found), default=0),
            )

    def _operands(
        self, op: Op, names: Sequence[str], places: Sequence[Where], axis: str
    ) -> list[Operand]:
        """Values as they would be on the rank if they were whole on the axis."""
        dtype = self._compute_dtype(op, classify(op.target))
        whole = [{**where, axis: R} for where in places]
        return [
            Operand(self.shape(n, w), self.nbytes(n, w, dtype if self._casts(op, n) else ""))
            if n else Operand((), 0)
            for n, w in zip(names, whole, strict=True)
        ]  # fmt: skip

    def _exposed_s(self, messages: Sequence[Inner], axis: str, computing_s: float) -> float:
        beside = sum(self.site.inner_s(m, axis) for m in messages if m.beside)
        alone = sum(self.site.inner_s(m, axis) for m in messages if not m.beside)
        return alone + max(0.0, beside - computing_s)

    def _has_gradient(self, op: Op) -> bool:
        return any(n and self._tensor(n).requires_grad for n in op.outputs)

    def _where(self, strategies: Mapping[str, Strategy], index: int, *, is_input: bool) -> Where:
        return {
            axis: (strategy.inputs if is_input else strategy.outputs)[index]
            for axis, strategy in strategies.items()
        }

    def _share(self, op: Op, strategies: Mapping[str, Strategy]) -> float:
        """Share of the op's work on this rank: one factor of it is split on each axis."""
        share = 1.0
        for axis, strategy in strategies.items():
            named = zip(
                (*op.inputs, *op.outputs), (*strategy.inputs, *strategy.outputs), strict=True
            )
            for name, placement in named:
                if name and isinstance(placement, Shard):
                    size = self.facts.graph.tensors[name].shape[placement.dim]
                    if size:
                        share *= self.shape(name, {axis: placement})[placement.dim] / size
                        break
        return share

    def _local(
        self, op: Op, inputs: Sequence[Where], outputs: Sequence[Where], share: float
    ) -> LocalOp:
        op_class = classify(op.target)
        dtype = self._compute_dtype(op, op_class)
        causal = op_class is OpClass.ATTENTION and ("is_causal", True) in op.args
        sections = self._sections(op.inputs[0], inputs[0]) if causal else 0
        return LocalOp(
            target=op.target,
            op_class=op_class,
            dtype=dtype,
            # Of queries in n sections the last rank sees so much of the keys.
            flops=op.flops * share * ((sections + 1) / (2 * sections) if sections else 1.0),
            inputs=tuple(
                self._operand(name, where, dtype if self._casts(op, name) else "")
                for name, where in zip(op.inputs, inputs, strict=True)
            ),
            outputs=tuple(self.shape(n, w) for n, w in zip(op.outputs, outputs, strict=True) if n),
            output_bytes=sum(
                self.nbytes(n, w) for n, w in zip(op.outputs, outputs, strict=True) if n
            ),
            differentiable=self._has_gradient(op),
            saved_bytes=self._kept_bytes(op, inputs, share),
            causal=causal and not sections,
        )

    def _sections(self, name: str, where: Where) -> int:
        """In how many parts a rank has the sequence of queries; 0: it has all of it."""
        dim, axes = len(self._tensor(name).shape) - 2, self.site.axes
        return min(
            (p.outer for axis, p in where.items()
             if isinstance(p, Shard) and p.dim == dim and axes[axis].size > 1), default=0,
        )  # fmt: skip

    def _casts(self, op: Op, name: str) -> bool:
        """Whether autocast may hand the op this operand in another dtype."""
        op_class = classify(op.target)
        norm = op_class is OpClass.NORMALIZATION and op_name(op.target) not in NORMS_AS_GIVEN
        cast = op_class in COMPUTE or norm
        return cast and self.facts.precision == "bf16" and is_float(self.facts.dtypes[name])

    def _operand(self, name: str, where: Where, dtype: str) -> LocalInput:
        tensor = self.facts.graph.tensors[name]
        there = self.nbytes(name, where)
        nbytes = self.nbytes(name, where, dtype)
        return LocalInput(
            self.shape(name, where),
            nbytes,
            tensor.requires_grad,
            tensor.kind is Kind.PARAMETER,
            there + nbytes if dtype not in ("", self.facts.dtypes[name]) else 0,
        )

    def _kept_bytes(self, op: Op, inputs: Sequence[Where], share: float) -> int:
        """What the op's backward reads besides gradients. What it saves may go by the name of
        another value in the same memory."""
        kept = 0
        for saved in op.saved:
            name, target = self._where_saved(op, saved, inputs)
            kept += self.nbytes(name, dict(zip(self.site.axes, target, strict=True)))
        return kept + round(op.saved_extra_bytes * share)

    def _compute_dtype(self, op: Op, op_class: OpClass) -> str:
        if self.facts.precision == "bf16" and op_class in COMPUTE:
            return "bfloat16"
        floats = [self.facts.dtypes[n] for n in (*op.outputs, *op.inputs) if n]
        return next(filter(is_float, floats), "float32")

    def _save(
        self, op: Op, inputs: Sequence[Where], outputs: Sequence[Where], share: float
    ) -> None:
        """Note what autograd keeps of this op, each storage once."""
        if not self._has_gradient(op):
            return
        cast = self._compute_dtype(op, classify(op.target))
        for name in op.saved:
            if nbytes := self.apart.get((op.name, self.facts.roots[name])):
                self.saved[op.name, name, ()] = nbytes
                continue
            dtype = self.facts.dtypes[name]
            if classify(op.target) in COMPUTE and is_float(dtype):
                dtype = cast
            self._save_one(self._where_saved(op, name, inputs), dtype)
        if op.saved_extra_bytes:
            self.saved[op.name, "extra", ()] = round(op.saved_extra_bytes * share)

    def stored(self, name: str, where: Where) -> _Storage:
        """The memory that a value looks into where it is placed so."""
        key = name, self.normal(where)
        return self.storage.get(key, key)

    def _where_saved(self, op: Op, name: str, inputs: Sequence[Where]) -> _Storage:
        """The memory that is kept: that of an operand as the op gets it, or of a result."""
        roots = self.facts.roots
        for operand, where in zip(op.inputs, inputs, strict=True):
            if operand == name or roots[operand] == roots[name]:
                return self.stored(operand, where)
        return self.stored(name, self.placed.get(name, {}))

    def _save_one(self, storage: _Storage, dtype: str) -> None:
        name, target = storage
        is_cast = dtype != self.facts.dtypes[name]
        if (name in self.facts.prelude_values or self._is_state(name, target)) and not is_cast:
            return
        where = dict(zip(self.site.axes, target, strict=True))
        self.saved[name, dtype, target] = self.nbytes(name, where, dtype)

    def _is_state(self, name: str, target: _Target) -> bool:
        """Whether it is there anyway: not if its parts have been gathered for the op."""
        kind = self._tensor(name).kind
        return kind is not Kind.ACTIVATION and target == self.normal(self.placed.get(name, {}))

    def _everywhere(self, where: Where) -> _Target:
        return tuple(where.get(axis, R) for axis in self.site.axes)

    def normal(self, where: Where) -> _Target:
        return tuple(
            R if isinstance(where.get(axis, R), Replicate) else where[axis]
            for axis in self.site.axes
        )
