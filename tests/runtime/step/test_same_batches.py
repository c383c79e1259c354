"""Ranks that read other batches are refused before the first step, with what to do."""

import torch

from meshwright.ir.errors import MismatchError
from meshwright.ir.torch_private import job_store
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.step.same_batches import check_same_batches
from meshwright.runtime.world.failure import first_failure
from meshwright.testing.nets import Net, data, graph_of, net_plan
from meshwright.testing.spawn import run_ranks


def _said(act):
    try:
        act()
    except MismatchError as error:
        return str(error)
    return "fine"


def _of_rank(rank, plan):
    """What is said of batches, and of steps and evaluations that are given other ones."""
    shared, own = data(0), data(rank)
    tensors = {name: dict(enumerate_batch(x)) for name, x in (("shared", shared), ("own", own))}
    found = {
        "equal": _said(lambda: check_same_batches(tensors["shared"], None)),
        "other": _said(lambda: check_same_batches(tensors["own"], None)),
        "other samples": _said(lambda: check_same_batches(tensors["own"], [rank])),
        "same samples": _said(lambda: check_same_batches(tensors["own"], [0])),
    }
    job = compile_job(Net(), plan, lr=1e-3, graph=graph_of(plan))
    job.step(shared)
    job.step(own)  # later ones are the user's word
    found["evaluation"] = _said(lambda: job.eval(own))
    job = compile_job(Net(), plan, lr=1e-3, graph=graph_of(plan))
    found["step"] = _said(lambda: job.step(own))
    found["again"] = _said(lambda: job.step(own))  # whoever caught it has changed nothing
    found["ended"] = first_failure(job_store())
    return found


def enumerate_batch(batch):
    return ((str(index), tensor) for index, tensor in enumerate(batch))


def _all(plan):
    return _of_rank(torch.distributed.get_rank(), plan)


def test_ranks_that_read_other_batches_are_refused():
    for found in run_ranks(2, _all, net_plan("zero1")):
        assert found["equal"] == found["other samples"] == "fine"
        assert found["ended"] is None, "what is caught ends no job"
        for name in ("other", "same samples", "evaluation", "step", "again"):
            assert "rank 1 has read another first batch than rank 0 (0, 1 differ)" in found[name]
            assert "generator of one seed" in found[name] and "sharded=True" in found[name]


def test_large_tensors_are_compared_by_rows(monkeypatch):
    from meshwright.runtime.step import same_batches

    monkeypatch.setattr(same_batches, "_WHOLE_BYTES", 64)
    x = torch.arange(64.0).view(16, 4)
    assert same_batches._checksum(x) == same_batches._checksum(x.clone())
    assert same_batches._checksum(x) != same_batches._checksum(x + 1)
    reads = [same_batches._BatchRead(None, {"a": 1, "b": n}) for n in (2, 2, 3)]
    said = same_batches._first_odd(reads)
    assert said == "rank 2 has read another first batch than rank 0 (b differs)"
