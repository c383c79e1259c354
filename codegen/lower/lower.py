"""Plan and graph to the programs of one rank: a module per distinct block, and who calls what."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from math import prod

from torch.fx import GraphModule

from meshwright.codegen.emit.emit import stage_source
from meshwright.codegen.lower.builder import Builder
from meshwright.codegen.lower.joint import skipped, spots_of
from meshwright.codegen.lower.prelude import lower_prelude
from meshwright.codegen.lower.program import BlockCode, BorderValue, Call, StageProgram
from meshwright.codegen.lower.stage_context import Where, label_of, parsed, strategies, where
from meshwright.codegen.lower.stored import param_of, stored_layouts
from meshwright.codegen.passes.compiled import compiled
from meshwright.codegen.passes.overlap import overlap_gradients, split_rows
from meshwright.codegen.passes.piped import in_halves, in_phases
from meshwright.codegen.passes.taps import tap
from meshwright.forms.folding import folded_groups
from meshwright.forms.retention import whole_form
from meshwright.forms.sync import exchange_of, has_taps, reads_some_rows
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.dtypes import runtime_dtypes
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.graph.param import Param
from meshwright.ir.layout.crossing import Crossing, crossings
from meshwright.ir.layout.layout import RP, Layout, R, Shard
from meshwright.ir.layout.nesting import local_split
from meshwright.ir.layout.samples import sample_axes
from meshwright.ir.plan.bag_problems import bag_problems
from meshwright.ir.plan.paired import paired_stages
from meshwright.ir.plan.parameters import stage_for, views_of
from meshwright.ir.plan.plan import HALVING, Plan, param_key
from meshwright.ir.precision import precision
from meshwright.ir.trace.changing import buffer_problems


def lower(graph: Graph, plan: Plan, rank: int) -> tuple[StageProgram, ...]:
    """The stages that run on global `rank`, in order."""
    for problem in (*buffer_problems(graph, plan), *bag_problems(graph, plan)):
        raise PlanError(problem)
    crossing = crossings(plan, graph)
    dtypes = _dtypes_sent(graph, plan) if crossing else {}
    return tuple(
        _lower_stage(where(graph, plan, index, rank), crossing, dtypes)
        for index, stage in enumerate(plan.stages)
        if rank in stage.devices
    )


def _dtypes_sent(graph: Graph, plan: Plan) -> Mapping[str, str]:
    """Dtypes that values have as they run, where autocast casts some: what is narrow travels so,
    and the next stage computes with what one process would."""
    numbers, kind = precision(plan.precision), plan.cluster.device_kind
    return runtime_dtypes(graph, numbers, kind) if numbers.autocast and kind else {}


def _lower_stage(
    at: Where, crossing: dict[str, Crossing], dtypes: Mapping[str, str]
) -> StageProgram:
    made_before = {out for op in at.graph.prelude_ops for out in op.outputs if out}
    reads = dict.fromkeys(name for block in at.blocks for name in block.inputs)
    prelude = lower_prelude(at, tuple(name for name in reads if name in made_before))
    received = {n: c.layout for n, c in crossing.items() if c.enters(at.stage)}
    sent = {n: c.layout for n, c in crossing.items() if c.leaves(at.stage)}
    stored = stored_layouts(at)
    known: dict[str, Layout] = {name: at.input_layout(name) for name in at.graph.inputs}
    known |= prelude.layouts | received
    calls = _calls(at, known, stored, sent)
    is_last = at.stage == len(at.plan.stages) - 1
    everything = [call for call in (prelude.totals, prelude.call, *calls) if call]
    inputs = {name for call in everything for name in call.inputs}
    totals = prelude.totals.outputs if prelude.totals else ()
    kept = {*sent, *totals, at.graph.loss}
    dropping = _with_drops([call for call in (prelude.call, *calls) if call], kept, received)
    program = StageProgram(
        index=at.stage,
        receives=tuple(_value(at, n, layout, dtypes) for n, layout in received.items()),
        sends=tuple(_value(at, n, layout, dtypes) for n, layout in sent.items()),
        totals=prelude.totals,
        prelude=dropping[0] if prelude.call else None,
        calls=tuple(dropping[1:] if prelude.call else dropping),
        inputs=tuple(name for name in at.graph.inputs if name in inputs),
        params=_params(at, everything, stored),
        loss=at.graph.loss if is_last else "",
        source="",
        paired=at.stage in paired_stages(at.plan),
    )
    return replace(program, source=stage_source(program, at))


def _value(at: Where, name: str, layout: Layout, dtypes: Mapping[str, str]) -> BorderValue:
    tensor, data = at.graph.tensors[name], layout.get("dp", R)
    shape = at.local_shape(name, layout)
    if isinstance(data, Shard):
        size = tensor.shape[data.dim]
        seen = local_split(size, "dp", data, layout, at.axes, at.coordinates)
        data = replace(data, outer=seen.outer)
    apart = sample_axes(layout, at.axes)
    return BorderValue(
        name, shape, dtypes.get(name, tensor.dtype), tensor.requires_grad, data,
        tensor.channels_last,
        apart, prod([at.axes[axis].size for axis in apart]),
    )  # fmt: skip


def _calls(
    at: Where, known: dict[str, Layout], stored: dict[str, Layout], sent: dict[str, Layout]
) -> tuple[Call, ...]:
    """The blocks in order; those that would give the same code share it."""
    codes: dict[str, BlockCode] = {}
    calls: list[Call] = []
    stage = at.plan.stages[at.stage]
    # Replicas exchange parameters and gradients block by block, in one order: all must go alike.
    goes_on = stage.overlap == "blocks" and len(set(stage.batch_shares)) == 1
    taps = any(has_taps(view.sync_form) for view in views_of(stage))
    for block in at.blocks:
        outputs = _outputs(at, block, sent)
        key = repr((
            block.pattern, outputs, [known[name] for name in block.inputs],
            [stored[name] for name in block.params],
            [at.graph.tensors[name].requires_grad for name in block.inputs],
            sorted(spots_of(at, block)), _some_rows(at, block),
            bool(stage.keeping(block)) and stage.overlap,
        ))  # fmt: skip
        if key not in codes:
            code = _code(at, block, known, stored, outputs)
            code = _overlapped(at, block, known, stored, outputs, code)
            if taps:
                tap(code.module, len(block.params))
            codes[key] = compiled(code) if stage.compile else code
        known |= dict(zip(block.outputs, outputs, strict=True))
        halved = goes_on and _in_two(codes[key])
        follows = halved and bool(calls) and _in_two(calls[-1].code)
        calls.append(
            Call(
                block.name, codes[key], block.params, block.inputs, block.outputs,
                whole_form(stage, block), stage.keeping(block), follows=follows,
            )
        )  # fmt: skip
    return tuple(calls)


def _in_two(code: BlockCode) -> bool:
    return code.halves is not None and len(code.halves.cuts) > 1


def _some_rows(at: Where, block: Block) -> Mapping[str, str]:
    """Tables of which the block has only the rows that its batch reads, with their paths."""
    paths = {name: at.graph.tensors[name].fqn for name in block.params}
    stage = at.plan.stages[at.stage]
    return {
        name: path for name, path in paths.items()
        if path and reads_some_rows(stage_for(stage, path))
    }  # fmt: skip


def _outputs(at: Where, block: Block, sent: dict[str, Layout]) -> list[Layout]:
    """As the block's layout declares them, or as they cross the border; the loss of the last stage
    is whole on model axes."""
    layout = at.layout(block.pattern)
    declared = (
        [parsed(placed) for placed in layout.outputs] if layout else [{}] * len(block.outputs)
    )
    named = dict(zip(block.outputs, declared, strict=True))
    if at.graph.loss in named:
        named[at.graph.loss] = {a: p for a, p in named[at.graph.loss].items() if a == "dp"}
    return [sent.get(name, placed) for name, placed in named.items()]


def _code(
    at: Where,
    block: Block,
    known: dict[str, Layout],
    stored: dict[str, Layout],
    outputs: list[Layout],
) -> BlockCode:
    layout = at.layout(block.pattern)
    builder = Builder(
        at.graph, at.axes, at.coordinates, label_of(at.graph, block), _some_rows(at, block)
    )
    for name in block.params:
        fqn = at.graph.tensors[name].fqn
        builder.add_placeholder(name, stored[name], param_key(block, fqn) if fqn else name)
    for name in block.inputs:
        builder.add_placeholder(name, known[name])
    for i, name in enumerate(block.inputs if layout else ()):
        assert layout is not None
        builder.enter(name, parsed(layout.inputs[i]))
    found = spots_of(at, block)
    others = skipped(found)
    for op in at.graph.block_ops(block):
        if op.key in found:
            builder.add_joint(*found[op.key], partial(strategies, layout))
        elif op.key not in others:
            builder.add_op(op, strategies(layout, op))
    made = tuple(zip(block.outputs, outputs, strict=True))
    stage = at.plan.stages[at.stage]
    read = [at.graph.tensors[name].fqn for name in block.params]
    sums = {
        at.graph.tensors[name].fqn: frozenset(a for a, p in stored[name].items() if p == RP)
        for name in block.params
    }
    apart = any(exchange_of(group.stage).refills for group in folded_groups(stage, read, sums))
    return BlockCode(block.pattern, builder.finish(made, apart=apart))


def _overlapped(
    at: Where,
    block: Block,
    known: dict[str, Layout],
    stored: dict[str, Layout],
    outputs: list[Layout],
    code: BlockCode,
) -> BlockCode:
    """The code with what the stage's `overlap` asks for, where the block allows it."""

    def again(there: Where) -> GraphModule:
        return _code(there, block, known, stored, outputs).module

    if at.stage in paired_stages(at.plan):
        phases = in_phases(at, block, outputs, again)
        return replace(code, halves=phases) if phases else code
    level = at.plan.stages[at.stage].overlap
    if level == "none":
        return code
    if level in HALVING:
        if halves := in_halves(at, block, known, outputs, again):
            return replace(code, halves=halves)
    if at.plan.stages[at.stage].keeping(block):
        return code  # ops that are kept or made again one by one are no parts of a call
    if level != "gradients":
        split_rows(code.module)
    overlap_gradients(code.module)
    return code


def _with_drops(calls: list[Call], kept: set[str], received: Iterable[str]) -> list[Call]:
    """Each call with the values that nothing after it needs."""
    last_use: dict[str, int] = {}
    for i, call in enumerate(calls):
        last_use |= dict.fromkeys((*call.outputs, *call.inputs), i)
    return [
        replace(call, drop=tuple(n for n, at in last_use.items() if at == i and n not in kept))
        for i, call in enumerate(calls)
    ]


def _params(at: Where, calls: Iterable[Call], stored: dict[str, Layout]) -> tuple[Param, ...]:
    names = dict.fromkeys(name for call in calls for name in call.params)
    return tuple(param_of(at, name, stored.get(name, {})) for name in names)
