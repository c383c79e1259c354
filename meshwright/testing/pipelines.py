"""Plans for chains of linear layers, under any schedule and with any borders."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from meshwright.ir.plan.plan import Plan, Stage
from meshwright.ir.plan.schedule import Schedule
from meshwright.testing.handmade import (
    BATCH,
    Chain,
    plan_of,
)

PATTERNS = ("first", "middle", "last")


@dataclass(frozen=True)
class Pipeline:
    """A plan for a hand-made chain, by name."""

    name: str
    chain: Chain
    plan: Plan


def pipeline(name: str, schedule: Schedule, replicas: int | tuple[int, ...]) -> Pipeline:
    """A chain of two blocks a stage whose first and last stage share a weight."""
    ranks = len(schedule.ranks)
    counts = (replicas,) * ranks if isinstance(replicas, int) else replicas
    ends = [sum(counts[:i]) for i in range(ranks + 1)]
    devices = [tuple(range(a, b)) for a, b in pairwise(ends)]
    samples = BATCH // schedule.num_microbatches
    stages = tuple(
        _stage(index, devices[schedule.rank_of(index)], samples, index % 4)
        for index in range(schedule.num_stages)
    )
    plan = plan_of(stages, schedule, schedule.num_microbatches)
    return Pipeline(name, Chain(2 * len(stages)), plan)


def _stage(index: int, devices: tuple[int, ...], samples: int, zero: Any) -> Stage:
    count = len(devices)
    shares = tuple(samples // count + (i < samples % count) for i in range(count))
    return Stage(
        first=f"b{2 * index}", last=f"b{2 * index + 1}", devices=devices, batch_shares=shares,
        mesh={"dp_replicate": 1, "dp_shard": count, "tp": 1}, zero=zero,
        recompute=dict.fromkeys(PATTERNS, "full" if index % 2 else "none"),
    )  # fmt: skip
