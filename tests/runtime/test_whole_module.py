"""The user's module beside the job: stale until it is synced, whole in exports and checkpoints."""

import copy
import io
import pickle

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import nn

from meshwright.ir.errors import PlanError
from meshwright.ir.trace.trace import trace
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.nets import CHOICES, Net, data, graph_of, net_plan, plan_for
from meshwright.testing.spawn import alone, run_ranks


def plain(steps=2):
    model = Net(norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    for seed in range(steps):
        optimizer.zero_grad()
        model(*data(seed)).backward()
        optimizer.step()
    return model.state_dict()


def begun(plan, make=Net, steps=2, **settings):
    model = make(norm=True)
    job = compile_job(model, plan, graph=graph_of(plan), **settings)
    for seed in range(steps):
        job.step(data(seed))
    return job


def refusal(work):
    try:
        work()
    except PlanError as error:
        return str(error)
    return ""


def synced(plan):
    """What the module refuses while it is stale, and its state once it is synced."""
    model = Net(norm=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    job = compile_job(model, plan, optimizer=optimizer, graph=graph_of(plan))
    model(*data())  # before the first step it is what the job has
    model.norm.reset_running_stats()
    refused = {}
    for number in range(2):
        job.step(data(number))
        refused |= {
            "state_dict": refusal(model.state_dict),
            "forward": refusal(lambda: model(*data())),
            "part": refusal(lambda: model.head(data()[0])),
            "part's state": refusal(lambda: model.layers.state_dict()),
            "copy": refusal(lambda: copy.deepcopy(model).state_dict()),
            "pickle": refusal(lambda: pickle.dumps(model)),
            "save": refusal(lambda: torch.save(model, io.BytesIO())),
            "compile": refusal(lambda: compile_job(model, plan)),
        }
    trace(model, data())  # which reads no values
    job.sync_to()
    state = copy.deepcopy(model).state_dict()
    pickle.dumps(model)
    other = Net(norm=True)
    job.step(data(2))
    job.sync_to(other)
    still = refusal(model.state_dict)
    job.close(sync=True)
    return refused, state, still, model.state_dict(), other.state_dict()


@pytest.mark.parametrize("kind", ["tp", "pp", "zero1", "zero3"])
def test_the_module_refuses_until_it_is_synced(kind):
    wanted, later = alone(plain), alone(plain, 3)
    for refused, state, still, closed, other in run_ranks(2, synced, net_plan(kind, True)):
        for way, text in refused.items():
            assert "job.sync_to()" in text or "sync_to() of that job" in text, way
        assert still
        for found, of_plain in [(state, wanted), (closed, later), (other, later)]:
            for name, value in of_plain.items():
                if kind != "pp":  # By contract statistics are those of a micro-batch.
                    torch.testing.assert_close(found[name], value, rtol=1e-8, atol=1e-9)
            assert not torch.equal(found["head.weight"], Net(norm=True).state_dict()["head.weight"])
            torch.testing.assert_close(found["unused.weight"], of_plain["unused.weight"])


def odd():
    """Other ways to and from the module."""
    plan, found = net_plan("", True), {}
    job = compile_job(Net(norm=True), plan, graph=graph_of(plan))
    with torch.no_grad():
        job.model.head.weight.zero_()
    found["changed"] = refusal(lambda: job.step(data()))
    job = begun(plan)
    other = Net(norm=True)
    other.head = nn.Linear(8, 4)
    found["shape"] = refusal(lambda: job.sync_to(other))
    found["meta"] = refusal(lambda: job.sync_to(Net(norm=True).to("meta")))
    job.close()
    found["closed"] = refusal(job.model.state_dict)
    job.model.load_state_dict(Net(norm=True).state_dict())  # now it has what the user wants
    found["loaded"] = refusal(job.model.state_dict)
    return found


def test_other_ways_are_refused_in_words():
    found = alone(odd)
    assert "'head.weight' of the module was changed after compile()" in found["changed"]
    assert "'head.weight' has another shape" in found["shape"]
    assert "on the meta device" in found["meta"] and "job.export" in found["meta"]
    assert "job.sync_to()" in found["closed"] and not found["loaded"]


class Tied(Net):
    """Also with tied weights, a buffer under two names, and frozen parameters."""

    def __init__(self, *, norm: bool = False) -> None:
        super().__init__(norm=norm)
        self.layers[3][0].weight = self.layers[0][0].weight
        self.unused.weight = self.detached.weight
        self.register_buffer("twin", self.norm.running_mean)
        self.layers[1].requires_grad_(False)


def exported(plan, folder):
    job = begun(plan, Tied, optimizer="sgd", lr=0.1)
    path = job.export(folder)
    job.sync_to()
    with torch.no_grad():
        for x in (job.model.unused.bias, job.model.idle, job.model.detached.bias):
            x.add_(1)  # never read with a gradient, and not the job's
    job.save(folder)
    state = job.model.state_dict()
    other = compile_job(Tied(norm=True), plan, graph=graph_of(plan))
    other.load(folder)
    other.sync_to()
    loaded = other.model.state_dict()
    return path, state, loaded


@pytest.mark.parametrize("kind", ["pp", "zero3"])
def test_exports_load_strictly_and_checkpoints_have_all(kind, tmp_path):
    plan = plan_for(lambda: Tied(norm=True), 2, **CHOICES[kind])
    results = run_ranks(2, exported, plan, tmp_path)
    path, state, _ = results[0]
    assert results[1][0] is None
    model = Tied(norm=True)
    assert load_model(model, path, strict=True) == (set(), [])
    for name, value in model.state_dict().items():
        if name not in ("unused.bias", "idle", "detached.bias"):  # changed since
            torch.testing.assert_close(value, state[name], rtol=0, atol=0)
    assert not torch.equal(model.state_dict()["twin"], Tied(norm=True).state_dict()["twin"])
    for _, given, loaded in results:
        for name, value in loaded.items():
            if name != "detached.bias":  # the job's: read without a gradient
                torch.testing.assert_close(value, given[name], rtol=0, atol=0)


def from_meta(plan, folder):
    """A model without values, before and after a checkpoint that has them."""
    begun(plan).save(folder / "saved")
    job = compile_job(Net(norm=True).to("meta"), plan)
    before = refusal(lambda: job.export(folder / "early"))
    job.load(folder / "saved")
    return before, job.export(folder / "late")


def test_what_has_no_values_is_not_exported(tmp_path):
    before, path = run_ranks(1, from_meta, net_plan("", True), tmp_path)[0]
    assert "the export is not written" in before and "tensors have no values" in before
    assert not (tmp_path / "early").exists()
    assert Net(norm=True).load_state_dict(load_file(path), strict=True)
