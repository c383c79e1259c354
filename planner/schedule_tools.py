"""What the files of `planner/schedules` share: finding them, stage placements, rows of actions."""

import difflib
import importlib
import pkgutil
from collections.abc import Callable, Iterator
from functools import cache

from meshwright.ir.errors import PlanError
from meshwright.ir.schedule import Action, Schedule, Work
from meshwright.planner import schedules

F, B, I, W = Work.FORWARD, Work.BACKWARD, Work.BACKWARD_INPUT, Work.BACKWARD_WEIGHT  # noqa: E741

SCHEDULES = tuple(module.name for module in pkgutil.iter_modules(schedules.__path__))
"""Keys of the schedules: the file names."""
MADE = "synthesised"
"""Name of schedules that a solver makes for the stages of a plan."""
K, R = Work.FORWARD_KEEPING, Work.RECOMPUTE


def _module(name: str) -> object:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, 1, 0.0)[0]
        raise PlanError(f"no schedule {name!r}; nearest is {near!r} of {', '.join(SCHEDULES)}")
    return importlib.import_module(f"{schedules.__name__}.{name}")


def stages_per_rank(name: str) -> tuple[int, ...]:
    """How many stages a pipeline rank may hold under the schedule, the usual one first."""
    found: tuple[int, ...] = _module(name).STAGES_PER_RANK  # type: ignore[attr-defined]
    return found


@cache
def recomputes_early(name: str) -> bool:
    """Whether the schedule says when stages recompute: equal to another where none does."""
    return bool(getattr(_module(name), "RECOMPUTES_EARLY", False))


@cache
def make_schedule(name: str, num_stages: int, num_microbatches: int, num_ranks: int) -> Schedule:
    """The schedule of file `planner/schedules/<name>.py`; PlanError if it does not fit."""
    if min(num_stages, num_microbatches, num_ranks) < 1:
        raise PlanError(
            f"schedule {name!r}: {num_stages} stages, {num_microbatches} micro-batches and "
            f"{num_ranks} ranks must each be at least 1"
        )
    found: Schedule = _module(name).schedule(num_stages, num_microbatches, num_ranks)  # type: ignore[attr-defined]
    return found


def chunks_of(name: str, num_stages: int, num_ranks: int, only: int | None = None) -> int:
    """Stages per rank, after checking that ranks share the stages equally (`only`: exactly so)."""
    if num_stages % num_ranks or (only and num_stages != only * num_ranks):
        wanted = only or max(1, num_stages // num_ranks)
        raise PlanError(
            f"schedule {name!r} needs {only or 'as many'} stages on each of {num_ranks} ranks, "
            f"given {num_stages} stages; nearest is {wanted * num_ranks}"
        )
    return num_stages // num_ranks


def early_backward(name: str, num_microbatches: int, warm_ups: tuple[int, ...]) -> Schedule:
    """One stage per rank: `warm_ups[stage]` forwards, then backward and forward in turn."""
    return Schedule(
        name, tuple(tuple(_early_row(s, num_microbatches, k)) for s, k in enumerate(warm_ups))
    )


def _early_row(stage: int, num_microbatches: int, warm_up: int) -> Iterator[Action]:
    yield from (Action(stage, F, m) for m in range(warm_up))
    for done in range(num_microbatches):
        yield Action(stage, B, done)
        if warm_up + done < num_microbatches:
            yield Action(stage, F, warm_up + done)


def recomputing_early(
    name: str, num_stages: int, num_microbatches: int, kept: tuple[int, ...] = ()
) -> Schedule:
    """1F1B in which a stage recomputes before it waits for the gradient; stages of `kept` do not
    recompute at all."""
    rows = []
    for stage in range(num_stages):
        row = _early_row(stage, num_microbatches, min(num_stages - stage, num_microbatches))
        rows.append(tuple(_kept(row) if stage in kept else _made_before(row)))
    return Schedule(name, tuple(rows))


def _kept(row: Iterator[Action]) -> Iterator[Action]:
    for action in row:
        yield Action(action.stage, K, action.microbatch) if action.work is F else action


def _made_before(row: Iterator[Action]) -> Iterator[Action]:
    for action in row:
        if action.work is B:
            yield Action(action.stage, R, action.microbatch)
        yield action


def greedy(
    name: str,
    num_microbatches: int,
    placement: tuple[int, ...],
    cap: int,
    rank_key: Callable[[Action], tuple[int, ...]],
) -> Schedule:
    """List scheduling in unit times with F, I and W: each rank takes the ready action of least key.

    A rank admits a micro-batch to its first stage only while fewer than `cap` others are unfinished
    there. Micro-batches go in order, so an admitted one never waits for a later one.
    """
    num_ranks, num_stages = 1 + max(placement), len(placement)
    held = [tuple(s for s, r in enumerate(placement) if r == rank) for rank in range(num_ranks)]
    count = {(stage, work): 0 for stage in range(num_stages) for work in (F, I, W)}
    rows: list[list[Action]] = [[] for _ in range(num_ranks)]

    def ready(action: Action, first: int) -> bool:
        stage, work, m = action.stage, action.work, action.microbatch
        if m == num_microbatches or (work is F and stage == first and m - count[stage, W] >= cap):
            return False
        if work is F:
            return not stage or count[stage - 1, F] > m
        if work is I and stage + 1 < num_stages:
            return count[stage + 1, I] > m
        return count[stage, F if work is I else I] > m

    while sum(map(len, rows)) < 3 * num_stages * num_microbatches:
        picks = []
        for stages in held:
            heads = [Action(s, work, count[s, work]) for s in stages for work in (F, I, W)]
            picks += sorted((a for a in heads if ready(a, stages[0])), key=rank_key)[:1]
        for action in picks:
            rows[placement[action.stage]].append(action)
            count[action.stage, action.work] += 1
    return Schedule(name, tuple(map(tuple, rows)))
