"""A value that has more digits than its message is refused, not rounded."""

from dataclasses import replace

import pytest
import torch

from meshwright.ir.errors import PlanError
from meshwright.planner.problem.schedule_tools import make_schedule, stages_per_rank
from meshwright.runtime.messages.mailbox import Mailbox
from meshwright.runtime.messages.messages import pairs_of, plan_messages
from meshwright.runtime.record.record import Recorder
from meshwright.runtime.world.groups import Groups
from meshwright.testing.handmade import programs_of
from meshwright.testing.pipelines import pipeline

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_value_that_would_be_rounded_is_refused(dtype: str) -> None:
    schedule = make_schedule("gpipe", stages_per_rank("gpipe")[0] * 2, 4, 2)
    one = pipeline("gpipe", schedule, 1)
    (made,) = programs_of(one.chain, one.plan, 0)
    narrow = replace(made, sends=tuple(replace(value, dtype=dtype) for value in made.sends))
    groups = Groups({}, dict.fromkeys(pairs_of(one.plan, (made,), 0), None))
    mailbox = Mailbox(
        0, plan_messages(one.plan, schedule, (made,), 0), (narrow,),
        {0: one.plan.stages[0].batch_shares[0]}, groups, CPU, Recorder(CPU),
    )  # fmt: skip
    value = made.sends[0]
    with pytest.raises(PlanError, match=f"{value.name} goes to another stage in torch.{dtype}"):
        mailbox.send(0, value.name, False, 0, torch.zeros(value.shape, dtype=torch.float64))
