"""Plans in which kernels take over collectives."""

from dataclasses import replace

import meshwright as mw
from meshwright.ir.graph.graph import Fusion, Graph
from meshwright.ir.placed import joint_kernels, placed
from meshwright.ir.plan.plan import BlockLayout, Plan
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem


def joint(plan: Plan, graph: Graph) -> Plan:
    """The plan with all calls that can be made of its collectives."""
    found = placed(
        replace(plan, kernels=tuple(Fusion(name, 0) for name in sorted(joint_kernels()))), graph
    )
    fused = tuple(f for f in plan.kernels if f.kernel not in joint_kernels())
    return replace(plan, kernels=(*fused, *found))


MIDDLE = {
    "post_attention_layernorm/add_rms_norm": "S(1) S(1) R|P -> S(1) S(1) S(1)",
    "/add": "S(1) S(1) -> S(1)",
}
"""Of Llama's block: tokens are split from the second norm on."""


def sequence_plan(
    graph: Graph, strategies: dict[str, str], tp: int = 2, precision: str = "fp64"
) -> Plan:
    """Llama on ranks of tp, with these strategies in its blocks."""
    problem = make_problem(graph, mw.Cluster.local(tp), precision=precision)
    plan = build_plan(problem, uniform_choice(problem, tp=tp), predict=False)

    def changed(layout: BlockLayout) -> BlockLayout:
        if layout.pattern != "model.layers.*":
            return layout
        given = {key: {**layout.ops.get(key, {}), "tp": text} for key, text in strategies.items()}
        return replace(layout, ops={**layout.ops, **given})

    return joint(replace(plan, layouts=tuple(changed(x) for x in plan.layouts)), graph)
