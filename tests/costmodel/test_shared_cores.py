"""What is work to others where processes share cores."""

import pytest

from meshwright.costmodel.program import Program, run, talk
from meshwright.costmodel.simulate import StageTimes, simulate
from meshwright.costmodel.table import F
from meshwright.ir.schedule import parse_schedule


def _stage(program: Program) -> StageTimes:
    return StageTimes(forward_s=0.0, backward_s=0.0, processes=2, programs={F: program})


def test_collectives_are_work_to_others() -> None:
    """A stage of two processes is in collectives of 2 s, another's two compute for 3 s, on two
    cores: side by side the computing is at half speed, and the collective as long as ever."""
    stages = [_stage(Program((talk(2.0, "tensor"),))), _stage(Program((run(3.0, "forward"),)))]
    alone = parse_schedule("x", ("0F0 0B0", "1F0 1B0"))
    assert simulate(alone, stages, cores=2).step_s == pytest.approx(2 + 3)
    beside = parse_schedule("x", ("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"))
    assert simulate(beside, stages, cores=2).step_s == pytest.approx(2 + (2 + 2) + 3)
    assert simulate(beside, stages, cores=4).step_s == pytest.approx(2 + 3 + 3)
