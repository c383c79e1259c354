"""A plan as other tools see one: the same mesh everywhere, layers in a row; and where it is not."""

from collections.abc import Iterator
from dataclasses import dataclass

from meshwright.ir.graph.prelude import PRELUDE
from meshwright.ir.layout.layout import parse_strategy
from meshwright.ir.placed.route import travels
from meshwright.ir.plan.plan import BlockLayout, Plan, Stage
from meshwright.ir.plan.sampled import sample_ranks

TOOL_SCHEDULES = ("gpipe", "one_f_one_b", "interleaved", "zbv", "zero_bubble", "dual_pipe_v")
"""Schedules that tools have names for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What all stages have in common; of what differs, the largest."""

    pp: int
    stages_per_rank: int
    dp_replicate: int
    dp_shard: int
    """Ranks of `ep` that have samples of their own are among them: tools take the groups of experts
    from replicas."""
    cp: int
    ep: int
    tp: int
    zero: int
    recompute: str
    """none, full, or some: of some blocks."""
    recomputed_layers: int
    """If each stage recomputes so many of its layers, its first ones; else 0."""
    sequence_parallel: bool
    """Whether layers hand on values that are split along the sequence over tp."""
    samples: int
    """Of one micro-batch on one replica."""
    layers: tuple[tuple[int, int], ...]
    """Per stage, first layer and the one after the last; empty if layers are not all alike."""
    odd: tuple[str, ...]
    """What no tool with one mesh for all can say."""

    @property
    def dp(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def num_layers(self) -> int:
        return self.layers[-1][1] if self.layers else 0


def shape_of(plan: Plan) -> Shape:
    """The common shape of a plan's stages."""
    sizes = {
        axis: max(stage.mesh.get(axis, 1) for stage in plan.stages)
        for axis in ("dp_replicate", "dp_shard", "cp", "ep", "tp")
    }
    own = [sample_ranks(plan, stage)[1] for stage in plan.stages]
    sizes["dp_shard"] *= max(own)
    return Shape(
        pp=len(plan.schedule.rows),
        stages_per_rank=len(plan.stages) // len(plan.schedule.rows),
        **sizes,
        zero=max(stage.zero for stage in plan.stages),
        recompute=_recompute(plan),
        recomputed_layers=_recomputed_layers(plan),
        sequence_parallel=_sequence_parallel(plan),
        samples=max(max(s.batch_shares) // n for s, n in zip(plan.stages, own, strict=True)),
        layers=_layers(plan),
        odd=tuple(_odd(plan)),
    )


def _recompute(plan: Plan) -> str:
    """Whether the layers are recomputed, over all stages."""
    counts = [_recomputed(stage) for stage in plan.stages]
    if not any(counts):
        return "none"
    layers = _layers(plan)
    if layers:
        every = all(
            len(again) == stop - start or "*" in "".join(again)
            for again, (start, stop) in zip(counts, layers, strict=True)
        )
    else:
        every = all(set(s.layouts) - {PRELUDE} <= set(s.recompute) for s in plan.stages)
    return "full" if every else "some"


def _recomputed(stage: Stage) -> tuple[str, ...]:
    """Names and patterns of layers that are recomputed."""
    patterns = [pattern for pattern in stage.layouts if "*" in pattern]
    return tuple(
        name
        for name, how in stage.recompute.items()
        if how == "full"
        and (name in patterns or any(_number(name, p) is not None for p in patterns))
    )


def _recomputed_layers(plan: Plan) -> int:
    counts = set()
    for stage, (start, _) in zip(plan.stages, _layers(plan), strict=False):
        pattern = next((p for p in stage.layouts if "*" in p), "*")
        numbers = sorted(_number(name, pattern) or 0 for name in _recomputed(stage))
        first_ones = numbers == list(range(start, start + len(numbers)))
        counts.add(len(numbers) if first_ones else 0)
    return counts.pop() if len(counts) == 1 else 0


def _layer_layouts(plan: Plan) -> list[BlockLayout]:
    used = {name for stage in plan.stages for name in stage.layouts.values()}
    return [x for x in plan.layouts if x.name in used and "*" in x.pattern]


def _sequence_parallel(plan: Plan) -> bool:
    layers = [x for x in _layer_layouts(plan) if "tp" in x.mesh]
    return bool(layers) and all(x.inputs and x.inputs[0].get("tp") == "S(1)" for x in layers)


def _layers(plan: Plan) -> tuple[tuple[int, int], ...]:
    """Layers are the blocks of the one pattern that repeats; all others come once."""
    patterns = {pattern for stage in plan.stages for pattern in stage.layouts} - {PRELUDE}
    repeated = [pattern for pattern in patterns if "*" in pattern]
    if len(repeated) != 1:
        return ()
    count = plan.model.num_blocks - (len(patterns) - 1)
    starts = [_number(stage.first, repeated[0]) for stage in plan.stages]
    starts[0] = 0
    if None in starts[1:]:
        starts = [count if start is None else start for start in starts]
    ends = [*starts[1:], count]
    return tuple((start or 0, end or 0) for start, end in zip(starts, ends, strict=True))


def _number(name: str, pattern: str) -> int | None:
    """Which layer a block is; None if it is none."""
    before, _, after = pattern.partition("*")
    middle = name.removeprefix(before).removesuffix(after)
    inside = name.startswith(before) and name.endswith(after) and middle.isdecimal()
    return int(middle) if inside else None


def _odd(plan: Plan) -> Iterator[str]:
    first = plan.stages[0]
    if any(stage.mesh != first.mesh for stage in plan.stages):
        meshes = dict.fromkeys(_mesh_text(stage) for stage in plan.stages)
        yield f"stages with meshes of their own: {' / '.join(meshes)}; the largest sizes are given"
    if any(len(set(stage.batch_shares)) > 1 for stage in plan.stages):
        yield "replicas with unequal shares of the batch; equal ones are given"
    used = {axis for stage in plan.stages for axis, _ in stage.model}
    if axes := sorted(used & {"tp_depth", "tp_row", "tp_col"}):
        yield f"tensor parallelism in several dimensions ({', '.join(axes)})"
    if len({stage.zero for stage in plan.stages}) > 1:
        yield "a ZeRO level per stage; the highest is given"
    if any(stage.capture for stage in plan.stages):
        yield "blocks in CUDA graphs: ask for them in the tool's own words"
    for sync in sorted({stage.sync.form for stage in plan.stages if stage.sync}):
        yield f"sync {sync}: replicas agree as the ZeRO level says"
    if any(stage.by_parameter or stage.store for stage in plan.stages):
        yield "single parameters with a ZeRO level or a store of their own (by_parameter, store)"
    if any(stage.saved for stage in plan.stages):
        yield "what single ops keep, make again or move to the host (saved)"
    if plan.schedule.name not in TOOL_SCHEDULES and len(plan.schedule.rows) > 1:
        yield f"the schedule {plan.schedule.name!r}, a table of its own"
    if any(s.mesh.get("ep", 1) > sample_ranks(plan, s)[1] for s in plan.stages):
        yield "ranks of experts that share each sample: those of tools have samples of their own"
    if any(_routes_over_several(layout) for layout in plan.layouts):
        yield "experts that lie on several axes: their product is the ep of tools, with etp 1"
    if any(_lie_along(layout) for layout in plan.layouts):
        yield "experts along a sequence (cp): the ep of tools counts those ranks, with etp 1"
    if any(tuple(stage.devices) != tuple(sorted(stage.devices)) for stage in plan.stages):
        yield "devices of a stage in an order of their own"


def _routes_over_several(layout: BlockLayout) -> bool:
    """Whether tokens travel on several axes to the experts of one layer."""
    strategies = [
        [parse_strategy(text) for axis, text in texts.items() if axis != "dp"]
        for texts in layout.ops.values()
    ]
    return any(
        sum(len(s.inputs) > 4 and travels(s) and s.inputs[3] == s.inputs[4] for s in found) > 1
        for found in strategies
    )


def _lie_along(layout: BlockLayout) -> bool:
    """Whether ranks of `cp` have parameters of their own: only experts are split there."""
    return any("S(" in placed.get("cp", "") for placed in layout.parameters.values())


def _mesh_text(stage: Stage) -> str:
    return " ".join(f"{axis} {n}" for axis, n in stage.mesh.items() if n > 1) or "one device"
