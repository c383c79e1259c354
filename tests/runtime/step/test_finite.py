"""A loss or a gradient that is no number ends a job, or as the user says; none gets into a file."""

import warnings

import pytest
import torch

from meshwright.ir.errors import NonFinite, PlanError
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.saver import Saver
from meshwright.runtime.record.closing import StepRecords
from meshwright.testing.nets import CHOICES, Net, data, graph_of, net_plan
from meshwright.testing.spawn import alone, run_ranks


def bad(value=float("nan")):
    x, y = data()
    x[3, 2] = value
    return x, y


def refusal(work, *given):
    try:
        work(*given)
    except NonFinite as error:
        return str(error)
    return ""


def trained(folder):
    """What happens under each layout, on every rank."""
    found = {}
    for name in CHOICES:
        job = compile_job(Net(), net_plan(name), graph=graph_of(net_plan(name)), lr=0.1)
        job.step(data())
        before = full_state(job)
        step = refusal(job.step, bad())
        gathered = refusal(job.accumulate, bad())
        same = all(torch.equal(x, before[n]) for n, x in full_state(job).items())
        loss = float(job.step(data(1)))  # none of it is left
        name_of_first = job.parts.held[0].param.fqn
        with torch.no_grad():
            job.parts.held[0].tensor.fill_(float("inf"))
        save = refusal(job.save, folder)
        export = refusal(job.export, folder)
        found[name] = step, gathered, same, loss, save, export, name_of_first
        job.close()
    return found


def test_all_ranks_stop_and_name_the_first(tmp_path):
    wanted = alone(two_steps)
    for name in CHOICES:
        net_plan(name)
    for found in run_ranks(2, trained, tmp_path, timeout_s=300):
        for name, (step, gathered, same, loss, save, export, first) in found.items():
            assert step.startswith("step 1: the loss is nan, gradients are not finite ('"), step
            assert "first on rank 0" in step and "first on rank 1" in step
            assert gathered.startswith("step 1: the loss is nan") and same
            assert loss == pytest.approx(wanted, rel=1e-9), name
            assert "the checkpoint is not written" in save and first in save
            assert "the export is not written" in export
    assert not list(tmp_path.iterdir())


def two_steps():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(*data()).backward()
    optimizer.step()
    return float(model(*data(1)).detach())


def policies(folder):
    found = {}
    plan = net_plan()
    job = compile_job(Net(), plan, graph=graph_of(plan), on_nonfinite="warn")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job.step(bad())
        job.save(folder)
    found["warn"] = [str(w.message) for w in told]
    job = compile_job(Net(), plan, graph=graph_of(plan), on_nonfinite="ignore")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job.step(bad())
        job.save(folder)
    found["ignore"] = [str(w.message) for w in told if "finite" in str(w.message)]
    # A finite loss whose gradient is not: seen in its norm, before the optimizer steps.
    job = compile_job(Net(), plan, graph=graph_of(plan), max_grad_norm=1.0)
    before = full_state(job)
    job.parts.held[0].tensor.register_hook(lambda gradient: gradient / 0)
    found["norm"] = refusal(job.step, data())
    found["kept"] = all(torch.equal(x, before[n]) for n, x in full_state(job).items())
    # Parameters that a step has ruined are said at the next.
    job = compile_job(Net(), plan, graph=graph_of(plan), optimizer="sgd", lr=0.1)
    for group in job.optimizer.param_groups:
        group["lr"] = float("inf")
    job.step(data())
    found["parameters"] = refusal(job.step, data())
    try:
        compile_job(Net(), plan, graph=graph_of(plan), on_nonfinite="stopp")
    except PlanError as error:
        found["wrong"] = str(error)
    return found


def test_the_user_says_what_happens(tmp_path):
    found = run_ranks(1, policies, tmp_path)[0]
    assert any("the loss is nan; training goes on" in text for text in found["warn"])
    assert any("parameters are not finite" in text for text in found["warn"])
    assert not found["ignore"]
    assert "the norm of the gradients is" in found["norm"] and found["kept"]
    assert "as parameters are not finite ('" in found["parameters"]
    assert "'stopp' is none of stop, skip, back, warn, ignore" in found["wrong"]


def looked_back(folder):
    """As on a GPU, where the host does not wait for the device in a step."""
    found = {}
    job = compile_job(Net(), net_plan(), graph=graph_of(net_plan()), lr=0.1, check=False)
    job.records = StepRecords(late=True)
    job.step(data())
    found["first"] = refusal(job.step, bad())
    found["next"] = refusal(job.step, data())
    found["settled"] = refusal(job.settle)  # as a load does, which goes back
    job = compile_job(Net(), net_plan(), graph=graph_of(net_plan()), lr=0.1, check=False)
    job.records = StepRecords(late=True)
    job.step(data())
    job.step(bad())
    found["taken"] = [(step.kind, step.step_s > 0) for step in job.stats.taken]
    found["save"] = refusal(job.save, folder)
    job = compile_job(
        Net(), net_plan(), graph=graph_of(net_plan()), lr=0.1, check=False, max_grad_norm=1.0
    )
    job.records = StepRecords(late=True)
    job.on_nonfinite = "warn"
    job.step(bad())
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        job.close()
    found["warn"] = [str(w.message) for w in told if "finite" in str(w.message)]
    return found


def test_where_steps_are_not_waited_for_the_next_one_tells_or_whoever_saves(tmp_path):
    found = run_ranks(1, looked_back, tmp_path)[0]
    assert not found["first"]
    assert found["next"].startswith("step 1: the loss is nan") and not found["settled"]
    assert found["taken"] == [("warm-up", True), ("timed", True)]
    assert found["save"].startswith("step 1: the loss is nan")
    assert not list(tmp_path.glob("step-*"))
    assert [text.partition(";")[0] for text in found["warn"]] == [
        "step 0: the loss is nan",
        "step 0: the norm of the gradients is nan",
    ]


def left_out(folder):
    """Skipping, and going back, under each layout, against a job that never saw the bad batch."""
    found = {}
    for name in CHOICES:
        plan = net_plan(name)
        plain = compile_job(Net(), plan, graph=graph_of(plan), lr=0.1)
        wanted = [float(plain.step(data(n))) for n in (0, 1, 3)]
        plain.close()
        job = compile_job(Net(), plan, graph=graph_of(plan), lr=0.1, on_nonfinite="skip")
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            losses = [float(job.step(x)) for x in (data(0), data(1), bad(), data(3))]
        skipped = losses[:2] + losses[3:], job.state.step, [str(w.message) for w in said]
        job.close()
        job = compile_job(Net(), plan, graph=graph_of(plan), lr=0.1, on_nonfinite="back")
        saver, losses = Saver(job, folder / name, every=1, keep=2), []
        for x in (data(0), data(1), bad(), data(3)):
            try:
                losses.append(float(job.step(x)))
                saver.stepped()
            except NonFinite as error:
                saver.go_back(error)
        back = losses, job.state.step, job.state.samples // plan.global_batch_size
        saver.finish()
        job.close()
        found[name] = wanted, skipped, back
    return found


def test_a_bad_batch_is_left_out_or_gone_back_from(tmp_path):
    for name in CHOICES:
        net_plan(name)
    for rank, found in enumerate(run_ranks(2, left_out, tmp_path, timeout_s=300)):
        for name, (wanted, (skipped, steps, said), (back, taken, seen)) in found.items():
            assert skipped == pytest.approx(wanted, rel=1e-12), name
            assert back == pytest.approx(wanted, rel=1e-12), name
            assert steps == 4 and taken == 3 and seen == 4, "steps that count, batches that went by"
            assert len(said) == (rank == 0), said
            assert all("step 2: the loss is nan" in s and "first on rank 1" in s for s in said)
