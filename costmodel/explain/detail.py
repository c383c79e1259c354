"""What a plan keeps of its prediction for reports (`ir.plan.detail`)."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from statistics import mean
from typing import TypeVar

from meshwright.costmodel.comm.volume import Walked, stage_traffic
from meshwright.costmodel.cost_cache import CostTables
from meshwright.costmodel.estimate import Estimate, estimate_all
from meshwright.costmodel.explain.breakdown import breakdown_of
from meshwright.costmodel.explain.messages import messages_of
from meshwright.costmodel.explain.rows import rows_saved
from meshwright.costmodel.explain.utilisation import peak_flops, step_flops
from meshwright.costmodel.memory.memory_timeline import stays
from meshwright.costmodel.memory.stage_memory import Bytes, StageMemory
from meshwright.costmodel.simulate.compiled_schedule import HELD, LAST, B, F, I, K, R, W
from meshwright.costmodel.simulate.simulate import StageTimes
from meshwright.costmodel.simulate.timeline import Timeline
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.graph import Graph, Kind
from meshwright.ir.plan.detail import (
    BlockName,
    Detail,
    DeviceRun,
    Moving,
    ParameterShape,
    RankDetail,
    StageDetail,
    StageTraffic,
    SyncMessage,
)
from meshwright.ir.plan.parameters import names_forms
from meshwright.ir.plan.plan import Plan, param_key
from meshwright.ir.plan.predicted import Breakdown

KIND_NAMES = {F: "F", B: "B", I: "I", W: "W", B + LAST: "B last", W + LAST: "W last",
              K: "K", R: "R", B + HELD: "B held", I + HELD: "I held",
              B + HELD + LAST: "B held last"}  # fmt: skip
RISES = {"B": (False, False), "B first": (True, False), "B last": (False, True),
         "B first last": (True, True)}  # fmt: skip
"""Name -> whether it is the first and the last backward of its stage in a step."""
N = TypeVar("N", int, float)


def detail_of(tables: CostTables, plan: Plan, cap_bytes: int | None = None) -> Detail:
    """`cap_bytes`: what a device may use, if that is less than it has."""
    found = estimate_all(tables.graph, tables.cluster, plan, tables)
    stepped = found.stepped
    assert found.prediction.breakdown
    overhead_s = found.prediction.step_s - stepped.step_s
    timeline, walked = found.stepped.timeline, Walked()
    actions, pairs = _actions(timeline), _pairs(timeline)
    named = [names_forms(stage) for stage in plan.stages]
    stages = [
        _stage(
            found, i, actions[i], stage_traffic(tables, plan, i, costs, model, walked),
            messages_of(tables, model, plan.num_microbatches) if named[i] else (),
            _collectives(found.times[i], actions[i]), pairs[i],
        )
        for i, (costs, model) in enumerate(zip(found.costs, found.models, strict=True))
    ]  # fmt: skip
    kinds = tuple({repr(stage): stage for stage in stages}.values())
    return Detail(
        blocks=tuple(BlockName(name=b.name, pattern=b.pattern) for b in tables.graph.blocks),
        parameters=_parameters(tables.graph),
        devices=_devices(tables.cluster, cap_bytes),
        kinds=kinds,
        stages=tuple(kinds.index(stage) for stage in stages),
        ranks=tuple(_rank(found, r, overhead_s) for r in range(len(stepped.ended))),
        meeting_s=_short(
            stepped.step_s - stepped.timeline.step_s - min(e.total_s for e in stepped.ended)
        ),
        overhead_s=_short(overhead_s),
        links=_links(tables.cluster),
        model_flops=_short(step_flops(tables.graph)),
        peak_flops=_short(peak_flops(plan, tables.cluster)),
        rows=rows_saved(tables, plan, found.prediction),
    )


def _short(value: float) -> float:
    return float(f"{max(value, 0.0):.6g}")


def _parameters(graph: Graph) -> dict[str, dict[str, ParameterShape]]:
    """Of the first block of each pattern; its equals have the same."""
    found: dict[str, dict[str, ParameterShape]] = {}
    for block in graph.blocks:
        if block.pattern not in found:
            tensors = (graph.tensors[name] for name in block.params)
            found[block.pattern] = {
                param_key(block, t.fqn): ParameterShape(
                    shape=t.shape, dtype=t.dtype, nbytes=t.nbytes
                )
                for t in tensors
                if t.kind is Kind.PARAMETER
            }
    return found


def _devices(cluster: Cluster, cap_bytes: int | None) -> tuple[DeviceRun, ...]:
    slots = [
        (name, len(node.devices)) for node in cluster.nodes for name in node.devices
    ]  # fmt: skip
    types = {device.name: device for device in cluster.device_types}
    runs, first = [], 0
    for (name, node_devices), group in groupby(slots):
        count, usable = len(list(group)), types[name].usable_bytes
        runs.append(DeviceRun(
            first=first, count=count, device=name, node_devices=node_devices,
            memory_bytes=types[name].memory_bytes,
            room_bytes=usable if cap_bytes is None else min(cap_bytes, usable),
        ))  # fmt: skip
        first += count
    return tuple(runs)


def _links(cluster: Cluster) -> dict[str, float]:
    links = [node.link for node in cluster.nodes]
    links += [node.uplink for node in cluster.nodes if node.uplink]
    links += [link for link in (cluster.between_nodes, cluster.between_racks) if link]
    return {link.name: _short(link.rate) for link in links}


def _stage(
    found: Estimate,
    index: int,
    actions: dict[str, float],
    traffic: tuple[StageTraffic, ...],
    messages: tuple[SyncMessage, ...],
    collectives: dict[str, float],
    pairs: dict[str, float],
) -> StageDetail:
    held, costs = found.models[index].memory, found.costs[index]
    there = stays(held, found.stepped.timeline.table, index)
    return StageDetail(
        actions=actions,
        saved_bytes=0 if held.slots else held.saved,
        entry_bytes=held.entry,
        border_bytes=held.border,
        entry_back_bytes=_where_other(held.entry_back, held.entry),
        border_back_bytes=_where_other(held.border_back, held.border),
        back_s=_where_other(_short(costs.back_s), _short(costs.send_s)),
        sent_bytes=held.sent,
        shared_bytes=held.shared,
        kept_bytes=held.kept_saved,
        halved_bytes=held.halved,
        always=_moving(held.always.plus(there)),
        begun=_moving(held.begun),
        rises=_rises(held, found.stepped.timeline.table.kinds[index]),
        traffic=traffic,
        messages=messages,
        collectives=collectives,
        pairs=pairs,
    )


def _where_other(figure: N, usual: N) -> N | None:
    return None if figure == usual else figure


def _actions(timeline: Timeline) -> list[dict[str, float]]:
    """Per stage, mean seconds by kind, of those that run by themselves if there are any."""
    found: list[dict[int, list[float]]] = [defaultdict(list) for _ in timeline.table.owners]
    paired: list[dict[int, list[float]]] = [defaultdict(list) for _ in timeline.table.owners]
    together = timeline.table.together
    for position, item in enumerate(timeline.table.items):
        by = paired if position in together or position - 1 in together else found
        by[item.stage][item.kind].append(
            timeline.ran.ends[position] - timeline.ran.starts[position]
        )
    return [
        {KIND_NAMES[kind]: _short(mean(own.get(kind) or other[kind]))
         for kind in sorted({*own, *other})}
        for own, other in zip(found, paired, strict=True)
    ]  # fmt: skip


def _pairs(timeline: Timeline) -> list[dict[str, float]]:
    """Per stage of a forward, mean seconds of what it takes with a backward of another."""
    found: list[dict[int, list[float]]] = [defaultdict(list) for _ in timeline.table.owners]
    for position in timeline.table.together:
        ahead, back = timeline.table.items[position], timeline.table.items[position + 1]
        seconds = timeline.ran.ends[position + 1] - timeline.ran.starts[position]
        found[ahead.stage][back.stage].append(seconds)
    return [{str(stage): _short(mean(own[stage])) for stage in sorted(own)} for own in found]


def _collectives(times: StageTimes, actions: Mapping[str, float]) -> dict[str, float]:
    """Of each kind of action, seconds in collectives inside blocks, but those that hide."""
    found = {
        name: _short(times.program(kind).own_by_what.get("tensor", 0.0))
        for kind, name in KIND_NAMES.items()
        if name in actions
    }
    return {name: seconds for name, seconds in found.items() if seconds}


def _rises(held: StageMemory, kinds: Collection[int]) -> dict[str, Moving]:
    """`kinds`: of the stage's actions."""
    halves = (False, True) if any(kind & (LAST - 1) == W for kind in kinds) else (False,)
    named = {"F": held.forward, "I": held.halving}
    if held.kept:
        named |= {"K": held.keeping, "R": held.remaking, "I held": held.kept_halving}
    for whole in (False, True) if held.kept else (False,):
        for second in halves:
            named |= {
                f"{name.replace('B', 'W') if second else name}{' held' * whole}": held.backward(
                    first=first, last=last, held=whole, second=second
                )
                for name, (first, last) in RISES.items()
            }
    return {name: _moving(rise) for name, rise in named.items()}


def _moving(held: Bytes) -> Moving:
    return Moving(**held._asdict())


def _rank(found: Estimate, rank: int, overhead_s: float) -> RankDetail:
    stepped = found.stepped
    ended = stepped.ended[rank]
    parts = breakdown_of(rank, stepped, found.times, overhead_s)
    return RankDetail(
        starts_s=_short(stepped.timeline.offsets[rank]),
        gradients_s=_short(ended.gradients_s),
        optimizer_s=_short(ended.optimizer_s),
        publish_s=_short(ended.publish_s),
        seconds={name: _short(s) for name, s in by_category(parts).items() if s},
    )


def by_category(parts: Breakdown) -> dict[str, float]:
    """Category -> seconds."""
    names: Sequence[str] = [f.name for f in fields(parts) if f.name.endswith("_s")]
    return {name.removesuffix("_s"): getattr(parts, name) for name in names}
