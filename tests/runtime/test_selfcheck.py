"""`compile` compares a step with plain PyTorch: what it catches, what it says, what it leaves."""

import random
import sys
from dataclasses import replace
from functools import cache
from unittest.mock import patch

import pytest
import torch
from torch import nn

from meshwright.codegen.collectives.comm import Comm
from meshwright.codegen.one_process import run_local
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import CheckFailed, MeshwrightError
from meshwright.ir.heap import keep_freed_memory
from meshwright.ir.plan import plan_io
from meshwright.planner.search.search import search
from meshwright.runtime.check import model as model_check
from meshwright.runtime.check import plan as plan_check
from meshwright.runtime.check import run
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job import compile as job_module
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.step import step_end
from meshwright.testing.nets import CHOICES, Net, data, graph_of, net_plan, plan_for
from meshwright.testing.spawn import run_ranks


class Counting(Net):
    """Its loss grows by calls."""

    calls = 0

    def forward(self, x, y):
        self.calls += 1
        return super().forward(x, y) * self.calls


class Remembering(Net):
    """Keeps a tensor that is no buffer."""

    past = 0.0

    def forward(self, x, y):
        loss = super().forward(x + self.past, y)
        self.past = loss.detach()
        return loss


class Drawing(Net):
    """Draws numbers of Python's."""

    def forward(self, x, y):
        return super().forward(x, y) * (1 + random.random())


class Watched(Net):
    """Doubles a gradient on its way."""

    def forward(self, x, y):
        x = self.layers[0](x)
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * 2)
        return super().forward(x, y)


def with_weight_hook():
    net = Net()
    net.head.weight.register_hook(lambda gradient: gradient / 2)
    return net


def with_backward_hook():
    net = Net()
    net.layers[1].register_full_backward_hook(lambda m, given, made: (given[0] * 2,))
    return net


def with_backward_pre_hook():
    net = Net()
    net.layers[1].register_full_backward_pre_hook(lambda m, made: (made[0] * 2,))
    return net


def with_accumulated_hook():
    def halve(parameter):
        parameter.grad.mul_(0.5)

    net = Net()
    net.head.weight.register_post_accumulate_grad_hook(halve)
    return net


BROKEN = {
    "counting": Counting, "remembering": Remembering, "drawing": Drawing, "watched": Watched,
    "weight hook": with_weight_hook, "backward hook": with_backward_hook,
    "backward pre-hook": with_backward_pre_hook, "accumulated hook": with_accumulated_hook,
}  # fmt: skip


def outcome(make, plan, **settings):
    """What compile with a check ends in."""
    model = make()
    settings = {k: v(model) if k == "optimizer" else v for k, v in settings.items()}
    try:
        job = compile_job(model, plan, example_inputs=data(), check=True, **settings)
    except MeshwrightError as error:
        return type(error).__name__, str(error)
    text = str(job.checked)
    job.close()
    return "", text


def all_broken():
    """Without what a trace or a second trace refuses by itself: the check stands alone."""
    plan = net_plan()
    found = {}
    graph = job_module.trace(Net(), data())
    with patch.object(run, "check_repeats", lambda *args, **named: None):
        for name, make in BROKEN.items():
            found[name] = outcome(make, plan, graph=graph)
    return found


@cache
def broken():
    return run_ranks(1, all_broken, timeout_s=300)[0]


@pytest.mark.parametrize("name", BROKEN)
def test_what_a_trace_does_not_see_is_caught(name):
    kind, text = broken()[name]
    assert kind == "CheckFailed", text
    assert "differs" in text and "check=False" in text


@cache
def full_plan(name: str):
    """For a net with dropout and batch-norm."""
    return plan_for(full_net, 2, **CHOICES[name])


def full_net():
    return Net(drop=0.5, norm=True)


class Soft(nn.Module):
    """A softmax between two products."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.double()

    def forward(self, x, y):
        return ((self.last(torch.softmax(self.first(x), -1)) - y) ** 2).mean()


@cache
def with_wrong_rule():
    """A plan whose softmax runs on parts of its rows, as a wrong rule would have it."""
    plan = plan_for(Soft, 2, tp=2)
    rule = {"/softmax": {"dp": "S(0) -> S(0)", "tp": "S(1) -> S(1)"}}
    layouts = [
        replace(layout, ops=layout.ops | rule)
        if "/softmax" in layout.ops else layout
        for layout in plan.layouts
    ]  # fmt: skip
    return plan_io.rehash(replace(plan, layouts=tuple(layouts)))


def unsummed(ties, held, groups, rank):
    """Rank 1 loses a gradient."""
    for h in held:
        if h.param.fqn == "layers.1.0.weight" and rank == 1:
            h.tensor.grad.zero_()


def wrongs():
    """Jobs with something wrong under their layout."""
    found = {}
    found["rule"] = outcome(Soft, with_wrong_rule())
    for name in ("zero1", "zero3"):
        with patch.object(step_end, "sum_ties", unsummed):
            found[f"gradient under {name}"] = outcome(Net, net_plan(name))
    found["optimizer"] = outcome(
        Net, net_plan("zero3"), optimizer=lambda m: torch.optim.Adafactor(m.parameters(), lr=0.01)
    )
    forgetful = property(lambda comm: True, lambda comm, value: None)
    with patch.object(Comm, "recomputing", forgetful, create=True):
        found["buffer"] = outcome(lambda: Net(norm=True), net_plan("pp", True))
    return found


def test_what_is_wrong_under_a_layout_is_caught_on_all_ranks_and_named():
    with_wrong_rule()
    for name, norm in [("zero1", False), ("zero3", False), ("pp", True)]:
        net_plan(name, norm)
    both = run_ranks(2, wrongs, timeout_s=300)
    assert both[0] == both[1]
    named = {
        "rule": "the loss", "gradient under zero1": "gradient of 'layers.1.0.weight'",
        "gradient under zero3": "gradient of 'layers.1.0.weight'",
        "optimizer": "depends on the whole parameter",
        "buffer": "the buffer 'norm.",
    }  # fmt: skip
    for name, (kind, text) in both[0].items():
        # An optimizer that is not element-wise is refused before anything is compared.
        assert kind == ("PlanError" if name == "optimizer" else "CheckFailed"), (name, text)
        assert named[name] in text, (name, text)
        # What forgets to count batches is broken on one rank as well.
        assert ("the plan is at fault" in text) == (name not in ("buffer", "optimizer"))


def steps(check: bool):
    """What is to be seen of a job and of the process after `compile`, and of three steps."""
    found = {}
    for name in CHOICES:
        torch.manual_seed(3)
        random.seed(3)
        job = compile_job(
            full_net(), full_plan(name), example_inputs=data(), lr=0.1, max_grad_norm=0.1,
            check=check, graph=graph_of(full_plan(name)),
        )  # fmt: skip
        seen = [len(job.optimizer.state), len(job.stats.taken), job.state.step, job.grad_norm]
        seen += [random.random(), float(torch.rand(())), job.stats.called, job.recorder.record]
        seen += [[h.tensor.grad is None for h in job.parts.held]]
        losses = [float(job.step(data(seed))) for seed in range(3)]
        state = full_state(job), job.optimizer.state_dict()["state"]
        found[name] = seen, losses, state, str(job.checked)
        job.close()
    return found


def test_sound_plans_pass_under_every_layout_and_the_job_is_as_if_nothing_had_been():
    for name in CHOICES:
        full_plan(name)
    with_check, without = (run_ranks(2, steps, check, timeout_s=300) for check in (True, False))
    for found, wanted in zip(with_check, without, strict=True):
        for name in CHOICES:
            assert found[name][:2] == wanted[name][:2], name
            torch.testing.assert_close(found[name][2], wanted[name][2], rtol=0, atol=0)
            assert "a second trace; one step of the plan" in found[name][3]
            assert wanted[name][3] == "None"


class Deep(nn.Module):
    """Twelve equal layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(12))

    def forward(self, x, y):
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return ((x - y) ** 2).mean()


def single(make):
    plan = plan_for_single(make)
    model = make()
    try:
        job = compile_job(
            model, plan, example_inputs=[x.float() for x in data()], check=True, lr=0.1
        )
    except CheckFailed as error:
        return str(error)
    return job.checked


@cache
def plan_for_single(make):
    return plan_for(make, 1, inputs=tuple(x.float() for x in data()), precision="bf16-autocast")


def too_large():
    with patch.object(run, "LIMIT_S", 1e-9), patch.object(run, "_SHORT_S", 0.0):
        nothing = single(Deep)
    with (
        patch.object(run, "_why_not", lambda *args: "it is large"),
        patch.object(run, "_SHORT_S", 0.0),
    ):
        cut = single(Deep)
        with patch.object(model_check, "run_local", lambda *args: run_local(*args) * 1.01):
            wrong = single(Deep)
    with torch.device("meta"):
        meta = single(Deep)
    return nothing, cut, wrong, meta


def test_a_large_model_is_checked_cut_and_what_is_not_checked_is_said(capfd):
    nothing, cut, wrong, meta = run_ranks(1, too_large, timeout_s=300)[0]
    assert nothing.checked == ("a second trace",)
    assert any("the limit is" in text for text in nothing.unchecked)
    assert "10 equal blocks left out" in str(cut)
    assert "not checked: the plan (it is large)" in str(cut)
    assert "program of one rank differs from plain PyTorch: the loss differs" in wrong
    assert "meta device" in str(meta) and any("the model on one rank" in t for t in meta.checked)
    assert "meshwright: checked in" in capfd.readouterr().err


class Chaotic(Net):
    """Doubles what its input differs by sixty times over: one unit of rounding becomes all."""

    def forward(self, x, y):
        at = (1000 * self.layers[0](x)).sin().square()
        for _ in range(60):
            at = 4 * at * (1 - at)
        return super().forward(x, y) + at.mean()


def blamed_on_rounding():
    """The plan, as a whole, and one rank alone."""
    job = compile_job(Chaotic(), plan_for(Chaotic, inputs=data()), example_inputs=data())
    job.close()
    wrong = patch.object(model_check, "run_local", lambda *args: run_local(*args) * 1.01)
    with patch.object(run, "_why_not", lambda *args: "it is large"), wrong:
        of_model = outcome(Chaotic, plan_for(Chaotic, inputs=data()))
    usual = plan_check._stepped

    def off(job, batch):
        found, after, apart = usual(job, batch)
        return replace(found, loss=found.loss * 1.01), after, apart

    with patch.object(plan_check, "_stepped", off):
        of_plan = outcome(Chaotic, plan_for(Chaotic, inputs=data()))
        of_steady = outcome(Net, plan_for(Net, inputs=data()))
    return of_model, of_plan, of_steady


def test_a_model_that_makes_rounding_large_is_told_so_and_refused_all_the_same():
    of_model, of_plan, of_steady = run_ranks(1, blamed_on_rounding, timeout_s=300)[0]
    for kind, text in (of_model, of_plan):
        assert kind == "CheckFailed" and "makes rounding large" in text and "check=False" in text
        assert "report" not in text
    assert of_steady[0] == "CheckFailed" and "the plan is at fault" in of_steady[1]


class Narrow(nn.Module):
    """All in bfloat16, as fine-tuned models often come; steps of a small rate are lost there."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8))
        self.to(torch.bfloat16)

    def forward(self, x, y):
        return ((self.layers(x) - y) ** 2).mean()


def warm(model):
    """An optimizer that has stepped before, with state in bfloat16."""
    made = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for p in model.parameters():
        p.grad = torch.full_like(p, 1e-3)
    made.step()
    made.zero_grad()
    return made


def narrow_steps(plan):
    batch = tuple(x.bfloat16() for x in data())
    found = []
    for optimizer in ("adamw", warm):
        model = Narrow()
        given = optimizer if isinstance(optimizer, str) else optimizer(model)
        more = {"lr": 1e-5} if isinstance(given, str) else {}
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        job = compile_job(model, plan, optimizer=given, example_inputs=batch, check=True, **more)
        job.step(batch)
        moved = {n: float((p - before[n]).abs().max()) for n, p in full_state(job).items()}
        found.append((str(job.checked), moved))
        job.close()
    return found


def test_a_model_in_bfloat16_is_stepped_in_float32_in_the_check_too():
    """As the job steps it: in bfloat16 a weight of 1 does not move by 1e-5."""
    batch = tuple(x.bfloat16() for x in data())
    plan = search(Narrow(), Cluster.local(1), example_inputs=batch, progress=False)
    assert plan.precision == "bf16"
    for checked, moved in run_ranks(1, narrow_steps, plan, timeout_s=300)[0]:
        assert "one step of the plan" in checked
        assert all(0.5e-5 < by < 2e-5 for by in moved.values()), moved


class Wide(nn.Module):
    """36 MB of parameters in float64; a check takes ten times that for a while."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Linear(1500, 1500, dtype=torch.float64) for _ in range(2)))

    def forward(self, x, y):
        return ((self.layers(x) - y) ** 2).mean()


def _held(plan, batch, check):
    """What the process holds when training may begin."""
    keep_freed_memory()
    job = compile_job(Wide(), plan, example_inputs=batch, lr=0.01, device="cpu", check=check)
    held = job.residence.start_bytes
    job.close()
    return held


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc only")
def test_a_check_leaves_no_memory_behind():
    batch = torch.ones(4, 1500).double(), torch.zeros(4, 1500).double()
    plan = plan_for(Wide, inputs=batch)
    without, checked = (run_ranks(1, _held, plan, batch, check)[0] for check in (False, True))
    assert checked - without < 36 * 2**20
