"""Three equal MLP blocks and a head, traced by hand, and plans for it."""

from typing import Literal

import torch

from meshwright.ir.graph.graph import Block, Graph, Kind, Op, Ref, Tensor
from meshwright.ir.plan.plan import (
    BlockLayout,
    ClusterId,
    InputSpec,
    ModelId,
    Plan,
    ScheduleTable,
    Stage,
)

BATCH, WIDTH, HIDDEN = 8, 6, 10


def graph() -> Graph:
    """x -> (linear, relu, linear) three times -> mean square."""
    tensors = {"x": Tensor("x", (BATCH, WIDTH), "float64", Kind.INPUT)}
    ops: list[Op] = []
    blocks: list[Block] = []
    previous = "x"

    def op(
        path: str, kind: str, target: str, out: str, shape: tuple[int, ...], **args: object
    ) -> None:
        inputs = tuple(a.name for a in args.values() if isinstance(a, Ref))
        tensors[out] = Tensor(out, shape, "float64", Kind.ACTIVATION, requires_grad=True)
        key = path.split(".", 2)[-1] + "/" + kind
        ops.append(Op(out, key, target, tuple(args.items()), inputs, (out,), path))

    for i in range(3):
        params = []
        for layer, shape in (("up", (HIDDEN, WIDTH)), ("down", (WIDTH, HIDDEN))):
            for kind, size in (("weight", shape), ("bias", shape[:1])):
                name = f"p_{i}_{layer}_{kind}"
                fqn = f"h.{i}.{layer}.{kind}"
                tensors[name] = Tensor(name, size, "float64", Kind.PARAMETER, fqn, True)
                params.append(name)
        start, linear = len(ops), "aten.linear.default"
        op(f"h.{i}.up", "linear", linear, f"up{i}", (BATCH, HIDDEN), input=Ref(previous),
           weight=Ref(params[0]), bias=Ref(params[1]))  # fmt: skip
        op(
            f"h.{i}.act",
            "relu",
            "aten.relu.default",
            f"act{i}",
            (BATCH, HIDDEN),
            self=Ref(f"up{i}"),
        )
        op(f"h.{i}.down", "linear", linear, f"down{i}", (BATCH, WIDTH), input=Ref(f"act{i}"),
           weight=Ref(params[2]), bias=Ref(params[3]))  # fmt: skip
        out = f"down{i}"
        blocks.append(
            Block(f"h.{i}", "h.*", "mlp", start, len(ops), (previous,), (out,), tuple(params))
        )
        previous = out
    op("head.a", "square", "aten.square.default", "square", (BATCH, WIDTH), self=Ref(previous))
    op("head.a", "mean", "aten.mean.default", "loss", (), self=Ref("square"), dtype=None)
    blocks.append(Block("head", "head", "head", len(ops) - 2, len(ops), (previous,), ("loss",), ()))
    return Graph(tensors, tuple(ops), 0, tuple(blocks), ("x",), ("x",), "loss", BATCH, ("x",))


MLP_OPS = {
    "up/linear": {"dp": "S(0) R|P R|P -> S(0)", "tp": "R|P S(0) S(0) -> S(1)"},
    "act/relu": {"dp": "S(0) -> S(0)", "tp": "S(1) -> S(1)"},
    "down/linear": {"dp": "S(0) R|P R|P -> S(0)", "tp": "S(1) S(1) P -> P"},
}
HEAD_OPS = {"a/square": {"dp": "S(0) -> S(0)"}, "a/mean": {"dp": "S(0) -> P"}}
PARAMETERS = {
    "up.weight": {"tp": "S(0)"}, "up.bias": {"tp": "S(0)"}, "down.weight": {"tp": "S(1)"},
}  # fmt: skip


def layouts() -> tuple[BlockLayout, ...]:
    side = {"dp": "S(0)"}
    return (
        BlockLayout(name="mlp", pattern="h.*", mesh={"tp": 2}, parameters=PARAMETERS,
                    inputs=(side,), outputs=(side,), ops=MLP_OPS),
        BlockLayout(name="head", pattern="head", mesh={"tp": 2}, parameters={}, inputs=(side,),
                    outputs=({"dp": "P"},), ops=HEAD_OPS),
    )  # fmt: skip


def stage(
    first: str, last: str, devices: tuple[int, ...], shares: tuple[int, ...], tp: int,
    recompute: Literal["none", "full"] = "none",
) -> Stage:  # fmt: skip
    return Stage(
        first=first, last=last, mesh={"dp_replicate": 1, "dp_shard": len(shares), "tp": tp},
        devices=devices, batch_shares=shares, recompute={"h.*": recompute},
        layouts={"h.*": "mlp", "head": "head"},
    )  # fmt: skip


def plan(*stages: Stage, num_microbatches: int = 1) -> Plan:
    return Plan(
        model=ModelId(name="MLP", fingerprint="", num_parameters=0, num_blocks=4,
                      inputs=(InputSpec(name="x", shape=(BATCH, WIDTH), dtype="float64"),)),
        cluster=ClusterId(name="test", fingerprint="", num_devices=8),
        global_batch_size=BATCH, num_microbatches=num_microbatches, optimizer="adamw",
        precision="fp64", stages=stages, schedule=ScheduleTable(name="gpipe", rows=("0F0 0B0",)),
        layouts=layouts(),
    )  # fmt: skip


def parameters() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        t.name: torch.randn(t.shape, dtype=torch.float64, generator=generator) / 2
        for t in graph().parameters
    }


def batch() -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, WIDTH, dtype=torch.float64, generator=generator)


def reference(params: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for i in range(3):
        x = torch.nn.functional.linear(
            x, params[f"p_{i}_up_weight"], params[f"p_{i}_up_bias"]
        ).relu()
        x = torch.nn.functional.linear(x, params[f"p_{i}_down_weight"], params[f"p_{i}_down_bias"])
    return x.square().mean()
