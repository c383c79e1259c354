"""Contenders take turns, step by step, on a slow wire and on a free one; another is the first each
time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from benchmarks.embrace.contenders import contenders
from benchmarks.embrace.models import Batch, Case
from benchmarks.embrace.wire import plug_in
from meshwright.ir.plan.plan import Plan
from meshwright.testing.spawn import run_ranks

WARM = 3
"""Steps of each that do not count."""


@dataclass
class Seen:
    """Of one contender."""

    slow_s: list[float] = field(default_factory=list)
    """Of each step on the slow wire, of the slowest rank."""
    free_s: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of all steps, from the first."""


def run_turns(
    case: Case, plans: Mapping[str, Plan], ranks: int, bits_per_s: float, turns: int
) -> dict[str, Seen]:
    """Trains all of them; `turns` steps of each on either wire. This process must be a switch."""
    each = run_ranks(
        ranks, _rank, ranks, case, plans, bits_per_s, turns, init=False, timeout_s=3600
    )
    return slowest(each)


def slowest(each: Sequence[dict[str, Seen]]) -> dict[str, Seen]:
    """What all ranks saw, as one: a step is over when it is on all of them."""
    found = {}
    for name in each[0]:
        own = [seen[name] for seen in each]
        slow, free = ([max(turn) for turn in zip(*times, strict=True)] for times in
                      ([s.slow_s for s in own], [s.free_s for s in own]))  # fmt: skip
        found[name] = Seen(slow, free, own[0].losses)
    return found


def _rank(
    rank: int, store: str, ranks: int, case: Case, plans: Mapping[str, Plan], bits_per_s: float,
    turns: int,
) -> dict[str, Seen]:  # fmt: skip
    wire = plug_in()
    dist.init_process_group("gloo", store=FileStore(store, ranks), rank=rank, world_size=ranks)
    running = contenders(case, plans, bits_per_s)
    found = {name: Seen() for name in running}
    batches = {0: case.batch(0)}

    def step(name: str, number: int) -> float:
        """Seconds of a step of one of them."""
        after: Batch = batches.setdefault(number + 1, case.batch(number + 1))
        dist.barrier()
        begun = time.perf_counter()
        running[name].step(batches[number], after)
        took = time.perf_counter() - begun
        found[name].losses.append(running[name].loss())
        return took

    for number in range(WARM):
        for name in running:
            step(name, number)
    for turn in range(turns):
        for place, bits in enumerate((bits_per_s, None)):
            wire.shape(bits)
            dist.barrier()
            names = list(running)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                took = step(name, WARM + 2 * turn + place)
                seen = found[name]
                (seen.slow_s if bits else seen.free_s).append(took)
    dist.barrier()
    return found
