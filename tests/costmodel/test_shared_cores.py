"""What is work to others where processes share cores."""

from dataclasses import replace

import pytest

from meshwright.costmodel.estimate import estimate
from meshwright.costmodel.ops.overheads import TALKING
from meshwright.costmodel.simulate.compiled_schedule import F
from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.stage.program import Program, run, talk
from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.plan.predicted import Prediction
from meshwright.ir.plan.schedule import parse_schedule
from tests.costmodel.models import mlp, plan


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


def test_a_rank_that_ends_its_step_late_takes_cores_from_others() -> None:
    """Two stages of two processes on two cores: for its first 2 s the forward of the first, which
    takes 3 s alone, has the second's optimizer beside it."""
    stages = [_stage(Program((run(3.0, "forward"),))), _stage(Program((run(1.0, "forward"),)))]
    schedule = parse_schedule("x", ("0F0 0B0", "1F0 1B0"))
    late = simulate(schedule, stages, cores=2, offsets=(0.0, 2.0))
    assert late.row_end_s[0] == pytest.approx(2 + 2 + 1)
    apart = simulate(schedule, stages, cores=4, offsets=(0.0, 2.0))
    assert apart.row_end_s[0] == pytest.approx(3 + 1)


def test_measured_communication_takes_cores_from_everybody() -> None:
    """What computing lost while all communicated is the share of cores that communication needs;
    unmeasured it is half a core."""
    half = _step_s(1.0 + TALKING)
    assert half == pytest.approx(_step_s(1.0))
    assert _step_s(1.9) > half * 1.01


def test_a_stage_states_the_optimizer_step_that_its_rank_will_see() -> None:
    """Two ranks on one core step at once, each at half speed; the step has it so, and so has its
    stage."""
    found = _estimate(cores=1)
    assert found.stages[0].optimizer_s == pytest.approx(
        2 * _estimate(cores=2).stages[0].optimizer_s
    )
    assert found.breakdown is not None
    assert found.stages[0].optimizer_s == pytest.approx(found.breakdown.optimizer_s)


def _estimate(cores: int) -> Prediction:
    local = Cluster.local(2)
    (node,) = local.nodes
    node = Node(devices=node.devices, link=node.link, cores=cores)
    cluster = Cluster(name="l", device_types=local.device_types, nodes=(node,))
    return estimate(mlp(), cluster, plan(cluster, dp=2))[0]


def _step_s(compute_slowdown: float) -> float:
    """Of two stages of two replicas on one core."""
    local = Cluster.local(4)
    (node,) = local.nodes
    link = replace(node.link, overlap_compute_slowdown=compute_slowdown, bandwidth_bytes_per_s=1e7)
    node = Node(devices=node.devices, link=link, cores=1)
    cluster = Cluster(name="l", device_types=local.device_types, nodes=(node,))
    return estimate(mlp(), cluster, plan(cluster, pp=2, dp=2))[0].step_s
