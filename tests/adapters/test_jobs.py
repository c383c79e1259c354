"""Jobs that train adapters beside quantised weights: equal to one process under every layout, in as
much memory as planned, with checkpoints that go from plan to plan."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.adapters.adapted_linear import AdaptedLinear
from meshwright.adapters.files import trained_names
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph import quantised
from meshwright.ir.graph.graph import Graph
from meshwright.ir.graph.quantised import dequantised
from meshwright.ir.plan.plan import Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import predict_plan
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.record import tracking
from meshwright.runtime.record.tensors import TensorTracker
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES, ModelCase
from meshwright.testing.spawn import run_ranks
from tests.traces import zoo_graph

BATCH = 8


def small(form: str, kind: str) -> nn.Module:
    """A GPT-2 of four layers in blocks of 8 values, whose adapters are not zero."""
    model = mw.quantise(CASES["gpt2"].build(), form, block=8)
    mw.adapt(model, kind, rank=2, skip="lm_head")
    for module in model.modules():
        if isinstance(module, AdaptedLinear):
            nn.init.normal_(module.up, std=0.1)
    return model


POOLED = ModelCase("pooled", lambda: small("int4", "pooled"), CASES["gpt2"].batch)
BALANCED = ModelCase("balanced", lambda: small("nf4", "balanced"), CASES["gpt2"].batch)
PLANS: list[tuple[ModelCase, str, dict[str, Any]]] = [
    (POOLED, "", {"dp_shard": 2, "zero": 3, "tp": 2, "num_microbatches": 2}),
    (POOLED, "", {"pp": 2, "tp": 2, "num_microbatches": 4, "schedule": "interleaved"}),
    (BALANCED, "", {"dp_shard": 4, "zero": 3, "recompute": "full"}),
    (BALANCED, "", {"pp": 2, "dp_shard": 2, "zero": 1, "num_microbatches": 4,
                    "schedule": "zero_bubble"}),
    (BALANCED, "copies64", {"dp_shard": 2, "zero": 2, "tp": 2, "num_microbatches": 2}),
]  # fmt: skip


@cache
def traced(case: ModelCase, precision: str) -> Graph:
    return zoo_graph(case, BATCH, precision=precision)


def planned(case: ModelCase, world: int, precision: str, **choice: Any) -> tuple[Plan, Graph]:
    graph = traced(case, precision)
    problem = make_problem(
        graph, Cluster.local(world), optimizer="adam", precision=precision or "fp64"
    )
    return build_plan(problem, uniform_choice(problem, **choice), predict=False), graph


@pytest.mark.parametrize("case", [POOLED, BALANCED], ids=lambda case: case.name)
def test_a_job_equals_the_single_process(case: ModelCase) -> None:
    chosen = [(precision, choice) for own, precision, choice in PLANS if own is case]
    plans = [planned(case, 4, precision, **choice) for precision, choice in chosen]
    found = zip(chosen, check_each_equal(case, plans, steps=2), strict=True)
    bad = {str(c): str(d) for c, d in found if not d.worst_of_both <= 1e-9}
    assert not bad


def test_tensor_parallelism_splits_whole_blocks() -> None:
    """Rows of the first product, blocks of the second."""
    plan, _ = planned(POOLED, 4, "", tp=4)
    layouts = [layout.parameters for layout in plan.layouts if layout.pattern.endswith("h.0")]
    assert layouts
    for part in ("codes", "scale", "zero"):
        assert layouts[0][f"mlp.c_fc.base.{part}"]["tp"] == "S(0)"
        assert layouts[0][f"mlp.c_proj.base.{part}"]["tp"] == "S(1)"


WIDTH, DEPTH, BLOCK = 256, 12, 64


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + torch.tanh(self.wide(self.norm(x)))
        return made


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def deep() -> nn.Module:
    torch.manual_seed(0)
    return mw.adapt(mw.quantise(Deep(), "nf4", block=BLOCK), "balanced", rank=8)


def batch() -> tuple[Tensor]:
    return (torch.randn(128, WIDTH, generator=torch.Generator().manual_seed(0)),)


class _Tracker(TensorTracker):
    """Sees the wide weight, too, which is there inside of one operator."""

    def __init__(self, resized: Sequence[Tensor] = ()) -> None:
        super().__init__(resized)
        quantised.dequantised = self._noted  # type: ignore[assignment]

    def _noted(self, *given: Any) -> Tensor:
        wide = dequantised(*given)
        self.see([wide])
        return wide


def most(plans: list[Plan], graph: Graph) -> list[Any]:
    tracking.TensorTracker = _Tracker  # type: ignore[misc]
    found = []
    for plan in plans:
        job = compile_job(deep(), plan, optimizer="adamw", device="cpu", graph=graph)
        for _ in range(2):
            job.step(batch())
        job.track_memory(batch())
        found.append(job.tensor_memory)
        job.close()
    return found


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_memory_is_as_planned(precision: str) -> None:
    """With the wide weight that is there inside of one operator, and what that makes meanwhile,
    which is no tensor that is seen."""
    graph = trace(deep(), batch(), precision="bf16" if precision == "bf16" else "")
    problem = make_problem(graph, Cluster.local(2), optimizer="adamw", precision=precision)
    choices: list[dict[str, Any]] = [
        {"dp_replicate": 2}, {"dp_shard": 2, "zero": 1}, {"dp_shard": 2, "zero": 3}
    ]  # fmt: skip
    plans = [build_plan(problem, uniform_choice(problem, **c), predict=False) for c in choices]
    wide = WIDTH * WIDTH * (2 if precision == "bf16" else 4)
    layer = next(m for m in deep().modules() if isinstance(m, AdaptedLinear)).base
    codes, scale = (x.nbytes for x in (layer.codes, layer.scale))  # type: ignore[union-attr,operator]
    assert (codes, scale) == (WIDTH * WIDTH // 2, WIDTH * WIDTH // BLOCK * 4)
    for choice, plan, tracked in zip(
        choices, plans, run_ranks(2, most, plans, graph)[0], strict=True
    ):
        memory = predict_plan(problem, plan).stages[0].memory
        assert memory.workspace_bytes > wide
        made = wide // 4  # 64 samples of a rank
        assert memory.tensor_bytes == pytest.approx(tracked.peak_bytes + made, rel=0.02), choice
        assert memory.optimizer_bytes == pytest.approx(tracked.optimizer_bytes, rel=0.001)
        if choice.get("zero") != 3:
            assert memory.parameters_bytes == tracked.parameters_bytes


def saved_and_loaded(jobs: list[tuple[Plan, Graph]], folder: str) -> list[float]:
    """The loss that a job ends with that saves its adapter, and those of others with the files."""
    batch, found = POOLED.example(BATCH, 2), []
    for number, (plan, graph) in enumerate(jobs):
        job = compile_job(POOLED.model(), plan, optimizer="adam", lr=1e-2, device="cpu",
                          graph=graph)  # fmt: skip
        if number:
            mw.load_adapter(job, folder)
        else:
            job.step(batch)
            mw.save_adapter(job, folder)
        found.append(float(job.eval(batch)))
        job.close()
    return found


def test_an_adapter_is_a_file_of_its_own(tmp_path: Path) -> None:
    """For a job under another plan, and for a model that has none yet."""
    jobs = [planned(POOLED, 2, "", **c) for c in ({"dp_shard": 2, "zero": 3}, {"tp": 2})]
    first, other = run_ranks(2, saved_and_loaded, jobs, str(tmp_path))[0]
    assert other == pytest.approx(first, rel=1e-12)
    trained = sum(p.nbytes for p in POOLED.model().parameters() if p.requires_grad)
    assert (tmp_path / "adapter.safetensors").stat().st_size < 1.5 * trained + 8192
    model = mw.quantise(CASES["gpt2"].model(), "int4", block=8)
    model.load_state_dict(
        {n.replace(".base.", "."): x for n, x in POOLED.model().state_dict().items()}, strict=False
    )
    mw.load_adapter(model, tmp_path)
    batch = POOLED.example(BATCH, 2)
    assert isinstance(batch, dict)
    assert float(model.eval()(**batch).loss.detach()) == pytest.approx(first, rel=1e-12)
    with pytest.raises(PlanError, match=r"the model's adapter at .* is .*'rank': 3.*, the file's"):
        mw.load_adapter(mw.adapt(CASES["gpt2"].model(), "balanced", rank=3), tmp_path)
    with pytest.raises(PlanError, match=r"no layer 'transformer.h.0.attn.c_attn'"):
        mw.load_adapter(nn.Sequential(nn.Linear(2, 2)), tmp_path)
    with pytest.raises(PlanError, match=r"adapter.json does not exist"):
        mw.load_adapter(CASES["gpt2"].model(), tmp_path / "none")


def test_what_is_trained_beside_adapters_has_no_adapter_file(tmp_path: Path) -> None:
    model = small("int4", "pooled")
    model.transformer.ln_f.requires_grad_(True)  # type: ignore[union-attr]
    with pytest.raises(PlanError, match=r"transformer.ln_f.weight is trained too"):
        trained_names(model)
    with pytest.raises(PlanError, match="the model has no adapters"):
        trained_names(CASES["gpt2"].model())


def trained_on(jobs: list[tuple[Plan, Graph]], folder: str) -> list[Any]:
    """What the first job saves after two steps, what each other one has loaded, and the losses of
    a further step."""
    found = []
    for number, (plan, graph) in enumerate(jobs):
        job = compile_job(POOLED.model(), plan, optimizer="adam", lr=1e-2, device="cpu",
                          graph=graph)  # fmt: skip
        if number:
            job.load(folder)
        else:
            for seed in range(2):
                job.step(POOLED.example(BATCH, seed))
            job.save(folder)
        state = full_state(job)
        found.append((state, float(job.step(POOLED.example(BATCH, 2)))))
        job.close()
    return found


def test_checkpoints_go_from_plan_to_plan(tmp_path: Path) -> None:
    jobs = [planned(POOLED, 2, "", **c) for c in (
        {"dp_shard": 2, "zero": 3}, {"tp": 2}, {"pp": 2, "num_microbatches": 2},
    )]  # fmt: skip
    (first, loss), *others = run_ranks(2, trained_on, jobs, str(tmp_path))[0]
    assert {x.dtype for name, x in first.items() if name.endswith("codes")} == {torch.uint8}
    for state, other in others:
        assert state.keys() == first.keys()
        assert all(torch.equal(state[name], x) for name, x in first.items())
        assert other == pytest.approx(loss, rel=1e-12)
    model = POOLED.model()
    model.load_state_dict(first, strict=False)
    batch = POOLED.example(BATCH, 2)
    assert isinstance(batch, dict)
    assert float(model(**batch).loss.detach()) == pytest.approx(loss, rel=1e-12)
    assert float(mw.merge(model)(**batch).loss.detach()) == pytest.approx(loss, rel=1e-12)
    at = "transformer.h.0.mlp.c_fc.base"
    wide = dequantised(first[f"{at}.codes"], first[f"{at}.scale"], first[f"{at}.zero"], 4,
                       torch.float64)  # fmt: skip
    whole = CASES["gpt2"].model().transformer.h[0].mlp.c_fc.weight.T
    assert (wide - whole).abs().max() <= first[f"{at}.scale"].max() / 2 + 1e-6
