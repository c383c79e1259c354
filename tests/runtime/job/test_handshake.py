"""Ranks that do not agree refuse to start, and say who differs."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import meshwright as mw
from meshwright.ir.errors import MismatchError
from meshwright.ir.graph.graph import Kind, Tensor
from meshwright.ir.plan import plan_io
from meshwright.runtime.job.handshake import (
    Identity,
    check_identity,
    check_model,
    check_world,
    share_plan,
)
from meshwright.runtime.job.same_weights import weights_digest
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


def _weights(tensors):
    model = torch.nn.ParameterDict(tensors)
    if dist.get_rank() == 1:
        with torch.no_grad():
            for tensor in model.values():
                if not tensor.is_meta:
                    tensor.add_(torch.randn(tensor.shape, dtype=tensor.dtype))
    try:
        check_identity(Identity("plan", "model", "code", weights=weights_digest(model)))
    except MismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(()), torch.zeros(3, 1000), torch.zeros(500, 7, dtype=torch.bfloat16),
     torch.zeros(9, 300).T, torch.zeros(2, 2).expand(200, 2, 2).transpose(0, 1).clone()],
)  # fmt: skip
def test_ranks_that_draw_weights_of_their_own_are_told(tensor):
    """A plan that splits a tensor would else put it together of parts of two tensors."""
    first, second = run_ranks(2, _weights, {"w": torch.nn.Parameter(tensor)})
    assert first == second and "weights differs from rank 0's on rank 1: every rank" in first


def _compiled(plan):
    torch.manual_seed(dist.get_rank())
    with pytest.raises(MismatchError) as refused:
        mw.compile(Weighed(), plan, check=False, example_inputs=(torch.zeros(4, 3),))
    return str(refused.value)


class Weighed(torch.nn.Module):
    """Weights as each process draws them."""

    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(3, 2)

    def forward(self, x):
        return self.line(x).sum() / len(x)


def test_jobs_on_other_weights_are_refused():
    asked = {"precision": "fp32", "progress": False, "example_inputs": (torch.zeros(4, 3),)}
    plan = mw.search(Weighed(), mw.Cluster.local(2), constraints=("dp_replicate=2",), **asked)
    for said in run_ranks(2, _compiled, plan):
        assert "weights differs from rank 0's on rank 1" in said


@pytest.mark.parametrize("tensor", [torch.empty(9, device="meta"), torch.empty(0, 3)])
def test_ranks_without_values_go_on(tensor):
    assert run_ranks(2, _weights, {"w": torch.nn.Parameter(tensor)}) == ["", ""]


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


@pytest.mark.parametrize(
    ("dtypes", "precision", "said"),
    [
        (("float32",), "fp64", r"fp64, and all .* in float32: make it float64 \(model.to"),
        (("bfloat16",), "fp32", "in bfloat16: make it float32"),
        (("bfloat16", "float64"), "fp64", ""), (("float64",), "fp32", ""), (("int64",), "fp64", ""),
        (("float32",), "bf16-autocast", ""), ((), "fp64", ""),
    ],
)  # fmt: skip
def test_a_model_that_is_all_narrower_is_refused(dtypes, precision, said):
    graph = replace(graph_of(Chain(4)), fingerprint="")
    own = {
        name: Tensor(name=name, shape=(2,), dtype=name, kind=Kind.PARAMETER, fqn=name)
        for name in dtypes
    }
    graph, plan = replace(graph, tensors=own), replace(PLAN, precision=precision)
    plan = replace(plan, model=replace(plan.model, fingerprint=""))
    told = pytest.raises(MismatchError, match=said) if said else nullcontext()
    with told:
        check_model(plan, graph)
