"""A plan for people: tables of what runs where, how long it takes, what it needs, and why."""

from collections.abc import Iterator, Sequence
from io import StringIO
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshwright.ir.graph.graph import Missed
from meshwright.ir.plan.beside import bounded
from meshwright.ir.plan.detail import NEXT_FORWARD, StageTraffic
from meshwright.ir.plan.parameters import names_forms
from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.predicted import Evidence, Prediction
from meshwright.ir.plan.runs import in_runs
from meshwright.ir.styles import style
from meshwright.ir.text.terminal import Terminal
from meshwright.ir.text.units import size, size_unit

MEMORY_CATEGORIES = {
    "parameters": "params", "gradients": "grads", "optimizer": "optim.",
    "activations": "activ.", "communication": "comm.", "workspace": "work",
    "inputs": "batch", "fragmentation": "frag.",
}  # fmt: skip
SHARES = {
    "forward": "forward", "backward": "backward", "recompute": "recompute",
    "tensor": "collectives in blocks", "wait": "waiting for other stages",
    "gradients": "gradients", "gather": "gathering parameters", "optimizer": "optimizer",
    "overhead": "overhead", "offload": "copies to and from the host",
}  # fmt: skip
SCHEDULE_COLUMNS = 24
"""Actions shown per row of the schedule."""
SCHEDULE_ROWS = 16
"""Rows shown of a schedule, and the last."""


Row = TypeVar("Row", bound=tuple[Any, ...])
STYLE: dict[str, Any] = {
    "title_justify": "left", "box": SIMPLE_HEAD, "pad_edge": False, "padding": (0, 1, 0, 0),
}  # fmt: skip


def seconds(value: float) -> str:
    """`12.3 ms` and the like."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value / 1e-6:.2g} us"


def render(plan: Plan) -> RenderableType:
    """The whole plan as a rich renderable."""
    parts: list[RenderableType] = [
        Text(_headline(plan), style="bold"),
        *(Text(f"gives up: {what}", style="bold yellow") for what in plan.gives_up),
        _stages(plan),
        *_saved(plan),
        *_synchronised(plan),
        *_overlaps(plan),
        *_compiled(plan),
        *_captured(plan),
    ]
    if plan.predicted and plan.predicted.stages:
        parts += [_times(plan.predicted), *_breakdown(plan.predicted), *_traffic(plan.predicted)]
        parts += [*_messages(plan), _memory(plan)]
    if len(plan.schedule.rows) > 1:
        parts.append(_schedule(plan))
    if plan.evidence:
        parts += _evidence(plan, plan.evidence)
    if plan.profile:
        machine = plan.profile.machine
        parts.append(Text(f"profile: {machine} ({plan.profile.fingerprint[:8]})"))
    if plan.constraints:
        parts.append(Text("constraints: " + ", ".join(plan.constraints)))
    parts += [Text(line) for line in _kernels(plan)]
    parts += [Text(f"note: {note}") for note in plan.notes]
    return Group(*parts)


def to_text(plan: Plan, width: int = 110) -> str:
    """The same as plain text."""
    return printed(render(plan), width)


def printed(what: RenderableType, width: int = 110) -> str:
    """Plain text without trailing blanks."""
    console = Terminal(file=StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(what)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def _headline(plan: Plan) -> str:
    parts = [
        f"{plan.model.name}, {plan.model.num_parameters / 1e6:,.1f}M parameters",
        f"{plan.cluster.name}: {plan.world_size} of {plan.cluster.num_devices} devices",
        f"batch {plan.global_batch_size} = {plan.num_microbatches} x {plan.samples_per_microbatch}",
        f"{plan.precision}, {plan.method or plan.optimizer}" + _clipping(plan),
    ]
    if plan.style:
        parts.append(f"priced as {style(plan.style).title} runs it")
    if plan.predicted:
        predicted = plan.predicted
        parts.append(
            f"{seconds(predicted.step_s)} per step +-{predicted.error_band:.0%} "
            f"({predicted.samples_per_s:,.4g} samples/s, {predicted.source})"
        )
    return "\n".join(parts)


def _mesh(stage: Stage) -> str:
    return "\n".join(f"{axis} {n}" for axis, n in stage.mesh.items() if n > 1) or "one device"


def ranges(ranks: tuple[int, ...]) -> str:
    """`0-3, 8` for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs)


def _shares(stage: Stage) -> str:
    if len(set(stage.batch_shares)) == 1:
        return f"{stage.dp} x {stage.batch_shares[0]}"
    return "+".join(map(str, stage.batch_shares))


def _blocks(stage: Stage) -> str:
    return stage.first if stage.first == stage.last else f"{stage.first} .. {stage.last}"


def _zero(stage: Stage) -> str:
    ahead = f", {stage.prefetch} ahead" if stage.prefetch else ""
    return f"{stage.zero}{ahead}" + (f", {stage.sync.form}" if stage.sync else "")


def _stages(plan: Plan) -> Table:
    table = Table(title="Stages", **STYLE)
    for name in ("#", "blocks", "ranks", "mesh", "samples", "zero", "recompute"):
        table.add_column(name, no_wrap=name in ("#", "mesh", "samples"))
    for i, stage in enumerate(plan.stages):
        again = ", ".join(in_runs({k: h for k, h in stage.recompute.items() if h == "full"})) or "-"
        table.add_row(str(i), _blocks(stage), ranges(stage.devices), _mesh(stage), _shares(stage),
                      _zero(stage), again)  # fmt: skip
    return table


def _overlaps(plan: Plan) -> list[RenderableType]:
    """What goes on beside collectives of model axes, stages that say the same together."""
    stages: dict[str, list[int]] = {}
    for i, stage in enumerate(plan.stages):
        if stage.overlap != "none":
            stages.setdefault(stage.overlap, []).append(i)
    return [Text(f"overlap, stage {ranges(tuple(own))}: {how}") for how, own in stages.items()]


def _synchronised(plan: Plan) -> list[RenderableType]:
    """Forms that stages name and what the next forward hides, stages that say the same together."""
    stages: dict[tuple[str, str], list[int]] = {}
    for i, stage in enumerate(plan.stages):
        said = [("parameters", f"{name}: {how}") for name, how in stage.by_parameter.items()]
        if stage.store:
            said.insert(0, ("store", f"{stage.store}{_there(plan, i)}"))
        if stage.sync and stage.dp > 1:
            said.insert(0, ("sync", f"{stage.sync}{_hidden(plan, i)}"))
        for key in said:
            stages.setdefault(key, []).append(i)
    return [Text(f"{what}, stage {ranges(tuple(own))}: {how}")
            for (what, how), own in stages.items()]  # fmt: skip


def _there(plan: Plan, stage: int) -> str:
    """What a rank has of a stage in the host's memory."""
    if not plan.predicted or not plan.predicted.stages:
        return ""
    nbytes = plan.predicted.stages[stage].memory.host_bytes
    return f", {size(nbytes)} of each rank on the host" if nbytes else ""


def _hidden(plan: Plan, stage: int) -> str:
    if not plan.predicted or not plan.predicted.stages:
        return ""
    detail = plan.predicted.detail
    if detail and not any(m.when == NEXT_FORWARD for m in detail.stage(stage).messages):
        return ""
    hidden_s = plan.predicted.stages[stage].hidden_s
    how = seconds(hidden_s) if hidden_s else "none"
    return f", hides {how} of its gathers under the next forward"


def _compiled(plan: Plan) -> list[RenderableType]:
    own = tuple(i for i, stage in enumerate(plan.stages) if stage.compile)
    return [Text(f"torch.compile, stage {ranges(own)}")] if own else []


def _captured(plan: Plan) -> list[RenderableType]:
    own = tuple(i for i, stage in enumerate(plan.stages) if stage.capture)
    return [Text(f"CUDA graphs, stage {ranges(own)}")] if own else []


def _saved(plan: Plan) -> list[RenderableType]:
    """What single ops make and the backward needs, where it is not simply kept; by line, blocks
    and stages that say the same together."""
    stages: dict[str, list[int]] = {}
    for i, stage in enumerate(plan.stages):
        blocks: dict[str, list[str]] = {}
        for block, policy in stage.saved.items():
            for how in sorted(set(policy.values()), reverse=True):
                keys = ", ".join(key for key, said in policy.items() if said == how)
                if keys:
                    blocks.setdefault(f"{how} {keys}", []).append(block)
        for said, names in blocks.items():
            stages.setdefault(f"{_names(names)}: {said}", []).append(i)
    return [Text(f"saved, stage {ranges(tuple(own))}, {line}") for line, own in stages.items()]


def _names(blocks: Sequence[str]) -> str:
    """A few by name, more by their number."""
    if len(blocks) <= 2:
        return ", ".join(blocks)
    return f"{len(blocks)} blocks, {blocks[0]} .. {blocks[-1]}"


def _times(predicted: Prediction) -> Table:
    table = Table(title="Predicted time: of one micro-batch, of one step", **STYLE)
    times = ("forward", "backward", "send", "sync", "optimizer")
    for name in ("#", *times):
        table.add_column(name, justify="left" if name == "#" else "right", no_wrap=True)
    rows = [tuple(seconds(getattr(s, f"{name}_s")) for name in times) for s in predicted.stages]
    for stages, row in _together(rows):
        table.add_row(stages, *row)
    return table


def _together(rows: Sequence[Row]) -> Iterator[tuple[str, Row]]:
    """(stages, row) with stages that say the same in one row."""
    found: dict[Row, list[int]] = {}
    for stage, row in enumerate(rows):
        found.setdefault(row, []).append(stage)
    for row, stages in found.items():
        yield ranges(tuple(stages)), row


def _kernels(plan: Plan) -> Iterator[str]:
    """Where fused kernels were put in, and where one that was expected was not."""
    if put_in := [f"{f.kernel} x{f.places}" for f in plan.kernels if f.places]:
        yield "fused kernels: " + ", ".join(put_in)
    for fusion in plan.kernels:
        alike: dict[str, list[Missed]] = {}
        for miss in fusion.missed:
            alike.setdefault(miss.why, []).append(miss)
        for why, missed in alike.items():
            places = sum(miss.places for miss in missed)
            many = f"{places} place{'s' * (places != 1)}"
            yield f"fused kernel {fusion.kernel} left out at {_where(missed)} ({many}): {why}"


def _where(missed: Sequence[Missed]) -> str:
    """Places of one reason: their names, or numbers of stages."""
    stages = [miss.where.removeprefix("stage ") for miss in missed]
    if len(stages) > 1 and all(text.isdecimal() for text in stages):
        return f"stages {ranges(tuple(sorted(map(int, stages))))}"
    return ", ".join(miss.where for miss in missed)


def _clipping(plan: Plan) -> str:
    return "" if plan.max_grad_norm is None else f", gradients clipped to {plan.max_grad_norm:g}"


def _breakdown(predicted: Prediction) -> list[RenderableType]:
    """The step of the busiest rank in one line, without what is less than 0.5 % of it."""
    found = predicted.breakdown
    if found is None or not predicted.step_s:
        return []
    shares = {text: getattr(found, f"{name}_s") / predicted.step_s for name, text in SHARES.items()}
    shown = [f"{text} {share:.0%}" for text, share in shares.items() if share >= 0.005]
    whose = f" of pipeline rank {found.rank}" if len(predicted.stages) > 1 else ""
    return [Text(f"the step{whose}: {', '.join(shown)}; loading data is not part of it")]


_PURPOSES = {"tensors": "inside blocks", "gradients": "of gradients",
             "parameters": "of parameters", "stages": "between stages"}  # fmt: skip


def _traffic(predicted: Prediction) -> list[RenderableType]:
    """What takes most seconds on each link, of the stage that sends most."""
    detail = predicted.detail
    most: dict[str, StageTraffic] = {}
    for one in (one for kind in detail.kinds for one in kind.traffic) if detail else ():
        if one.link not in most or one.seconds > most[one.link].seconds:
            most[one.link] = one
    told = [
        f"{size(x.nbytes)} {_PURPOSES[x.purpose]} over {x.axis} on {x.link} ({seconds(x.seconds)})"
        for x in sorted(most.values(), key=lambda x: -x.seconds)
    ]
    return [Text("a rank sends in a step, most on each link: " + ", ".join(told))] if told else []


def _messages(plan: Plan) -> list[RenderableType]:
    """What replicas of the stages send each other in a step, if the plan names forms for it."""
    detail = plan.predicted.detail if plan.predicted else None
    if detail is None or not any(names_forms(stage) for stage in plan.stages):
        return []
    table = Table(title="Messages among replicas: of one rank in a step", **STYLE)
    for name in ("#", "form", "what", "how", "over", "when", "bytes", "takes", "exposed"):
        right = name in ("bytes", "takes", "exposed")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "when")
    rows = [
        tuple(
            (m.form, m.what, m.primitive, m.axis, m.when, size(m.nbytes), seconds(m.seconds),
             seconds(m.exposed_s) if m.exposed_s else "hidden")
            for m in detail.stage(index).messages
        )
        for index in range(len(plan.stages))
    ]  # fmt: skip
    for stages, of_stage in _together(rows):
        for row in of_stage:
            table.add_row(stages, *row)
    return [table]


def _memory(plan: Plan) -> Table:
    predicted = plan.predicted
    assert predicted
    memories = [stage.memory for stage in predicted.stages]
    unit, scale = size_unit(max(m.used_bytes for m in memories))
    process = max(m.process_bytes for m in memories)
    title = f"Predicted peak memory of a stage's worst rank, in {unit}"
    beside = f"A process takes {size(process)} beside that." if process else None
    table = Table(title=title, caption=beside, **STYLE)
    used = [n for n in MEMORY_CATEGORIES if any(getattr(m, f"{n}_bytes") for m in memories)]
    limits = _limits(plan)
    for name in ("#", *(MEMORY_CATEGORIES[n] for n in used), "used", *["of"] * bool(limits)):
        table.add_column(name, justify="left" if name == "#" else "right", no_wrap=True)
    figures = [
        (*(getattr(m, f"{name}_bytes") for name in used), m.used_bytes, *limits[i : i + 1])
        for i, m in enumerate(memories)
    ]
    rows = [tuple(f"{part / scale:.2f}" for part in parts) for parts in figures]
    for stages, row in _together(rows):
        table.add_row(stages, *row)
    return table


def _limits(plan: Plan) -> list[int]:
    """Per stage, what a plan may use of the tightest of its devices, if the plan says."""
    detail = plan.predicted.detail if plan.predicted else None
    if detail is None:
        return []
    return [min(detail.device(d).room_bytes for d in stage.devices) for stage in plan.stages]


def _schedule(plan: Plan) -> Table:
    table = Table(title=f"Schedule: {plan.schedule.name}", **STYLE)
    table.add_column("group", min_width=5, no_wrap=True)
    table.add_column("actions")
    rows = plan.schedule.rows
    for i in range(len(rows)):
        if SCHEDULE_ROWS <= i < len(rows) - 1:
            if i == SCHEDULE_ROWS:
                table.add_row("..", f"{len(rows) - 1 - SCHEDULE_ROWS} more groups")
            continue
        actions = rows[i].split()
        more = f" .. {len(actions) - SCHEDULE_COLUMNS} more"
        shown = " ".join(actions[:SCHEDULE_COLUMNS])
        table.add_row(str(i), shown + more * (len(actions) > SCHEDULE_COLUMNS))
    return table


def _evidence(plan: Plan, evidence: Evidence) -> list[RenderableType]:
    seen = "its whole space" if evidence.exhausted else "part of its space"
    found = Text(
        f"found by {evidence.searcher} (seed {evidence.seed}): {evidence.candidates:,} candidates, "
        f"{evidence.infeasible:,} infeasible, {seen}; "
        + (
            f"{bounded(plan)} is faster than {seconds(evidence.bound_s)}, gap {evidence.gap:.1%}"
            if evidence.gap is not None
            else "no bound is known"
        )
    )
    if not evidence.alternatives:
        return [found]
    table = Table(title="Alternatives", **STYLE)
    for name in ("plan", "step", "peak", "why not"):
        table.add_column(name, justify="right" if name in ("step", "peak") else "left")
    for other in evidence.alternatives:
        step = seconds(other.step_s) if other.step_s else "-"
        table.add_row(other.name, step, size(other.peak_bytes), other.why)
    return [found, table]
