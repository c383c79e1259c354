"""Ranks that do not agree refuse to start, and say who differs."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from meshwright.ir.errors import MismatchError
from meshwright.ir.plan import plan_io
from meshwright.runtime.job.handshake import (
    Identity,
    check_identity,
    check_model,
    check_world,
    share_plan,
)
from meshwright.testing.handmade import Chain, graph_of, plan_of
from meshwright.testing.spawn import run_ranks
from tests.runtime.small_jobs import gpipe, stage

PLAN = plan_of((stage(0, 3, (0, 1, 2), shares=(4, 4, 4)),), gpipe(1, 2), 2)


def _identities(field):
    own = Identity("plan", "model", "code")
    if dist.get_rank() == 2:
        own = replace(own, **{field: "other"})
    try:
        check_identity(own)
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("field", ["plan", "model", "code"])
def test_every_rank_says_who_differs(field):
    for message in run_ranks(3, _identities, field):
        assert message == f"{field} differs from rank 0's on rank 2: other instead of {field}"


def _share():
    shared = share_plan(PLAN if dist.get_rank() == 0 else None)
    return plan_io.content_hash(shared) == plan_io.content_hash(PLAN)


def test_rank_zero_shares_its_plan():
    assert run_ranks(3, _share) == [True] * 3


def test_another_world_size_is_refused():
    with pytest.raises(MismatchError, match="for 3 ranks, this job has 1"):
        check_world(PLAN)


def test_another_model_is_refused():
    with pytest.raises(MismatchError, match="is another or has changed"):
        check_model(PLAN, replace(graph_of(Chain(4)), fingerprint="different"))
