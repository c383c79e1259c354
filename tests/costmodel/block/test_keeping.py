"""Costs of what is made again or offloaded, against what really runs and by hand."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright.costmodel.block import keeping
from meshwright.costmodel.comm.comm import Level
from meshwright.costmodel.cost_cache import BlockSpot, CostTables
from meshwright.costmodel.estimate import estimate_all
from meshwright.costmodel.ops.formulas import curve_of, memory_s
from meshwright.costmodel.stage.offload import arriving_s, copy_s, leaving_s
from meshwright.costmodel.stage.placement import stage_costs
from meshwright.costmodel.stage.stage_model import stage_model
from meshwright.forms.retaining import AS_IT_IS, Footprint, RetentionRun
from meshwright.forms.retention import Retention
from meshwright.forms.retention import retention as known
from meshwright.ir import presets
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.cluster.launching import Launching
from meshwright.ir.graph.graph import Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Prediction
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.testing.spawn import alone
from tests import model_axes

LAYERS = "transformer.h.*"
AWAY = {"*": "offload"}
SELECTIVE = {"attn/*": "recompute", "mlp.act/*": "recompute", "*layer_norm": "recompute"}


def build() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=64, n_layer=3, n_head=4, vocab_size=256, n_positions=64, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        loss_type="ForCausalLM",
    )  # fmt: skip
    return GPT2LMHeadModel(config).train()


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (16, 64), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


@cache
def graph() -> Graph:
    return trace(build(), batch())


@cache
def problem(name: str) -> Problem:
    cluster = (
        Cluster.local(1)
        if name == "local"
        else Cluster.preset(name, num_nodes=1, devices_per_node=1)
    )
    return make_problem(graph(), cluster, precision="fp32", optimizer="adam")


def plan_of(at: Problem, policy: dict[str, Any] | str, count: int = 2) -> Plan:
    """`full`: the layers are recomputed whole."""
    plan = build_plan(at, uniform_choice(at, num_microbatches=count), predict=False)
    full = {LAYERS: "full"} if policy == "full" else {}
    patterns = (b.pattern for b in graph().blocks) if policy == AWAY else [LAYERS]
    saved = {} if policy == "full" or not policy else dict.fromkeys(patterns, policy)
    return replace(plan, stages=(replace(plan.stages[0], recompute=full, saved=saved),))  # type: ignore[arg-type]


def predicted(name: str, policy: dict[str, Any] | str, count: int = 2) -> Prediction:
    at = problem(name)
    return estimate_all(graph(), at.cluster, plan_of(at, policy, count), at.tables).prediction


def _tracked(plan: Plan) -> int:
    job = compile_job(build(), plan, graph=graph(), optimizer="adam", lr=1e-3, device="cpu")
    job.step(batch())
    job.track_memory(batch())
    assert job.tensor_memory is not None
    job.close()
    return job.tensor_memory.peak_bytes


@pytest.mark.filterwarnings("ignore:offload on cpu")
@pytest.mark.parametrize(
    "policy",
    [{}, {"*": "recompute"}, SELECTIVE, {"mlp.act/*": "recompute"}, AWAY, "full"],
    ids=["keep", "all", "selective", "activations", "offload", "whole"],
)
def test_tensor_bytes_are_those_that_are_tracked(policy: dict[str, Any] | str) -> None:
    found = predicted("local", policy).stages[0].memory.tensor_bytes
    assert found == pytest.approx(alone(_tracked, plan_of(problem("local"), policy)), rel=0.01)


def test_less_memory_for_more_time() -> None:
    keep, selective, full = (predicted("a100-40", p) for p in ({}, SELECTIVE, "full"))
    everything = predicted("a100-40", {"*": "recompute"})
    assert keep.step_s < selective.step_s < full.step_s
    assert keep.peak_bytes > selective.peak_bytes > full.peak_bytes
    # All ops one by one are the block as a whole, but for what need not run.
    assert everything.peak_bytes == full.peak_bytes
    assert selective.step_s < everything.step_s <= full.step_s
    assert selective.breakdown and full.breakdown
    assert 0 < selective.breakdown.recompute_s < full.breakdown.recompute_s


def test_offloaded_bytes_are_away_and_copies_take_time() -> None:
    keep, away = predicted("a100-40", {}, 4), predicted("a100-40", AWAY, 4)
    assert away.stages[0].memory.activations_bytes < keep.stages[0].memory.activations_bytes
    assert away.peak_bytes < keep.peak_bytes
    assert away.breakdown and away.breakdown.offload_s > 0
    assert away.step_s == pytest.approx(keep.step_s + away.breakdown.offload_s)
    # In the memory of a CPU nothing goes anywhere.
    assert predicted("local", AWAY).peak_bytes == predicted("local", {}).peak_bytes


def _halved(dtype: str) -> Footprint:
    return Footprint(held=0.5, copied=1.5) if dtype == "float32" else AS_IT_IS


def test_what_is_held_in_less_is_whole_while_its_block_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every figure by hand: half of the floats, written and read again, each way."""
    half = Retention(exact=False, describe=_halved, build=lambda device: RetentionRun())
    monkeypatch.setattr(keeping, "retention", lambda name: half if name == "half" else known(name))
    at = problem("a100-40")
    index = next(i for i, block in enumerate(graph().blocks) if block.pattern == LAYERS)
    models, costs = [], []
    for policy in ({}, {"*": "half"}):
        plan = plan_of(at, policy)
        found = stage_costs(at.tables, plan, 0)
        costs.append(found.cost.blocks[index])
        models.append(stage_model(at.tables, plan, 0, found))
    kept, now = costs
    spot = stage_costs(at.tables, plan_of(at, {}), 0).spot
    layout = next(x for x in at.layouts(()) if x.pattern == LAYERS)
    makers = at.tables.blocks.makers(graph().blocks[index], layout, spot)
    floats = [
        n for key, n in makers.walk.saved.items() if makers.maker(key) and key[1] == "float32"
    ]
    freed, device = sum(floats) // 2, at.tables.devices[spot.device]
    assert freed > 0 and now.freed_bytes == now.remade_bytes == freed
    assert now.saved_bytes == kept.saved_bytes - freed and now.moved_bytes == 0
    curve = curve_of(OpClass.COPY, device)
    more_s = len(floats) * curve.floor_s + memory_s(3 * freed, curve, device)
    assert now.forward_s == pytest.approx(kept.forward_s + more_s)
    assert now.backward_s == pytest.approx(kept.backward_s + more_s) and now.again_s == 0
    first, second = (model.memory.blocks[index] for model in models)
    assert second.saved == first.saved - freed and second.forward == first.forward
    assert second.workspace == first.workspace + freed


def test_copies_hide_behind_computing() -> None:
    assert leaving_s([3.0] * 4, [2.0] * 4) == [0.0] * 4
    # The third waits for the first, and so on: copies are the slower ones.
    assert leaving_s([1.0] * 4, [2.0] * 4) == [0.0, 0.0, 0.0, 1.0]
    assert arriving_s([3.0] * 3, [2.0] * 3) == [2.0, 0.0, 0.0]
    assert arriving_s([1.0] * 3, [2.0] * 3) == [2.0, 1.0, 1.0]
    assert arriving_s([1.0] * 3, [0.0, 2.0, 0.0]) == [0.0, 1.0, 0.0]


def test_copies_go_by_the_host_link() -> None:
    seconds = [copy_s(presets.device(n), 10**9) for n in ("v100-16", "a100-40", "h100-sxm")]
    assert seconds[0] == pytest.approx(2 * seconds[1], rel=0.05)
    assert seconds[1] == pytest.approx(2 * seconds[2], rel=0.05)


def test_gathering_again_is_priced_as_communication_alone() -> None:
    case = model_axes.forms.case()
    made = model_axes.traced(case)
    cluster = Cluster.preset("a100-40", num_nodes=1, devices_per_node=2)
    (device,) = cluster.device_types
    free = replace(device, launching=Launching())  # the CPU takes nothing for a collective
    tables = CostTables(made, replace(cluster, device_types=(free,)), "fp32")
    block = made.blocks[1]  # the first one reads the batch
    layouts = model_axes.forms.layouts(made, model_axes.FORMS["1d_sequence"])
    layout = next(layout for layout in layouts if layout.pattern == block.pattern)
    levels = (Level(2, cluster.nodes[0].link),)
    spot = BlockSpot(4, 1, (("tp", 2),), "a100-40", (), (levels,))
    plain = tables.block(block, layout, spot)
    again = tables.block(block, layout, spot, (("up/linear<", "recompute"),))
    whole = 4 * 4 * 4 * 4  # samples, tokens, width, bytes
    assert plain.saved_bytes - again.saved_bytes == again.remade_bytes == whole
    assert again.again_s == 0.0
    assert again.comm_backward_s > plain.comm_backward_s
    assert again.backward_s - plain.backward_s == pytest.approx(
        again.comm_backward_s - plain.comm_backward_s
    )
