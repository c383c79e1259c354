"""A published run as a user of ours would ask for it: the model traced, the layout as a plan by
hand, the plan's own prediction.

The user's model is a Hugging Face model of the row's shape. What the row's stack does that a plan
does not say is a file of `ir/styles`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path

import torch

from benchmarks.published.cuts import starts
from benchmarks.published.measured import RowError
from benchmarks.published.model_kinds import ModelKind, model_of
from benchmarks.published.recipes import core, per_op, recompute_mode
from benchmarks.published.rows import Row
from benchmarks.published.sites import cluster_of
from benchmarks.published.stacks import Stack, stack_of
from benchmarks.published.traces import kept
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.plan.keeping import Keeping
from meshwright.ir.plan.plan import ModelMesh, Plan, ScheduleTable, Stage, model_mesh
from meshwright.ir.plan.predicted import RankMemory
from meshwright.ir.plan.schedule import Schedule
from meshwright.ir.styles import style
from meshwright.ir.trace.trace import trace
from meshwright.planner.inside.variants import own_variants
from meshwright.planner.problem.by_stage import recomputable
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import settled
from meshwright.planner.problem.problem import Problem, make_problem
from meshwright.planner.problem.schedule_tools import USUAL, make_schedule

Kept = Callable[[Graph, Block], Mapping[str, Keeping]]
"""What recomputation of parts of a layer keeps of it."""
_SCHEDULES = {
    "": "one_f_one_b", "1f1b": "one_f_one_b", "onefoneb": "one_f_one_b",
    "interleaved": "interleaved", "interleaved1f1b": "interleaved", "gpipe": "gpipe",
    "zbv": "zbv", "zbvzerobubble": "zbv", "zb1p": "zero_bubble", "zerobubble": "zero_bubble",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Asked:
    """All that a user gives."""

    graph: Graph
    cluster: Cluster
    pins: tuple[str, ...]
    precision: str
    style: str


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the product says of a row."""

    step_s: float
    band: float
    """Relative error that the plan states."""
    peaks: Mapping[str, float]
    """By what a table calls memory: bytes of the fullest rank, or of that which the stack logs."""
    fits: bool
    """Whether something is left, so that no allocator has to give back what it has reserved apart:
    a search that leaves any headroom takes no other plan."""
    style: str


def predict(row: Row, traces: Path | None = None) -> Prediction:
    """RowError or PlanError where plans of ours have no word for something in the row. `traces`: a
    folder that keeps graphs."""
    stack = stack_of(row)
    asked = asked_of(row, stack, traces)
    plan = plan_of(row, stack, asked)
    assert plan.predicted
    stages = plan.predicted.stages
    fullest = max(stages, key=lambda stage: stage.memory.total_bytes).memory
    logged = stages[0].memory if stack.logs_first_stage else fullest
    room = min(device.memory_bytes for device in asked.cluster.device_types)
    return Prediction(
        plan.predicted.step_s, plan.predicted.error_band, _peaks(logged),
        fullest.total_bytes < room, stack.style,
    )  # fmt: skip


def _peaks(memory: RankMemory) -> dict[str, float]:
    reserved = memory.total_bytes - memory.process_bytes
    return {
        "device": memory.total_bytes,
        "reserved": reserved,
        "allocated": reserved - memory.fragmentation_bytes,
    }


def asked_of(row: Row, stack: Stack, traces: Path | None = None) -> Asked:
    """RowError where the row has something that our plans have no word for."""
    pins, cluster = pins_of(row, stack), cluster_of(row)
    precision = precision_of(row, stack)
    known = style(stack.style)
    kernels = known.kernels
    fused = kernels if isinstance(kernels, tuple) else ()
    multiple = known.vocab_multiple * row.parallel.tp
    shape = replace(row.shape, vocab=-(-row.shape.vocab // multiple) * multiple)
    key = ModelKind(
        shape=shape, flash=stack.flash, dropout=stack.dropout, squared=_is_squared(row),
        narrow="fp8" in precision, adapter=row.adapter,
    )  # fmt: skip
    graph = _graph(key, row.gbs, row.seq, precision, fused, traces)
    return Asked(graph, cluster, pins, precision, stack.style)


def plan_of(row: Row, stack: Stack, asked: Asked) -> Plan:
    """The row's layout as a plan by hand, with its prediction. Ranks of one group of experts that
    have samples of their own are the axis `ep`, which takes from the replicas what of the group is
    neither on `tp` nor on `cp`."""
    problem = make_problem(
        asked.graph, asked.cluster, constraints=asked.pins, precision=asked.precision,
        style=asked.style,
    )  # fmt: skip
    p = row.parallel
    ep = 1 if _lie_along(row) else _expert_ranks(row)
    dp = p.dp // ep
    shard = min(p.shard, dp) if p.zero else 1
    mode, _ = recompute_mode(row.recompute)
    model = model_mesh({"cp": p.cp, "ep": ep, "tp": p.tp})
    plans = [
        _as_run(problem, row, build_plan(problem, uniform_choice(
            problem, pp=p.pp, model=model, variant=variant, dp_shard=shard,
            dp_replicate=dp // shard, zero=_zero(row, stack) if shard * p.cp * ep > 1 else 0,
            num_microbatches=row.microbatches, schedule=schedule_of(row),
            recompute="full" if mode == "full" else "none",
            cuts=starts(stack.cut(row, p.pp * p.vpp)) if p.pp > 1 else (),
        ))) for variant in _variants(asked.style, model, row.gbs)
    ]  # fmt: skip
    return min(plans, key=_step_s)


def _as_run(problem: Problem, row: Row, plan: Plan) -> Plan:
    """The plan whose layers keep what a row's recomputation of parts of layers does, and whose
    pipeline is as often empty."""
    of_layer = {"op": per_op, "core": core}.get(recompute_mode(row.recompute)[0])
    rounds = row.microbatches * row.mbs // row.lbs if row.lbs and row.parallel.pp > 1 else 1
    if of_layer is None and rounds == 1:
        return plan
    if rounds > 1:
        plan = replace(plan, schedule=_emptied(plan, rounds))
    stages = plan.stages if of_layer is None else _kept_stages(problem, of_layer, plan)
    return settled(problem, replace(plan, stages=stages))


def _emptied(plan: Plan, rounds: int) -> ScheduleTable:
    """The plan's schedule for a part of its micro-batches, as often as it takes for all."""
    name, count = plan.schedule.name, plan.num_microbatches // rounds
    one = make_schedule(name, len(plan.stages), count, len(plan.schedule.rows))
    rows = [
        [replace(a, microbatch=a.microbatch + i * count) for i in range(rounds) for a in row]
        for row in one.ranks
    ]
    return ScheduleTable(name=name, rows=Schedule(name, tuple(map(tuple, rows))).rows)


def _kept_stages(problem: Problem, of_layer: Kept, plan: Plan) -> tuple[Stage, ...]:
    graph, stages = problem.graph, []
    for stage in plan.stages:
        first, last = (problem.tables.block_index[name] for name in (stage.first, stage.last))
        layers = recomputable(graph, graph.blocks[first : last + 1])
        blocks = {block.pattern: block for block in graph.blocks if block.pattern in layers}
        said = {pattern: of_layer(graph, block) for pattern, block in blocks.items()}
        stages.append(replace(stage, saved=said) if all(said.values()) else stage)
    return tuple(stages)


def _zero(row: Row, stack: Stack) -> int:
    p = row.parallel
    return min(p.zero, 1) if stack.keeps_gathered and p.pp > 1 else p.zero


def _step_s(plan: Plan) -> float:
    assert plan.predicted
    return plan.predicted.step_s


def _variants(stack: str, model: ModelMesh, batch: int) -> tuple[str, ...]:
    if not model:
        return ("",)
    return own_variants(model, batch) or style(stack).variants or ("", "fast")


def _expert_ranks(row: Row) -> int:
    """Ranks of a group of experts that are not of one group of tensor parallelism: where these do
    not share each expert, they have other experts."""
    p = row.parallel
    return max(1, p.ep // p.tp) if p.ep > 1 and p.etp < p.tp else p.ep


def _lie_along(row: Row) -> bool:
    """Whether those ranks are the ones with parts of the same samples: Megatron's groups of experts
    are neighbours, and `cp` is next to `tp`. Of a part of `cp` plans have no word: they have `ep`
    then."""
    return 1 < row.parallel.cp == _expert_ranks(row)


def _experts_of(row: Row) -> tuple[str, ...]:
    """Where experts lie; RowError where plans have no word for it."""
    p, ranks = row.parallel, _expert_ranks(row)
    if p.ep == 1:
        return ()
    if p.etp not in (1, p.tp):
        raise RowError(f"experts that {p.etp} of {p.tp} ranks of tensor parallelism share")
    along = _lie_along(row)
    if (not along and p.dp % ranks) or (p.etp < p.tp and p.ep % p.tp):
        raise RowError(f"groups of {p.ep} ranks for experts among {p.dp} replicas of tp {p.tp}")
    found = [f"place *.experts.* {'cp' if along else 'ep'}=S(0)"] if ranks > 1 else []
    if p.etp < p.tp:  # neighbours, who share attention, have neighbouring experts
        found.append(f"place *.experts.* tp=S(0{f',outer={ranks}' if ranks > 1 else ''})")
    return (*found, *(_WITHIN if p.etp > 1 else ()))


_WITHIN = ("place *.experts.gate_up_proj tp=S(1,outer=2)", "place *.experts.down_proj tp=S(2)")
"""Of each expert a part on each rank of `tp`, gate and up alike."""


def schedule_of(row: Row) -> str:
    """The schedule of ours that a row names; RowError for an unknown one."""
    p = row.parallel
    if p.pp == 1:
        return USUAL
    named = p.schedule.lower().replace("_", "").replace("-", "")
    if named not in _SCHEDULES:
        raise RowError(f"schedule {p.schedule!r}")
    return "interleaved" if p.vpp > 1 else _SCHEDULES[named]


def precision_of(row: Row, stack: Stack) -> str:
    """The precision of ours that a row's words mean."""
    words = row.precision.lower()
    if "fp8" in words or "float8" in words:
        if "rowwise" in words:
            return "fp8-rowwise"
        return "fp8-tensorwise-sums" if stack.sums_half else "fp8-tensorwise"
    if "throughout" in words or stack.sums_half:
        return "bf16-sums"
    if "fp16" in words:
        return "fp16"
    return "bf16"


def pins_of(row: Row, stack: Stack) -> tuple[str, ...]:
    """What of the layout is no matter of meshes and stages."""
    p = row.parallel
    if row.gbs % (row.mbs * p.dp):
        raise RowError(f"{row.gbs} samples are not whole micro-batches of {row.mbs} x {p.dp}")
    mode, every = recompute_mode(row.recompute)
    if every > 1:
        raise RowError(f"recompute {row.recompute!r}")
    kept = ("saved=none",) if mode in ("none", "full") else ()
    if mode == "core" and stack.flash:  # which parts, its stack says
        kept = ("saved=selective",)
    kept += _experts_of(row)
    return (*kept, "prefetch=1") if p.zero == 3 and p.pp == 1 else kept


def _is_squared(row: Row) -> bool:
    """Whether its activation is a squared ReLU."""
    return "nemotron" in row.label.lower()


def _attention(model: ModelKind) -> str:
    """Windows with sinks are an operator of ours; gpt-oss writes products in its place."""
    return "sdpa" if model.flash and not model.shape.window else "eager"


@lru_cache(maxsize=2)
def _graph(
    model: ModelKind,
    batch: int,
    seq: int,
    precision: str,
    kernels: tuple[str, ...],
    traces: Path | None,
) -> Graph:
    asked = (model, batch, seq, precision, kernels)
    return kept(traces, asked, lambda: _traced(*asked)) if traces else _traced(*asked)


def _traced(
    model: ModelKind, batch: int, seq: int, precision: str, kernels: tuple[str, ...]
) -> Graph:
    with torch.device("meta"):
        made = model_of(model, seq, _attention(model))
        ids = torch.zeros(2, seq, dtype=torch.long)
    return trace(
        made, {"input_ids": ids, "labels": ids}, global_batch_size=batch, precision=precision,
        kernels=kernels,
    )  # fmt: skip
