"""DAPPLE's Table 5: BERT-48 in 2 stages on config B, micro-batches of 2 samples, V100-16GB.

Time: two equal stages through the simulator, with two fitted numbers: seconds of a micro-batch in a
stage, and seconds once per step. Memory: nothing fitted; what a layer keeps is traced from
transformers' BERT with its attention and GELU written out, as TensorFlow 1.12 ran them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from transformers import BertConfig, BertForQuestionAnswering

from benchmarks.dapple.setup import ETHERNET, cluster, even, problem, step_s
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.stage.placement import stage_costs
from meshwright.ir.graph.profiled_graph import profiled_graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.layer_profile import LayerProfile
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.problem.schedule_tools import make_schedule

MICRO_BATCH = 2
SEQUENCE = 384
"""The profile's attention mask has 384 x 384 values per sample."""


@dataclass(frozen=True, slots=True)
class Row:
    """A cell of the table; None where the paper says out of memory."""

    schedule: str
    recompute: bool
    microbatches: int
    samples_per_s: float | None
    average_gb: float | None
    fitted: bool = False
    """Whether the two numbers are fitted to it."""

    @property
    def label(self) -> str:
        name = "GPipe" if self.schedule == "gpipe" else "DAPPLE"
        return f"{name}{' + recompute' * self.recompute}, M={self.microbatches}"


ROWS = (
    Row("gpipe", False, 2, 5.10, 12.1),
    Row("gpipe", False, 3, None, None),
    Row("gpipe", True, 2, 4.00, 9.9),
    Row("gpipe", True, 5, 5.53, 13.2),
    Row("gpipe", True, 8, None, None),
    Row("dapple_pa", False, 2, 5.10, 10.6, fitted=True),
    Row("dapple_pa", False, 8, 7.60, 10.6),
    Row("dapple_pa", False, 16, 8.18, 10.6, fitted=True),
    Row("dapple_pa", True, 2, 4.24, 8.5, fitted=True),
    Row("dapple_pa", True, 8, 6.23, 8.5),
    Row("dapple_pa", True, 16, 6.77, 8.5, fitted=True),
)


@dataclass(frozen=True, slots=True)
class Fit:
    """Seconds of one micro-batch in one stage, and once per step."""

    tau_s: float
    once_s: float


def pipeline_s(row: Row, times: Sequence[StageTimes]) -> float:
    """Seconds of the row's schedule."""
    return simulate(make_schedule(row.schedule, 2, row.microbatches, 2), times).step_s


def _stage(forward_s: float, backward_s: float) -> StageTimes:
    return StageTimes(forward_s=forward_s, backward_s=backward_s)


def fit(recompute: bool, forward: float) -> Fit:
    """From the two fitted rows. `forward`: share of the forward in a micro-batch's time."""
    known = [row for row in ROWS if row.fitted and row.recompute == recompute]
    units = [pipeline_s(row, [_stage(forward, 1 - forward)] * 2) for row in known]
    seconds = [_seconds(row) for row in known]
    tau_s = (seconds[1] - seconds[0]) / (units[1] - units[0])
    return Fit(tau_s, seconds[0] - tau_s * units[0])


def _seconds(row: Row) -> float:
    assert row.samples_per_s is not None
    return row.microbatches * MICRO_BATCH / row.samples_per_s


def predicted(row: Row, found: Fit, forward: float) -> float:
    """Samples per second of a row."""
    times = [_stage(found.tau_s * forward, found.tau_s * (1 - forward))] * 2
    return row.microbatches * MICRO_BATCH / (pipeline_s(row, times) + found.once_s)


# Memory -------------------------------------------------------------------------------------------


@cache
def layer_kept_bytes() -> int:
    """What one BERT-large layer keeps of one sample, in float32, besides its input."""
    with torch.device("meta"):
        settings = {
            "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096,
            "num_hidden_layers": 3, "hidden_act": "gelu_new", "attn_implementation": "eager",
        }  # fmt: skip
        model = BertForQuestionAnswering(BertConfig.from_dict(settings))
        ids = torch.zeros(MICRO_BATCH, SEQUENCE, dtype=torch.long)
        edge = torch.zeros(MICRO_BATCH, dtype=torch.long)
    given = {"input_ids": ids, "start_positions": edge, "end_positions": edge}
    graph = trace(model, given)
    one = make_problem(graph, cluster("B", 1, 1), precision="fp32")
    plan = build_plan(one, uniform_choice(one))
    costs = stage_costs(one.tables, plan, 0).cost
    layers = [
        saved
        for block, saved in zip(graph.blocks, costs.block_saved, strict=True)
        if ".layer." in block.name
    ]
    own_input = MICRO_BATCH * SEQUENCE * 1024 * 4
    return (sorted(layers)[1] - own_input) // MICRO_BATCH


def memory_gb(profile: LayerProfile, row: Row) -> tuple[float, float]:
    """GB per device: the mean of both stages, and the most.

    DAPPLE recomputes a whole stage at once, our runtime block by block: there, the activations of
    one whole micro-batch come back beside what is kept at the borders.
    """
    if not row.recompute:
        return _gigabytes(plan_of(profile, row))
    whole = _gigabytes(plan_of(profile, replace(row, recompute=False, microbatches=1)))
    borders = [
        _gigabytes(plan_of(profile, replace(row, microbatches=count)))
        for count in (row.microbatches, 1)
    ]
    mean, most = (w + b - one for w, b, one in zip(whole, *borders, strict=True))
    return mean, most


def plan_of(profile: LayerProfile, row: Row) -> Plan:
    """The row as a plan of two stages with its predicted memory."""
    kept = {
        layer.name: layer_kept_bytes()
        for layer in profile.layers
        if layer.description.startswith("layer_")
    }
    graph = profiled_graph(profile, row.microbatches * MICRO_BATCH, kept_bytes=kept)
    given = problem(graph, cluster("B", 2, 1))
    choice = uniform_choice(
        given, pp=2, cuts=even(profile, 2, ETHERNET["B"][1]), schedule=row.schedule,
        num_microbatches=row.microbatches, recompute="full" if row.recompute else "none",
    )  # fmt: skip
    return build_plan(given, choice)


def _gigabytes(plan: Plan) -> tuple[float, float]:
    """Mean of the stages and the most of any: what the framework's allocator counts. Unlike ours,
    TensorFlow's sums of gradients are variables: there from start to end."""
    assert plan.predicted
    totals = []
    for stage in plan.predicted.stages:
        found = stage.memory
        gradients = found.parameters_bytes
        state = found.parameters_bytes + gradients + found.optimizer_bytes
        moving = found.activations_bytes + found.communication_bytes + found.workspace_bytes
        totals.append((state + moving) / 1e9)
    return sum(totals) / len(totals), max(totals)


def unfitted(plan: Plan) -> float:
    """Samples per second from the profile alone, with the authors' links."""
    return plan.global_batch_size / step_s(plan)
