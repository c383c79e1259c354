"""Keys of blocks and ops: equal for equal work wherever it stands, different for different work."""

import pytest
import torch

from meshwright.costmodel.cost_cache import BlockSpot, CostTables
from meshwright.costmodel.ops.compute import op_time
from meshwright.costmodel.ops.keys import op_key
from meshwright.costmodel.ops.local_op import LocalInput, LocalOp
from meshwright.costmodel.ops.op_classes import class_of
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import model_mesh
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.planner.problem.kernels import whole_op
from meshwright.testing.models import CASES
from tests.traces import zoo_graph

CPU = Cluster.local(4)


def traced(name: str, batch: int = 8) -> Graph:
    case, dtype = CASES[name], torch.float32
    return zoo_graph(case, batch, dtype)


def keys(
    graph: Graph, samples: int, dp: int = 1, tp: int = 1, precision: str = "fp32",
    layout_tp: int | None = None,
) -> list[str]:  # fmt: skip
    """Of every block."""
    layouts = {x.pattern: x for x in solve_layouts(graph, model_mesh({"tp": layout_tp or tp}))}
    blocks = CostTables(graph, CPU, precision).blocks
    model = model_mesh({"tp": tp})
    spot = BlockSpot(samples, dp, model, CPU.device_types[0].name, (), ((),) * len(model))
    return [blocks.key(block, layouts[block.pattern], spot) for block in graph.blocks]


@pytest.fixture(scope="module")
def gpt2() -> Graph:
    return traced("gpt2")


def test_replicas_and_micro_batches_do_not_matter(gpt2: Graph) -> None:
    assert keys(gpt2, samples=2, dp=2) == keys(gpt2, samples=2, dp=1) == keys(gpt2, 2, dp=4)


@pytest.mark.parametrize("name", ["gpt2", "t5", "vit"])
def test_the_global_batch_does_not_matter(name: str) -> None:
    assert keys(traced(name, 8), samples=2) == keys(traced(name, 4), samples=2)


def test_blocks_of_a_pattern_share_a_key(gpt2: Graph) -> None:
    found = keys(gpt2, samples=4)
    assert len(set(found[1:-1])) == 1
    assert len(set(found)) == 3


@pytest.mark.parametrize(
    "other",
    [
        {"samples": 4},
        {"samples": 2, "tp": 2},
        {"samples": 2, "tp": 4},
        {"samples": 2, "precision": "bf16-autocast"},
    ],
)
def test_what_changes_the_work_changes_the_key(gpt2: Graph, other: dict[str, object]) -> None:
    plain, changed = keys(gpt2, samples=2), keys(gpt2, **other)
    # The embedding does not compute in bfloat16.
    assert all(a != b for a, b in zip(plain[1:], changed[1:], strict=True))


def test_another_layout_of_the_same_shapes_has_another_key(gpt2: Graph) -> None:
    assert keys(gpt2, 2, tp=2, layout_tp=1)[2] != keys(gpt2, 2, tp=2)[2]


def test_batch_statistics_over_replicas_are_other_work() -> None:
    graph = traced("resnet50")
    alone, together = keys(graph, samples=2), keys(graph, samples=2, dp=2)
    normed = [
        any("batch_norm" in op.target for op in graph.block_ops(block)) for block in graph.blocks
    ]
    assert [a != b for a, b in zip(alone, together, strict=True)] == normed
    assert any(normed) and not all(normed)


def op() -> LocalOp:
    activation = LocalInput((4, 8), 128, requires_grad=True, is_param=False)
    weight = LocalInput((16, 8), 512, requires_grad=True, is_param=True)
    return LocalOp(
        target="aten.linear.default", op_class=OpClass.MATMUL, dtype="float32", flops=1024,
        inputs=(activation, weight), outputs=((4, 16),), output_bytes=256, differentiable=True,
    )  # fmt: skip


def test_op_keys() -> None:
    weight = op().inputs[1]
    others = [
        op()._replace(target="aten.mm.default"),
        op()._replace(dtype="bfloat16"),
        op()._replace(causal=True),
        op()._replace(differentiable=False),
        op()._replace(channels_last=True),
        op()._replace(inputs=(op().inputs[0]._replace(channels_last=True), weight)),
        op()._replace(outputs=((4, 32),)),
        op()._replace(inputs=(op().inputs[0]._replace(requires_grad=False), weight)),
        op()._replace(inputs=(op().inputs[0]._replace(shape=(8, 4)), weight)),
    ]
    found = {op_key(x) for x in (op(), *others)}
    assert len(found) == 1 + len(others)
    # A share of a larger op's flops is a rounding error away from those of a small one.
    assert op_key(op()._replace(flops=1024.0000001, saved_bytes=7)) == op_key(op())


class _Powers(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ((self.scale * x).pow(2) + (self.scale * x).abs().pow(1.7)).mean()

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(64))


def test_squares_are_multiplications_and_other_powers_are_not() -> None:
    graph = trace(_Powers(), (torch.ones(32, 64),))
    powers = [op for op in graph.ops if op.target == "aten.pow.Tensor_Scalar"]
    assert [class_of(op) for op in powers] == [OpClass.ELEMENTWISE, OpClass.TRANSCENDENTAL]
    device = CPU.device_types[0]
    square, other = (whole_op(op, graph.tensors, device) for op in powers)
    assert op_time(square, device).total_s < op_time(other, device).total_s
    assert op_key(square) != op_key(other)
