"""In a step the host waits for nothing that the device does in it: checked on a GPU that is not
there (`tests.fake_gpu`), where no operand may lie on another device and no value can be read."""

from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch

import meshwright as mw
from meshwright.ir.kernels import KERNELS
from meshwright.ir.placed import used
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.testing.models import CASES
from tests.fake_gpu import process
from tests.fake_gpu.process import Planned, waits_of

pytestmark = pytest.mark.skipif(bool(process.why_not()), reason=process.why_not())

PLANS: dict[str, dict[str, Any]] = {
    "microbatches": {"num_microbatches": 4},
    "dp": {"dp_replicate": 2},
    "zero1": {"dp_shard": 2, "dp_replicate": 2, "zero": 1},
    "zero2": {"dp_shard": 2, "zero": 2, "num_microbatches": 2},
    "zero3": {"dp_shard": 2, "zero": 3, "num_microbatches": 2, "recompute": "full"},
    "tp2_pp2": {"tp": 2, "pp": 2, "num_microbatches": 2},
    "zero_bubble_zero3": {"pp": 2, "dp_shard": 2, "zero": 3, "num_microbatches": 4,
                          "schedule": "zero_bubble"},
}  # fmt: skip
SETTINGS: dict[str, tuple[str, str, str, tuple[str, ...], list[str]]] = {
    "gpt2": ("gpt2", "fp32", "adamw", (), [*PLANS]),
    "gpt2 kernels": ("gpt2", "bf16", "sgd", KERNELS, ["dp", "zero1"]),
    "llama": ("llama", "bf16", "adamw", (), ["zero3", "tp2_pp2"]),
    "gpt2 fp16": ("gpt2", "fp16", "adamw", (), ["zero1"]),
    "llama kernels": ("llama", "bf16", "adamw", KERNELS, ["zero1", "zero2", "tp2_pp2"]),
}
STEPS, LOOKS = 2, 4
"""A step is looked back at once it is over: its end, its loss twice, and the norm of gradients."""


def planned(
    model: str, precision: str, optimizer: str, kernels: tuple[str, ...], names: list[str]
) -> Planned:
    """Plans for GPUs, with clipped gradients."""
    case, found = CASES[model], {}
    example = case.example(8, dtype=torch.float32)
    graph = mw.trace(
        case.model(torch.float32), example, case.loss_fn, kernels=kernels, precision=precision
    )
    for name in names:
        axes = ("dp_shard", "dp_replicate", "tp", "pp")
        world = prod(PLANS[name].get(axis, 1) for axis in axes)
        cluster = mw.Cluster.preset("h100-sxm", num_nodes=1, devices_per_node=world)
        problem = make_problem(graph, cluster, precision=precision, optimizer=optimizer)
        plan = build_plan(problem, uniform_choice(problem, **PLANS[name]), predict=False)
        found[name] = replace(plan, max_grad_norm=1.0), graph
    return found


def test_a_step_waits_for_nothing_of_itself() -> None:
    given = {
        f"{setting}, {name}": job
        for setting, told in SETTINGS.items()
        for name, job in planned(*told).items()
    }
    assert {"bucket", "bucket_update"} <= used(given["llama kernels, zero1"][0])
    found = waits_of(given, STEPS)
    assert found == {name: ([], LOOKS * (STEPS - 1)) for name in given}


def test_what_waits_is_found() -> None:
    given = planned(*SETTINGS["gpt2"][:4], ["dp"])
    found, _ = waits_of(given, STEPS, careless="dp")["dp"]
    assert found == ["float() of a tensor", "aten._to_copy of [3] from cpu to cuda"]
