"""In a step the host waits for nothing that the device does in it, what streams do to the same
memory is in an order, and no operator has operands of the host and of the device: checked on a GPU
that is not there (`meshwright.testing.fake_gpu`), where no value can be read."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

import meshwright as mw
from meshwright.ir.graph.graph import Graph
from meshwright.ir.kernels import KERNELS
from meshwright.ir.placed import used
from meshwright.ir.plan.plan import FormChoice, model_mesh
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.equal_plans import Case
from meshwright.testing.fake_gpu import process
from meshwright.testing.fake_gpu.process import LOOKS, STEPS, Planned, Seen, waits_of
from meshwright.testing.models import CASES
from meshwright.testing.ring_layouts import with_rings
from tests.runtime.wide_layers import gpt2
from tests.traces import zoo_graph

pytestmark = pytest.mark.skipif(bool(process.why_not()), reason=process.why_not())

PLANS = {
    "microbatches": Case(1, {"num_microbatches": 4}),
    "dp": Case(2, {"dp_replicate": 2}),
    "zero1": Case(4, {"dp_shard": 2, "dp_replicate": 2, "zero": 1}),
    "zero2": Case(2, {"dp_shard": 2, "zero": 2, "num_microbatches": 2}),
    "zero3": Case(2, {"dp_shard": 2, "zero": 3, "num_microbatches": 2, "recompute": "full"}),
    "tp2_pp2": Case(4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
    "cp2": Case(2, {"model": model_mesh({"cp": 2})}),
    "zero_bubble_zero3": Case(4, {"pp": 2, "dp_shard": 2, "zero": 3, "num_microbatches": 4,
                                  "schedule": "zero_bubble"}),
    # Its first update is in the second step.
    "late": Case(2, {"dp_replicate": 2}, stage={"sync": FormChoice(form="dear")}),
}  # fmt: skip
SETTINGS: dict[str, tuple[str, str, str, tuple[str, ...], list[str]]] = {
    "gpt2": ("gpt2", "fp32", "adamw", (), [*PLANS]),
    "gpt2 kernels": ("gpt2", "bf16", "sgd", KERNELS, ["dp", "zero1", "late"]),
    "llama": ("llama", "bf16", "adamw", (), ["zero3", "tp2_pp2", "cp2"]),
    "gpt2 fp16": ("gpt2", "fp16", "adamw", (), ["zero1"]),
    "llama kernels": ("llama", "bf16", "adamw", KERNELS, ["zero1", "zero2", "tp2_pp2"]),
}


def planned(
    model: str, precision: str, optimizer: str, kernels: tuple[str, ...],
    kinds: Mapping[str, Case],
) -> Planned:  # fmt: skip
    """Plans of a model of the zoo."""
    graph = zoo_graph(CASES[model], 8, torch.float32, precision, kernels)
    return _on_gpus(graph, precision, optimizer, kinds)


def _on_gpus(graph: Graph, precision: str, optimizer: str, kinds: Mapping[str, Case]) -> Planned:
    """Plans for GPUs, with clipped gradients."""
    found = {}
    for name, kind in kinds.items():
        cluster = mw.Cluster.preset("h100-sxm", num_nodes=1, devices_per_node=kind.world)
        problem = make_problem(graph, cluster, precision=precision, optimizer=optimizer)
        plan = build_plan(problem, uniform_choice(problem, **kind.choice), predict=False)
        plan = with_rings(plan, graph) if "cp" in plan.stages[0].mesh else plan
        plan = replace(plan, stages=tuple(replace(s, **kind.stage) for s in plan.stages))
        found[name] = replace(plan, max_grad_norm=1.0), graph
    return found


def test_a_step_waits_for_nothing_of_itself() -> None:
    given = {
        f"{setting}, {name}": job
        for setting, (*told, names) in SETTINGS.items()
        for name, job in planned(*told, {name: PLANS[name] for name in names}).items()
    }
    assert {"bucket", "bucket_update"} <= used(given["llama kernels, zero1"][0])
    found = waits_of(given, STEPS)
    assert found == {name: _sound(found[name]) for name in given}


def test_dropout_waits_for_nothing() -> None:
    """In attention and beside it, with kernels of ours and with torch's."""
    given, ids = {}, torch.zeros(8, 64, dtype=torch.long)
    with torch.device("meta"):
        model = gpt2(0.1).train()
    for kernels in ((), KERNELS):
        batch = {"input_ids": ids, "labels": ids}
        graph = mw.trace(model, batch, precision="bf16", kernels=kernels)
        made = _on_gpus(graph, "bf16", "adamw", {name: PLANS[name] for name in ("dp", "zero3")})
        given |= {f"{name}, {len(kernels)} kernels": job for name, job in made.items()}
    found = waits_of(given, STEPS)
    assert found == {name: _sound(found[name]) for name in given}


def _sound(found: Seen) -> Seen:
    """What is to be seen: on whichever stream inputs come, they are free later."""
    return Seen(looks=LOOKS, late=found.late, calls=found.calls)


def test_copies_to_the_host_are_in_order_beside_what_computes() -> None:
    """And their memory is free as soon as it goes back: a host that is ahead takes no more. What is
    kept for the backward waits for nothing; an optimizer on the host waits for gradients."""
    ((plan, graph),) = planned(*SETTINGS["gpt2"][:4], {"": PLANS["microbatches"]}).values()
    stages = {
        "device": {}, "saved": {"saved": {b.pattern: {"*": "offload"} for b in graph.blocks}},
        **{x: {"store": FormChoice(form=x)} for x in ("on_host", "update_on_host", "sums_on_host")},
    }  # fmt: skip
    given = {
        name: (replace(plan, stages=tuple(replace(s, **told) for s in plan.stages)), graph)
        for name, told in stages.items()
    }
    found = waits_of(given, STEPS)
    for name in ("device", "saved"):
        assert found[name] == replace(_sound(found["device"]), calls=found[name].calls)
    for name, seen in found.items():
        assert not seen.races and seen.late == found["device"].late, (name, seen)


def test_what_waits_and_what_is_in_no_order_is_found() -> None:
    given = planned(*SETTINGS["gpt2"][:4], {"dp": PLANS["dp"]})
    found = waits_of(given, STEPS, careless="dp")["dp"]
    assert found.waits == ("float() of a tensor", "aten._to_copy of [3] from cpu to cuda")
    assert found.mixed == ("aten.mul with [] of the host", "aten.index with [2] of the host")
    first, second = found.races
    assert first.startswith("aten.exp on a side stream beside ")
    assert second == "a cuda memory [] goes back while aten.sin on a side stream may be at it"
