"""Annotations in the model's code as constraints.

replicate   parameters are whole on all model axes; with a size, stages of these blocks have so
            many replicas
split       weights are split over at least one model axis; with a size, replicas of these blocks
            have so many ranks. Parameters of one dim (biases, norms) go with their op.
stage       the blocks run in that stage
"""

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Block, Graph
from meshwright.ir.trace.hints import Hint, HintKind
from meshwright.planner.pins.decisions import Constraint, OnStage, Pin, Placed, Scope
from meshwright.planner.pins.placement_rules import parameter_names

_SIZES = {"replicate": "dp", "split": "model"}


def hint_constraints(graph: Graph) -> tuple[Constraint, ...]:
    """What the hints of a traced model ask of a plan."""
    if not graph.hints:
        return ()
    return (*_placements(graph), *_sizes(graph), *_stages(graph))


def _placements(graph: Graph) -> Iterable[Constraint]:
    for kind, placement in (("replicate", "R"), ("split", "S")):
        wanted = {
            path
            for path, name in parameter_names(graph).items()
            if _hint_of(graph, path, ("replicate", "split"), kind)
            and (kind == "replicate" or len(graph.tensors[name].shape) > 1)
        }
        for pattern in _patterns(sorted(wanted), parameter_names(graph)):
            yield Placed(pattern, "model", placement)


def _hint_of(
    graph: Graph, path: str, kinds: Sequence[HintKind], kind: str | None = None
) -> Hint | None:
    """The innermost hint of some kinds on a parameter, if it is of `kind`."""
    around = [h for h in graph.hints if h.kind in kinds and _inside(path, h.path)]
    hint = max(around, key=lambda h: len(h.path), default=None)
    return hint if hint and kind in (None, hint.kind) else None


def _inside(path: str, module: str) -> bool:
    return path == module or path.startswith(module + ".")


def _patterns(names: Sequence[str], everything: Iterable[str]) -> tuple[str, ...]:
    """Patterns that name these and no others; numbers become `*` where that is so."""
    others = set(everything) - set(names)
    found: dict[str, None] = {}
    for name in names:
        wide = ".".join("*" if part.isdecimal() else part for part in name.split("."))
        # As a module's name a pattern stands for all that is inside, too.
        taken = any(fnmatchcase(o, wide) or fnmatchcase(o, f"{wide}.*") for o in others)
        found[name if taken else wide] = None
    return tuple(found)


def _sizes(graph: Graph) -> Iterable[Constraint]:
    for kind, decision in _SIZES.items():
        sized = {block.name: _sized(graph, block, kind) for block in graph.blocks}
        for size, pattern in _grouped(sized):
            yield Pin(decision, size, scope=Scope(block=pattern))


def _grouped(values: Mapping[str, int | None]) -> Iterable[tuple[int, str]]:
    """Patterns of the blocks that share a value."""
    for value in dict.fromkeys(values.values()):
        if value is not None:
            names = [name for name, own in values.items() if own == value]
            for pattern in _patterns(names, values):
                yield value, pattern


def _sized(graph: Graph, block: Block, kind: str) -> int | None:
    found = {h.size: h for h in _hints_in(graph, block, ("replicate", "split")) if h.kind == kind}
    found.pop(None, None)
    _one(block, found.values())
    return next(iter(found), None)


def _stages(graph: Graph) -> Iterable[Constraint]:
    stages: dict[str, int | None] = {}
    for block in graph.blocks:
        found = {hint.size: hint for hint in _hints_in(graph, block, ("stage",))}
        _one(block, found.values())
        stages[block.name] = next(iter(found), None)
    for stage, pattern in _grouped(stages):
        yield OnStage(pattern, stage)


def _hints_in(graph: Graph, block: Block, kinds: Sequence[HintKind]) -> list[Hint]:
    paths = {path for path, name in parameter_names(graph).items() if name in block.params}
    hints = [_hint_of(graph, path, kinds) for path in sorted(paths)]
    return [hint for hint in hints if hint]


def _one(block: Block, hints: Iterable[Hint]) -> None:
    if len(given := tuple(hints)) > 1:
        raise PlanError(
            f"hints {given[0]} and {given[1]} meet in block {block.name}, which is planned as one; "
            "give both the same size, or annotate modules that are whole blocks"
        )
