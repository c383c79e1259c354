"""The rules of a plan that need its model."""

from collections.abc import Callable, Iterable, Iterator

from meshwright.ir.graph.graph import Block, Graph, Kind
from meshwright.ir.graph.prelude import PRELUDE, prelude_block
from meshwright.ir.layout.check_layout import layout_problems, tied_problems
from meshwright.ir.plan.bag_problems import bag_problems
from meshwright.ir.plan.finding import Finding, nearest_name
from meshwright.ir.plan.keeping import makers, unknown
from meshwright.ir.plan.keeping import torn as torn_policy
from meshwright.ir.plan.parameters import choice_of, torn, unmatched
from meshwright.ir.plan.plan import (
    ModelMesh,
    Plan,
    Stage,
)
from meshwright.ir.precision import WITHOUT_AUTOCAST, autocast_problem
from meshwright.ir.trace.changing import buffer_problems


def mesh_text(model: ModelMesh) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in model) or "no model axes"


def fitting_layout(plan: Plan, pattern: str, stage: Stage) -> str:
    """A layout of the plan that the stage could name."""
    fits = (x.name for x in plan.layouts if (x.pattern, x.model) == (pattern, stage.model))
    return next(fits, "")


def model_findings(plan: Plan, graph: Graph) -> Iterator[Finding]:
    if plan.model.fingerprint != graph.fingerprint:
        yield Finding(
            "model",
            f"the plan is for {plan.model.name} ({plan.model.fingerprint[:12]}), the model given "
            f"has fingerprint {graph.fingerprint[:12]}",
            "search a plan for this model",
        )
    if plan.global_batch_size != graph.batch_size:
        message = f"global batch {plan.global_batch_size}, the model was traced at "
        yield Finding("model", f"{message}{graph.batch_size}", f"{graph.batch_size}")


def _blocks(plan: Plan, graph: Graph) -> Iterator[Finding]:
    names = {block.name: i for i, block in enumerate(graph.blocks)}
    expected = 0
    for i, stage in enumerate(plan.stages):
        for name in (stage.first, stage.last):
            if name not in names:
                message = f"stage {i}: the model has no block {name!r}"
                yield Finding("blocks", message, nearest_name(name, names))
                return
        first, last = names[stage.first], names[stage.last]
        if first != expected or last < first:
            near = graph.blocks[min(expected, len(graph.blocks) - 1)].name
            message = f"stage {i} runs {stage.first} to {stage.last}; the next block is {near}"
            yield Finding("blocks", message, f"first {near}")
            return
        expected = last + 1
    if expected != len(graph.blocks):
        rest = [block.name for block in graph.blocks[expected:]]
        yield Finding("blocks", f"no stage runs {', '.join(rest[:4])}", f"last {rest[-1]}")


def _stage_patterns(plan: Plan, graph: Graph, stage: Stage) -> dict[str, None]:
    names = [block.name for block in graph.blocks]
    blocks = graph.blocks[names.index(stage.first) : names.index(stage.last) + 1]
    return dict.fromkeys(block.pattern for block in blocks)


def _stage_layouts(plan: Plan, graph: Graph) -> Iterator[Finding]:
    if list(_blocks(plan, graph)):
        return
    for i, stage in enumerate(plan.stages):
        needed = {**_stage_patterns(plan, graph, stage), PRELUDE: None}
        for pattern in needed:
            if pattern not in stage.layouts:
                message = f"stage {i} ({mesh_text(stage.model)}) names no layout for {pattern}"
                yield Finding("layouts", message, fitting_layout(plan, pattern, stage))


def _layout_content(plan: Plan, graph: Graph) -> Iterator[Finding]:
    by_name = {layout.name: layout for layout in plan.layouts}
    used = {name: None for stage in plan.stages for name in stage.layouts.values()}
    known = [by_name[name] for name in used if name in by_name]
    for block in (prelude_block(graph), *graph.distinct_blocks()):
        for layout in known:
            if layout.pattern == block.pattern:
                for problem in layout_problems(graph, block, layout):
                    yield Finding("layouts", problem)
    if not list(_blocks(plan, graph)):
        for index, stage in enumerate(plan.stages):
            pairs = [
                (block, by_name[name])
                for block in plan.stage_blocks(graph, index)
                if (name := stage.layouts.get(block.pattern)) in by_name
            ]
            for problem in tied_problems(graph, pairs):
                yield Finding("layouts", f"stage {index}: {problem}")


def _buffers(plan: Plan, graph: Graph) -> Iterator[Finding]:
    if not list(_blocks(plan, graph)):
        for problem in buffer_problems(graph, plan):
            yield Finding("buffers", problem)


def _bags(plan: Plan, graph: Graph) -> Iterator[Finding]:
    for problem in bag_problems(graph, plan):
        yield Finding("num_microbatches", problem)


def _recompute(plan: Plan, graph: Graph) -> Iterator[Finding]:
    known = {block.name for block in graph.blocks} | {block.pattern for block in graph.blocks}
    for i, stage in enumerate(plan.stages):
        for name in stage.recompute:
            if name not in known:
                message = f"stage {i}: recompute names {name!r}, which is no block or pattern"
                yield Finding("recompute", message, nearest_name(name, sorted(known)))


def _saved(plan: Plan, graph: Graph) -> Iterator[Finding]:
    named = {block.pattern: block for block in graph.distinct_blocks()}
    named |= {block.name: block for block in graph.blocks}
    for i, stage in enumerate(plan.stages):
        known: set[object] = set()  # what is right for one block is for its equals
        for name, policy in stage.saved.items():
            if name not in named:
                message = f"stage {i}: saved names {name!r}, which is no block or pattern"
                yield Finding("saved", message, nearest_name(name, sorted(named)))
                continue
            said = named[name].pattern, tuple(policy.items())
            if said in known:
                continue
            keys = makers(graph, named[name])
            strange, split = unknown(policy, keys), torn_policy(policy, keys)
            for key in strange:
                message = f"stage {i}: saved names {key!r}, which is no op of {name}"
                yield Finding("saved", message, nearest_name(key, keys))
            if split:
                message = f"stage {i}: saved says different things of {split!r} of {name}"
                yield Finding("saved", message, f"name {split!r} itself beside the patterns")
            if not (strange or split):
                known.add(said)
        yield from _saved_twice(i, stage, () if list(_blocks(plan, graph)) else
                                plan.stage_blocks(graph, i))  # fmt: skip


def _saved_twice(index: int, stage: Stage, blocks: Iterable[Block]) -> Iterator[Finding]:
    if not (stage.saved and stage.recompute):
        return
    for block in blocks:
        if stage.recomputes(block) and stage.keeping(block):
            message = (
                f"stage {index}: {block.name} is recomputed whole, so that saved has no effect"
            )
            yield Finding("saved", message, f"recompute none for {block.name}, or no saved")
            return


def _by_parameter(plan: Plan, graph: Graph) -> Iterator[Finding]:
    if not any(stage.by_parameter for stage in plan.stages) or list(_blocks(plan, graph)):
        return
    tensors = graph.tensors
    for i, stage in enumerate(plan.stages):
        said, blocks = stage.by_parameter, plan.stage_blocks(graph, i)
        names = dict.fromkeys(name for block in blocks for name in block.params)
        paths = [tensors[n].fqn for n in names if tensors[n].kind is Kind.PARAMETER]
        for pattern in unmatched(said, paths):
            message = f"stage {i}: by_parameter names {pattern!r}, which is none of its parameters"
            yield Finding("by_parameter", message, nearest_name(pattern, paths))
        if split := torn(said, paths):
            message = f"stage {i}: by_parameter says different things of {split!r}"
            yield Finding("by_parameter", message, f"name {split!r} itself beside the patterns")
    stepped: dict[str, tuple[int, str]] = {}
    for i, stage in enumerate(plan.stages):
        for path in dict.fromkeys(
            tensors[name].fqn for block in plan.stage_blocks(graph, i) for name in block.params
        ):
            choice = choice_of(stage.by_parameter, path)
            own = (choice.update if choice else "") or plan.optimizer
            first, other = stepped.setdefault(path, (i, own))
            if other != own:
                message = f"stages {first} and {i} share {path}, and step it by {other} and {own}"
                yield Finding("by_parameter", message, f"update {other} in both")


def _autocast(plan: Plan, graph: Graph) -> Iterator[Finding]:
    if problem := autocast_problem(graph, plan.precision):
        yield Finding("precision", problem, WITHOUT_AUTOCAST)


GRAPH_RULES: tuple[Callable[[Plan, Graph], Iterator[Finding]], ...] = (
    _blocks, _stage_layouts, _layout_content, _bags, _recompute, _saved, _by_parameter, _buffers,
    _autocast,
)  # fmt: skip
