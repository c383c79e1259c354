"""The whole path of a kernel beside a collective that a user's folder has:

python -m tests.dropped.joint_path NAME
"""

import json
import sys
from dataclasses import replace

from meshwright.codegen.lower.lower import lower
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Fusion
from meshwright.ir.placed import placed
from meshwright.ir.plan import plan_io
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.placed_kernels import put_in
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.equality import check_equal
from meshwright.testing.models import CASES
from tests.runtime.fused_graphs import graph_of


def main(name: str) -> None:
    """Print as JSON what came of it: Llama on two ranks that share each layer."""
    graph = graph_of("llama")
    problem = make_problem(graph, Cluster.local(2), precision="fp64")
    plan = build_plan(problem, uniform_choice(problem, tp=2), predict=False)
    plan = replace(plan, kernels=(*plan.kernels, Fusion(name, 0)))
    plan = plan_io.loads(plan_io.dumps(replace(plan, kernels=placed(plan, graph))))
    found = check_equal(CASES["llama"], plan, graph, steps=2)

    gpus = Cluster.preset("a100-80", num_nodes=1, devices_per_node=2)
    problem = make_problem(graph, gpus, precision="fp32")
    plain = build_plan(problem, uniform_choice(problem, tp=2), predict=False)
    priced = replace(plain, kernels=(*plain.kernels, Fusion(name, 0, priced=True)))
    priced = replace(priced, kernels=put_in(problem, priced))
    print(
        json.dumps({
            "layers": sum(block.pattern == "model.layers.*" for block in graph.blocks),
            "places": {one.kernel: one.places for one in plan.kernels}[name],
            "worth": {one.kernel: one.places for one in priced.kernels}[name],
            "calls": lower(graph, plan, 0)[0].source.count("sharded.kernel_of("),
            "difference": found.worst_of_both,
        })
    )  # fmt: skip


if __name__ == "__main__":
    main(*sys.argv[1:])
