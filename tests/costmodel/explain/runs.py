"""A plan with a prediction, and runs of it that were measured."""

from dataclasses import replace

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.plan_io import rehash
from meshwright.ir.plan.predicted import Prediction, RankMemory, StagePrediction
from meshwright.ir.plan.schedule import Work
from meshwright.ir.profile.measured import (
    ActionMeasured,
    CollectiveMeasured,
    Measured,
    MemoryMeasured,
    Spread,
    StepMeasured,
    TensorMemory,
)
from meshwright.ir.profile.profile import Machine
from meshwright.testing.handmade import plan_of
from tests.runtime.small_jobs import gpipe, stage

MACHINE = Machine(device="cpu", kind="cpu", driver="6", torch="2", backend="gloo", cores=2)


def flat(seconds: float) -> Spread:
    return Spread(median_s=seconds, p10_s=seconds, p90_s=seconds)


def predicted_plan(step_s: float = 1.0, band: float = 0.2) -> Plan:
    """Two stages of two ranks and of one; 4 micro-batches."""
    memory = RankMemory(
        parameters_bytes=100, gradients_bytes=100, optimizer_bytes=200, activations_bytes=50,
        communication_bytes=10, workspace_bytes=20, inputs_bytes=20, process_bytes=1300,
    )  # fmt: skip
    of_stage = StagePrediction(
        forward_s=0.05, backward_s=0.1, send_s=0.0, sync_s=0.03, optimizer_s=0.02, memory=memory
    )
    stages = stage(0, 1, (0, 1), shares=(3, 3)), stage(2, 3, (2,), shares=(6,))
    plan = replace(
        plan_of(stages, gpipe(2, 4), 4),
        predicted=Prediction(
            step_s=step_s, samples_per_s=24 / step_s, error_band=band, source="measured",
            stages=(of_stage, of_stage),
        ),
    )  # fmt: skip
    return rehash(plan)


def run_of(plan: Plan, rank: int) -> Measured:
    """Rank 1 is the slower replica of stage 0 and comes last to its collectives."""
    index, slow = rank // 2, 1.25 if rank == 1 else 1.0
    actions = tuple(
        ActionMeasured(
            stage=index, work=work, count=8, busy=flat(busy * slow), waiting=flat(0.01 * index),
            blocked=flat(0.0),
        )
        for work, busy in ((Work.FORWARD, 0.05), (Work.BACKWARD, 0.08))
    )  # fmt: skip
    reduce = CollectiveMeasured(
        purpose="gradients", stage=0, axis="dp", primitive="all_reduce", nbytes=1000, size=2,
        count=2, median_s=0.04 / slow, spread=0.1, exposed_s=0.04 / slow, total_s=0.08 / slow,
    )  # fmt: skip
    steps = [("warm-up", 3.0), ("timed", 1.0), ("timed", 1.25), ("tracked", 9.0)]
    tensors = TensorMemory(
        peak_bytes=500 * (index + 1), parameters_bytes=100, gradients_bytes=100,
        optimizer_bytes=200, inputs_bytes=20, rest_bytes=500 * (index + 1) - 420,
    )  # fmt: skip
    return Measured(
        plan=plan.hash, rank=rank, world_size=3, machine=MACHINE, host="here",
        steps=tuple(StepMeasured(kind=k, step_s=s, loss=1.0) for k, s in steps),
        actions=actions, collectives=(reduce,) if rank < 2 else (),
        phases={"gradients": flat(0.02 * (2 - slow)), "publish": flat(0.01),
                "optimizer": flat(0.02 * slow)},
        updated_tensors=4, updated_bytes=100,
        memory=MemoryMeasured(
            tensors=tensors, resident_before_bytes=1000, resident_start_bytes=1500,
            resident_peak_bytes=1000 + 600 * (rank + 1),
        ),
    )  # fmt: skip


def runs_of(plan: Plan) -> tuple[Measured, ...]:
    return tuple(run_of(plan, rank) for rank in range(3))
