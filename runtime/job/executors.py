"""The loops over a rank's row of the schedule that a job runs."""

import torch

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.schedule import FORWARDS
from meshwright.ir.precision import rounds_products
from meshwright.runtime.job.build import RankParts
from meshwright.runtime.messages.mailbox import Mailbox
from meshwright.runtime.messages.messages import plan_messages
from meshwright.runtime.record.record import Recorder
from meshwright.runtime.step.batch import BatchCutter
from meshwright.runtime.step.executor import Executor, RankProgress


def executor_of(
    plan: Plan,
    parts: RankParts,
    cutter: BatchCutter,
    device: torch.device,
    progress: RankProgress,
    recorder: Recorder,
    *,
    training: bool,
) -> Executor:
    """Makes the loop over this rank's row; evaluation takes only the forwards of it."""
    schedule, programs = plan.schedule.parse(), parts.programs
    messages = plan_messages(plan, schedule, programs, parts.rank, backward=training)
    mailbox = Mailbox(
        parts.rank, messages, programs, cutter.samples, parts.groups, device, recorder
    )
    row = schedule.ranks[schedule.rank_of(programs[0].index)]
    return Executor(
        row if training else tuple(a for a in row if a.work in FORWARDS),
        parts.stages,
        mailbox,
        cutter.offsets,
        plan.samples_per_microbatch,
        progress,
        recorder,
        pairs=schedule.pairs if training else frozenset(),
        tf32=rounds_products(plan.precision),
    )
