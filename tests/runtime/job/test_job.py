"""The job's other methods: evaluation, accumulation, own samples, optimizers, statistics."""

import pytest
import torch

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.schedule import Action
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.record.record import StepRecord
from meshwright.runtime.step.optimizer import make_optimizer
from meshwright.testing.handmade import BATCH, Chain, batches, make_job, plan_of, reference
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.small_jobs import gpipe, stage

ONE = plan_of((stage(0, 3, (0,), shares=(12,)),), gpipe(1, 2), 2)
MIXED = plan_of(
    (stage(0, 1, (0, 1, 2), shares=(2, 3, 1), zero=2), stage(2, 3, (3,), shares=(6,))),
    gpipe(2, 4), 4,
)  # fmt: skip


def _evaluate():
    job = make_job(Chain(4), MIXED)
    before = full_state(job)
    losses = [float(job.eval(batch)) for batch in batches(2)]
    after = full_state(job)
    job.step(batches(1)[0])
    job.close()
    return losses, all(torch.equal(before[name], after[name]) for name in before)


def test_eval_gives_the_loss_and_changes_nothing():
    for losses, same in run_ranks(4, _evaluate):
        assert losses == pytest.approx([float(Chain(4)(*b).detach()) for b in batches(2)])
        assert same


def _accumulate(plan, sharded):
    job = make_job(Chain(4), plan)
    for first, second in zip(*[iter(batches(4))] * 2, strict=True):
        for batch in (first, second):
            job.accumulate(job.shard(batch) if sharded else batch, sharded=sharded)
        job.apply(0.5)
    state = full_state(job)
    job.close()
    return state


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("plan", [ONE, MIXED], ids=["one", "mixed"])
def test_accumulated_batches_are_one_step(plan, sharded):
    wanted = alone(_mean_of_two)
    state = run_ranks(plan.world_size, _accumulate, plan, sharded)[0]
    for name, value in wanted.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def _mean_of_two():
    chain = Chain(4)
    optimizer = torch.optim.Adam(chain.parameters(), lr=0.01)
    for first, second in zip(*[iter(batches(4))] * 2, strict=True):
        optimizer.zero_grad()
        ((chain(*first) + chain(*second)) / 2).backward()
        optimizer.step()
    return {name: p.detach() for name, p in chain.named_parameters()}


def test_apply_needs_gradients():
    with pytest.raises(PlanError, match="at least one accumulate"):
        make_job(Chain(4), ONE).apply()


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((torch.zeros(5, 6).double(),) * 2, r"'0' has shape \(5, 6\); the plan expects \(24, 6\)"),
        ((torch.zeros(BATCH, 6).double(),), r"lacks \['1'\]"),
        ((torch.zeros(BATCH, 6),) * 2, r"is torch.float32, the plan expects float64"),
        ((torch.zeros(BATCH, 6).double(),) * 3, r"the batch has \['2'\]"),
    ],
)
def test_wrong_batches_are_explained(batch, message):
    with pytest.raises(PlanError, match=message):
        make_job(Chain(4), ONE).step(batch)


def section_s(record: StepRecord) -> dict[str, tuple[float, ...]]:
    """Kind of work (F, B, I, W) or phase -> seconds of each, in order, waiting included."""
    found: dict[str, list[float]] = {}
    for name, start_s, end_s in record.sections:
        kind = name.work.value if isinstance(name, Action) else name
        found.setdefault(kind, []).append(end_s - start_s)
    return {kind: tuple(seconds) for kind, seconds in found.items()}


def _records():
    job = make_job(Chain(4), ONE)
    for batch in batches(3):
        job.step(batch)
    stats = job.stats
    kinds = [step.kind for step in stats.taken]
    return kinds, stats.step_s, [(record.step_s, section_s(record)) for record in stats.records]


def test_statistics_are_kept():
    kinds, step_s, records = alone(_records)
    assert kinds == ["warm-up", "timed", "timed"]
    assert step_s == [taken for taken, _ in records] and len(records) == 2
    for taken, seconds in records:
        assert {"F", "B", "schedule", "gradients", "optimizer"} < seconds.keys()
        assert len(seconds["F"]) == 2
        parts = (sum(spans) for kind, spans in seconds.items() if kind not in ("F", "B"))
        assert 0 < sum(parts) <= taken


def test_an_optimizer_is_rebuilt_with_its_groups():
    chain = Chain(4)
    groups = [
        {"params": list(chain.weights), "weight_decay": 0.1},
        {"params": [*chain.biases, chain.gain], "lr": 0.05},
    ]
    given = torch.optim.AdamW(groups, lr=0.01, betas=(0.8, 0.9))
    job = make_job(chain, ONE)
    made = make_optimizer(given, job.parts.held, None, chain)
    assert isinstance(made, torch.optim.AdamW)
    for group, wanted in zip(made.param_groups, given.param_groups, strict=True):
        assert len(group["params"]) == len(wanted["params"])
        assert {k: v for k, v in group.items() if k != "params"} == {
            k: v for k, v in wanted.items() if k != "params"
        } | {"fused": True}, "nobody has said how it computes"


def test_an_unknown_optimizer_is_named():
    with pytest.raises(PlanError, match="no optimizer 'adamx'; nearest is 'adam'"):
        make_optimizer("adamx", (), None, Chain(4))
    for lr in (-1.0, float("nan")):
        with pytest.raises(PlanError, match=f"lr is {lr:g}; it must be at least 0"):
            make_optimizer("adamw", (), lr, Chain(4))


def test_the_reference_itself_learns():
    losses, _ = alone(reference, Chain(4), batches(1) * 5)
    assert losses[-1] < losses[0]
