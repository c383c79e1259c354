"""Prices of a mesh on a cluster: the cost model's collectives and ops, and what memory is worth.

The replica that is priced lies on the first ranks, its inner axes next to each other, and data
parallelism over all other ranks. What memory is worth is a question of the plan; a weight of 1
means that filling a device's memory is as bad as taking the computation's time once more.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod

from meshwright.costmodel.block.site import StageSite
from meshwright.costmodel.comm.comm import collective_time
from meshwright.costmodel.cores import slowdown
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.memory.memory import optimizer_traffic
from meshwright.costmodel.ops.compute import op_time
from meshwright.costmodel.ops.expert_passes import as_multiplied_by, passes_beside
from meshwright.costmodel.ops.inner_work import inner_work
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.op_classes import class_of
from meshwright.forms.updates import update
from meshwright.ir.cluster.device import DeviceType, OpClass
from meshwright.ir.graph.graph import DTYPE_BYTES, Kind, Op
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.layout.layout import Axis
from meshwright.ir.memo import Memo
from meshwright.ir.plan.plan import ModelMesh
from meshwright.planner.inside.layout_objective import Regime

Shape = tuple[int, ...]
ONCE = 0.9
"""What gradients that are summed once per step cost, of those summed with the backward of a block:
they are summed in larger pieces."""


@dataclass(frozen=True, slots=True)
class AxisPrices:
    """Collectives along one axis."""

    site: StageSite
    axis: str

    @property
    def hides(self) -> bool:
        return not self.site.shares_cores

    def primitive_s(self, primitive: Primitive, nbytes: int, ranks: int) -> float:
        return self.site.primitive_s(primitive, nbytes, self.axis)

    def op_s(self, flops: float, nbytes: float) -> float:
        """An op of unknown kind."""
        device = self.site.device
        return max(
            flops / max(device.peak_flops.values()), nbytes / device.memory_bandwidth_bytes_per_s
        )

    def packed_s(self, nbytes: float) -> float:
        packs = self.site.run_as.packs_rings
        return packs * nbytes / self.site.device.memory_bandwidth_bytes_per_s

    def stored_s(self, nbytes: int) -> float:
        return 0.0


_times: Memo[object, float] = Memo()


@dataclass(slots=True)
class OpTimes:
    """Seconds of ops by the cost model, each shape once."""

    tables: CostTables
    device: DeviceType
    known: dict[object, float] = field(default_factory=dict)

    @classmethod
    def of(cls, tables: CostTables) -> "OpTimes":
        """On the first device; all meshes share what is known."""
        return cls(tables, tables.cluster.device(0), _times.of(tables))

    def whole_s(self, samples: int) -> float:
        """All ops on one rank, for so many samples."""
        key = "whole", samples
        if key not in self.known:
            graph = self.tables.graph
            first = [
                (graph.pattern_counts[b.pattern], graph.block_ops(b))
                for b in graph.distinct_blocks()
            ]
            self.known[key] = sum(
                count * sum(_whole_s(self, op, samples) for op in ops)
                for count, ops in [(1, graph.prelude_ops), *first]
            )
        return self.known[key]

    def __call__(
        self, op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape], share: float
    ) -> float:
        local = self._local(op, inputs, outputs, share)
        if local not in self.known:
            run_as = self.tables.run_as
            multiplied = as_multiplied_by(local, op, run_as, self.tables.facts.precision)
            time = op_time(multiplied, self.device)
            beside = passes_beside(multiplied, time, self.device, run_as)
            times = (time, beside) if beside else (time,)
            dispatch_s = sum(
                t.forward_dispatch_s + t.input_dispatch_s + t.weight_dispatch_s for t in times
            )
            self.known[local] = max(sum(t.total_s for t in times), dispatch_s)
        return self.known[local]

    def _local(
        self, op: Op, inputs: Sequence[Shape], outputs: Sequence[Shape], share: float
    ) -> LocalOp:
        graph, known = self.tables.graph, self.tables.facts
        dtypes, op_class = known.dtypes, class_of(op)
        cast = known.precision.autocast if known.is_narrow(op) else ""
        made = next((n for n in op.outputs if n), "")
        dtype = cast or dtypes.get(made, "float32")
        return LocalOp(
            target=op.target,
            op_class=op_class,
            dtype=dtype,
            flops=op.flops * share,
            inputs=tuple(
                LocalInput(
                    shape,
                    prod(shape) * DTYPE_BYTES[known.read_as(op, name)],
                    graph.tensors[name].requires_grad,
                    graph.tensors[name].kind is Kind.PARAMETER,
                    channels_last=graph.tensors[name].channels_last,
                )
                for name, shape in zip(op.inputs, inputs, strict=True)
            ),
            outputs=tuple(s for n, s in zip(op.outputs, outputs, strict=True) if n),
            output_bytes=sum(
                prod(s) * DTYPE_BYTES[dtypes[n]]
                for n, s in zip(op.outputs, outputs, strict=True)
                if n
            ),
            differentiable=any(n and graph.tensors[n].requires_grad for n in op.outputs),
            causal=op_class is OpClass.ATTENTION and ("is_causal", True) in op.args,
            channels_last=any(n and graph.tensors[n].channels_last for n in op.outputs),
            inner=inner_work(op, graph, share),
        )


def cluster_regime(
    timer: OpTimes, optimizer: str, model: ModelMesh, samples: int, memory: float
) -> Regime:
    """The prices of a mesh for so many samples on a rank, with a weight of memory."""
    tables = timer.tables
    site = _site(tables, model)
    size = prod(n for _, n in model)
    dp = max(1, tables.cluster.num_devices // size)
    count = max(1, tables.graph.batch_size // (dp * samples))
    computing_s = timer.whole_s(samples) / size
    per_byte = memory * computing_s / site.device.usable_bytes
    state = 2 + update(optimizer).copies
    update_s = optimizer_traffic(10**9, optimizer) / 1e9
    update_s /= site.device.memory_bandwidth_bytes_per_s
    return Regime(
        prices=tuple(AxisPrices(site, axis) for axis, _ in model),
        samples=samples,
        parameter_uses=1.0,
        once=ONCE / count,
        stored_s_per_byte=(update_s + _sync_s(tables, model, computing_s)) / count
        + state * per_byte,
        saved_s_per_byte=per_byte,
        timer=timer,
        dtypes=tables.facts.dtypes,
    )


def _site(tables: CostTables, model: ModelMesh) -> StageSite:
    replica = tuple(range(prod(size for _, size in model)))
    levels = tables.model_levels(replica, model)
    names = [axis for axis, _ in model]
    return StageSite(
        axes={axis: Axis(size) for axis, size in model},
        coordinates=dict.fromkeys(names, 0),
        device=tables.cluster.device(0),
        levels=dict(zip(names, levels, strict=True)),
        run_as=tables.run_as,
        shares_cores=slowdown(tables.cluster) > 1.0,
    )


def _whole_s(timer: OpTimes, op: Op, samples: int) -> float:
    """An op on one rank, for so many samples."""
    tensors, batch = timer.tables.graph.tensors, timer.tables.graph.batch_size

    def shape(name: str) -> Shape:
        found = tensors[name].shape if name else ()
        part = found and found[0] % batch == 0 and tensors[name].kind is Kind.ACTIVATION
        return (found[0] // batch * samples, *found[1:]) if part else found

    inputs, outputs = [shape(n) for n in op.inputs], [shape(n) for n in op.outputs]
    return timer(op, inputs, outputs, samples / batch)


def _sync_s(tables: CostTables, model: ModelMesh, computing_s: float) -> float:
    """What summing gradients over data parallel ranks costs, per byte of parameters on a rank.

    It hides behind the last backward, so that max(computing, communicating) counts. Where it is the
    shorter of both, a byte more costs nothing yet, but the more of them the nearer it comes: as a
    line through both ends it costs the share of the computation that it takes.
    """
    size = prod(n for _, n in model)
    ranks = tuple(range(0, tables.cluster.num_devices, size))
    if len(ranks) < 2:
        return 0.0
    nbytes = tables.graph.parameter_bytes / size
    whole_s = collective_time(Primitive.ALL_REDUCE, nbytes, tables.levels(ranks))
    return whole_s / nbytes * min(1.0, whole_s / (2 / 3 * computing_s))
