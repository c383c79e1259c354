"""LoRA as users of peft have it: searched, trained as in one process, saved and loaded."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.adapters.files import load_adapter, save_adapter
from meshwright.forms.host_link import shaped
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError, TraceError
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import FormChoice, ParameterChoice, Plan
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.runtime.checkpoint.export import full_state
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.equality import check_each_equal
from meshwright.testing.models import CASES, ModelCase
from meshwright.testing.spawn import run_ranks

peft = pytest.importorskip("peft", reason="an optional extra: pip install 'meshwright[peft]'")
BATCH = 8


def lora(**more: Any) -> nn.Module:
    """A GPT-2 with adapters that are not zero."""
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, lora_alpha=8, target_modules=["c_attn", "c_fc", "c_proj"], fan_in_fan_out=True, **more
    )
    model: nn.Module = peft.get_peft_model(CASES["gpt2"].build(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def test_adapters_of_parameters_are_refused_by_name() -> None:
    """peft puts them into the module and takes them out again in each call."""
    model = nn.Sequential(nn.Linear(4, 4))
    config = peft.LoraConfig(r=2, target_modules=[], target_parameters=["0.weight"])
    with pytest.raises(TraceError, match=r"parameter weight \(target_parameters\).*target_modules"):
        trace(peft.get_peft_model(model, config), (torch.ones(2, 4),), torch.sum)


KINDS: dict[str, dict[str, Any]] = {
    "lora": {}, "dora": {"use_dora": True}, "rslora": {"use_rslora": True},
}  # fmt: skip
CHOICES: dict[str, list[dict[str, Any]]] = {
    "lora": [
        {"dp_shard": 2, "zero": 1, "tp": 2, "num_microbatches": 2},
        {"pp": 2, "dp_shard": 2, "zero": 3, "num_microbatches": 4, "schedule": "zero_bubble"},
    ],
    "dora": [{"dp_shard": 2, "zero": 3, "tp": 2, "num_microbatches": 2}],
    "rslora": [{"dp_shard": 4, "zero": 3}],
}


def planned(case: ModelCase, world: int, choices: list[dict[str, Any]]) -> list[tuple[Plan, Graph]]:
    graph = trace(case.model(), case.example(BATCH))
    problem = make_problem(graph, Cluster.local(world), optimizer="adam", precision="fp64")
    return [(build_plan(problem, uniform_choice(problem, **c), predict=False), graph)
            for c in choices]  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("kind", KINDS)
def test_a_job_equals_the_single_process(kind: str) -> None:
    case = ModelCase(kind, lambda: lora(**KINDS[kind]), CASES["gpt2"].batch)
    found = check_each_equal(case, planned(case, 4, CHOICES[kind]), steps=2)
    bad = {
        str(c): str(d) for c, d in zip(CHOICES[kind], found, strict=True)
        if not d.worst_of_both <= 1e-9
    }  # fmt: skip
    assert not bad


def as_users_do(plan: Plan, folder: str) -> tuple[list[float], list[float]]:
    """Losses, with dropout of adapters, and what a second job goes on with from the files."""
    case = ModelCase("dropped", lambda: lora(lora_dropout=0.1), CASES["gpt2"].batch)
    model = case.model(torch.float32)
    job = compile_job(model, plan, optimizer="adamw", lr=1e-2, device="cpu")
    losses = [float(job.step(case.example(BATCH, 0, torch.float32))) for _ in range(4)]
    save_adapter(job, folder)
    last = [float(job.eval(case.example(BATCH, 0, torch.float32)))]
    job.close()
    other = compile_job(case.model(torch.float32), plan, optimizer="adamw", device="cpu")
    load_adapter(other, folder)
    last.append(float(other.eval(case.example(BATCH, 0, torch.float32))))
    other.close()
    return losses, last


def test_a_search_a_run_and_files_that_peft_reads(tmp_path: Path) -> None:
    case = ModelCase("dropped", lambda: lora(lora_dropout=0.1), CASES["gpt2"].batch)
    example = case.example(BATCH, 0, torch.float32)
    assert isinstance(example, dict)
    plan = mw.search(
        case.model(torch.float32), Cluster.local(2), example_inputs=example, time_limit_s=5,
        precision="fp32",
    )  # fmt: skip
    losses, (saved, loaded) = run_ranks(2, as_users_do, plan, str(tmp_path))[0]
    assert losses[-1] < losses[0]
    assert loaded == pytest.approx(saved, rel=1e-6)
    assert {path.name for path in tmp_path.iterdir()} >= {
        "adapter_model.safetensors", "adapter_config.json",
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = CASES["gpt2"].build()
    # Weights of the base are those of `case.model`, which seeds before it builds.
    base.load_state_dict(_base_of(case.model(torch.float32)))
    model = peft.PeftModel.from_pretrained(base, str(tmp_path)).eval()
    with torch.no_grad():
        assert float(model(**example).loss) == pytest.approx(saved, rel=1e-5)
        merged = model.merge_and_unload()
        assert float(merged(**example).loss) == pytest.approx(saved, rel=1e-5)


def _base_of(model: nn.Module) -> dict[str, torch.Tensor]:
    state = model.base_model.model.state_dict()  # type: ignore[union-attr,operator]
    return {name.replace(".base_layer", ""): x for name, x in state.items() if "lora_" not in name}


TABLE = "base_model.model.words."
SAVED = TABLE + "modules_to_save.default.weight"
ROWS = 60


class WithTable(nn.Module):
    """A table, and a layer that gets an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.hidden = nn.Embedding(ROWS, 6), nn.Linear(6, 3)

    def forward(self, ids: Tensor, y: Tensor) -> Tensor:
        return nn.functional.mse_loss(self.hidden(self.words(ids).mean(1)), y)


def with_table(*, trained: bool) -> nn.Module:
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=2, target_modules=["hidden"], modules_to_save=["words"] if trained else None
    )
    model: nn.Module = peft.get_peft_model(WithTable().double(), config)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.1)
    return model


def of_words(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, ROWS, (BATCH, 3), generator=draw)
    return ids, torch.randn(BATCH, 3, generator=draw, dtype=torch.float64)


def stored(ranks: int, path: str, store: FormChoice | None) -> Plan:
    problem = make_problem(
        trace(with_table(trained=path == SAVED), of_words(0)), Cluster.local(ranks),
        optimizer="sgd", precision="fp64",
    )  # fmt: skip
    more = {"dp_shard": ranks, "zero": 1} if ranks > 1 else {}
    plan = build_plan(problem, uniform_choice(problem, **more), predict=False)
    sync = FormChoice(form="owned_rows", settings={"ids": "0"}) if ranks > 1 else None
    said = {path: ParameterChoice(zero=1 if sync else 0, sync=sync, store=store)} if store else {}
    return replace(plan, stages=(replace(plan.stages[0], by_parameter=said),))


def rows_trained(plan: Plan, trained: bool) -> tuple[list[float], dict[str, Tensor]]:
    job = compile_job(with_table(trained=trained), plan, optimizer="sgd", lr=0.3, device="cpu",
                      check=False, example_inputs=of_words(0))  # fmt: skip
    losses = [float(job.step(of_words(n), next_batch=of_words(n + 1))) for n in range(4)]
    state = full_state(job)
    job.close()
    return losses, state


def test_adapters_go_beside_a_table_with_a_cache() -> None:
    """Where peft trains the table, too (`modules_to_save`), on one rank and at owners; a frozen
    table is refused, and the store that is named for it is right."""
    cached = FormChoice(form="cached", settings={"ids": "0", "ratio": 0.5})
    wanted = rows_trained(stored(1, SAVED, None), True)
    for found in (
        rows_trained(stored(1, SAVED, cached), True),
        run_ranks(2, rows_trained, stored(2, SAVED, cached), True)[0],
    ):
        assert found[0] == pytest.approx(wanted[0], rel=1e-10)
        assert all((found[1][name] - x).abs().max() <= 1e-12 for name, x in wanted[1].items())
    frozen = TABLE + "weight"
    with pytest.raises(PlanError, match=r"words.weight is frozen; nearest: store on_host or"):
        rows_trained(stored(1, frozen, cached), False)
    wanted = rows_trained(stored(1, frozen, None), False)
    with shaped(1e9):
        found = rows_trained(stored(1, frozen, FormChoice(form="on_host", settings={})), False)
    assert found[0] == pytest.approx(wanted[0], rel=1e-12)
