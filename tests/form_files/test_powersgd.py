"""PowerSGD: equal to torch's own hook, step by step; exact where rank is full; bytes, memory, and
what a checkpoint has."""

from dataclasses import replace
from math import ceil
from typing import Any
from zlib import crc32

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.explain.detail import detail_of
from meshwright.forms.sync import changes, is_exact
from meshwright.forms.sync.powersgd import columns_to_begin_with, orthonormal
from meshwright.forms.sync_findings import findings
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.sent import counted
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.small import batches, graph, model

STEPS, LR = 6, 0.05
Found = tuple[list[float], dict[str, Tensor]]


def data(step: int) -> tuple[Tensor, ...]:
    return batches()[step % 5]


def plan_of(
    ranks: int, optimizer: str = "sgd", traced: Any = None, micro: int = 1, zero: int = 0,
    sizes: dict[str, int] | None = None, **settings: Any,
) -> Plan:  # fmt: skip
    problem = make_problem(
        traced or graph(), Cluster.local(ranks), precision="fp64", optimizer=optimizer
    )
    choice = uniform_choice(
        problem, num_microbatches=micro, zero=zero, **(sizes or {"dp_replicate": ranks})
    )
    plan = build_plan(problem, choice, predict=False)
    sync = FormChoice(form="powersgd", settings=settings)
    return replace(plan, stages=tuple(replace(stage, sync=sync) for stage in plan.stages))


def job_of(plan: Plan, of: Any = model, traced: Any = None, **more: Any) -> Any:
    return compile_job(
        of(), plan, optimizer=plan.optimizer, lr=LR, device="cpu", graph=traced or graph(),
        check=False, **more,
    )  # fmt: skip


def trained(plan: Plan, clip: float | None = None, broken: str = "", parts: int = 1) -> Found:
    """Losses, and parameters in the end; `parts`: how often a step reads its batch."""
    job, losses = job_of(plan, max_grad_norm=clip), []
    for step in range(STEPS):
        if broken and step == 3:
            job.save(broken)
            job.close()
            job = job_of(plan, max_grad_norm=clip)
            job.load(broken)
        if parts == 1:
            losses.append(float(job.step(data(step))))
        else:
            found = [float(job.accumulate(data(step))) for _ in range(parts)]
            losses.append(sum(found) / parts)
            job.apply(1 / parts)
    state = full_state(job)
    job.close()
    return losses, state


def _under_torch(
    of: Any, read: Any, optimizer: str, rank: int, gain: float, start: int, clip: float | None
) -> Found:
    """The same under DDP with torch's hook, which begins with the same columns."""
    own = of()
    names = {id(p): name for name, p in own.named_parameters()}
    parallel = DistributedDataParallel(own)
    state = PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=start, min_compression_rate=gain
    )

    def hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        if state.iter == start and bucket.index() not in state.q_memory_dict:
            rights: dict[Any, list[Tensor]] = {}
            left = 0
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                m = gradient.view(gradient.shape[0], -1)
                r = min(*m.shape, rank)
                if sum(m.shape) * r * gain < m.numel():
                    seed = _seed(names[id(parameter)])
                    drawn = columns_to_begin_with((m.shape[1], r), seed)
                    rights.setdefault(m.shape, []).append(drawn.flatten())
                    left += r * m.shape[0]
            state.p_memory_dict[bucket.index()] = torch.empty(left, dtype=torch.float64)
            found = [x for same in rights.values() for x in same]
            state.q_memory_dict[bucket.index()] = torch.cat(found)
        return powerSGD_hook(state, bucket)

    parallel.register_comm_hook(state, hook)
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    stepped = kinds[optimizer](own.parameters(), lr=LR)
    losses = []
    for step in range(STEPS):
        mine = [x.chunk(dist.get_world_size())[dist.get_rank()] for x in read(step)]
        stepped.zero_grad()
        loss = parallel(*mine)
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(own.parameters(), clip)
        stepped.step()
        whole = loss.detach() / dist.get_world_size()
        dist.all_reduce(whole)
        losses.append(float(whole))
    return losses, {name: x.detach().clone() for name, x in own.named_parameters()}


def _seed(name: str) -> int:
    return crc32(f"0 {name}".encode())


def assert_equal(found: Found, wanted: Found, rel: float = 1e-9) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=rel)
    for name, x in wanted[1].items():
        assert (found[1][name] - x).abs().max() <= rel * x.abs().max(), name


def differ(found: Found, wanted: Found) -> bool:
    return found[0][-1] != pytest.approx(wanted[0][-1], rel=1e-5)


def plain(optimizer: str = "sgd") -> Found:
    own, losses = model(), []
    kinds: dict[str, Any] = {"sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    stepped = kinds[optimizer](own.parameters(), lr=LR)
    for step in range(STEPS):
        stepped.zero_grad()
        loss = own(*data(step))
        loss.backward()
        stepped.step()
        losses.append(float(loss.detach()))
    return losses, {name: x.detach().clone() for name, x in own.named_parameters()}


@pytest.mark.parametrize(
    ("optimizer", "rank", "gain", "start", "clip"),
    [("sgd", 1, 2.0, 2, None), ("adamw", 2, 1.0, 3, 0.5), ("sgd", 4, 0.5, 2, None)],
)
def test_it_is_what_torch_does(
    optimizer: str, rank: int, gain: float, start: int, clip: float | None
) -> None:
    """Step by step, from the step on in which it begins; clipped, too."""
    plan = plan_of(2, optimizer, rank=rank, gain=gain, start=start)
    found = run_ranks(2, trained, plan, clip)[0]
    wanted = run_ranks(2, _under_torch, model, data, optimizer, rank, gain, start, clip)[0]
    assert_equal(found, wanted)
    assert differ(found, alone(plain, optimizer))


@pytest.mark.parametrize(("ranks", "micro"), [(2, 1), (3, 2)])
def test_full_rank_is_exact(ranks: int, micro: int) -> None:
    """Also of unequal shares: what replicas have lost sums up to nothing."""
    plan = plan_of(ranks, micro=micro, rank=2**20, gain=0.0)
    assert (len(set(plan.stages[0].batch_shares)) > 1) == (ranks == 3)
    assert_equal(run_ranks(ranks, trained, plan)[0], alone(plain))


def test_accumulated_batches_are_one() -> None:
    plan = plan_of(2, rank=1, gain=1.0)
    one, two = (run_ranks(2, trained, plan, None, "", parts)[0] for parts in (1, 2))
    assert_equal(two, one)


def test_a_run_that_goes_on_is_the_same_run(tmp_path: Any) -> None:
    """What is lost and the columns of the last step go through a checkpoint."""
    plan = plan_of(2, "adamw", rank=1, gain=1.0)
    whole = run_ranks(2, trained, plan)[0]
    assert_equal(run_ranks(2, trained, plan, None, str(tmp_path / "kept"))[0], whole, 1e-12)
    for setting in ("feedback", "warm"):
        other = plan_of(2, "adamw", rank=1, gain=1.0, **{setting: "no"})
        assert differ(run_ranks(2, trained, other)[0], whole)


class Tied(nn.Module):
    """A table that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(40, 12), nn.Linear(12, 40, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.out(torch.tanh(self.words(ids))), y)


def tied() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Tied().double()


def words(step: int) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(step)
    return tuple(torch.randint(0, 40, (8,), generator=draw) for _ in range(2))


def _tied(plan: Plan) -> Found:
    job = job_of(plan, tied, trace(tied(), words(0)))
    losses = [float(job.step(words(step))) for step in range(STEPS)]
    state = full_state(job)
    job.close()
    return losses, state


def test_tied_parameters() -> None:
    """Their gradient goes once, with all that has been added to it."""
    plan = plan_of(2, traced=trace(tied(), words(0)), rank=2, start=2)
    wanted = run_ranks(2, _under_torch, tied, words, "sgd", 2, 2.0, 2, None)[0]
    assert_equal(
        run_ranks(2, _tied, plan)[0], (wanted[0], {"words.weight": wanted[1]["words.weight"]})
    )


def sent_by(plan: Plan) -> list[list[int]]:
    """Bytes of each message of gradients, of three steps."""
    job = job_of(plan)
    with counted(job, "gradients") as found:
        for step in range(3):
            job.step(data(step))
    job.close()
    return found


def test_what_goes_is_two_thin_matrices() -> None:
    """Rank times rows and all that is no matrix or too small, then rank times columns: counted, by
    formula and predicted."""
    rank = 2
    shapes = [tuple(x.shape) for x in model().parameters()]
    thin = [s for s in shapes if len(s) > 1 and 2 * rank * sum(s) < s[0] * s[1]]
    whole = sum(torch.Size(s).numel() for s in shapes)
    others = whole - sum(a * b for a, b in thin)
    assert 0 < len(thin) < len([s for s in shapes if len(s) > 1])
    wanted = [8 * (others + rank * sum(a for a, _ in thin)), 8 * rank * sum(b for _, b in thin)]
    plan = plan_of(2, rank=rank, start=1)
    found = run_ranks(2, sent_by, plan)
    assert found[0] == found[1]
    assert sum(found[0][0]) == 8 * whole and found[0][1:] == [wanted, wanted]
    problem = make_problem(graph(), Cluster.local(2), precision="fp64", optimizer="sgd")
    (kind,) = detail_of(problem.tables, plan).kinds
    (said,) = [t.nbytes for t in kind.traffic if t.purpose == "gradients"]
    assert said == ceil(sum(wanted))  # in a ring of two, each sends as much as there is


def test_matrices_that_are_split_over_a_model_axis() -> None:
    """Each rank has thin ones of its part, whose shape the price knows; full rank is exact."""
    sizes = {"dp_replicate": 2, "tp": 2}
    problem = make_problem(graph(), Cluster.local(4), precision="fp64", optimizer="sgd")
    plan = plan_of(4, sizes=sizes, rank=1, gain=1.0)
    found = run_ranks(4, sent_by, plan)
    (kind,) = detail_of(problem.tables, plan).kinds
    (said,) = [t.nbytes for t in kind.traffic if t.purpose == "gradients" and t.axis == "dp"]
    assert sum(found[0][1]) == said
    whole = sum(x.numel() for x in model().parameters())
    assert said < 0.6 * 8 * whole / 2, "parts of matrices are split"
    plan = plan_of(4, sizes=sizes, rank=2**20, gain=0.0)
    assert_equal(run_ranks(4, trained, plan)[0], alone(plain))


def test_thin_matrices_of_some_parameters_only() -> None:
    """Beside others, whose gradients go whole."""
    plan = plan_of(2, rank=1, gain=1.0)
    own = ParameterChoice(sync=plan.stages[0].sync)
    said = {"layers.1.*": own}
    plan = replace(plan, stages=(replace(plan.stages[0], sync=None, by_parameter=said),))
    found = run_ranks(2, sent_by, plan)[0]
    rows = sum(x.shape[0] if x.ndim > 1 else x.numel() for x in model().layers[1].parameters())  # type: ignore[union-attr]
    columns = sum(x.shape[1] for x in model().layers[1].parameters() if x.ndim > 1)  # type: ignore[union-attr]
    whole = sum(x.numel() for x in model().parameters())
    inner = sum(x.numel() for x in model().layers[1].parameters())  # type: ignore[union-attr]
    assert sorted(found[0]) == sorted([8 * (whole - inner), 8 * rows, 8 * columns])


def wide() -> nn.Module:
    """Parameters outweigh what it saves."""
    layers = [layer for _ in range(3) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return Loss(nn.Sequential(*layers)).double()


class Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.inner(x).square().mean()
        return found


def _most(plans: list[Plan]) -> list[int]:
    """Bytes that are there in the third step."""
    found, x = [], torch.ones(8, 64, dtype=torch.float64)
    for plan in plans:
        job = job_of(plan, wide, trace(wide(), (x,)))
        job.step((x,))
        job.step((x,))
        job.track_memory((x,))
        found.append(job.tensor_memory.peak_bytes)
        job.close()
    return found


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_tracked_memory_is_as_predicted(optimizer: str) -> None:
    """With what is lost, without, and of plain replicas."""
    traced = trace(wide(), (torch.ones(8, 64, dtype=torch.float64),))
    said: tuple[dict[str, Any], ...] = ({"rank": 4}, {"rank": 2, "feedback": "no"})
    plans = [plan_of(2, optimizer, traced, **settings) for settings in said]
    plans.append(replace(plans[0], stages=(replace(plans[0].stages[0], sync=None),)))
    problem = make_problem(traced, Cluster.local(2), precision="fp64", optimizer=optimizer)
    most = run_ranks(2, _most, plans)[0]
    for each, nbytes in zip(plans, most, strict=True):
        found = estimate_all(traced, problem.cluster, each, problem.tables).prediction
        assert found.stages[0].memory.tensor_bytes == pytest.approx(nbytes, rel=0.03)
    assert most[0] > most[1] + 0.9 * 3 * 64 * 64 * 8, "what is lost is held"


@pytest.mark.parametrize(
    ("settings", "zero", "said", "near"),
    [
        ({"rank": 0}, 0, "rank must be a whole number from 1", "rank 1"),
        ({"feedback": "maybe"}, 0, "one of yes, no", "feedback yes"),
        ({"rang": 2}, 0, "no setting 'rang'", "rank 4"),
        ({}, 1, "has them whole", "zero 0"),
    ],
)
def test_what_cannot_be_is_refused(settings: Any, zero: int, said: str, near: str) -> None:
    sizes = {"dp_shard": 2} if zero else None
    (finding,) = findings(plan_of(2, zero=zero, sizes=sizes, **settings))
    assert said in finding.message and near in finding.nearest, finding


def test_only_who_asks_gets_it() -> None:
    assert not is_exact("powersgd") and changes("powersgd") == "low_rank"


def test_columns_are_orthonormal_of_whatever_there_is() -> None:
    for x in (torch.zeros(5, 2), torch.ones(5, 2), torch.randn(5, 2, dtype=torch.bfloat16)):
        found = orthonormal(x)
        assert found.dtype == x.dtype
        far = (found.float().t() @ found.float() - torch.eye(2)).abs().max()
        assert far < (0.02 if x.dtype == torch.bfloat16 else 1e-6)
