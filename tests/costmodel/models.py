"""Small graphs and plans written by hand, so that every cost can be counted on paper."""

from collections.abc import Sequence

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Block, Graph, Kind, Op, Ref, Tensor
from meshwright.ir.layout.layout import balanced
from meshwright.ir.plan.plan import (
    BlockLayout,
    ClusterId,
    InputSpec,
    ModelId,
    Plan,
    ScheduleTable,
    Stage,
)

BATCH, WIDTH, HIDDEN = 8, 16, 64
_MEGATRON = {
    "fc1/linear": {"dp": "S(0) R|P -> S(0)", "tp": "R|P S(0) -> S(1)"},
    "act/gelu": {"dp": "S(0) -> S(0)", "tp": "S(1) -> S(1)"},
    "fc2/linear": {"dp": "S(0) R|P -> S(0)", "tp": "S(1) S(1) -> P"},
    "/add": {"dp": "S(0) S(0) -> S(0)", "tp": "R R -> R"},
}


Names = tuple[str, ...]


def _layer(index: int) -> tuple[list[Tensor], list[Op], Block, str]:
    """x + fc2(gelu(fc1(x)))."""
    name, entry = f"layers.{index}", f"x{index}"
    up, down, h, g, y, out = (f"{n}_{index}" for n in ("up", "down", "h", "g", "y", "out"))
    out = f"x{index + 1}"
    tensors = [
        Tensor(up, (HIDDEN, WIDTH), "float32", Kind.PARAMETER, f"{name}.fc1.weight", True),
        Tensor(down, (WIDTH, HIDDEN), "float32", Kind.PARAMETER, f"{name}.fc2.weight", True),
        *(
            Tensor(n, (BATCH, size), "float32", Kind.ACTIVATION, "", True)
            for n, size in ((h, HIDDEN), (g, HIDDEN), (y, WIDTH), (out, WIDTH))
        ),
    ]

    def op(
        key: str, target: str, inputs: tuple[str, ...], result: str, saved: tuple[str, ...]
    ) -> Op:
        flops = 2 * BATCH * WIDTH * HIDDEN * ("linear" in target)
        args = tuple((f"a{i}", Ref(n)) for i, n in enumerate(inputs))
        return Op(f"{name}.{key}", key, target, args, inputs, (result,), name, flops, saved)

    ops = [
        op("fc1/linear", "aten.linear.default", (entry, up), h, (entry, up)),
        op("act/gelu", "aten.gelu.default", (h,), g, (h,)),
        op("fc2/linear", "aten.linear.default", (g, down), y, (g, down)),
        op("/add", "aten.add.Tensor", (entry, y), out, ()),
    ]
    block = Block(name, "layers.*", "s", 4 * index, 4 * index + 4, (entry,), (out,), (up, down))
    return tensors, ops, block, out


def mlp(num_layers: int = 4) -> Graph:
    """Residual layers of two linears; the last value stands for the loss."""
    tensors = [Tensor("x0", (BATCH, WIDTH), "float32", Kind.INPUT)]
    ops: list[Op] = []
    blocks: list[Block] = []
    out = "x0"
    for index in range(num_layers):
        made, done, block, out = _layer(index)
        tensors += made
        ops += done
        blocks.append(block)
    return Graph(
        tensors={t.name: t for t in tensors},
        ops=tuple(ops),
        prelude=0,
        blocks=tuple(blocks),
        inputs=("x0",),
        input_names=("x",),
        loss=out,
        batch_size=BATCH,
        batch_inputs=("x0",),
    )


def layout(tp: int) -> BlockLayout:
    """Megatron's layout of a layer; all replicated without tp."""
    weights = {"fc1.weight": {"tp": "S(0)"}, "fc2.weight": {"tp": "S(1)"}} if tp > 1 else {}
    ops = _MEGATRON if tp > 1 else {k: {"dp": v["dp"]} for k, v in _MEGATRON.items()}
    return BlockLayout(
        name=f"layers.tp{tp}",
        pattern="layers.*",
        mesh={"tp": tp} if tp > 1 else {},
        parameters=weights,
        inputs=({"dp": "S(0)"},),
        outputs=({"dp": "S(0)"},),
        ops=ops,
    )


def plan(
    cluster: Cluster,
    *,
    num_layers: int = 4,
    pp: int = 1,
    dp: int = 1,
    tp: int = 1,
    zero: int = 0,
    num_microbatches: int = 2,
    rows: Sequence[str] = (),
    recompute: bool = False,
    precision: str = "fp32",
) -> Plan:
    """Equal stages over consecutive ranks; GPipe unless `rows` says otherwise."""
    width = dp * tp
    per_stage = num_layers // pp
    samples = BATCH // num_microbatches
    stages = tuple(
        Stage(
            first=f"layers.{s * per_stage}",
            last=f"layers.{(s + 1) * per_stage - 1}",
            mesh={"dp_replicate": 1, "dp_shard": dp, "tp": tp} if zero
            else {"dp_replicate": dp, "dp_shard": 1, "tp": tp},
            devices=tuple(range(s * width, (s + 1) * width)),
            batch_shares=balanced(samples, dp),
            zero=zero,  # type: ignore[arg-type]
            recompute={"layers.*": "full"} if recompute else {},
            layouts={"layers.*": f"layers.tp{tp}"},
        )
        for s in range(pp)
    )  # fmt: skip
    order = [
        *(f"F{m}" for m in range(num_microbatches)),
        *(f"B{m}" for m in range(num_microbatches)),
    ]
    gpipe = tuple(" ".join(f"{s}{a}" for a in order) for s in range(pp))
    return Plan(
        model=ModelId(name="mlp", fingerprint="", num_parameters=0, num_blocks=num_layers,
                      inputs=(InputSpec(name="x", shape=(BATCH, 8), dtype="int64"),)),
        cluster=ClusterId(name=cluster.name, fingerprint=cluster.fingerprint,
                          num_devices=cluster.num_devices),
        global_batch_size=BATCH,
        num_microbatches=num_microbatches,
        optimizer="adamw",
        precision=precision,  # type: ignore[arg-type]
        stages=stages,
        schedule=ScheduleTable(name="gpipe", rows=tuple(rows) or gpipe),
        layouts=(layout(tp),),
    )  # fmt: skip
