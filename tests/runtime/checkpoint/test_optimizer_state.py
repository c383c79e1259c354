"""State of optimizers that is more than one tensor of a parameter's shape: blocks with scales,
tables, counts of Python, vectors of whole matrices. Saved under one plan, it goes on under others,
or is refused in words."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.torch_private import job_store
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.checkpoint import stored_tensors
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.checkpoint.manifest import PartFile, StoredPiece
from meshwright.runtime.checkpoint.optimizer_state import leaves, put_numbers_back
from meshwright.runtime.checkpoint.parts import Written
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.job import Job
from meshwright.runtime.world.failure import first_failure
from meshwright.testing.own_optimizers import (
    BlockwiseMomentum,
    CountedMomentum,
    PairedMomentum,
)
from meshwright.testing.spawn import run_ranks

KINDS = {
    "blocks, counts and tables": (CountedMomentum, (0, 1, 3)),
    "a list of two": (PairedMomentum, (0, 0)),
    "vectors": (torch.optim.Adafactor, (0, 0)),
}
"""And the levels of zero of plans, each of which goes on from the one before."""


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 4)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(8, 64, generator=draw).double(), torch.randn(8, 4, generator=draw).double()


@cache
def graph() -> Graph:
    return trace(net(), batch(0), F.mse_loss)


def plan(zero: int) -> Plan:
    problem = make_problem(graph(), Cluster.local(2), precision="fp64", optimizer="sgd")
    return build_plan(problem, uniform_choice(problem, dp_shard=2, zero=zero))


def begun(kind: Any, zero: int) -> Job:
    model = net()
    given = kind(model.parameters())
    return compile_job(model, plan(zero), graph=graph(), optimizer=given, device="cpu")


class _Counted(CountedMomentum):
    """Whose state is of parameters' shape, but for the count."""

    LEAST = 2**30


def _without_numbers(state: Any, what: str) -> dict[str, Tensor]:
    return {path: x for path, x in leaves(state, what).items() if ":" not in path}


def chains(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, (kind, levels) in KINDS.items():
        job = begun(kind, levels[0])
        for step in range(2 * len(levels)):
            job.step(batch(step))
        found[name] = [full_state(job)]
        job.close()
        for place, zero in enumerate(levels):
            job = begun(kind, zero)
            if place:
                job.load(folder / name)
            job.step(batch(2 * place))
            job.step(batch(2 * place + 1))
            job.save(folder / name)
            found[name] += [full_state(job)]
            job.close()
    with pytest.raises(PlanError) as said:
        begun(BlockwiseMomentum, 0).load(folder / "blocks, counts and tables")
    found["others"] = str(said.value)
    job = begun(_Counted, 0)
    job.step(batch(0))
    with pytest.MonkeyPatch.context() as patch:  # as checkpoints were once
        patch.setattr("meshwright.runtime.checkpoint.optimizer_state.leaves", _without_numbers)
        job.save(folder / "older")
    (folder / "file").touch()
    with pytest.raises(PlanError, match="the checkpoint cannot be written"):
        job.save(folder / "file")
    job.close()
    with pytest.raises(PlanError) as said:
        begun(_Counted, 0).load(folder / "older")
    found["older"] = str(said.value)
    found["ended"] = first_failure(job_store())
    return found


def test_what_was_saved_goes_on_under_another_plan(tmp_path: Path) -> None:
    graph()  # once, not on each rank
    found, other = run_ranks(2, chains, tmp_path)
    assert found["ended"] is other["ended"] is None, "what is caught ends no job"
    for name in KINDS:
        whole, *_, last = found[name]
        assert whole.keys() == last.keys()
        for path, x in whole.items():
            assert (last[path] - x).abs().max() <= 1e-12 * x.abs().max(), (name, path)
    assert "keeps count:int of '" in found["older"] and "mean alone" in found["older"]
    assert "the checkpoint has count:int, mean, scale, tables.0, tables.1" in found["others"]


def test_numbers_come_back_as_they_were_and_objects_are_refused() -> None:
    state = {"step": 3, "rate": 0.5, "on": True, "mean": torch.ones(2), "none": None}
    kept: dict[str, Any] = dict(leaves(state, "it"))
    assert sorted(kept) == ["mean", "on:bool", "rate:float", "step:int"]
    put_numbers_back(kept)
    assert kept["step"] == 3 and type(kept["step"]) is int and kept["on"] is True
    for odd in ({"basis": object()}, {"name": "a"}, {"own": [1, 2]}):
        with pytest.raises(PlanError, match="tensors and, beside them, numbers"):
            leaves(odd, "the optimizer Own")
    for same in ({"a/b": torch.ones(2)}, {"a.b": torch.ones(2), "a": {"b": torch.ones(2)}}):
        with pytest.raises(PlanError, match="a name of its own without '/'"):
            leaves(same, "the optimizer Own")


def test_what_ranks_keep_in_different_ways_is_not_joined() -> None:
    """An optimizer of blocks keeps what is small as it is: so may the smaller half of an uneven
    parameter be."""
    piece = StoredPiece((0,), (4,), "part-00000.safetensors", 0, 4, 0)
    own, other = (
        Written("optim/mean/weight", dtype, (8,), replace(piece, offsets=(at,)))
        for dtype, at in (("int8", 0), ("float64", 4))
    )
    file = PartFile(8, 4, 0)
    with pytest.raises(PlanError, match=r"float64 of \[8\] and int8 of \[8\]"):
        stored_tensors([("a", file, [own], {}), ("b", file, [other], {})])
