"""Dropout masks belong to the sample, not to the layout: the same training under every plan."""

import pytest

from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import run_ranks
from tests.activated_jobs import activated_graph, activated_losses
from tests.dropout_jobs import alone, batch, build, graph, losses, plan_for


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("world", "choice"),
    [
        (1, {"num_microbatches": 4}),
        (1, {"recompute": "full"}),
        (3, {"dp_replicate": 3}),
        (2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2}),
        (2, {"tp": 2}),
        (2, {"tp": 2, "overlap": "block"}),
        (2, {"pp": 2, "num_microbatches": 4, "schedule": "zero_bubble"}),
        (4, {"pp": 2, "stage_dp": (3, 1), "num_microbatches": 2, "recompute": "full"}),
    ],
)
def test_every_layout_drops_the_same(world, choice):
    plan = plan_for(world, **choice)
    for found in run_ranks(world, losses, plan, 0):
        assert found == pytest.approx(alone(), rel=1e-10)


@pytest.mark.parametrize(
    ("world", "choice"),
    [
        (1, {"num_microbatches": 4}),
        (3, {"dp_replicate": 3}),
        (2, {"pp": 2, "num_microbatches": 2, "recompute": "full"}),
    ],
)
def test_a_kernel_drops_what_dropout_alone_does(world, choice):
    fused = activated_graph(("bias_gelu",))
    assert [op.target for op in fused.ops].count("meshwright.bias_gelu_dropout.default") == 2
    wanted = activated_losses((), 1, {})
    for found in run_ranks(world, activated_losses, ("bias_gelu",), world, choice):
        assert found == pytest.approx(wanted, rel=1e-10)


def test_another_seed_drops_other_elements():
    assert losses(plan_for(1), 1)[0] != pytest.approx(alone()[0], rel=1e-6)


def test_each_step_drops_other_elements():
    job = compile_job(build(), plan_for(1), graph=graph(), optimizer="sgd", lr=0.0)
    first, second = (float(job.step(batch(0))) for _ in range(2))
    job.close()
    assert first != pytest.approx(second, rel=1e-6)
