"""Parameters, gradients and updates on the host: what copies keep a stage waiting for."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.memory.leaving import Leaving, Way, on_the_way
from meshwright.costmodel.ops.optimizer import host_work_s
from meshwright.costmodel.stage.buckets import BlockParams
from meshwright.costmodel.stage.form_group import FormGroup
from meshwright.costmodel.stage.offload import arriving_s, coming_s, copy_s, leaving, leaving_s
from meshwright.costmodel.stage.placement import StageCosts
from meshwright.costmodel.stage.times import NO_WAITS, BlockTimes, HostWaits
from meshwright.forms.exchange_rows import Event, HostCopy

CopyTime = Callable[[float], float]
"""Bytes to seconds, one way."""


def host_waits(
    groups: Sequence[FormGroup],
    held: Sequence[BlockParams],
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    seconds: CopyTime,
    *,
    apart: bool,
    adding_s: CopyTime,
) -> HostWaits:
    """Of a stage whose blocks take so long, in order of the forward; `apart`: copies go on beside
    computing; `adding_s`: of the host, for bytes that it reads and writes."""
    leaves, late = [0.0] * len(forward_s), 0.0
    each = [0.0] * len(forward_s)
    comes, waited = [0.0] * len(forward_s), 0.0
    for group, own in zip(groups, held, strict=True):
        exchange = group.exchange
        part = exchange.parts("optimizer", group.shards)
        copies = [seconds(owned.trained_bytes / part) for owned in own.owned]
        for copy in [c for c in exchange.host_copies if c.at is Event.AFTER_BACKWARD]:
            each = [
                a
                + seconds(copy.times * owned.trained_bytes)
                + adding_s((2 + copy.times) * owned.trained_bytes)
                for a, owned in zip(each, own.owned, strict=True)
            ]
        if _copies(exchange.host_copies, Event.AFTER_LAST):
            if exchange.gradients_leave_early:
                leaves = [a + b for a, b in zip(leaves, copies, strict=True)]
            else:
                late += sum(copies)
        for copy in [c for c in exchange.host_copies if c.at is Event.UPDATED]:
            back = [seconds(copy.times * owned.trained_bytes / part) for owned in own.owned]
            if part > 1:  # ranks gather what has come
                waited += sum(back)
            else:
                comes = [a + b for a, b in zip(comes, back, strict=True)]
    if not apart:
        return HostWaits(tuple(leaves), tuple(each), late, waited + sum(comes))
    waits, tail = leaving(list(reversed(backward_s)), leaves[::-1])
    again, after = leaving(list(reversed(backward_s)), each[::-1])
    shown = sum(coming_s(forward_s, comes))
    return HostWaits(
        tuple(waits[::-1]), tuple(again[::-1]), tail + after + late, waited + shown,
        sum(comes) - shown,
    )  # fmt: skip


def ways_of(
    tables: CostTables,
    costs: StageCosts,
    groups: Sequence[FormGroup],
    held: Sequence[BlockParams],
    blocks: Sequence[BlockTimes],
) -> tuple[Way, Way] | None:
    """Returns what of gradients is on its way to the host by the times of the blocks; None where
    none leave, or not beside computing."""
    if not costs.device.is_apart or not any([g.exchange.gradients_are_freed for g in groups]):
        return None
    copies, in_flight = [0.0] * len(blocks), 2
    for group, own in zip(groups, held, strict=True):
        exchange = group.exchange
        part = exchange.parts("optimizer", group.shards)
        for copy in exchange.host_copies:
            if copy.what != "gradients":
                continue
            share = copy.times if copy.at is Event.AFTER_BACKWARD else 1 / part
            for index, owned in enumerate(own.owned):
                nbytes = round(share * owned.trained_bytes)
                copies[index] += copy_s(costs.device, nbytes, tables.profile)
            in_flight = min(in_flight, 1 if exchange.comes_from_host else 2)
    leaving = [
        Leaving(
            b.returns_s + b.again_s + cost.most_at * (b.input_s + b.weight_s),
            b.returns_s + b.again_s + b.input_s + b.weight_s + b.tensor_backward_s, copy,
        )
        for b, cost, copy in zip(blocks, costs.cost.blocks, copies, strict=True)
    ]  # fmt: skip
    forward_s = sum([b.fetched_s + b.forward_s + b.tensor_forward_s + b.leaves_s for b in blocks])
    return on_the_way(leaving, forward_s, in_flight)


def _copies(copies: Sequence[HostCopy], at: Event) -> bool:
    return any([copy.at is at for copy in copies])


def waits_of_step(
    tables: CostTables,
    costs: StageCosts,
    groups: Sequence[FormGroup],
    held: Sequence[BlockParams],
    blocks: Sequence[BlockTimes],
) -> HostWaits:
    """Returns what copies of gradients and values keep a stage waiting for in a step."""
    if not any([group.exchange.host_copies or group.exchange.row_copies for group in groups]):
        return NO_WAITS
    forward = [b.fetched_s + b.forward_s + b.tensor_forward_s + b.leaves_s for b in blocks]
    backward = [
        b.returns_s + b.again_s + b.input_s + b.weight_s + b.tensor_backward_s for b in blocks
    ]

    def seconds(nbytes: float) -> float:
        return copy_s(costs.device, round(nbytes), tables.profile)

    apart = costs.device.is_apart
    whole = host_waits(
        groups, held, forward, backward, seconds, apart=apart,
        adding_s=lambda nbytes: host_work_s(costs.device, costs.host, nbytes),
    )  # fmt: skip
    now, hidden = _rows_wait(groups, held, sum(forward) + sum(backward), seconds, apart)
    return replace(whole, brings_s=whole.brings_s + now, hidden_s=whole.hidden_s + hidden)


def _rows_wait(
    groups: Sequence[FormGroup],
    held: Sequence[BlockParams],
    step_s: float,
    seconds: CopyTime,
    apart: bool,
) -> tuple[float, float]:
    """Of copies of tables' rows, what a step waits for, and what goes on beside it. Each way goes
    by itself; what comes ahead has a step's time."""
    ways: dict[tuple[str, bool], float] = {}
    for group, own in zip(groups, held, strict=True):
        part = group.exchange.parts("optimizer", group.shards)
        for copy in group.exchange.row_copies:
            nbytes = group.exchange.stated[copy.share] * own.trained_bytes / part
            key = copy.to, copy.until is not copy.at
            more = seconds(nbytes * (1 + group.state * copy.state))
            ways[key] = ways.get(key, 0.0) + more
    if not ways:
        return 0.0, 0.0
    if not apart:
        return sum(ways.values()), 0.0
    now = max([s for (_, ahead), s in ways.items() if not ahead], default=0.0)
    later = max([s for (_, ahead), s in ways.items() if ahead], default=0.0)
    shown = max(0.0, later - step_s)
    return now + shown, later - shown


def copy_waits(
    tables: CostTables, costs: StageCosts, groups: Sequence[FormGroup], prefetch: int
) -> tuple[list[float], list[float], list[float]]:
    """Per block, what its offloaded values keep it waiting for after its forward, what these and
    parameters from the host before its backward, and parameters before its forward."""
    blocks = costs.cost.blocks
    known = {
        nbytes: copy_s(costs.device, nbytes, tables.profile)
        for nbytes in {cost.moved_bytes for cost in blocks}
    }
    copies = [known[cost.moved_bytes] for cost in blocks]
    fetched = [0.0] * len(blocks)
    for own in [group.gathered for group in groups if group.exchange.comes_from_host]:
        more = [copy_s(costs.device, nbytes, tables.profile) for nbytes in own]
        fetched = [a + b for a, b in zip(fetched, more, strict=True)]
    if not costs.device.is_apart:
        return copies, [a + b for a, b in zip(copies, fetched, strict=True)], fetched
    if not any(copies) and not any(fetched):
        return copies, copies, fetched
    forward = [cost.forward_s for cost in blocks]
    backward = [cost.backward_s for cost in reversed(blocks)]
    leaves = leaving_s(forward, copies)
    if not any(fetched):
        return leaves, arriving_s(backward, copies[::-1])[::-1], fetched
    if prefetch:  # both come over one link, one after the other
        both = [a + b for a, b in zip(copies, fetched, strict=True)]
        returns = arriving_s(backward, both[::-1], prefetch)
    else:
        returns = [
            a + b for a, b in zip(arriving_s(backward, copies[::-1]), fetched[::-1], strict=True)
        ]
    return leaves, returns[::-1], arriving_s(forward, fetched, prefetch)
