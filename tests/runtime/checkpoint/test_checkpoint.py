"""A checkpoint of one plan goes on under another, as if nothing had happened."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_model

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint import checkpoint, parts
from meshwright.runtime.checkpoint import folder as folders
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.world.standing import standing
from meshwright.testing.handmade import Chain, batches, make_job, reference
from meshwright.testing.spawn import alone, run_ranks
from tests.runtime.checkpoint.plans import PLANS


def test_what_fails_on_one_rank_is_known_to_be_everywhere():
    with (
        pytest.raises(PlanError, match="it failed: no") as caught,
        checkpoint.told(True, "it failed"),
    ):
        raise OSError("no")
    assert caught.value.everywhere and not PlanError().everywhere


def _first_half(plan, folder):
    job = make_job(Chain(5), plan)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, 0.5)
    for batch in batches(4)[:2]:
        job.step(batch)
        scheduler.step()
    job.save(folder, scheduler)
    job.close()


def _second_half(plan, folder):
    chain = Chain(5)
    with torch.no_grad():
        for p in chain.parameters():
            p.zero_()
    job = make_job(chain, plan)
    scheduler = torch.optim.lr_scheduler.StepLR(job.optimizer, 1, 0.5)
    job.load(folder, scheduler)
    assert str(standing(job.progress)) == "outside a step, after step 1", "as the job that saved"
    losses = []
    for batch in batches(4)[2:]:
        losses.append(float(job.step(batch)))
        scheduler.step()
    state = full_state(job)
    step = job.state.step
    job.close()
    return losses, state, step


def _reference():
    chain = Chain(5)
    optimizer = torch.optim.Adam(chain.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    losses = []
    for x, y in batches(4):
        optimizer.zero_grad()
        loss = chain(x, y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses, {name: p.detach() for name, p in chain.named_parameters()}


@pytest.mark.sampled
@pytest.mark.parametrize("target", PLANS)
@pytest.mark.parametrize("source", PLANS)
def test_any_plan_goes_on_from_any_other(source, target, tmp_path):
    run_ranks(PLANS[source].world_size, _first_half, PLANS[source], tmp_path)
    results = run_ranks(PLANS[target].world_size, _second_half, PLANS[target], tmp_path)
    losses, parameters = alone(_reference)
    for found, _, step in results:
        assert found == pytest.approx(losses[2:], rel=1e-12)
        assert step == 4
    for name, value in parameters.items():
        torch.testing.assert_close(results[0][1][name], value, rtol=1e-9, atol=1e-12)


def _crash_while_saving(plan, folder, where):
    job = make_job(Chain(5), plan)
    job.step(batches(1)[0])
    job.save(folder)
    saved = full_state(job)
    job.step(batches(1)[0])
    owner, name = where
    setattr(owner, name, _die)
    with pytest.raises(KeyboardInterrupt):
        job.save(folder)
    return saved


def _die(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    "where",
    [(parts, "write"), (folders, "finish"), (os, "replace")],
    ids=str,
)
def test_a_crash_leaves_the_last_checkpoint(where, tmp_path):
    plan = PLANS["one"]
    (saved,) = run_ranks(1, _crash_while_saving, plan, tmp_path, where)
    job = make_job(Chain(5), plan)
    job.load(tmp_path)
    assert job.state.step == 1
    for name, value in full_state(job).items():
        assert torch.equal(value, saved[name])


def test_saving_a_step_twice_keeps_one(tmp_path):
    job = make_job(Chain(5), PLANS["one"])
    job.save(tmp_path)
    job.save(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-00000000"]
    job.load(tmp_path)


def test_a_folder_without_checkpoint_is_named(tmp_path):
    job = make_job(Chain(5), PLANS["one"])
    with pytest.raises(PlanError, match="holds no checkpoint"):
        job.load(tmp_path)


def _meta(plan, folder):
    chain = Chain(5).to("meta")
    job = make_job(chain, plan)
    with pytest.raises(PlanError, match=r"have no values.*call job.load"):
        job.step(batches(1)[0])
    job.load(folder)
    return float(job.step(batches(1)[0]))


def _save_and_step(folder):
    job = make_job(Chain(5), PLANS["one"])
    job.save(folder)
    return float(job.step(batches(1)[0]))


def test_a_meta_model_must_be_loaded(tmp_path):
    plan = PLANS["zero3"]
    wanted = alone(_save_and_step, tmp_path)
    assert run_ranks(4, _meta, plan, tmp_path)[0] == pytest.approx(wanted, rel=1e-12)


def _export(plan, folder):
    job = make_job(Chain(5), plan)
    job.step(batches(1)[0])
    return job.export(folder)


@pytest.mark.parametrize("name", PLANS)
def test_export_loads_into_the_user_module(name, tmp_path):
    path: Path = run_ranks(PLANS[name].world_size, _export, PLANS[name], tmp_path)[0]
    chain = Chain(5)
    load_model(chain, path)
    _, wanted = alone(reference, Chain(5), batches(1))
    for key, value in wanted.items():
        torch.testing.assert_close(chain.state_dict()[key], value, rtol=1e-9, atol=1e-12)
