"""Parameters without gradients of plans that gather them block by block: of as many blocks as
memory allows every rank keeps all, so that nothing is gathered there."""

from collections.abc import Iterator
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import takewhile

from meshwright.forms.sync import exchange_of
from meshwright.ir.graph.graph import Block
from meshwright.ir.plan.parameters import choice_of
from meshwright.ir.plan.plan import ParameterChoice, Plan, Stage
from meshwright.planner.pins.decisions_kept import broken
from meshwright.planner.pins.parameter_pins import paths_of
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from meshwright.planner.search.finish import changed

WHOLE = ParameterChoice(zero=1)
_HALVINGS = 5
_SMALL = 8
"""What is trained in a block is small where so many times as much is frozen."""


def variants(problem: Problem, plan: Plan) -> Iterator[Plan]:
    """The plan with the frozen parameters of some blocks of each stage whole, as large a share of
    them as fits, by halves."""
    named = [_by_block(problem, plan, index) for index in range(len(plan.stages))]
    if not any(named):
        return
    low, high = 0.0, 1.0  # shares of blocks: fits, or does not
    share = 1.0
    for _ in range(_HALVINGS):
        found = _keeping(problem, plan, named, share)
        if found is None:
            return
        fits = not excess_bytes(problem, found)
        if fits:
            yield found
            low = share
            if share == 1.0:
                return
        else:
            high = share
        share = (low + high) / 2


def _by_block(problem: Problem, plan: Plan, index: int) -> list[list[str]]:
    """Of each block of a stage that gathers its parameters, names of the frozen ones of which the
    plan says nothing apart; blocks that are gathered for a backward too come first."""
    stage = plan.stages[index]
    if stage.dp == 1 or stage.sync or stage.store or not exchange_of(stage).fetches:
        return []
    tables, blocks = problem.tables, plan.stage_blocks(problem.graph, index)
    every = paths_of(problem.graph, blocks)
    found = [
        (block.name in tables.still, _named(problem, block, paths, every))
        for block in blocks
        if (paths := _frozen(problem, stage, block))
    ]
    return [paths for _, paths in sorted(found, key=lambda pair: pair[0])]


def _frozen(problem: Problem, stage: Stage, block: Block) -> list[str]:
    tensors, frozen = problem.graph.tensors, problem.tables.frozen
    own = {tensors[name].fqn for name in block.params if name in frozen}
    paths = [path for path in paths_of(problem.graph, [block]) if path in own]
    return [path for path in paths if choice_of(stage.by_parameter, path) is None]


def _named(problem: Problem, block: Block, frozen: list[str], every: list[str]) -> list[str]:
    """Frozen parameters of a block, by one pattern where that names little else: what is trained
    in the block, if that is small, and nothing of other blocks (`every` path of the stage)."""
    tensors = problem.graph.tensors
    sizes = {tensors[name].fqn: tensors[name].nbytes for name in block.params}
    own = paths_of(problem.graph, [block])
    parts = [path.split(".") for path in own]
    shared = [same[0] for same in takewhile(lambda x: len(set(x)) == 1, zip(*parts))]  # noqa: B905
    pattern = ".".join([*shared, "*"])
    taken = [path for path in every if fnmatchcase(path, pattern)]
    more = sum(sizes.get(path, 0) for path in taken if path not in frozen)
    small = _SMALL * more <= sum(sizes[path] for path in frozen)
    if not shared or len(frozen) == 1 or not small or not set(taken) <= set(own):
        return frozen
    return [pattern]


def _keeping(
    problem: Problem, plan: Plan, named: list[list[list[str]]], share: float
) -> Plan | None:
    """The plan with such a share of the blocks whole; None where a pin forbids that."""
    stages = []
    for stage, blocks in zip(plan.stages, named, strict=True):
        paths = [path for own in blocks[: round(share * len(blocks))] for path in own]
        said = {**stage.by_parameter, **dict.fromkeys(paths, WHOLE)}
        stages.append(replace(stage, by_parameter=said) if paths else stage)
    made = replace(plan, stages=tuple(stages), predicted=None)
    if made.stages == plan.stages or broken(problem.constraints, made, problem.graph):
        return None
    return changed(problem, plan, stages=made.stages)
