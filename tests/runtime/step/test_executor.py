"""The executor on hand-made programs against plain training."""

import pytest
import torch

from meshwright.ir.plan.schedule import Action, Schedule
from meshwright.runtime.checkpoint.export import full_state
from meshwright.testing.handmade import Chain, batches, make_job, plan_of, reference
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.small_jobs import BI, BW, B, F, gpipe, split_gpipe, stage

STEPS = 3


def train(chain, plan, clip, accumulate=1):
    job = make_job(chain, plan, max_grad_norm=clip)
    losses = [float(job.step(batch)) for batch in batches(STEPS)]
    state = full_state(job)
    job.close()
    return losses, state


def check(chain, plan, clip=None):
    results = run_ranks(plan.world_size, train, chain, plan, clip)
    losses, parameters = alone(reference, chain, batches(STEPS), clip)
    for found, _ in results:
        assert found == pytest.approx(losses, rel=1e-12)
    for name, value in parameters.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.sampled
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", [(1, 4), (2, 2), (4, 1)], ids=str)
def test_data_parallel(zero, mesh, recompute):
    replicate, shard = mesh
    only = stage(
        0, 3, (0, 1, 2, 3), mesh={"dp_replicate": replicate, "dp_shard": shard, "tp": 1},
        shares=(5, 3, 2, 2), zero=zero, recompute=recompute,
    )  # fmt: skip
    check(Chain(4), plan_of((only,), gpipe(1, 2), 2), clip=0.5)


@pytest.mark.sampled
@pytest.mark.parametrize("schedule", [gpipe, split_gpipe])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_prefetched_parameters(prefetch, recompute, schedule):
    """Three blocks per stage, uneven shards, a parameter of the first stage tied to the second."""
    stages = (
        stage(0, 2, (0, 1, 2), shares=(3, 2, 1), zero=3, recompute=recompute, prefetch=prefetch),
        stage(3, 5, (3, 4), shares=(2, 4), zero=3, recompute=recompute, prefetch=prefetch),
    )
    check(Chain(6), plan_of(stages, schedule(2, 4), 4), clip=1.0)


def test_prefetch_of_a_block_that_shares_a_parameter():
    """The first and the last block read one weight, in the same stage."""
    only = stage(0, 3, (0, 1), shares=(7, 5), zero=3, prefetch=3)
    check(Chain(4), plan_of((only,), split_gpipe(1, 2), 2))


@pytest.mark.parametrize("schedule", [gpipe, split_gpipe])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_pipeline(schedule, recompute):
    stages = tuple(
        stage(2 * s, 2 * s + 1, (s,), shares=(6,), recompute=recompute) for s in range(3)
    )
    check(Chain(6), plan_of(stages, schedule(3, 4), 4))


def test_one_process():
    only = stage(0, 3, (0,), shares=(6,))
    check(Chain(4), plan_of((only,), split_gpipe(1, 4), 4))


@pytest.mark.sampled
@pytest.mark.parametrize("zeros", [(0, 0), (1, 0), (3, 3), (2, 3), (0, 3)], ids=str)
@pytest.mark.parametrize(
    "shares", [((3, 2, 1), (6,)), ((6,), (1, 2, 3)), ((4, 2), (1, 2, 3))], ids=str
)
def test_uneven_replicas_with_ties(shares, zeros):
    left, right = shares
    split = len(left)
    stages = (
        stage(0, 1, tuple(range(split)), shares=left, zero=zeros[0]),
        stage(2, 4, tuple(range(split, split + len(right))), shares=right, zero=zeros[1]),
    )
    check(Chain(5), plan_of(stages, gpipe(2, 4), 4), clip=1.0)


def test_seven_to_one():
    stages = (
        stage(0, 1, tuple(range(7)), shares=(1,) * 6 + (2,)),
        stage(2, 3, (7,), shares=(8,)),
    )
    check(Chain(4), plan_of(stages, gpipe(2, 3), 3))


def test_several_stages_per_rank():
    """Four stages in a V over two ranks: 0 and 3 share a rank, and so do 1 and 2."""
    stages = tuple(
        stage(2 * s, 2 * s + 1, devices, shares=(2,) * 2)
        for s, devices in enumerate([(0, 1), (2, 3), (2, 3), (0, 1)])
    )
    ms = range(2)
    order = [
        [a for m in ms for a in (Action(0, F, m),)]
        + [a for m in ms for a in (Action(3, F, m), Action(3, BI, m))]
        + [Action(0, B, m) for m in ms]
        + [Action(3, BW, m) for m in ms],
        [a for m in ms for a in (Action(1, F, m), Action(2, F, m))]
        + [a for m in ms for a in (Action(2, B, m), Action(1, BI, m), Action(1, BW, m))],
    ]
    schedule = Schedule("v", tuple(map(tuple, order)))
    stages = tuple(
        stage(2 * s, 2 * s + 1, d, shares=(7, 5), zero=z)
        for s, (d, z) in enumerate([((0, 1), 3), ((2, 3), 1), ((2, 3), 0), ((0, 1), 3)])
    )
    check(Chain(8), plan_of(stages, schedule, 2), clip=1.0)


def test_frozen_parameters_stay():
    chain = Chain(4)
    chain.weights[1].requires_grad_(False)
    chain.biases[3].requires_grad_(False)
    stages = (
        stage(0, 1, (0, 1), shares=(3, 3), zero=3),
        stage(2, 3, (2, 3), shares=(3, 3), zero=2),
    )
    check(chain, plan_of(stages, gpipe(2, 4), 4))
