"""Batch-norms whose replicas train alone: equal to models of their own in one process, each with
the statistics of its own samples; whoever looks sees the mean."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.codegen.lower.lower import lower
from meshwright.costmodel.stage.placement import spots, stage_costs
from meshwright.forms.sync_findings import findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph
from meshwright.ir.layout.op_messages import Inner
from meshwright.ir.plan.plan import FormChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.whole import differing_copies, whole_buffers
from meshwright.testing.spawn import alone, run_ranks

STEPS, SAMPLES, LR, MICRO = 7, 12, 0.1, 2
LATE = {"every": 3, "delay": 2}
Batch = tuple[Tensor, Tensor]


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.out = nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.out(torch.tanh(self.norm(self.up(x)))), y)


class Centred(nn.Module):
    """Ops that are no batch-norm read all samples, by their sums; of its loss a part is of none."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.out = nn.Linear(5, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.up(x)
        centred = hidden - hidden.mean(0)
        spread = centred.square().mean(0).sqrt().mean()
        decay = self.up.weight.square().sum()
        return nn.functional.mse_loss(self.out(centred), y) + 0.1 * spread + 0.05 * decay


class Weighted(Centred):
    """Samples have weights, which every rank makes for all of them."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weights = torch.linspace(0.5, 1.5, x.shape[0], dtype=x.dtype)
        off = (self.out(torch.tanh(self.up(x))) - y).square().mean(1)
        return (weights * off).mean()


class Paired(Centred):
    """Each sample is compared with all others, beside what sums over samples and parameters make
    together."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.up(x)
        spread = (hidden - hidden.mean(0)).square().mean(0).sqrt()
        made = self.out(hidden)
        beside = (spread * self.up.bias.exp()).mean() + (made @ made.T).square().mean()
        return nn.functional.mse_loss(made, y) + 0.05 * self.up.weight.square().sum() + 0.1 * beside


KINDS: dict[str, type[nn.Module]] = {
    "normed": Normed, "centred": Centred, "weighted": Weighted, "paired": Paired,
}  # fmt: skip


def micro(kind: str) -> int:
    return MICRO if kind == "normed" else 1


def model(kind: str = "normed") -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return KINDS[kind]().double().train()


def batch(step: int) -> Batch:
    draw = torch.Generator().manual_seed(step)
    return (torch.randn(SAMPLES, 5, generator=draw, dtype=torch.float64) + step % 3,
            torch.randn(SAMPLES, 2, generator=draw, dtype=torch.float64))  # fmt: skip


def graph(kind: str = "normed") -> Graph:
    return _traced(kind)


@cache
def _traced(kind: str) -> Graph:
    """Once, for plans and for the jobs of every rank that is forked after them."""
    return trace(model(kind), batch(0))


def plan_of(ranks: int, said: dict[str, Any], kind: str = "normed", **sizes: int) -> Plan:
    problem = make_problem(graph(kind), Cluster.local(ranks), precision="fp64", optimizer="sgd")
    choice = uniform_choice(problem, num_microbatches=micro(kind), **sizes)
    plan = build_plan(problem, choice, predict=False)
    sync = FormChoice(form="dasgd", settings=said)
    return replace(plan, stages=tuple(replace(stage, sync=sync) for stage in plan.stages))


def job_of(plan: Plan, kind: str = "normed") -> Any:
    return compile_job(model(kind), plan, optimizer="sgd", lr=LR, device="cpu", graph=graph(kind),
                       check=False)  # fmt: skip


def _begun(plan: Plan) -> Any:
    """What is exported before any step is taken, of a batch that has been read."""
    job = job_of(plan)
    job.accumulate(batch(0))
    state, differ = full_state(job), differing_copies(job, 1e-12)
    job.close()
    return state, differ


def _run(plans: list[Plan], kind: str) -> list[Any]:
    """Of each: losses, what is exported in the end, and losses of evaluations in between."""
    found = []
    for plan in plans:
        job, losses, asked = job_of(plan, kind), [], []
        for step in range(STEPS):
            losses.append(float(job.step(batch(step))))
            if step in (0, 3):
                asked.append(float(job.eval(batch(9))))
        found.append((losses, full_state(job, everyone=True), asked))
        job.close()
    return found


def _trained(cases: list[tuple[Plan, str]]) -> list[Any]:
    """Of each: losses, what is exported in the end, losses of evaluations in between, and what
    ranks have differently then. Some are saved in the middle, and go on as another job."""
    found = []
    for plan, folder in cases:
        job, losses, asked = job_of(plan), [], []
        for step in range(STEPS):
            if folder and step == STEPS - 2:
                job.save(folder)
                job.close()
                job = job_of(plan)
                job.load(folder)
            losses.append(float(job.step(batch(step))))
            if step in (0, 3):
                asked.append(float(job.eval(batch(9))))
        buffers = {name: x.clone() for name, x in whole_buffers(job, everyone=True)}
        state = full_state(job, everyone=True)
        assert buffers and all(torch.equal(x, state[name]) for name, x in buffers.items())
        found.append((losses, state, asked, differing_copies(job, 1e-12)))
        job.close()
    return [*found, _begun(cases[0][0])]


def emulated(shares: tuple[int, ...], every: int, delay: int, kind: str = "normed") -> Any:
    """The same of all replicas one after another, of models of torch's."""
    own, parts_of = [model(kind) for _ in shares], micro(kind)
    weights = [share / sum(shares) for share in shares]
    steps = [torch.optim.SGD(x.parameters(), lr=LR) for x in own]
    losses, asked = [], []
    average: list[Tensor] = []
    begun = 0
    before: list[list[Tensor]] = []

    def values(of: nn.Module) -> list[Tensor]:
        return [p.detach().clone() for p in of.parameters()]

    def mean() -> dict[str, Tensor]:
        states = [x.state_dict() for x in own]
        return {
            name: sum(w * s[name] for w, s in zip(weights, states, strict=True)) if
            first.is_floating_point() else first
            for name, first in states[0].items()
        }  # type: ignore[misc] # fmt: skip

    def merge() -> None:
        with torch.no_grad():
            for x, had in zip(own, before, strict=True):
                for p, old, new in zip(x.parameters(), had, average, strict=True):
                    p += new - old

    for step in range(STEPS):
        parts = [
            [torch.split(half, list(shares)) for half in x.chunk(parts_of)] for x in batch(step)
        ]
        total = 0.0
        for i, (x, stepped) in enumerate(zip(own, steps, strict=True)):
            stepped.zero_grad()
            for number in range(parts_of):
                loss = x(parts[0][number][i], parts[1][number][i]) / parts_of
                loss.backward()
                total += (not i if delay else weights[i]) * float(loss.detach())
            stepped.step()
        losses.append(total)
        if average and step + 1 == begun + delay:
            merge()
            average = []
        if (step + 1) % every == 0:
            begun, before = step + 1, [values(x) for x in own]
            average = [sum(w * v[i] for w, v in zip(weights, before, strict=True))  # type: ignore[misc]
                       for i in range(len(before[0]))]  # fmt: skip
            if not delay:
                merge()
                average = []
        if step in (0, 3):
            seen = model(kind)
            seen.load_state_dict(mean())
            asked.append(float(seen.eval()(*batch(9)).detach()))
    return losses, mean(), asked


def read_once(shares: tuple[int, ...]) -> dict[str, Tensor]:
    """The mean of the statistics of replicas that have read the first batch."""
    own = [model() for _ in shares]
    for half in batch(0)[0].chunk(MICRO):
        for of, part in zip(own, torch.split(half, list(shares)), strict=True):
            of.norm(of.up(part))  # type: ignore[operator]
    found = [dict(of.named_buffers()) for of in own]
    return {
        name: torch.stack([x[name] for x in found]).mean(0)
        for name in ("norm.running_mean", "norm.running_var")
    }


def test_each_replica_has_the_statistics_of_its_own_samples(tmp_path: Any) -> None:
    """Averaged where they are read: in evaluation, checkpoint and export, after which each goes on
    with its own; also of a replica of two ranks with ZeRO, of unequal replicas, and in the limit of
    averages at once after every step, which is torch's DDP."""
    two, alike = {"dp_replicate": 2}, (3, 3)
    plans = [plan_of(2, LATE, **two), plan_of(2, {"every": 1, "delay": 0}, **two)]
    uneven = replace(plans[0], stages=(replace(plans[0].stages[0], batch_shares=(4, 2)),))
    cases = [(plans[0], ""), (plans[0], str(tmp_path / "kept")), (plans[1], ""), (uneven, "")]
    *found, (state, differ) = run_ranks(2, _trained, cases)[0]
    for name, x in alone(read_once, alike).items():
        assert torch.allclose(state[name], x, rtol=1e-10, atol=1e-12), name
    assert not differ
    sharded = plan_of(4, LATE, dp_replicate=2, dp_shard=2, zero=1)
    found += run_ranks(4, _trained, [(sharded, "")])[0][:1]
    late = alone(emulated, alike, 3, 2)
    wanted = [late, late, alone(emulated, alike, 1, 0), alone(emulated, (4, 2), 3, 2)]
    shares = sharded.stages[0].batch_shares
    wanted.append(alone(emulated, (sum(shares[:2]), sum(shares[2:])), 3, 2))
    assert len({losses[-1] for losses, *_ in wanted}) == 3
    for (losses, state, asked, differ), (own, values, seen) in zip(found, wanted, strict=True):
        assert losses == pytest.approx(own, rel=1e-10) and asked == pytest.approx(seen, rel=1e-10)
        assert not differ and state.keys() == values.keys()
        for name, x in values.items():
            assert torch.allclose(state[name], x, rtol=1e-10, atol=1e-12), name


def test_sums_over_samples_are_of_a_replica() -> None:
    """In blocks as in statistics; what a loss has beside samples each replica has. Of one rank, of
    unequal ones, and of two ranks with ZeRO."""
    two = {"dp_replicate": 2}
    plans = [plan_of(2, LATE, "centred", **two),
             plan_of(2, LATE, "centred", **two)]  # fmt: skip
    plans[1] = replace(plans[1], stages=(replace(plans[1].stages[0], batch_shares=(8, 4)),))
    found = run_ranks(2, _run, plans, "centred")
    each = [(found[0][0], (6, 6)), (found[0][1], (8, 4))]
    sharded = plan_of(4, LATE, "centred", dp_replicate=2, dp_shard=2, zero=1)
    shares = sharded.stages[0].batch_shares
    each.append(
        (run_ranks(4, _run, [sharded], "centred")[0][0], (sum(shares[:2]), sum(shares[2:])))
    )
    for (losses, state, asked), own in each:
        wanted, values, seen = alone(emulated, own, 3, 2, "centred")
        assert losses == pytest.approx(wanted, rel=1e-10)
        assert asked == pytest.approx(seen, rel=1e-10), "evaluation is of all samples"
        for name, x in values.items():
            assert torch.allclose(state[name], x, rtol=1e-10, atol=1e-12), name


def _both(plans: dict[str, Plan]) -> dict[str, Any]:
    return {kind: _run([plan], kind)[0] for kind, plan in plans.items()}


def test_averages_at_once_are_plain_training() -> None:
    """Where nothing is a replica's own: each has the weights of its own samples, and gradients of
    what all samples make together come to each once. Of unequal replicas of two ranks."""
    now, plans = {"every": 1, "delay": 0}, dict[str, Plan]()
    for kind in ("weighted", "paired"):
        plan = plan_of(4, now, kind, dp_replicate=2, dp_shard=2, zero=1)
        plans[kind] = replace(plan, stages=(replace(plan.stages[0], batch_shares=(4, 3, 3, 2)),))
    for kind, (losses, state, _) in run_ranks(4, _both, plans)[0].items():
        wanted, values, _ = alone(emulated, (SAMPLES,), 1, 0, kind)
        assert losses == pytest.approx(wanted, rel=1e-10), kind
        for name, x in values.items():
            assert torch.allclose(state[name], x, rtol=1e-10, atol=1e-12), (kind, name)


class Contrasted(nn.Module):
    """Each sample is compared with all others."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        return (hidden @ hidden.T).square().mean()


def forwards_s(graph: Graph, ranks: int, **sizes: int) -> list[float]:
    """What its blocks take forward, where replicas train alone and where they do not; messages take
    long."""
    cluster = Cluster.preset("v100-16", num_nodes=ranks, devices_per_node=1)
    assert cluster.between_nodes
    wire = replace(cluster.between_nodes, step_s=1e-3)
    cluster = replace(cluster, between_nodes=wire)
    problem = make_problem(graph, cluster, precision="fp64", optimizer="sgd")
    plain = build_plan(problem, uniform_choice(problem, num_microbatches=1, **sizes), predict=False)
    late = replace(plain.stages[0], sync=FormChoice(form="dasgd", settings=LATE))
    plans = replace(plain, stages=(late,)), plain
    return [stage_costs(problem.tables, each, 0).cost.forward_s for each in plans]


def test_the_plan_says_so_and_prices_no_sums_of_statistics() -> None:
    """Replicas of one rank send nothing while blocks run."""
    cluster = Cluster.preset("v100-16", num_nodes=4, devices_per_node=1)
    pins = ("pp=1", "model=1", "dp=4", "sync=dasgd")
    problem = make_problem(graph(), cluster, precision="fp64", optimizer="sgd", constraints=pins)
    plan = search_problem(problem, progress=False)
    assert any("statistics of batch-norms, are a replica's own" in text for text in plan.gives_up)
    assert any("statistics of batch norms are each replica's own" in note for note in plan.notes)
    assert not [finding for finding in findings(plan) if finding.severity == "error"]
    (spot,) = spots(problem.tables, plan.stages[0])
    site, message = problem.tables.blocks.site(spot), Inner("all_reduce", 64, 1, backward=False)
    own = replace(message, of_replica=True)
    assert site.inner_s(own, "dp") == 0.0 < site.inner_s(message, "dp")
    late_s, all_s = forwards_s(graph(), 4, dp_replicate=4)
    assert late_s < 1e-3 < all_s
    some_s, whole_s = forwards_s(graph(), 4, dp_replicate=2, dp_shard=2, zero=1)
    assert late_s < some_s < whole_s == pytest.approx(all_s), "of the two that share"
    # So with other sums; ops that need other samples meet all replicas.
    late_s, all_s = forwards_s(graph("centred"), 4, dp_replicate=4)
    assert late_s < 1e-3 < all_s
    contrasted = trace(Contrasted().double(), (batch(0)[0],))
    late_s, all_s = forwards_s(contrasted, 4, dp_replicate=4)
    assert late_s == all_s
    for traced, others in ((contrasted, True), (graph("centred"), False), (graph(), False)):
        asked = make_problem(traced, Cluster.local(2), precision="fp64", optimizer="sgd")
        choice = uniform_choice(asked, num_microbatches=1, dp_replicate=2)
        (program,) = lower(traced, build_plan(asked, choice, predict=False), 0)
        assert program.needs_others == others == bool(asked.meeting)
    # Ranks of one replica are on a node, those of the other on two: each has its own links.
    nodes = Cluster.preset("v100-16", num_nodes=2, devices_per_node=3)
    asked = make_problem(graph(), nodes, precision="fp64", optimizer="sgd")
    stage = build_plan(asked, uniform_choice(asked, dp_replicate=2, dp_shard=2)).stages[0]
    late = replace(stage, sync=plan.stages[0].sync, devices=(0, 1, 2, 3))
    own_levels = [spot.own_levels or () for spot in spots(asked.tables, late)]
    found = [levels[0].link.name for levels in own_levels]
    assert found == [nodes.nodes[0].link.name, nodes.link_of_nodes(0, 1).name]
