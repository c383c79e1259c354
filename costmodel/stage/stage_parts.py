"""Parameters of a stage on a rank, apart by what the plan says of them."""

from math import prod
from typing import NamedTuple

from meshwright.costmodel.as_run import as_exchanged, changes_exchanges
from meshwright.costmodel.comm.comm import Levels
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.stage.buckets import BlockParams, LocalParam, Owned, Tied
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.costmodel.stage.replica_lines import ReplicaLines, lines_in
from meshwright.forms.copied import copied
from meshwright.forms.exchange import Exchange
from meshwright.forms.exchange_rows import Shaped
from meshwright.forms.folding import folded_groups
from meshwright.forms.sync import exchange_of, folds, needs_shapes
from meshwright.forms.updates import update
from meshwright.ir.graph.graph import Kind
from meshwright.ir.layers import window_of
from meshwright.ir.memo import Memo
from meshwright.ir.plan.folded import Fold, fold_of, folded, folds_of
from meshwright.ir.plan.plan import Stage

_owned: Memo[tuple[object, ...], Owned] = Memo()
_folded: Memo[object, tuple[tuple[Fold, frozenset[str] | None], ...]] = Memo()
_rows: Memo[str, dict[str, float]] = Memo()


class Part(NamedTuple):
    """What is done with some of a stage's parameters."""

    exchange: Exchange
    update: str
    names: frozenset[str] | None
    """None: all that it has."""
    lines: ReplicaLines
    fold: Fold = ()
    """Model axes that are one with dp_shard for them."""
    shapes: tuple[Shaped, ...] = ()
    """Of the trained ones on a rank, where the time of their update depends on that."""


Parts = tuple[Part, ...]


def parts_of(tables: CostTables, stage: Stage, costs: StageCosts, optimizer: str) -> Parts:
    """Returns the parts of a stage, those apart whose gradients leave for the host later."""
    found = _parts_of(tables, stage, costs, optimizer)
    if not any([part.exchange.gradients_are_freed for part in found]):
        return found
    summed = _summed_at_end(tables, costs)
    return tuple([own for part in found for own in _by_leaving(tables, costs, part, summed)])


def _by_leaving(
    tables: CostTables, costs: StageCosts, part: Part, summed: frozenset[str]
) -> list[Part]:
    """A part, what is summed when the step ends apart: its gradients stay until then."""
    exchange = part.exchange
    names = frozenset(costs.cost.params) if part.names is None else part.names
    stays = names & summed
    if not stays or not exchange.gradients_are_freed or exchange.packs:
        return [part]
    found = []
    for own, of in ((names - stays, exchange), (stays, exchange.staying)):
        if any([tables.graph.tensors[name].kind is Kind.PARAMETER for name in own]):
            shapes = _stepped(tables, costs, part.update, own)
            found.append(part._replace(exchange=of, names=own, shapes=shapes))
    return found


def _summed_at_end(tables: CostTables, costs: StageCosts) -> frozenset[str]:
    """Parameters whose gradients are summed over a model axis, or with another stage."""
    found = {name for name, axes in costs.cost.summed_over.items() if axes}
    own = {block.name for block in costs.blocks}
    for block in tables.graph.blocks if tables.shared else ():
        if block.name not in own:
            found.update(name for name in block.params if name in costs.cost.params)
    return frozenset(found)


def _parts_of(tables: CostTables, stage: Stage, costs: StageCosts, optimizer: str) -> Parts:
    if not stage.by_parameter:
        return tuple(
            _part(tables, stage, fold, costs, optimizer, names)
            for fold, names in _foldings(tables, stage, costs)
        )
    names: dict[str, list[str]] = {}
    for name in costs.cost.params:
        names.setdefault(tables.graph.tensors[name].fqn, []).append(name)
    over = costs.cost.summed_over
    sums = {
        path: frozenset(axis for name in own for axis in over.get(name, ()))
        for path, own in names.items()
    }
    found = []
    for group in folded_groups(stage, names, sums):
        own = frozenset(name for path in group.paths for name in names[path])
        step = group.update or optimizer
        fold = tuple([axis for axis, _ in stage.model if axis not in dict(group.stage.model)])
        # A kernel steps all that it is given.
        rests = not costs.updates and bool(step) and update(step).rests_by_default
        for names_of in _by_copies(tables, own):
            of = _exchange(tables, group.stage, costs, names_of, rests)
            shapes = _stepped(tables, costs, step, names_of)
            lines = lines_in(tables, group.stage)
            found.append(Part(of, step, names_of, lines, fold, shapes))
    return tuple(found)


def _by_copies(tables: CostTables, names: frozenset[str]) -> list[frozenset[str]]:
    """Names, those apart that blocks read as they are stepped where they read copies of others."""
    wide = names & tables.as_stepped
    return [own for own in (names - wide, wide) if own] or [names]


def _part(
    tables: CostTables,
    stage: Stage,
    fold: Fold,
    costs: StageCosts,
    optimizer: str,
    names: frozenset[str] | None,
) -> Part:
    """Of a stage that says the same of all its parameters, those for which axes are folded."""
    view = folded(stage, fold)
    lines = lines_in(tables, view) if fold else costs.lines
    shapes = _stepped(tables, costs, optimizer, names)
    return Part(_exchange(tables, view, costs, names), optimizer, names, lines, fold, shapes)


def _foldings(
    tables: CostTables, stage: Stage, costs: StageCosts
) -> tuple[tuple[Fold, frozenset[str] | None], ...]:
    """The foldings of a stage's parameters, with the names of these; None: all there are."""
    widest = folds_of(stage.model)[-1] if folds(stage) else ()
    wide = tables.as_stepped
    if not widest and not wide:
        return (((), None),)
    known = _folded.of(tables)
    key = id(costs.cost), widest
    if key not in known:
        found: dict[tuple[Fold, bool], list[str]] = {}
        for name in costs.cost.params:
            if tables.graph.tensors[name].kind is Kind.PARAMETER:
                over = costs.cost.summed_over.get(name, ()) if widest else ()
                found.setdefault((fold_of(stage.model, over), name in wide), []).append(name)
        if len(found) < 2 and not wide:
            known[key] = tuple([(fold, None) for fold, _ in found] or [((), None)])
        else:
            known[key] = tuple([(fold, frozenset(own)) for (fold, _), own in sorted(found.items())])
    return known[key]


def _stepped(
    tables: CostTables, costs: StageCosts, optimizer: str, names: frozenset[str] | None
) -> tuple[Shaped, ...]:
    """Shapes of the trained parameters, if a step multiplies matrices."""
    if not optimizer or update(optimizer).products is None:
        return ()
    return _shapes(tables, costs, names)


def _exchange(
    tables: CostTables,
    stage: Stage,
    costs: StageCosts,
    names: frozenset[str] | None,
    rests: bool = False,
) -> Exchange:
    """What a stage does with some of its parameters; `rests`: what has no gradient need not be
    stepped."""
    if not needs_shapes(stage.sync_form):
        made = exchange_of(stage, rests=rests)
        if changes_exchanges(tables.run_as):
            made = as_exchanged(made, tables.run_as)
        return made if _read_as_stepped(tables, names) else copied(made, tables.numbers)
    shares = stage.batch_shares or (1,) * stage.dp
    shapes = _shapes(tables, costs, names, max(shares) / sum(shares))
    made = exchange_of(stage, shapes, rests=rests)
    return made if _read_as_stepped(tables, names) else copied(made, tables.numbers)


def _read_as_stepped(tables: CostTables, names: frozenset[str] | None) -> bool:
    """Whether blocks read no copies of a part."""
    return names is not None and not names.isdisjoint(tables.as_stepped)


def _shapes(
    tables: CostTables, costs: StageCosts, names: frozenset[str] | None, share: float = 0.0
) -> tuple[Shaped, ...]:
    """Of the trained parameters of a group on a rank; that of the replica with most samples."""
    found: dict[str, Shaped] = {}
    reads = _reads(tables)
    for block, cost in zip(costs.blocks, costs.cost.blocks, strict=True):
        kinds = tables.param_kinds[block.name]
        for name, kind, shape in zip(block.params, kinds, cost.param_shapes, strict=True):
            if kind and kind[1] and (names is None or name in names):
                rows = reads.get(name, 0.0) * share
                found[name] = Shaped(shape, costs.cost.params[name], rows)
    return tuple(found.values())


def _reads(tables: CostTables) -> dict[str, float]:
    """Of each weight of a layer, the rows that are multiplied with it in a step."""
    known = _rows.of(tables)
    if "" not in known:
        graph, found = tables.graph, dict[str, float]()
        for block in graph.blocks:
            for op in graph.block_ops(block):
                if window_of(op.target, [value for _, value in op.args[3:]]) is not None:
                    made, weight = graph.tensors[op.outputs[0]], graph.tensors[op.inputs[1]]
                    rows = prod(made.shape) / weight.shape[0]
                    found[op.inputs[1]] = found.get(op.inputs[1], 0.0) + rows
        known[""] = found
    return known[""]


Summed = tuple[tuple[str, tuple[int, ...], Levels], ...]
"""A model axis, bytes of the gradients that are summed over it, group by group, and its links."""


def summed_of(costs: StageCosts, parts: Parts) -> Summed:
    """Returns what is summed over each model axis where that is not folded."""
    params, over = costs.cost.params, costs.cost.summed_over
    lines = zip(costs.spot.model, costs.spot.model_levels, strict=True)
    return tuple(
        (
            axis,
            tuple(
                sum([
                    params[name] for name, axes in over.items()
                    if axis in axes and axis not in part.fold
                    and (part.names is None or name in part.names)
                ])
                for part in parts
            ),
            levels,
        )
        for (axis, _), levels in lines
    )  # fmt: skip


def held_of(tables: CostTables, costs: StageCosts, names: frozenset[str] | None) -> BlockParams:
    """The stage's parameters of a group on one rank."""
    owners, sizes = _shared(tables, costs)
    known = _owned.of(tables)
    copied_share = 1.0 if _read_as_stepped(tables, names) else tables.numbers.copied or 1.0
    owned: list[Owned] = []
    also: dict[int, frozenset[int]] = {}
    tied: dict[str, Tied] = {}
    for index, (block, cost) in enumerate(zip(costs.blocks, costs.cost.blocks, strict=True)):
        held = cost.param_bytes
        kinds = tables.param_kinds[block.name]
        if names is not None:
            kinds = tuple(
                kind if name in names else None
                for name, kind in zip(block.params, kinds, strict=True)
            )
        if owners and not owners.keys().isdisjoint(block.params):
            read = [name for name in block.params if names is None or name in names]
            others = {owners.get(name, index) for name in read} - {index}
            also |= {index: frozenset(others)} if others else {}
            held = tuple(sizes.get(n, size) for n, size in zip(block.params, held, strict=True))
            for name, kind, size in zip(block.params, kinds, held, strict=True):
                if kind and kind[1] and name in owners:
                    before = tied[name].readers if name in tied else ()
                    tied[name] = Tied(size, (*before, index))
            kinds = tuple(
                kind if owners.get(name, index) == index else None
                for name, kind in zip(block.params, kinds, strict=True)
            )
        key = kinds, held, copied_share
        if key not in known:
            known[key] = Owned.of(
                [LocalParam(size, *kind) for size, kind in zip(held, kinds, strict=True) if kind],
                copied_share,
            )
        owned.append(known[key])
    several = tuple([one for one in tied.values() if len(one.readers) > 1])
    return BlockParams(tuple(owned), also, several)


def _shared(tables: CostTables, costs: StageCosts) -> tuple[dict[str, int], dict[str, int]]:
    """Of parameters that several blocks of the model read, and some of the stage: the first of
    these, and the bytes."""
    owners: dict[str, int] = {}
    sizes: dict[str, int] = {}
    for name in tables.shared:
        if name in costs.cost.params and tables.graph.tensors[name].kind is Kind.PARAMETER:
            users = [i for i, block in enumerate(costs.blocks) if name in block.params]
            last = users[-1]
            owners[name] = users[0]
            at = costs.blocks[last].params.index(name)
            sizes[name] = costs.cost.blocks[last].param_bytes[at]
    return owners, sizes
