"""Runs that a report shows."""

from dataclasses import replace

from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.measured import KernelMeasured, Measured, TimedAction, TimelineMeasured
from tests.costmodel.explain.runs import runs_of


def timed_runs(plan: Plan) -> tuple[Measured, ...]:
    """Rank 2 began its step 0.1 s later than the others, by the clock; a forward waits at first."""
    return tuple(
        replace(run, timeline=TimelineMeasured(
            step=1, started_s=1e9 + 0.1 * (run.rank == 2), actions=_actions(run.rank), messages=(),
        ))
        for run in runs_of(plan)
    )  # fmt: skip


def _actions(rank: int) -> tuple[TimedAction, ...]:
    return (
        *(
            TimedAction(
                name=f"{rank // 2}F{n}", start_s=0.2 * n, end_s=0.2 * n + 0.15, waiting_s=0.05
            )
            for n in range(4)
        ),
        TimedAction(name="optimizer", start_s=0.9, end_s=0.95),
        TimedAction(name="loss", start_s=0.95, end_s=0.96),
    )


def with_kernels(plan: Plan) -> tuple[Measured, ...]:
    """Each rank has called one kernel, the first rank another one too."""
    on_cpu = KernelMeasured(
        kernel="route", way="torch", why="tensors are on <b>cpu</b>", calls=1500
    )
    ours = KernelMeasured(kernel="swiglu", way="triton", calls=7)
    return tuple(
        replace(run, kernels=(on_cpu, ours)[: 1 + (run.rank == 0)]) for run in timed_runs(plan)
    )
