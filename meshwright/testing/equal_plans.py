"""Every kind of plan whose run is to equal that of a single process."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright.ir.plan.plan import BlockLayout, FormChoice, Plan, model_mesh
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import Problem

BATCH = 8


@dataclass(frozen=True)
class Case:
    """One kind of plan, on `world` ranks."""

    world: int
    choice: dict[str, Any] = field(default_factory=dict)
    batch: int = BATCH
    stage: dict[str, Any] = field(default_factory=dict)
    """What all of its stages have beside."""


PLANS = {
    "one": Case(1),
    "one_microbatches": Case(1, {"num_microbatches": 4}),
    "dp4": Case(4, {"dp_replicate": 4}),
    "dp3_uneven": Case(3, {"dp_replicate": 3}),
    "zero1": Case(4, {"dp_shard": 4, "zero": 1}),
    "zero2": Case(4, {"dp_shard": 4, "zero": 2, "num_microbatches": 2}),
    "zero3": Case(4, {"dp_shard": 4, "zero": 3}),
    "hsdp": Case(4, {"dp_replicate": 2, "dp_shard": 2, "zero": 3, "num_microbatches": 2}),
    "tp2": Case(2, {"tp": 2}),
    "tp4": Case(4, {"tp": 4}),
    "tp3_uneven": Case(3, {"tp": 3}),
    "pp2": Case(2, {"pp": 2, "num_microbatches": 4}),
    "pp4": Case(4, {"pp": 4, "num_microbatches": 4}),
    "tp2_pp2": Case(4, {"tp": 2, "pp": 2, "num_microbatches": 2}),
    "dp2_tp2_pp2": Case(8, {"dp_replicate": 2, "tp": 2, "pp": 2, "num_microbatches": 2}),
    "zero3_tp2_pp2": Case(8, {"dp_shard": 2, "zero": 3, "tp": 2, "pp": 2, "num_microbatches": 2}),
    "uneven_stages": Case(2, {"pp": 2, "cuts": (1,), "num_microbatches": 4}),
    "replicas_3_1": Case(4, {"pp": 2, "stage_dp": (3, 1), "num_microbatches": 2}),
    "replicas_1_2": Case(3, {"pp": 2, "stage_dp": (1, 2), "num_microbatches": 2}),
    "tp_per_stage": Case(3, {"pp": 2, "stage_tp": (2, 1), "num_microbatches": 2}),
    "tp_1_2_zero": Case(6, {"pp": 2, "stage_tp": (1, 2), "dp_shard": 2, "zero": 2,
                            "num_microbatches": 2}),
    "gpipe": Case(2, {"pp": 2, "num_microbatches": 4, "schedule": "gpipe"}),
    "dapple_pa": Case(2, {"pp": 2, "num_microbatches": 4, "schedule": "dapple_pa"}),
    "dapple_pb": Case(4, {"pp": 4, "num_microbatches": 8, "schedule": "dapple_pb"}),
    "interleaved": Case(2, {"pp": 2, "num_microbatches": 4, "schedule": "interleaved"}),
    "zero_bubble": Case(2, {"pp": 2, "num_microbatches": 4, "schedule": "zero_bubble"}),
    "zbv": Case(2, {"pp": 2, "num_microbatches": 4, "schedule": "zbv"}),
    "dual_pipe_v": Case(4, {"pp": 2, "dp_shard": 2, "num_microbatches": 4,
                            "schedule": "dual_pipe_v"}),
    "zero_bubble_zero3": Case(4, {"pp": 2, "dp_shard": 2, "zero": 3, "num_microbatches": 4,
                                  "schedule": "zero_bubble"}),
    "recompute": Case(1, {"recompute": "full"}),
    "recompute_tp2_pp2": Case(4, {"tp": 2, "pp": 2, "num_microbatches": 2, "recompute": "full"}),
    "recompute_zero3": Case(2, {"dp_shard": 2, "zero": 3, "recompute": "full"}),
    "recompute_zero_bubble": Case(2, {"pp": 2, "num_microbatches": 4, "recompute": "full",
                                      "schedule": "zero_bubble"}),
}  # fmt: skip

_LATE = {"sync": FormChoice(form="dear", settings={"bucket_bytes": 4096, "ahead": 2})}
LATE = {
    "parameters_tp2": Case(4, {"dp_shard": 2, "zero": 1, "tp": 2, "num_microbatches": 2},
                           stage=_LATE),
    "gradients_tp2": Case(4, {"dp_replicate": 2, "tp": 2}, stage=_LATE),
    "parameters_pp2": Case(4, {"dp_shard": 2, "zero": 1, "pp": 2, "num_microbatches": 4},
                           stage=_LATE),
    "gradients_pp2": Case(4, {"dp_replicate": 2, "pp": 2, "num_microbatches": 4,
                              "schedule": "zero_bubble"}, stage=_LATE),
    "parameters_hsdp": Case(4, {"dp_replicate": 2, "dp_shard": 2, "zero": 1}, stage=_LATE),
    "gradients_of_both": Case(4, {"dp_replicate": 2, "dp_shard": 2, "recompute": "full"},
                              stage=_LATE),
}  # fmt: skip
"""What goes under the next step's forward (`Stage.sync`), in pipelines and beside model axes."""


def equal_plan(
    problem: Problem, kind: Case, split: Callable[[int], tuple[BlockLayout, ...]]
) -> Plan:
    """The plan of a kind. `split(tp)`: layouts in which all is split that can be, however small."""
    if {"tp", "stage_tp"} & kind.choice.keys():
        for tp in (2, 3, 4):
            problem.solved[model_mesh({"tp": tp}), ""] = split(tp)
    plan = build_plan(problem, uniform_choice(problem, **kind.choice), predict=False)
    return replace(plan, stages=tuple(replace(stage, **kind.stage) for stage in plan.stages))
