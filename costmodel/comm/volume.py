"""What one rank of a stage sends in a step: by purpose, axis and link tier."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil

from meshwright.costmodel.block.price_ops import PricedMove, Walk
from meshwright.costmodel.comm.borders import border, borders
from meshwright.costmodel.comm.comm import Levels, collective_time, ranks_of, send_time
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.costmodel.stage.stage_model import StageModel
from meshwright.costmodel.stage.sync import Sync
from meshwright.forms.exchange_rows import Event, Send
from meshwright.ir.layout.conversions import COMMUNICATES, Primitive
from meshwright.ir.layout.op_messages import SHIFT, Inner
from meshwright.ir.plan.detail import StageTraffic, TrafficPurpose
from meshwright.ir.plan.plan import Plan


@dataclass(frozen=True, slots=True)
class Sent:
    """Equal collectives or messages of a step."""

    purpose: TrafficPurpose
    axis: str
    link: str
    nbytes: float
    """Of all of them, by one rank."""
    seconds: float
    form: str = ""


Walked = dict[tuple[object, ...], list[Sent]]
"""What blocks send, for all stages of a plan."""


def stage_traffic(
    tables: CostTables, plan: Plan, index: int, costs: StageCosts, model: StageModel, walked: Walked
) -> tuple[StageTraffic, ...]:
    """Of stage `index`, the most bytes first."""
    rows = [
        StageTraffic(
            purpose=sent.purpose, axis=sent.axis, link=sent.link, nbytes=ceil(sent.nbytes),
            seconds=float(f"{sent.seconds:.6g}"), form=sent.form,
        )
        for sent in _together(_all(tables, plan, index, costs, model, walked)) if sent.nbytes
    ]  # fmt: skip
    return tuple(sorted(rows, key=lambda row: (-row.nbytes, row.purpose, row.axis, row.form)))


def _together(found: Iterable[Sent]) -> list[Sent]:
    """Those of one purpose, axis, link and form as one."""
    sums: dict[tuple[TrafficPurpose, str, str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for sent in found:
        total = sums[sent.purpose, sent.axis, sent.link, sent.form]
        total[0] += sent.nbytes
        total[1] += sent.seconds
    return [
        Sent(purpose, axis, link, nbytes, seconds, form)
        for (purpose, axis, link, form), (nbytes, seconds) in sums.items()
    ]


def _all(
    tables: CostTables, plan: Plan, index: int, costs: StageCosts, model: StageModel, walked: Walked
) -> Iterator[Sent]:
    yield from _in_blocks(tables, plan, index, costs, walked)
    yield from _between_blocks(tables, plan, index, costs)
    yield from _between_stages(tables, plan, index, costs)
    yield from _data(model.sync, plan.num_microbatches)
    for axis, sizes, levels in model.summed:
        nbytes = sum(sizes)
        yield from _collective("gradients", axis, Primitive.ALL_REDUCE, nbytes, levels, 1)


def sent_bytes(primitive: Primitive, nbytes: float, size: int) -> float:
    """By one of `size` ranks in a ring; `nbytes` is the whole value, as if replicated."""
    others = (size - 1) / size
    match primitive:
        case Primitive.ALL_REDUCE:
            return 2 * others * nbytes
        case Primitive.ALL_TO_ALL:
            return others * nbytes / size
        case _:
            return others * nbytes


def _collective(
    purpose: TrafficPurpose,
    axis: str,
    primitive: Primitive,
    nbytes: float,
    levels: Levels,
    times: float,
    form: str = "",
) -> Iterator[Sent]:
    """`times` equal ones, if anything is sent at all."""
    if not levels or not nbytes or primitive not in COMMUNICATES:
        return
    size = ranks_of(levels)
    slowest = min((level.link for level in levels), key=lambda link: link.rate)
    seconds = times * collective_time(primitive, nbytes, levels)
    total = times * sent_bytes(primitive, nbytes, size)
    yield Sent(purpose, axis, slowest.name, total, seconds, form)


def _in_blocks(
    tables: CostTables, plan: Plan, index: int, costs: StageCosts, walked: Walked
) -> Iterator[Sent]:
    """Conversions and messages of the blocks' ops."""
    names = plan.stages[index].layouts
    for block, mode in zip(costs.blocks, costs.modes, strict=True):
        layout, again = names[block.pattern], mode is True
        key = (layout, tables.facts.fed(block), again, costs.spot)
        if key not in walked:
            walk = tables.blocks.walk(block, plan.layout(layout), costs.spot)
            sent = _of_walk(tables, walk, plan.num_microbatches, again=again)
            walked[key] = _together(sent)
        yield from walked[key]


def _between_blocks(
    tables: CostTables, plan: Plan, index: int, costs: StageCosts
) -> Iterator[Sent]:
    for name, source, target in borders(tables, plan)[index].changes:
        walk = Walk(tables.facts, tables.blocks.site(costs.spot), None)
        walk.placed[name] = dict(source)
        walk.convert(name, dict(target))
        yield from _of_walk(tables, walk, plan.num_microbatches, again=False)


def _of_walk(tables: CostTables, walk: Walk, times: int, *, again: bool) -> Iterator[Sent]:
    """`again`: the forward runs a second time for the backward."""
    forwards = times * (1 + again)
    for entry in walk.trail:
        if isinstance(entry, PricedMove):
            change, levels = entry.conversion, walk.site.levels[entry.axis]
            of: tuple[TrafficPurpose, str] = ("tensors", entry.axis)
            yield from _collective(*of, change.forward, entry.nbytes, levels, forwards)
            if tables.graph.tensors[entry.name].requires_grad:
                yield from _collective(*of, change.backward, entry.nbytes, levels, times)
    for axis, message in walk.sent:
        count = message.times * (times if message.backward else forwards)
        yield from _message(axis, message, walk.site.levels[axis], count)


def _message(axis: str, message: Inner, levels: Levels, times: int) -> Iterator[Sent]:
    if message.kind != SHIFT:
        kind = Primitive(message.kind)
        yield from _collective("tensors", axis, kind, message.nbytes, levels, times)
        return
    slowest = min((level.link for level in levels), key=lambda link: link.rate)
    seconds = times * send_time(message.nbytes, slowest)
    yield Sent("tensors", axis, slowest.name, times * message.nbytes, seconds)


def _between_stages(
    tables: CostTables, plan: Plan, index: int, costs: StageCosts
) -> Iterator[Sent]:
    """Outputs to the next stage, gradients of what has come to the one before."""
    times, stages = plan.num_microbatches, plan.stages
    back_s, back_bytes = border(tables, plan, index - 1, back=True) if index else (0.0, 0)
    for other, nbytes, seconds in (
        (index + 1, costs.border_bytes, costs.send_s),
        (index - 1, back_bytes, back_s),
    ):
        if not 0 <= other < len(stages) or not nbytes:
            continue
        links = tables.links(stages[min(index, other)], stages[max(index, other)])
        if links:
            slowest = min(links, key=lambda link: link.rate)
            yield Sent("stages", "pp", slowest.name, times * nbytes, times * seconds)


def _data(sync: Sync, times: int) -> Iterator[Sent]:
    """Gradients and parameters over data parallel ranks."""
    for _, _, sent in replica_sends(sync, times):
        yield from sent


def replica_sends(sync: Sync, times: int) -> Iterator[tuple[int, Send, list[Sent]]]:
    """Yields what replicas of a stage send each other in a step of so many micro-batches: number of
    the group, row, messages. What is gathered before a forward and a backward is one."""
    for number, group in enumerate(sync.groups):
        exchange = group.exchange
        fetches = exchange.fetches
        for send in exchange.sends:
            if send in fetches:
                continue
            sizes = [group.part_of(send, b.nbytes) for b in group.buckets]
            count = times if send.at is Event.AFTER_BACKWARD else 1 / send.every
            yield number, send, list(_each(group, send, sizes, count))
        if fetches:
            sizes = [nbytes for send in fetches for nbytes in group.fetched(send)]
            yield number, fetches[0], list(_each(group, fetches[0], sizes, times))


def _each(group: FormGroup, send: Send, sizes: Sequence[float], times: float) -> Iterator[Sent]:
    for nbytes in sizes:
        yield from _exchanged(group, send, nbytes, times)


def _exchanged(group: FormGroup, send: Send, nbytes: float, times: float) -> Iterator[Sent]:
    levels, exchange = group.lines.levels(send.axis), group.exchange
    sent = exchange.sent(send, nbytes, ranks_of(levels))
    yield from _collective(send.what, send.axis, send.primitive, sent, levels, times, exchange.form)
