"""Calls that are a collective and the products or norm beside it: equal to separate ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest

from meshwright.codegen.collectives.comm import Comm, SentCollective
from meshwright.codegen.lower.lower import lower
from meshwright.ir.graph.graph import Graph
from meshwright.ir.placed import joint_kernels
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.verify import check
from meshwright.testing import tensor_forms as forms
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES, ModelCase
from meshwright.testing.simulated import simulate
from tests.model_axes import SEQUENCE, Part, plan_of, traced
from tests.runtime.fused_graphs import graph_of
from tests.runtime.joint_plans import MIDDLE, joint, sequence_plan


def counts(plan: Plan) -> dict[str, int]:
    return {f.kernel: f.places for f in plan.kernels if f.kernel in joint_kernels() and f.places}


@cache
def mlp(tokens: int) -> tuple[ModelCase, Graph]:
    case = forms.case(tokens=tokens)
    return case, traced(case)


PLANS = {
    "zero3": ((Part(SEQUENCE, shares=(1, 1), zero=3),), {"count": 2}),
    "recomputed": ((Part(SEQUENCE, shares=(2,), recompute=True),), {"count": 2}),
    "split_backward": (
        (Part(SEQUENCE, 2, (2,)), Part(SEQUENCE, 2, (1, 1))),
        {"count": 2, "schedule": "zero_bubble"},
    ),
}


@pytest.mark.parametrize(
    ("name", "tokens"), [("zero3", 5), ("recomputed", 4), ("split_backward", 4)]
)
def test_sequence_parallel_layers(name, tokens):
    """5 tokens: the ranks have 3 and 2."""
    case, graph = mlp(tokens)
    parts, options = PLANS[name]
    plan = joint(plan_of(graph, parts, **options), graph)
    assert counts(plan)["gather_linear"] >= 2 and counts(plan)["linear_scatter"] >= 2
    found = check_equal(case, plan, graph, steps=3)
    assert found.worst_of_both <= 1e-9, found


def test_products_of_one_value_are_one_call():
    """Gate and up read what is gathered once; attention's and the MLP's sums are scattered."""
    graph = graph_of("llama")
    plan = sequence_plan(graph, MIDDLE)
    check(plan, graph)
    layers = sum(block.pattern == "model.layers.*" for block in graph.blocks)
    assert counts(plan) == {"gather_linear": layers, "linear_scatter": 2 * layers}
    source = lower(graph, plan, 0)[0].source
    assert source.count("sharded.gather_linear(") == 1
    assert source.count("sharded.linear_scatter(") == 2
    found = check_equal(CASES["llama"], plan, graph, steps=2)
    assert found.worst_of_both <= 1e-9, found


def test_what_is_sent_is_the_same():
    case, graph = mlp(5)
    plain = plan_of(graph, (Part(SEQUENCE, shares=(2,)),), count=2)

    def logs(plan: Plan) -> list[list[SentCollective]]:
        return [sorted(log) for log in simulate({"dp": 1, "tp": 2}, logged(plan, case, graph))]

    assert logs(joint(plain, graph)) == logs(plain)


def logged(plan: Plan, case: ModelCase, graph: Graph) -> Callable[[Comm], list[SentCollective]]:
    """What a rank sends in the forward and the backward of a micro-batch."""

    def body(comm: Comm) -> list[SentCollective]:
        comm.log = []
        (program,) = lower(graph, plan, comm.coordinates["tp"])
        values = dict(zip(graph.inputs, case.example(), strict=True))
        values = {name: value[:2].double() for name, value in values.items()}
        for param in program.params:
            values[param.name] = values[graph.inputs[0]].new_ones(param.local_shape)
            values[param.name].requires_grad_(param.requires_grad)
        for call in (program.prelude, *program.calls):
            if call:
                made = call.run(comm, *(values[name] for name in (*call.params, *call.inputs)))
                values |= dict(zip(call.outputs, made, strict=True))
        values[program.loss].backward()
        return comm.log

    return body


def why(plan: Plan, kernel: str) -> set[str]:
    return {m.why for f in plan.kernels if f.kernel == kernel for m in f.missed}


@pytest.mark.parametrize(
    ("strategies", "kernel", "reason"),
    [
        (
            {**MIDDLE, "mlp.gate_proj/linear": "S(1) R|P -> S(1)"}, "gather_linear",
            "another product wants what it reads otherwise",
        ),
        (
            {"mlp.down_proj/linear": "R|P S(0) -> S(2)"}, "gather_linear",
            "it gathers what it sums over",
        ),
        (
            {"/add": "S(2) S(2) -> S(2)"}, "linear_scatter",
            "it scatters what the product makes of each row",
        ),
        (
            {"post_attention_layernorm/add_rms_norm": "R R|P R|P -> R|P R|P R"}, "reduce_norm",
            "the gradient of its summands is converted too",
        ),
    ],
)  # fmt: skip
def test_why_a_collective_stays_alone(strategies, kernel, reason):
    assert why(sequence_plan(graph_of("llama"), strategies), kernel) == {reason}


def test_a_block_whose_values_are_kept_op_by_op_keeps_its_calls():
    graph = graph_of("llama")
    plan = sequence_plan(graph, MIDDLE)
    saved = {"model.layers.*": {"*": "recompute"}}
    stages = tuple(replace(stage, saved=saved) for stage in plan.stages)
    plan = joint(replace(plan, stages=stages), graph)
    assert not counts(plan)
    assert why(plan, "gather_linear") == {"the plan says op by op what the block keeps"}
    assert "sharded.gather_linear(" not in lower(graph, plan, 0)[0].source
