"""GPT-2 with Megatron's sequence parallelism by hand: between the matrices, tokens are split."""

from collections import Counter
from dataclasses import replace

import pytest
import torch

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.lower.lower import lower
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.plan.plan import BlockLayout
from meshwright.ir.plan.verify_model import GRAPH_RULES
from meshwright.ir.trace.loss_module import TrainingStep, flatten_batch
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.layouts import solve_layouts
from meshwright.testing.models import CASES
from meshwright.testing.simulated import simulate
from tests.codegen.equality import plan_of, rank_of, run_plan
from tests.traces import zoo_graph

HEAD = 8
QKV, HEADS, NORM = f"outer=3,inner={HEAD}", f"inner={HEAD}", "S(1) R|P R|P -> S(1)"
TP = {
    "transformer.wte": {
        "/embedding": "S(0) R -> P",
        "transformer.wpe/embedding": "R|P S(1) -> S(1)",
        "transformer/add": "S(1) S(1) -> S(1)",
    },
    "transformer.h.*": {
        "ln_1/layer_norm": NORM,
        "attn.c_attn/view": "R|P -> R|P",
        "attn.c_attn/addmm": f"S(0,{QKV}) R|P S(1,{QKV}) -> S(1,{QKV})",
        "attn.c_attn/view#2": f"S(1,{QKV}) -> S(2,{QKV})",
        "attn/split": f"S(2,{QKV}) -> S(2,{HEADS}) S(2,{HEADS}) S(2,{HEADS})",
        **{f"attn/view{n}": f"S(2,{HEADS}) -> S(2)" for n in ("", "#2", "#3")},
        **{f"attn/transpose{n}": "S(2) -> S(1)" for n in ("", "#2", "#3")},
        "attn/scaled_dot_product_attention": "S(1) S(1) S(1) -> S(1)",
        "attn/transpose#4": "S(1) -> S(2)",
        "attn/reshape": f"S(2) -> S(2,{HEADS})",
        "attn.c_proj/view": f"S(2,{HEADS}) -> S(1,{HEADS})",
        "attn.c_proj/addmm": f"P S(1,{HEADS}) S(0,{HEADS}) -> P",
        "attn.c_proj/view#2": "P -> P",
        "/add": "S(1) S(1) -> S(1)",
        "ln_2/layer_norm": NORM,
        "mlp.c_fc/view": "R|P -> R|P",
        "mlp.c_fc/addmm": "S(0) R|P S(1) -> S(1)",
        "mlp.c_fc/view#2": "S(1) -> S(2)",
        **{f"mlp.act/{op}": "S(2) -> S(2)" for op in ("mul", "pow", "mul#2", "mul#3", "tanh")},
        "mlp.act/add": "S(2) S(2) -> S(2)",
        "mlp.act/add#2": "S(2) -> S(2)",
        "mlp.act/mul#4": "S(2) S(2) -> S(2)",
        "mlp.c_proj/view": "S(2) -> S(1)",
        "mlp.c_proj/addmm": "P S(1) S(0) -> P",
        "mlp.c_proj/view#2": "P -> P",
        "/add#2": "S(1) S(1) -> S(1)",
    },
    "lm_head": {
        "transformer.ln_f/layer_norm": NORM,
        "/linear": "R|P S(0) -> S(2)",
        "/view": "S(2) -> S(1)",
        "/cross_entropy_sum": "S(1) R -> R",
    },
}
STORED = {
    "transformer.wte": {"weight": "S(0)"},
    "transformer.h.*": {
        "attn.c_attn.weight": f"S(1,{QKV})", "attn.c_attn.bias": f"S(0,{QKV})",
        "attn.c_proj.weight": f"S(0,{HEADS})", "mlp.c_fc.weight": "S(1)",
        "mlp.c_fc.bias": "S(0)", "mlp.c_proj.weight": "S(0)",
    },
    "lm_head": {"transformer.wte.weight": "S(0)"},
}  # fmt: skip


def by_hand(graph: Graph, tp: int) -> tuple[BlockLayout, ...]:
    """The data axis as it is solved, the tensor axis as it is written above."""
    patterns = {block.pattern: block for block in graph.distinct_blocks()}
    return tuple(_with_tp(graph, patterns.get(x.pattern), x, tp) for x in solve_layouts(graph, ()))


def _with_tp(graph: Graph, block: Block | None, data: BlockLayout, tp: int) -> BlockLayout:
    ops = {key: dict(axes) for key, axes in data.ops.items()}
    for key, text in TP.get(data.pattern, {}).items():
        ops.setdefault(key, {})["tp"] = text
    parameters = {key: dict(axes) for key, axes in data.parameters.items()}
    for key, text in STORED.get(data.pattern, {}).items():
        parameters.setdefault(key, {})["tp"] = text

    def border(name: str, axes: dict[str, str]) -> dict[str, str]:
        tensor = graph.tensors[name]
        return {**axes, "tp": "S(1)"} if tensor.requires_grad and tensor.shape else dict(axes)

    made = replace(
        data, name=f"{data.pattern} by hand", mesh={"tp": tp}, ops=ops, parameters=parameters
    )
    if block is None:  # the prelude
        return made
    inputs = map(border, block.inputs, data.inputs)
    return replace(
        made, inputs=tuple(inputs), outputs=tuple(map(border, block.outputs, data.outputs))
    )


CASE = CASES["gpt2"]


@pytest.mark.parametrize(
    ("tp", "shares", "count", "cuts"), [(2, (8,), 1, ()), (3, (3, 1), 2, (2,)), (4, (1,), 8, (1,))]
)
def test_gradients_are_those_of_the_model(
    tp: int, shares: tuple[int, ...], count: int, cuts: tuple[int, ...]
) -> None:
    model, batch = CASE.model(), flatten_batch(CASE.example())
    graph = trace(model, CASE.example(), CASE.loss_fn)
    plan = plan_of(graph, by_hand(graph, tp), shares, count, cuts)
    assert not [finding for rule in GRAPH_RULES for finding in rule(plan, graph)]
    loss, gradients = run_plan(model, graph, plan, batch)
    wanted = TrainingStep(model, CASE.loss_fn, tuple(batch))(*batch.values())
    wanted.backward()
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-12, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_a_layer_gathers_and_scatters_where_it_reduced() -> None:
    """Two gathers and two scatters each way instead of two all-reduces, as in Megatron-LM."""
    graph = zoo_graph(CASE)
    plan = plan_of(graph, by_hand(graph, 2), (8,))

    def body(comm: Comm) -> Counter[tuple[str, str]]:
        (program,) = lower(graph, plan, rank_of(plan.stages[0], comm))
        layer = next(call for call in program.calls if call.block == "transformer.h.1")
        found: Counter[tuple[str, str]] = Counter()
        for node in layer.code.module.graph.nodes:
            if node.op == "call_method":
                found[str(node.target), str(node.kwargs["backward"])] += 1
        return found

    for found in simulate({"dp": 1, "tp": 2}, body):
        moved = {pair: n for pair, n in found.items() if set(pair) & {"all_gather", "all_reduce"}}
        assert moved == {("all_gather", "reduce_scatter"): 2, ("reduce_scatter", "all_gather"): 2}
