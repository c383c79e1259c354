"""Room where gradients arrive that are cast or added to others on the host, of a device whose
memory is its host's. What arrives on the host of another device is no part of its memory."""

from collections import Counter
from collections.abc import Sequence
from math import ceil

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.costmodel.stage.stage_parts import Part, Parts
from meshwright.forms.exchange import Exchange

_Room = tuple[tuple[int, ...], str, int]
"""Shape, dtype and bytes: what has arrived leaves its room to the next that is alike."""


def landings_of(
    tables: CostTables, costs: StageCosts, parts: Parts, prefetch: int
) -> tuple[int, ...]:
    """Returns its bytes in steps of one micro-batch, of two, and of more; empty if there is none.
    It stays from step to step."""
    if costs.device.is_apart:
        return ()
    found = [0, 0, 0]
    for part in parts:
        exchange = part.exchange
        if "gradients" not in exchange.hosted or part.lines.ranks > 1:
            continue
        rounds = [_rounds(exchange, count) for count in (1, 2, 3)]
        if any(rounds):
            blocks = _rooms(tables, costs, part)
            span = _blocks_at_once(exchange, prefetch)
            found = [
                more + _most(blocks, span, around=own > 1) * (own > 0)
                for more, own in zip(found, rounds, strict=True)
            ]
    return tuple(found) if any(found) else ()


def _rounds(exchange: Exchange, microbatches: int) -> int:
    """How many micro-batches have gradients that arrive so. The first of a step are not added to
    others, and arrive in their place if they have the dtype of what is stepped: those of copies
    have it once they are added up here."""
    casts = exchange.read != 1.0
    if not exchange.gradients_leave_each:
        return int(casts and microbatches == 1 and not exchange.copies_apart)
    return microbatches if casts else microbatches - 1


def _blocks_at_once(exchange: Exchange, prefetch: int) -> int:
    """Of how many blocks gradients have been sent and not been waited for (`forms.host_update`)."""
    if not exchange.comes_from_host:
        return 3
    return 2 if prefetch else 1


def _rooms(tables: CostTables, costs: StageCosts, part: Part) -> list[Counter[_Room]]:
    """Per block that sends some: what its gradients take. What is summed over a model axis goes
    when the step ends, and is the first to arrive."""
    seen, found = set[str](), list[Counter[_Room]]()
    for block, cost in zip(costs.blocks, costs.cost.blocks, strict=True):
        kinds = tables.param_kinds[block.name]
        own = Counter[_Room]()
        for name, kind, shape in zip(block.params, kinds, cost.param_shapes, strict=True):
            trained = kind is not None and kind[1]
            if not trained or name in seen or (part.names is not None and name not in part.names):
                continue
            seen.add(name)
            if not costs.cost.summed_over.get(name):
                nbytes = ceil(part.exchange.read * costs.cost.params[name])
                own[shape, tables.graph.tensors[name].dtype, nbytes] += 1
        if own:
            found.append(own)
    return found


def _most(blocks: Sequence[Counter[_Room]], span: int, *, around: bool) -> int:
    """Bytes of all rooms, if so many blocks in a row need some at once; `around`: the last of one
    micro-batch and the first of the next, too."""
    count, most = len(blocks), Counter[_Room]()
    span = min(span, count)
    for start in range(count if around else count - span + 1):
        at_once = Counter[_Room]()
        for index in range(start, start + span):
            at_once += blocks[index % count]
        most |= at_once
    return sum([number * nbytes for (*_, nbytes), number in most.items()])
