"""Cost of one block on one rank: its ops at local shapes, and the conversions between them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from meshwright.costmodel.comm import Levels, collective_time, group_levels
from meshwright.costmodel.compute import LocalInput, LocalOp, OpTimer, op_time, worst_source
from meshwright.costmodel.dtypes import is_float, runtime_dtypes, storage_roots
from meshwright.costmodel.op_classes import COMPUTE, classify
from meshwright.ir.cluster import Cluster
from meshwright.ir.conversions import Conversion, Primitive
from meshwright.ir.device import DeviceType, OpClass, Source
from meshwright.ir.graph import DTYPE_BYTES, Block, Graph, Kind, Op
from meshwright.ir.layout import (
    RP,
    Axis,
    Placement,
    R,
    Replicate,
    Shard,
    Strategy,
    local_shape,
    parse_placement,
    parse_strategy,
)
from meshwright.ir.plan import BlockLayout, param_key

AXES = ("dp", "tp")


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockCost:
    """One micro-batch through one block on one rank. Times include communication."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    comm_forward_s: float
    """Of the forward; conversions on any axis."""
    comm_backward_s: float
    saved_bytes: int
    """What autograd keeps of values made inside the block, each storage once."""
    saved_inputs: tuple[int, ...]
    """Bytes per `Block.inputs` that must stay alive for the backward; 0 if not needed."""
    input_bytes: tuple[int, ...]
    """Local size of each of `Block.inputs`."""
    output_bytes: tuple[int, ...]
    param_bytes: tuple[int, ...]
    """Local size per `Block.params` as stored (float32 under bf16); 0 for constants."""
    tp_sums: tuple[bool, ...]
    """Per `Block.params`: its gradient is summed over tp once per step."""
    workspace_bytes: int
    """Largest operands and results of one op."""
    flops: float
    source: Source

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s

    def recomputed(self) -> "BlockCost":
        """The same block when it keeps only its inputs and runs its forward again."""
        return replace(
            self,
            backward_input_s=self.backward_input_s + self.forward_s,
            comm_backward_s=self.comm_backward_s + self.comm_forward_s,
            saved_bytes=0,
            saved_inputs=self.input_bytes,
            workspace_bytes=self.workspace_bytes + self.saved_bytes,
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


@dataclass
class _Walk:
    """Prices ops one after the other, keeping track of where values lie."""

    facts: GraphFacts
    site: Site
    timer: OpTimer | None
    placed: dict[str, Where] = field(default_factory=dict)
    inside: frozenset[str] = frozenset()
    converted: set[tuple[str, str, Placement, Placement]] = field(default_factory=set)
    saved: dict[tuple[str, str, _Target], int] = field(default_factory=dict)
    sources: set[Source] = field(default_factory=set)
    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    comm_forward_s: float = 0.0
    comm_backward_s: float = 0.0
    workspace: int = 0
    flops: float = 0.0
    tp_sums: set[str] = field(default_factory=set)

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
        for axis in AXES:
            if self.site.axes[axis].size == 1:
                continue
            source, goal = where.get(axis, R), target.get(axis, R)
            where[axis] = goal
            if tensor.kind is Kind.PARAMETER and isinstance(source, Replicate):
                # The gradient stays as it is and is summed once per step.
                if axis == "tp" and goal == RP and tensor.requires_grad:
                    self.tp_sums.add(name)
                if isinstance(goal, Replicate):
                    continue
            key = (name, axis, source, goal)
            if key in self.converted:
                continue
            self.converted.add(key)
            whole = self._whole_bytes(name, where, axis, source, goal)
            conversion = Conversion(source, goal)
            seconds = self._primitive(conversion.forward, whole, axis)
            self.forward_s += seconds
            self.comm_forward_s += seconds
            if tensor.requires_grad:
                seconds = self._primitive(conversion.backward, whole, axis)
                self.backward_input_s += seconds
                self.comm_backward_s += seconds

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
        rate = device.memory_bandwidth_bytes_per_s * device.efficiency.get(OpClass.COPY, 1.0)
        levels = self.site.levels[axis]
        if levels:
            self.sources.update(level.link.source for level in levels)
        # Reading, and writing or packing, beside the transfer.
        local = whole / self.site.axes[axis].size / rate + device.overhead_s
        return collective_time(primitive, whole, levels) + local

    def op(self, op: Op, strategies: Mapping[str, Strategy]) -> None:
        inputs = [self._where(strategies, i, is_input=True) for i in range(len(op.inputs))]
        outputs = [self._where(strategies, i, is_input=False) for i in range(len(op.outputs))]
        for name, where in zip(op.inputs, inputs, strict=True):
            self.convert(name, where)
        for name, where in zip(op.outputs, outputs, strict=True):
            if name:
                self.placed[name] = where
        local = self._local(op, inputs, outputs, self._share(op, strategies))
        time = op_time(local, self.site.device, self.timer)
        self.forward_s += time.forward_s
        self.backward_input_s += time.backward_input_s
        self.backward_weight_s += time.backward_weight_s
        self.sources.add(time.source)
        self.flops += local.flops
        operands = sum(i.nbytes for i in local.inputs if not i.is_param)
        if local.op_class is not OpClass.VIEW:
            self.workspace = max(self.workspace, operands + local.output_bytes)
        self._save(op, inputs, outputs, self._share(op, strategies))

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
        cast = dtype if op_class in COMPUTE else ""
        return LocalOp(
            target=op.target,
            op_class=op_class,
            dtype=dtype,
            flops=op.flops * share,
            inputs=tuple(
                LocalInput(
                    self.shape(name, where),
                    self.nbytes(name, where, cast if is_float(tensors[name].dtype) else ""),
                    tensors[name].requires_grad,
                    tensors[name].kind is Kind.PARAMETER,
                )
                for name, where in zip(op.inputs, inputs, strict=True)
            ),
            outputs=tuple(self.shape(n, w) for n, w in zip(op.outputs, outputs, strict=True) if n),
            output_bytes=sum(
                self.nbytes(n, w) for n, w in zip(op.outputs, outputs, strict=True) if n
            ),
            differentiable=any(n and tensors[n].requires_grad for n in op.outputs),
        )

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
        places = {
            **dict(zip(op.outputs, outputs, strict=True)),
            **dict(zip(op.inputs, inputs, strict=True)),
        }
        cast = self._compute_dtype(op, classify(op.target))
        for name in op.saved:
            dtype = self.facts.dtypes[name]
            if classify(op.target) in COMPUTE and is_float(dtype):
                dtype = cast
            self._save_one(name, places.get(name, self.placed.get(name, {})), dtype)
        if op.saved_extra_bytes:
            key = (op.name, "extra", ())
            self.saved[key] = round(op.saved_extra_bytes * share)

    def _save_one(self, name: str, where: Where, dtype: str) -> None:
        root = self.facts.roots[name]
        is_cast = dtype != self.facts.dtypes[name]
        if (root in self.facts.prelude_values or self._is_state(root)) and not is_cast:
            return
        made = self.placed.get(name, {})
        if self.normal(made) == self.normal(where) and not is_cast and root in self.placed:
            name, where = root, self.placed[root]
        self.saved[name, dtype, self.normal(where)] = self.nbytes(name, where, dtype)

    def _is_state(self, name: str) -> bool:
        kind = self.facts.graph.tensors[name].kind
        return kind is not Kind.ACTIVATION

    def normal(self, where: Where) -> _Target:
        return tuple(
            R if isinstance(where.get(axis, R), Replicate) else where[axis] for axis in AXES
        )


def _placements(named: Mapping[str, str]) -> Where:
    return {axis: parse_placement(text) for axis, text in named.items()}


def _strategies(layout: BlockLayout, op: Op) -> dict[str, Strategy]:
    named = layout.ops.get(op.key, {})
    return {axis: parse_strategy(text) for axis, text in named.items()}


def block_cost(
    graph: Graph,
    block: Block,
    layout: BlockLayout,
    *,
    axes: Mapping[str, Axis],
    coordinates: Mapping[str, int],
    groups: Mapping[str, Sequence[int]],
    cluster: Cluster,
    precision: str,
    recompute: bool = False,
    timer: OpTimer | None = None,
) -> BlockCost:
    """Cost of one micro-batch of `block` on the rank at `coordinates`.

    `groups`: global ranks of the rank's line on each of dp and tp, itself included. For many blocks
    `costmodel.tables.CostTables` shares the work.
    """
    rank = groups["tp"][coordinates["tp"]]
    levels = {axis: group_levels(groups[axis], cluster) for axis in AXES}
    site = Site(axes, coordinates, cluster.device(rank), levels)
    cost = price_block(GraphFacts.of(graph, precision), block, layout, site, timer)
    return cost.recomputed() if recompute else cost


def price_block(
    facts: GraphFacts,
    block: Block,
    layout: BlockLayout,
    site: Site,
    timer: OpTimer | None = None,
) -> BlockCost:
    """`block_cost` with what many blocks share already made."""
    graph = facts.graph
    walk = _Walk(facts, site, timer)
    for name, entry in zip(block.inputs, layout.inputs, strict=True):
        walk.placed[name] = _placements(entry)
    for name in block.params:
        key = param_key(block, graph.tensors[name].fqn or name)
        # On dp parameters are whole and their gradients summands.
        walk.placed[name] = {"dp": RP, **_placements(layout.parameters.get(key, {}))}
    for op in graph.block_ops(block):
        walk.op(op, _strategies(layout, op))
    for name, leave in zip(block.outputs, layout.outputs, strict=True):
        walk.convert(name, _placements(leave))
    return _summary(walk, block, layout)


def _summary(walk: _Walk, block: Block, layout: BlockLayout) -> BlockCost:
    tensors = walk.facts.graph.tensors
    inputs = {n: walk.nbytes(n, walk.placed[n]) for n in block.inputs}
    entering, made = _split_saved(walk, inputs)
    activations = [tensors[n].kind is Kind.ACTIVATION for n in block.inputs]
    return BlockCost(
        forward_s=walk.forward_s,
        backward_input_s=walk.backward_input_s,
        backward_weight_s=walk.backward_weight_s,
        comm_forward_s=walk.comm_forward_s,
        comm_backward_s=walk.comm_backward_s,
        saved_bytes=made,
        saved_inputs=tuple(entering.get(name, 0) for name in block.inputs),
        input_bytes=tuple(
            inputs[n] * is_made for n, is_made in zip(block.inputs, activations, strict=True)
        ),
        output_bytes=tuple(
            walk.nbytes(n, _placements(e))
            for n, e in zip(block.outputs, layout.outputs, strict=True)
        ),
        param_bytes=tuple(
            walk.nbytes(n, walk.placed[n]) * (tensors[n].kind in (Kind.PARAMETER, Kind.BUFFER))
            for n in block.params
        ),
        tp_sums=tuple(name in walk.tp_sums for name in block.params),
        workspace_bytes=walk.workspace,
        flops=walk.flops,
        source=worst_source([walk.site.device.source, *walk.sources]),
    )


def _split_saved(walk: _Walk, inputs: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Saved bytes of values that enter the block as they are, and of everything else."""
    entering: dict[str, int] = {}
    made = 0
    for (name, dtype, where), nbytes in walk.saved.items():
        as_it_is = (
            name in inputs
            and dtype == walk.facts.dtypes[name]
            and where == walk.normal(walk.placed[name])
        )
        if as_it_is:
            entering[name] = nbytes
        else:
            made += nbytes
    return entering, made


def price_prelude(
    facts: GraphFacts, layout: BlockLayout, needed: frozenset[str], site: Site
) -> tuple[float, int]:
    """(forward seconds, bytes of what it makes) of the prelude ops behind the `needed` values."""
    walk = _Walk(facts, site, None)
    for name in facts.graph.inputs:
        batch = name in facts.graph.batch_inputs
        walk.placed[name] = {"dp": Shard(0)} if batch else {}
    wanted = set(needed)
    chosen = []
    for op in reversed(facts.graph.prelude_ops):
        if wanted.intersection(op.outputs):
            wanted.update(op.inputs)
            chosen.append(op)
    for op in reversed(chosen):
        walk.op(op, _strategies(layout, op))
    own = [out for op in chosen for out in op.outputs if out and facts.roots[out] == out]
    return walk.forward_s, sum(walk.nbytes(n, walk.placed[n]) for n in own)
