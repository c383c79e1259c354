"""Walks ops at one rank's local shapes: their time, the conversions between them, what is saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from meshwright.costmodel.clock import Clock
from meshwright.costmodel.comm import Levels, collective_band, collective_time
from meshwright.costmodel.compute import OpTimer, gradient_sum, op_time
from meshwright.costmodel.dtypes import NORMS_AS_GIVEN, is_float, runtime_dtypes, storage_roots
from meshwright.costmodel.formulas import curve_of, memory_s
from meshwright.costmodel.local_op import LocalInput, LocalOp
from meshwright.costmodel.op_classes import COMPUTE, classify, op_name
from meshwright.ir.conversions import Conversion, Primitive
from meshwright.ir.device import DeviceType, OpClass
from meshwright.ir.graph import DTYPE_BYTES, Graph, Kind, Op
from meshwright.ir.layout import (
    RP,
    Axis,
    Placement,
    R,
    Replicate,
    Shard,
    Strategy,
    local_shape,
)


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


@dataclass(frozen=True)
class Site:
    """Where a block runs: one rank's view of its stage."""

    axes: Mapping[str, Axis]
    coordinates: Mapping[str, int]
    device: DeviceType
    levels: Mapping[str, Levels]
    """Tiers of the rank's group on each axis."""


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
    inside: frozenset[str] = frozenset()
    converted: set[tuple[str, str, Placement, Placement]] = field(default_factory=set)
    storage: dict[tuple[str, _Target], "_Storage"] = field(default_factory=dict)
    """(value, placement) -> the memory it looks into, which may be another value's."""
    saved: dict[SavedKey, int] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    used: set[str] = field(default_factory=set)
    """Values that an op has read: each further reader adds its gradient to theirs."""
    workspace: int = 0
    flops: float = 0.0
    tp_sums: set[str] = field(default_factory=set)
    trail: list["Step | Move"] = field(default_factory=list)
    """All that was priced, in order."""

    def shape(self, name: str, where: Where) -> tuple[int, ...]:
        tensor = self.facts.graph.tensors[name]
        axes, coordinates = self.site.axes, self.site.coordinates
        return local_shape(tensor.shape, where, dict(axes), dict(coordinates))

    def nbytes(self, name: str, where: Where, dtype: str = "") -> int:
        return prod(self.shape(name, where)) * DTYPE_BYTES[dtype or self.facts.dtypes[name]]

    def convert(self, name: str, target: Where) -> None:
        """Price what codegen inserts to have `name` placed as `target`, once per target."""
        tensor = self.facts.graph.tensors[name]
        where = dict(self.placed.get(name, {}))
        for axis, line in self.site.axes.items():
            if line.size == 1:
                continue
            source, goal = where.get(axis, R), target.get(axis, R)
            before = dict(where)
            where[axis] = goal
            if tensor.kind is Kind.PARAMETER and isinstance(source, Replicate):
                # The gradient stays as it is and is summed once per step.
                if axis != "dp" and goal == RP and tensor.requires_grad:
                    self.tp_sums.add(name)
                if isinstance(goal, Replicate):
                    continue
            key = (name, axis, source, goal)
            if key in self.converted:
                continue
            self.converted.add(key)
            whole = self._whole_bytes(name, where, axis, source, goal)
            conversion = Conversion(source, goal)
            self.trail.append(Move(name, axis, conversion, self.site.axes[axis].size, whole))
            if conversion.forward is Primitive.IDENTITY:
                self.storage[name, self.normal(where)] = self.stored(name, before)
            forward_s = self._primitive(conversion.forward, whole, axis)
            backward_s = 0.0
            if tensor.requires_grad:
                backward_s = self._primitive(conversion.backward, whole, axis)
            levels = self.site.levels[axis]
            self.clock.communicate(forward_s, backward_s, collective_band(levels, whole))
            if forward_s or backward_s:
                self.clock.sources.update(level.link.source for level in levels)

    def _whole_bytes(
        self, name: str, where: Where, axis: str, source: Placement, goal: Placement
    ) -> int:
        """Size of the value as if replicated on `axis`, for one micro-batch."""
        whole = self.nbytes(name, {**where, axis: R})
        line = self.site.axes[axis]
        if line.shares and (isinstance(source, Shard) or isinstance(goal, Shard)):
            return whole * sum(line.shares) // line.whole
        return whole

    def _primitive(self, primitive: Primitive, whole: int, axis: str) -> float:
        if primitive is Primitive.IDENTITY:
            return 0.0
        device = self.site.device
        copy = curve_of(OpClass.COPY, device)
        # Reading, and writing or packing, beside the transfer.
        local = memory_s(whole / self.site.axes[axis].size, copy, device) + device.overhead_s
        return collective_time(primitive, whole, self.site.levels[axis]) + local

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
        local = self._local(op, inputs, outputs, self._share(op, strategies))
        self.trail.append(Step(op, local, strategies))
        self.clock.add(op_time(local, self.site.device, self.timer))
        self._fan_in(op, local)
        self.flops += local.flops
        operands = sum(i.nbytes for i in local.inputs if not i.is_param)
        if local.op_class is not OpClass.VIEW:
            self.workspace = max(self.workspace, operands + local.output_bytes)
        self._save(op, inputs, outputs, self._share(op, strategies))

    def _fan_in(self, op: Op, local: LocalOp) -> None:
        """Price adding up the gradients of values that an earlier op has read as well."""
        for name, operand in zip(op.inputs, local.inputs, strict=True):
            if not operand.requires_grad or operand.is_param or not local.differentiable:
                continue
            if name in self.used:
                self.clock.add(gradient_sum(operand.nbytes, self.site.device))
            self.used.add(name)

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
        tensors = self.facts.graph.tensors
        op_class = classify(op.target)
        dtype = self._compute_dtype(op, op_class)
        return LocalOp(
            target=op.target,
            op_class=op_class,
            dtype=dtype,
            flops=op.flops * share,
            inputs=tuple(
                self._operand(name, where, dtype if self._casts(op, name) else "")
                for name, where in zip(op.inputs, inputs, strict=True)
            ),
            outputs=tuple(self.shape(n, w) for n, w in zip(op.outputs, outputs, strict=True) if n),
            output_bytes=sum(
                self.nbytes(n, w) for n, w in zip(op.outputs, outputs, strict=True) if n
            ),
            differentiable=any(n and tensors[n].requires_grad for n in op.outputs),
            saved_bytes=self._kept_bytes(op, inputs, share),
            causal=op_class is OpClass.ATTENTION and ("is_causal", True) in op.args,
        )

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
        if not any(n and self.facts.graph.tensors[n].requires_grad for n in op.outputs):
            return
        cast = self._compute_dtype(op, classify(op.target))
        for name in op.saved:
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
        if (name in self.facts.prelude_values or self._is_state(name)) and not is_cast:
            return
        where = dict(zip(self.site.axes, target, strict=True))
        self.saved[name, dtype, target] = self.nbytes(name, where, dtype)

    def _is_state(self, name: str) -> bool:
        kind = self.facts.graph.tensors[name].kind
        return kind is not Kind.ACTIVATION

    def normal(self, where: Where) -> _Target:
        return tuple(
            R if isinstance(where.get(axis, R), Replicate) else where[axis]
            for axis in self.site.axes
        )
