"""Memory of backwards in two halves: what the first half makes again stays until the second."""

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import Plan
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.models import CASES
from meshwright.testing.peaks import peak_of
from meshwright.testing.spawn import run_ranks
from tests.overlap_plans import planned
from tests.traces import zoo_graph

BATCH = 32
SPLIT = ("zero_bubble", "zbv", "dual_pipe_v")


def test_it_is_as_predicted() -> None:
    made = {}
    for schedule in SPLIT:
        graph, plan = planned("gpt2", BATCH, "none", tp=1, pp=2, num_microbatches=4,
                              schedule=schedule, recompute="full")  # fmt: skip
        asked = make_problem(graph, Cluster.local(2), precision="fp64", optimizer="adam")
        made[schedule] = plan, predict_plan(asked, plan)
    found = run_ranks(2, _peaks, [plan for plan, _ in made.values()])
    for number, (schedule, (plan, predicted)) in enumerate(made.items()):
        for rank in (0, 1):
            index = plan.schedule.parse().ranks[rank][0].stage
            (device,) = plan.stages[index].devices
            room = predicted.stages[index].memory.tensor_bytes / found[device][number]
            assert 0.99 <= room <= 1.04, (schedule, rank, room)


def _peaks(plans: list[Plan]) -> list[int]:
    case = CASES["gpt2"]
    graph = zoo_graph(case, BATCH)
    jobs = (
        compile_job(case.model(), plan, loss_fn=case.loss_fn, optimizer="adam", device="cpu",
                    graph=graph)
        for plan in plans
    )  # fmt: skip
    return [peak_of(job, case.example(BATCH)) for job in jobs]
