"""A small model that forms are tried on, trained by a job and in one process."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.forms.updates import Reach, update
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan import plan_io
from meshwright.ir.plan.plan import Plan
from meshwright.ir.precision import in_which_traced
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone, run_ranks
from meshwright.tools.check import check_plan, read_plan

STEPS, BATCH, WIDTH, LR = 5, 8, 12, 0.01
Batch = tuple[Tensor, Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.norm(x))))
        return found


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), y)


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Small().double().train()


def batches() -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    shapes = ((BATCH, WIDTH), (BATCH, 3))
    return [
        tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        for _ in range(STEPS)
    ]  # type: ignore[misc]


def graph(precision: str = "") -> Graph:
    """`precision`: one under which blocks read copies; empty: the model as it is."""
    return _graph(precision)


@cache
def _graph(precision: str) -> Graph:
    return trace(model(), batches()[0], precision=precision)


def graph_of(plan: Plan) -> Graph:
    return graph(in_which_traced(plan.precision))


def plan_for(optimizer: str, ranks: int = 2) -> Plan:
    """Parts of parameters on each rank where the optimizer can step those, else replicas."""
    problem = make_problem(graph(), Cluster.local(ranks), precision="fp64", optimizer=optimizer)
    parts = update(optimizer).reach is Reach.ELEMENT
    sizes = {"dp_shard": ranks, "zero": 2} if parts else {"dp_replicate": ranks}
    return build_plan(problem, uniform_choice(problem, num_microbatches=2, **sizes))


def _train(plan: Plan, lr: float) -> tuple[list[float], dict[str, Tensor]]:
    job = compile_job(
        model(), plan, optimizer=plan.optimizer, lr=lr, device="cpu", graph=graph_of(plan),
        check=False,
    )  # fmt: skip
    losses = [float(job.step(batch)) for batch in batches()]
    state = full_state(job)
    job.close()
    return losses, state


def _plain(optimizer: str, lr: float) -> tuple[list[float], dict[str, Tensor]]:
    trained = model()
    stepped = update(optimizer).make(list(trained.parameters()), lr, fused=False)
    losses = []
    for batch in batches():
        stepped.zero_grad()
        loss = trained(*batch)
        loss.backward()
        stepped.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in trained.named_parameters()}


def difference(plan: Plan, lr: float = LR) -> float:
    """The largest of losses and of all parameters after some steps, relative to what one process
    makes of the same batches."""
    graph_of(plan)  # once, not on each rank
    losses, state = run_ranks(plan.world_size, _train, plan, lr)[0]
    wanted_losses, wanted = alone(_plain, plan.optimizer, lr)
    assert wanted_losses[-1] != wanted_losses[0] and set(wanted) <= set(state)
    far = [abs(a - b) / abs(b) for a, b in zip(losses, wanted_losses, strict=True)]
    far += [float((state[n] - x).abs().max() / x.abs().max()) for n, x in wanted.items()]
    return max(far)


def search_and_run(folder: Path, pins: tuple[str, ...], **settings: Any) -> dict[str, Any]:
    """The whole path of a plan on two Gloo ranks: search, verify, file, price, training."""

    cluster = Cluster.local(2)
    problem = make_problem(graph(), cluster, precision="fp64", constraints=pins, **settings)
    plan_io.save(search_problem(problem), folder / "plan.json")
    checked = check_plan(read_plan(folder / "plan.json"), graph(), cluster)
    plan = checked.plan
    assert plan and checked.fresh and checked.fresh.predicted and plan.predicted
    assert not checked.is_broken, checked.findings
    assert checked.fresh.predicted.step_s == plan.predicted.step_s
    assert plan.evidence and plan.evidence.bound_s <= plan.predicted.step_s
    return {"plan": plan, "difference": difference(plan)}


def tracked(plans: list[Plan]) -> list[int]:
    """The most bytes of each in the third step."""
    found = []
    for plan in plans:
        job = compile_job(
            model(), plan, graph=graph_of(plan), optimizer=plan.optimizer, lr=LR, device="cpu",
            check=False,
        )  # fmt: skip
        for batch in batches()[:2]:
            job.step(batch)
        job.track_memory(batches()[2])
        assert job.tensor_memory is not None
        found.append(job.tensor_memory.peak_bytes)
        job.close()
    return found
