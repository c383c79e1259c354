"""An emitted step launches no more for its blocks than the model as written; with kernels less."""

import pytest

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.kernels import KERNELS, PLACED
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.launches import Launches, of_plain_step
from meshwright.testing.models import CASES

TRACED = tuple(name for name in KERNELS if name not in PLACED)
PER_STEP = 12
"""Of a step, however many blocks it has: its batch, its loss's count and mean, its optimizer."""


def _launches(name: str, kernels: tuple[str, ...]) -> Launches:
    case = CASES[name]
    graph = trace(case.model(), case.example(), kernels=kernels, precision="fp32")
    problem = make_problem(graph, Cluster.local(1), precision="fp32", optimizer="adamw")
    plan = build_plan(problem, uniform_choice(problem), predict=False)
    job = compile_job(case.model(), plan, optimizer="adamw", device="cpu", graph=graph, check=False)
    job.step(case.example())
    found = Launches()
    with found:
        job.step(case.example())
    job.close()
    return found


@pytest.mark.parametrize(("name", "most"), [("gpt2", 0.85), ("llama", 0.58)])
def test_blocks_launch_no_more_than_the_model_as_written(name, most):
    eager = of_plain_step(CASES[name].model(), CASES[name].example())
    plain, fused = _launches(name, ()), _launches(name, TRACED)
    assert plain.total <= eager.total + PER_STEP
    assert fused.total <= most * eager.total
    # Nothing is made for gradients that nobody has.
    assert fused.counts["zeros"] == 0
