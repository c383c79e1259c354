"""A scheduler, or any change, on the optimizer that the user passed drives the job."""

import warnings
from functools import cache

import pytest
import torch
from torch.optim import lr_scheduler
from transformers import get_linear_schedule_with_warmup

from meshwright.ir.errors import PlanError
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.nets import Net, data, graph_of, net_plan
from meshwright.testing.spawn import RankFailed, alone, run_ranks

STEPS = 6
SCHEDULERS = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (step + 1)),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.05, total_steps=STEPS + 1),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "warm-up": lambda o: get_linear_schedule_with_warmup(o, 3, STEPS),
}


def optimizer_of(model):
    """Two groups of other settings; two parameters are in none."""
    heads = [p for name, p in model.named_parameters() if name.startswith("head")]
    first = list(model.layers[0].parameters())
    return torch.optim.AdamW(
        [{"params": first, "weight_decay": 0.3}, {"params": heads, "lr": 0.02}], lr=0.01
    )


def plain(name):
    model = Net()
    optimizer = optimizer_of(model)
    scheduler = SCHEDULERS[name](optimizer)
    losses = []
    for seed in range(STEPS):
        optimizer.zero_grad()
        loss = model(*data(seed))
        loss.backward()
        optimizer.step()
        _advance(scheduler, loss)
        losses.append(float(loss.detach()))
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def _advance(scheduler, loss):
    plateau = isinstance(scheduler, lr_scheduler.ReduceLROnPlateau)
    scheduler.step(float(loss.detach())) if plateau else scheduler.step()


def by_job(name, plan, after, folder=None):
    """With `after`, the scheduler is made after the job; with a folder, training is broken off."""
    job, optimizer, scheduler = _begun(name, plan, after)
    losses = []
    for seed in range(STEPS):
        if folder is not None and seed == STEPS // 2:
            job.save(folder, scheduler)
            job.parts.groups.close()
            job, optimizer, scheduler = _begun(name, plan, after)
            job.load(folder, scheduler)
            assert optimizer.param_groups[0]["lr"] == job.optimizer.param_groups[0]["lr"]
        loss = job.step(data(seed))
        _advance(scheduler, loss)
        losses.append(float(loss))
    return losses, full_state(job)


def _begun(name, plan, after):
    model = Net()
    optimizer = optimizer_of(model)
    scheduler = None if after else SCHEDULERS[name](optimizer)
    job = compile_job(model, plan, optimizer=optimizer, graph=graph_of(plan))
    return job, optimizer, scheduler or SCHEDULERS[name](optimizer)


def every_scheduler():
    warnings.filterwarnings("error", "Detected call of")
    plan, found = net_plan(), {}
    for name in SCHEDULERS:
        found[name] = [plain(name), *(by_job(name, plan, after) for after in (False, True))]
    return found


@cache
def trained():
    return alone(every_scheduler)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_the_users_optimizer_drive_the_job(name):
    (losses, wanted), *jobs = trained()[name]
    for found, state in jobs:
        assert found == pytest.approx(losses, rel=1e-9)
        for key in wanted.keys() & state.keys():
            torch.testing.assert_close(state[key], wanted[key], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("kind", ["zero3", "pp"])
def test_they_do_on_two_ranks_and_across_a_checkpoint(kind, tmp_path):
    losses, _ = trained()["one cycle"][0]
    for found, _ in run_ranks(2, by_job, "one cycle", net_plan(kind), True, tmp_path):
        assert found == pytest.approx(losses, rel=1e-9)


def changed():
    """What single changes do, and which are refused."""
    found = {}
    job, optimizer, _ = _begun("lambda", net_plan(), False)
    job.step(data())
    optimizer.param_groups[0]["betas"] = (0.5, 0.6)
    job.optimizer.param_groups[1]["lr"] = 0.125  # the job's own groups may be changed too
    job.step(data())
    groups = job.optimizer.param_groups
    found["taken"] = groups[0]["betas"], groups[1]["lr"]
    optimizer.param_groups[0]["lr"], groups[0]["lr"] = 0.25, 0.5
    found["both"] = refused(lambda: job.step(data()))
    groups[0]["lr"] = 0.25
    found["alike"] = refused(lambda: job.step(data()))
    optimizer.add_param_group({"params": list(job.model.unused.parameters())})
    found["added"] = refused(lambda: job.step(data()))
    return found


def apart(plan):
    """Only one rank steps its scheduler."""
    job, _, scheduler = _begun("lambda", plan, False)
    for _ in range(2):
        job.step(data())
        if job.parts.rank:
            scheduler.step()


def test_ranks_that_differ_stop():
    with pytest.raises(RankFailed, match="differ from rank to rank"):
        run_ranks(2, apart, net_plan("zero3"))


def refused(work):
    try:
        work()
    except PlanError as error:
        return str(error)
    return ""


def test_changes_are_taken_over_or_refused():
    found = alone(changed)
    assert found["taken"] == ((0.5, 0.6), 0.125)
    assert "lr of parameter group 0 is now 0.25 in your optimizer and 0.5" in found["both"]
    assert not found["alike"]
    assert "groups of your optimizer have changed since compile()" in found["added"]


class Clipped(torch.optim.SGD):
    """Has a setting that is none of its groups'."""

    def __init__(self, params, lr=0.1, most=1.0):
        super().__init__(params, lr)
        self.most = most

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.clamp_(-self.most, self.most)
        return super().step(closure)


class Holding(torch.optim.SGD):
    """Keeps parameters beside its groups."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, lr)

    def watch(self, params):
        self.watched = list(params)
        return self


def resumed(plan):
    """A clipping step of a job, two of Adam in plain PyTorch, and one more in a second job."""
    model = Net()
    job = compile_job(model, plan, optimizer=Clipped(model.parameters(), most=0.01),
                      graph=graph_of(plan))  # fmt: skip
    job.step(data(0))
    job.sync_to()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for seed in range(2):
        optimizer.zero_grad()
        model(*data(seed)).backward()
        optimizer.step()
    job = compile_job(model, plan, optimizer=optimizer, graph=graph_of(plan))
    job.step(data(2))
    errors = []
    for make, more in [
        (lambda m: Clipped(Net().parameters()), {}),
        (lambda m: Clipped(m.parameters()), {"lr": 1.0}),
        (lambda m: Holding(m.parameters()).watch(m.parameters()), {}),
        (lambda m: torch.optim.LBFGS(m.parameters()), {}),
    ]:
        other = Net()
        errors.append(refused(lambda: compile_job(other, plan, optimizer=make(other), **more)))  # noqa: B023
    return full_state(job), errors


def resumed_plain():
    model = Net()
    first = Clipped(model.parameters(), most=0.01)
    model(*data(0)).backward()
    first.step()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for seed in range(3):
        optimizer.zero_grad()
        model(*data(seed)).backward()
        optimizer.step()
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_an_optimizer_comes_with_its_attributes_and_its_state_or_is_refused():
    wanted = alone(resumed_plain)
    state, errors = run_ranks(2, resumed, net_plan("zero2"))[0]
    for name in wanted.keys() & state.keys():
        torch.testing.assert_close(state[name], wanted[name], rtol=1e-9, atol=1e-12)
    for error, part in zip(
        errors,
        ["that the model does not have", "lr=1.0 is for an optimizer by name",
         "keeps parameters in its attribute 'watched'", "asks for a closure"], strict=True,
    ):  # fmt: skip
        assert part in error, errors
