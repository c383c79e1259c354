"""`race(plans, model)`: runs plans in turns and says which is the fastest."""

import gc
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from meshwright.ir.comm.by_store import from_first, of_all
from meshwright.ir.errors import MeshwrightError, PlanError
from meshwright.ir.graph.graph import Fusion, Graph
from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.plan.show import seconds
from meshwright.ir.trace.loss_module import Batch, LossFn
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.plan_comparison import name_of
from meshwright.runtime.job import stale
from meshwright.runtime.job.compile import compile as compile_job
from meshwright.runtime.job.compile import inputs_of
from meshwright.runtime.job.handshake import check_world
from meshwright.runtime.world.patience import HANG_S
from meshwright.runtime.world.world import join, pick_device, take
from meshwright.tools.race import standing as heats
from meshwright.tools.race.standing import Heat, RaceStanding

TURNS, STEPS, WARMUP = 3, 5, 2
"""How often the plans in front run, and the steps of a run that count, after those that do not."""


@dataclass(frozen=True, slots=True)
class Race:
    """A race that is over."""

    plans: tuple[Plan, ...]
    standing: RaceStanding

    @property
    def best(self) -> Plan:
        """The fastest plan, with a note on the race."""
        first, *others = self.standing.order
        found = self.plans[first]
        return rehash(replace(found, notes=(*found.notes, self._note(first, others))))

    def _note(self, first: int, others: Sequence[int]) -> str:
        text = (
            f"raced: {seconds(self.step_s(first))} measured, the fastest of {len(self.plans)} "
            "plans that were run"
        )
        if not others:
            return text
        second = others[0]
        return f"{text}; {name_of(self.plans[second])} took {seconds(self.step_s(second))}"

    def step_s(self, number: int) -> float:
        """The measured step of a plan that ran."""
        found = self.standing.step_s(number)
        assert found is not None
        return found


def race(
    plans: Sequence[Plan],
    model: nn.Module,
    *,
    batches: Iterable[Batch],
    loss_fn: LossFn | None = None,
    example_inputs: Batch | None = None,
    lr: float = 1e-4,
    turns: int = TURNS,
    steps: int = STEPS,
    warmup: int = WARMUP,
    device: torch.device | str | None = None,
    journal: str | Path | None = None,
    told: Callable[[Plan, Heat], None] | None = None,
) -> Race:
    """Called by every rank, under torchrun, with plans for as many ranks: runs each for some steps.

    Plans within 30 % of the fastest run twice, those within 10 % then `turns` times in all. The one
    with the shortest lower quartile of its steps wins, as what disturbs a machine only slows it.
    All train on the first `warmup + steps` of the global `batches`. A race that is broken off goes
    on from its `journal`; a plan under which that happens twice, for example out of memory, is out.
    `told` hears of every heat.
    """
    check_plans(plans)
    for name, given, least in (("turns", turns, 1), ("steps", steps, 1), ("warmup", warmup, 0)):
        if given < least:
            raise PlanError(f"{name} is {given}; it must be at least {least}")
    owns_world = join(plans[0].world_size, device, HANG_S, plans[0].cluster.device_kind)
    check_world(plans[0])
    chosen = pick_device(device, plans[0].cluster.device_kind)
    take(chosen)
    path = Path(journal) if journal is not None else None
    standing: RaceStanding = from_first(_begun(plans, path))
    data = tuple(islice(batches, warmup + steps))
    if not data:
        raise PlanError("no batch to run the plans on; give at least one, as --data does")

    @cache
    def graph(kernels: tuple[Fusion, ...], precision: str) -> Graph:
        inputs = inputs_of(plans[0]) if example_inputs is None else example_inputs
        batch = plans[0].global_batch_size
        return trace(
            model, inputs, loss_fn, global_batch_size=batch, kernels=kernels, precision=precision
        )

    while up := standing.next_up(turns):
        turn, number = up
        plan = plans[number]
        _write(standing.starts(number), path)
        try:
            times = _run(
                model, plan, graph(plan.kernels, plan.precision), data, warmup, steps,
                loss_fn=loss_fn, lr=lr, device=chosen, example_inputs=example_inputs,
                check=None if turn == 0 else False,
            )  # fmt: skip
        except MeshwrightError:  # wrong input, no failure of this plan
            _write(standing, path)
            raise
        heat = Heat(number, turn, times)
        standing = standing.ends(heat)
        _write(standing, path)
        if told:
            told(plan, heat)
    if owns_world:
        dist.destroy_process_group()
    if not standing.order:
        raise PlanError(f"all {len(plans)} plans failed when they were run; see their errors above")
    return Race(tuple(plans), standing)


def check_plans(plans: Sequence[Plan]) -> None:
    """PlanError unless the plans can be raced in one job."""
    if not plans:
        raise PlanError("no plan to race; give at least one")
    for what, given in (
        ("ranks", {plan.world_size for plan in plans}),
        ("samples per step", {plan.global_batch_size for plan in plans}),
    ):
        if len(given) > 1:
            raise PlanError(
                f"the plans are for {', '.join(map(str, sorted(given)))} {what}; only plans for as "
                "many can be raced: race those of each number apart"
            )
    hashes = [plan.hash for plan in plans]
    if twice := sorted({each[:12] for each in hashes if hashes.count(each) > 1}):
        raise PlanError(f"plan {', '.join(twice)} is given twice; give each plan once")


def _begun(plans: Sequence[Plan], path: Path | None) -> RaceStanding:
    hashes = [plan.hash for plan in plans]
    return RaceStanding(plans=tuple(hashes)) if path is None else heats.load(path, hashes).gone_on()


def _write(standing: RaceStanding, path: Path | None) -> None:
    if path is not None and (not dist.is_initialized() or dist.get_rank() == 0):
        heats.save(standing, path)


def _run(
    model: nn.Module,
    plan: Plan,
    graph: Graph,
    data: Sequence[Batch],
    warmup: int,
    steps: int,
    **settings: Any,
) -> tuple[float, ...]:
    """Seconds of the slowest rank in each step that counts."""
    job = compile_job(model, plan, graph=graph, **settings)
    for batch in islice(cycle(data), warmup + steps):
        job.step(batch)
    taken = [record.step_s for record in job.stats.records[-steps:]]
    job.close()
    found = of_all(taken)  # all are done with the groups
    job.parts.groups.close()
    stale.forget(model)  # the next plan starts from the same weights
    del job
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return tuple(max(each) for each in zip(*found, strict=True))
