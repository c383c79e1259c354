"""Optimizers that users bring: exact under every ZeRO level or refused in words, and priced as they
are found by trying."""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler

from meshwright.forms.stepping import check_updates, cut_on_blocks, row_borders
from meshwright.forms.tried import named_update
from meshwright.forms.trying import Blocks, Reach, agrees_in_parts, blocks, reach
from meshwright.forms.updates import told_text, update
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.own_optimizers import BlockwiseMomentum, OwnLion
from meshwright.testing.spawn import alone, run_ranks

STEPS, WIDTH = 4, 64
LEVELS = (0, 1, 2, 3)


class Net(nn.Module):
    """Its matrices have blocks of 256 elements on two ranks, or with `more` rows do not."""

    def __init__(self, more: int) -> None:
        super().__init__()
        inner = 4 * WIDTH + more
        self.up, self.norm = nn.Linear(WIDTH, inner), nn.LayerNorm(inner)
        self.down = nn.Linear(inner, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.down(torch.tanh(self.norm(self.up(x))))
        return found


def net(more: int = 0) -> Net:
    torch.manual_seed(0)
    return Net(more).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(2, 8, WIDTH, generator=draw, dtype=torch.float64).unbind()  # type: ignore


def graph(more: int = 0) -> Graph:
    return _traced(more)


@cache
def _traced(more: int) -> Graph:
    return trace(net(more), batch(0), F.mse_loss)


def plan(zero: int, optimizer: Any = "adamw", more: int = 0) -> Plan:
    problem = make_problem(graph(more), Cluster.local(2), precision="fp64", optimizer=optimizer)
    return build_plan(problem, uniform_choice(problem, dp_shard=2, zero=zero))


def no_decay_on_norms(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    """As Hugging Face and nanoGPT make groups: what has one dim is not decayed."""
    of = [list(filter(lambda p: (p.ndim > 1) == large, model.parameters())) for large in (1, 0)]
    return kind(
        [{"params": of[0], "weight_decay": 0.2}, {"params": of[1], "weight_decay": 0.0}], lr=0.01
    )


def rate_for_each(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    """A group for each parameter, with a rate of its own."""
    groups = [{"params": [p], "lr": 0.001 * (n + 1)} for n, p in enumerate(model.parameters())]
    return kind(groups, lr=0.01)


def over(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    return kind(model.parameters())


optim = torch.optim
EXACT = {
    "lion": partial(over, OwnLion),
    "lion without decay on norms": partial(no_decay_on_norms, OwnLion),
    "adamw without decay on norms": partial(no_decay_on_norms, optim.AdamW),
    "lion, a rate for each": partial(rate_for_each, OwnLion),
    "adamw, a rate for each": partial(rate_for_each, optim.AdamW),
    "8 bits": partial(over, BlockwiseMomentum),
    "radam": partial(over, optim.RAdam),
}
"""Equal to one process under every level."""
WHOLE = {"Adafactor": partial(over, optim.Adafactor)}
"""Where ranks have whole parameters."""


def _halving(optimizer: torch.optim.Optimizer) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.5)


def by_job(make: Any, zero: int) -> dict[str, Tensor]:
    model = net()
    optimizer = make(model)
    job = compile_job(model, plan(zero), graph=graph(), optimizer=optimizer, device="cpu")
    scheduler = _halving(optimizer)
    for step in range(STEPS):
        job.step(batch(step))
        scheduler.step()
    found = full_state(job)
    job.close()
    return found


def jobs() -> dict[tuple[str, int], dict[str, Tensor]]:
    found = {(name, zero): by_job(make, zero) for name, make in EXACT.items() for zero in LEVELS}
    return found | {(name, 0): by_job(make, 0) for name, make in WHOLE.items()}


def plain() -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, make in (EXACT | WHOLE).items():
        model = net()
        optimizer = make(model)
        scheduler = _halving(optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = batch(step)
            F.mse_loss(model(x), y).backward()
            optimizer.step()
            scheduler.step()
        found[name] = {n: p.detach().clone() for n, p in model.named_parameters()}
    return found


def test_parts_are_stepped_as_one_process_steps_the_whole() -> None:
    wanted = alone(plain)
    graph()  # once, not on each rank
    for (name, zero), state in run_ranks(2, jobs)[0].items():
        for path, value in wanted[name].items():
            far = (state[path] - value).abs().max() / value.abs().max()
            assert far <= 1e-10, (name, zero, path, float(far))


REFUSED = {
    "whole parameters": (optim.Adafactor, 0, "depends on the whole parameter"),
    "a block in two": (BlockwiseMomentum, 4, r"its block of elements \(256 of them\), but zero=\d "
                       r"splits the rows of up.weight .* \(8320,\), which cuts through one"),
    "a closure": (optim.LBFGS, 0, "closure"),
    "some shapes": (optim.Muon, 0, "2D parameters"),
}  # fmt: skip


def asked(kind: Any, more: int, zero: int) -> str:
    try:
        compile_job(net(more), plan(zero, more=more), graph=graph(more), device="cpu",
                    optimizer=kind)  # fmt: skip
    except (PlanError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", REFUSED)
def test_others_are_refused_with_the_reason(name: str) -> None:
    kind, more, reason = REFUSED[name]
    graph(more)  # once, not on each rank
    for said in run_ranks(2, asked, kind, more, 1):
        assert said
        with pytest.raises(PlanError, match=reason):
            raise PlanError(said)


class Eighths(BlockwiseMomentum):
    """Other blocks, and every parameter has them."""

    BLOCK, LEAST = 32, 1


def test_blocks_are_found_by_trying() -> None:
    for kind in (BlockwiseMomentum, Eighths):
        most = kind.LEAST if kind.LEAST > 1 else 0
        if kind is BlockwiseMomentum:  # else small parameters show them
            assert reach(kind, {}, kind) is Reach.BLOCK
        assert blocks(kind, {}, kind) == Blocks(kind.BLOCK, most)
    form = update(told_text("B", Reach.BLOCK, state=0.1, passes=3, block=256, least=4096))
    for shape in ((256, 64), (260, 64), (64, 256), (100,), (8000,), (129, 64), (4096 * 3, 5), ()):
        for ranks in (2, 3, 8):
            # The rule that prices know may refuse more, never less, than what trying says.
            if cut_on_blocks(form, shape, ranks):
                assert agrees_in_parts(BlockwiseMomentum, row_borders(shape, ranks)), shape
    assert cut_on_blocks(form, (256, 64), 2) and not cut_on_blocks(form, (260, 64), 2)
    assert not agrees_in_parts(BlockwiseMomentum, row_borders((260, 64), 2))


PRICED = {
    "lion": (OwnLion, 1.0), "8 bits": (BlockwiseMomentum, None), "nadam": (optim.NAdam, 2.0),
    "amsgrad": (partial(optim.AdamW, amsgrad=True), 3.0), "adafactor": (optim.Adafactor, None),
}  # fmt: skip


def tracked(kind: Any, plans: list[Plan]) -> list[tuple[int, int]]:
    found = []
    for given in plans:
        job = compile_job(net(), given, graph=graph(), optimizer=kind, device="cpu")
        job.step(batch(0))
        job.step(batch(1))
        job.track_memory(batch(2))
        assert job.tensor_memory is not None
        found.append((job.tensor_memory.optimizer_bytes, job.tensor_memory.peak_bytes))
        job.close()
    return found


@pytest.mark.parametrize("name", PRICED)
def test_memory_is_as_predicted(name: str) -> None:
    kind, copies = PRICED[name]
    plans = [plan(0, kind), *([plan(3, kind)] if name != "adafactor" else [])]
    form = update(plans[0].optimizer)
    assert form.told and (copies is None or form.copies == copies)
    for given, (state, peak) in zip(plans, run_ranks(2, tracked, kind, plans)[0], strict=True):
        assert given.predicted is not None
        memory = given.predicted.stages[0].memory
        assert state == pytest.approx(memory.optimizer_bytes, rel=0.005, abs=128)
        counted = memory.total_bytes - memory.fragmentation_bytes - memory.process_bytes
        assert peak == pytest.approx(counted, rel=0.03)


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        (optim.AdamW, True),
        (partial(optim.AdamW, amsgrad=True), False),
        (partial(optim.AdamW, foreach=False), False),
    ],
)
def test_torchs_optimizers_step_in_one_kernel_where_nobody_says_how(kind: Any, named: bool) -> None:
    """Op by op they make tensors as large as parameters, as plans tell then."""
    found = plan(0, kind)
    assert found.predicted is not None and (found.optimizer == "adamw") == named
    fused = "foreach" not in getattr(kind, "keywords", {})
    assert (update(found.optimizer).made < 0.1) == fused
    memory = found.predicted.stages[0].memory
    assert run_ranks(2, tracked, kind, [found])[0][0][1] == pytest.approx(
        memory.tensor_bytes, rel=0.01
    )


def test_what_has_a_file_is_found_by_its_class() -> None:
    shapes = {"a": (6, 4), "b": (5,)}
    for kind, name in [(optim.AdamW, "adamw"), (partial(optim.SGD, lr=0.1), "sgd"),
                       (partial(optim.SGD, lr=0.1, momentum=0.9), "sgd_momentum")]:  # fmt: skip
        assert named_update(kind, shapes, torch.float32) == name
    model = net()
    two = [optim.AdamW(model.up.parameters()), OwnLion(model.down.parameters())]
    text = named_update(two, {}, torch.float64)
    share = sum(p.numel() for p in model.up.parameters()) * 2
    share += sum(p.numel() for p in model.down.parameters())
    every = sum(p.numel() for m in (model.up, model.down) for p in m.parameters())
    assert update(text).copies == pytest.approx(share / every, rel=1e-5)


def _begun(given: Plan) -> str:
    try:
        compile_job(net(), given, graph=graph(), device="cpu")
    except PlanError as error:
        return str(error)
    return ""


def test_a_search_with_a_class_makes_a_plan_that_is_data(tmp_path: Path) -> None:
    found = search(
        graph(), Cluster.local(2), optimizer=OwnLion, constraints=("zero=2", "dp_shard=2"),
        precision="fp64", progress=False,
    )  # fmt: skip
    found.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded == found and loaded.optimizer.startswith("tried OwnLion reach=element state=1 ")
    said = run_ranks(2, _begun, loaded)[0]
    assert "the plan is for the optimizer OwnLion" in said and "compile(model, plan, opt" in said
    whole = search(graph(), Cluster.local(2), optimizer=optim.Adafactor, precision="fp64",
                   progress=False)  # fmt: skip
    assert {stage.zero for stage in whole.stages} == {0}
    cut = search(graph(4), Cluster.local(2), optimizer=BlockwiseMomentum, precision="fp64",
                 progress=False)  # fmt: skip
    assert {stage.zero for stage in cut.stages} == {0}


def test_what_a_plan_tells_is_read_or_refused() -> None:
    text = told_text("Lion", Reach.BLOCK, state=0.5, passes=9, launches=5, made=1, block=256)
    form = update(text)
    assert (form.told, form.reach, form.copies, form.passes) == ("Lion", Reach.BLOCK, 0.5, 9)
    assert (form.launches, form.made, form.block, form.least) == (5, 1, 256, 0)
    edits = [
        ("reach=block", "reach=all"),
        ("state=0.5", "state=nan"),
        ("=9", "=-9"),
        ("passes", "run"),
        ("Lion", "os.system()"),
        ("block=256", "least=4"),
        ("=0.5", "=1e9"),
    ]
    for broken in edits:
        with pytest.raises(PlanError, match="not what a plan tells of an optimizer"):
            update(text.replace(*broken))
    with pytest.raises(PlanError, match=r"rows of up\.weight"):
        check_updates(replace(plan(1, more=4), optimizer=text), graph(4))
