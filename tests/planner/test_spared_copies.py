"""Bounds where blocks' values are moved to the host: what no stage has to wait for is spared."""

import numpy as np

from meshwright.costmodel.simulate.simulate import StageTimes, simulate
from meshwright.costmodel.stage.offload import arriving_s, leaving_s
from meshwright.planner.across.block_ways import BlockWays
from meshwright.planner.across.places import Places, orders
from meshwright.planner.across.run_costs import RunCosts
from meshwright.planner.bounds.frames import Frame
from meshwright.planner.bounds.relaxation import Relaxation
from meshwright.planner.problem.schedule_tools import make_schedule
from tests.planner.problems import cluster, mlp, problem

RANKS, CHUNKS, COUNT, BLOCKS = 2, 4, 8, 16
FORWARD_S, BACKWARD_S, COPY_S = 0.1, 10.0, 9.9
"""Of a block. Its copy to the host is as long as a hundred forwards, and hides behind one other
backward on its way back."""


def simulated_s() -> float:
    """A step of four stages of two blocks on each rank, where all blocks are moved."""
    each = BLOCKS // (RANKS * CHUNKS)
    copies = [COPY_S] * each
    waits = leaving_s([FORWARD_S] * each, copies), arriving_s([BACKWARD_S] * each, copies)
    assert sum(waits[0]) == 0.0, "the last two copies of a forward go on beside what comes next"
    stage = StageTimes(
        forward_s=each * FORWARD_S, backward_s=each * BACKWARD_S + sum(waits[1]), send_s=0.0,
        saved_bytes=0,
    )  # fmt: skip
    schedule = make_schedule("interleaved", RANKS * CHUNKS, COUNT, RANKS)
    return simulate(schedule, [stage] * RANKS * CHUNKS).step_s


def bound_s() -> float:
    """Of such blocks on ranks that have room for them if all are moved, and not otherwise."""
    pins = (f"pp={RANKS}", "schedule=interleaved", f"num_microbatches={COUNT}")
    asked = problem(mlp(BLOCKS), cluster(RANKS), constraints=pins)
    places = [Places(asked, order) for order in orders(asked)]
    busy = np.full((1, 2, 1), FORWARD_S + BACKWARD_S)
    moved, kept = 1.0, 100.0
    ways = BlockWays(
        blocks=np.array([float(BLOCKS)]), busy_s=busy, load_s=busy, state_bytes=np.zeros((1, 1, 1)),
        flight_bytes=np.array([[[kept], [moved]]]), room=moved * BLOCKS / RANKS, prices=(0.0, 1.0),
        input_s=busy, forward_s=np.array([[FORWARD_S]]),
        forward_share=np.array([FORWARD_S / (FORWARD_S + BACKWARD_S)]),
        copy_s=np.array([[COPY_S]]), offload=1, spared_s=np.zeros(1),
        kept_s=busy[:, 0],
    )  # fmt: skip
    relaxation = Relaxation(RunCosts(asked), places)
    return relaxation._relaxed(Frame(RANKS, COUNT), ways, np.ones(1), (0.0, 0.0)).together_s


def test_each_stage_of_a_rank_spares_its_last_two_copies() -> None:
    busy_s = COUNT * BLOCKS / RANKS * (FORWARD_S + BACKWARD_S)
    assert 0.99 * busy_s <= bound_s() <= simulated_s()
