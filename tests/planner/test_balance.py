"""Uneven shares: exact against OR-Tools, memory kept."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ortools.sat.python import cp_model

from meshwright.ir.cluster.cluster import Cluster, Node
from meshwright.ir.errors import PlanError
from meshwright.planner.across.balance import Replica, exact_shares
from meshwright.planner.across.device_order import device_orders, placements
from meshwright.planner.across.shares import balanced_shares
from meshwright.planner.problem.candidates import Choice, StageChoice, build_plan, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import Problem
from tests.planner.mixed import mixed
from tests.planner.problems import cluster, mlp, problem


def slowest(replicas: Sequence[Replica], shares: Sequence[int]) -> float:
    return max(r.seconds[n - 1] for r, n in zip(replicas, shares, strict=True))


def by_solver(samples: int, replicas: Sequence[Replica]) -> int | None:
    """The least time of the slowest replica, by CP-SAT; seconds are whole numbers here."""
    model = cp_model.CpModel()
    latest = model.new_int_var(0, 10**6, "latest")
    shares = []
    for i, replica in enumerate(replicas):
        most = min(replica.most, samples)
        if most < 1:
            return None
        share = model.new_int_var(1, most, f"n{i}")
        took = model.new_int_var(0, 10**6, f"t{i}")
        model.add_element(share, [0, *(round(s) for s in replica.seconds)], took)
        model.add(latest >= took)
        shares.append(share)
    model.add(sum(shares) == samples)
    model.minimize(latest)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    # All times are whole numbers; the solver says them as floats.
    return round(solver.objective_value) if solver.solve(model) == cp_model.OPTIMAL else None


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, list[Replica]]:
    samples = draw(st.integers(1, 12))
    times = st.lists(st.integers(0, 40), min_size=samples, max_size=samples)
    replicas = st.builds(
        lambda steps, most: Replica(
            tuple(float(sum(steps[: i + 1])) for i in range(samples)), most
        ),
        times,
        st.integers(0, 14),
    )
    return samples, draw(st.lists(replicas, min_size=1, max_size=5))


@given(tables())
@settings(max_examples=150, deadline=None)
def test_exact_shares_are_the_best_there_are(case: tuple[int, list[Replica]]) -> None:
    samples, replicas = case
    shares, best = exact_shares(samples, replicas), by_solver(samples, replicas)
    if best is None:
        assert shares is None
    else:
        assert shares is not None and sum(shares) == samples
        assert all(1 <= n <= r.most for n, r in zip(shares, replicas, strict=True))
        assert slowest(replicas, shares) == best


def test_a_step_in_the_table_is_used() -> None:
    steps = Replica((1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 2.0), 8)
    line = Replica(tuple(float(n) for n in range(1, 9)), 8)
    assert exact_shares(8, [line, steps]) == (2, 6)


def stage(asked: Problem, **how: int) -> StageChoice:
    return uniform_choice(asked, **how).stages[0]  # type: ignore[arg-type]


def busy_s(asked: Problem, one: StageChoice) -> float:
    """Forward and backward of the slowest replica, as a plan of this one stage predicts."""
    choice = Choice(stages=(one,), num_microbatches=1, schedule="one_f_one_b", num_ranks=1)
    predicted = build_plan(asked, choice).predicted
    assert predicted
    return predicted.stages[0].forward_s + predicted.stages[0].backward_s


def test_shares_follow_the_cost_tables() -> None:
    asked = problem(mlp(), mixed())
    found = balanced_shares(asked, stage(asked, dp_replicate=4), 1)
    assert found == (3, 3, 1, 1)
    pair = stage(asked, dp_replicate=2, tp=2)
    took = {n: busy_s(asked, replace(pair, shares=(n, 8 - n))) for n in range(1, 8)}
    assert balanced_shares(asked, pair, 1)[0] == min(took, key=lambda n: took[n])
    both = replace(stage(asked, dp_replicate=2, tp=2), devices=(0, 2, 1, 3))
    assert balanced_shares(asked, both, 1) == ()  # both replicas have one of each


def test_shares_keep_memory() -> None:
    asked = problem(mlp(), mixed())
    free = balanced_shares(asked, stage(asked, dp_replicate=4), 1)
    parameters = sum(t.nbytes for t in mlp().parameters)
    state, sample = 4 * parameters, 1664 + 512  # with Adam; activations and workspace
    for held, expected in ((3, (3, 3, 1, 1)), (2, (2, 2, 2, 2)), (1, (1, 1, 3, 3))):
        fast = replace(mixed(2**26).device_types[0], reserved_bytes=2**26 - state - held * sample)
        tight = replace(mixed(), device_types=(fast, mixed().device_types[1]))
        asked = problem(mlp(), tight)
        assert balanced_shares(asked, stage(asked, dp_replicate=4), 1) == expected
    assert free == (3, 3, 1, 1)


def judged(machine: Cluster, *shares: int) -> tuple[int, int]:
    """What the rank with least to spare needs, and what it needs too much."""
    asked = problem(mlp(), machine)
    one = replace(stage(asked, dp_replicate=4), shares=shares)
    choice = Choice(stages=(one,), num_microbatches=1, schedule="one_f_one_b", num_ranks=1)
    plan = build_plan(asked, choice)
    assert plan.predicted
    return plan.predicted.peak_bytes, excess_bytes(asked, plan)


def test_memory_is_judged_device_by_device() -> None:
    free = {n: judged(mixed(), n, n, 4 - n, 4 - n) for n in (1, 2, 3)}
    assert free[1][0] < free[2][0] < free[3][0]  # of the fast ones, which have less memory
    room = (free[2][0] + free[3][0]) // 2
    fast = replace(mixed(2**26).device_types[0], reserved_bytes=2**26 - room)
    tight = replace(mixed(), device_types=(fast, mixed().device_types[1]))
    assert judged(tight, 2, 2, 2, 2) == (free[2][0], 0)
    assert judged(tight, 1, 1, 3, 3) == (free[1][0], 0)  # slow ones hold more than fast ones could
    assert judged(tight, 3, 3, 1, 1) == (free[3][0], free[3][0] - room)


def test_orders_of_devices() -> None:
    assert device_orders(problem(mlp(), cluster(3))) == ((0, 1, 2),)
    found = device_orders(problem(mlp(), mixed()))
    assert found == ((0, 1, 2, 3), (2, 3, 0, 1))
    base = mixed()
    uneven = replace(base, nodes=(replace(base.nodes[0], devices=("fast", "slow")), base.nodes[1]))
    # Rich memory first: the pure node of slow devices has no better best one, so the node order
    # stays; inside the first node the slow device, with more memory, comes first.
    assert (1, 0, 2, 3) in device_orders(problem(mlp(), uneven))


def machines(*sizes: int) -> Cluster:
    base = cluster(1)
    nodes = tuple(Node(devices=("toy",) * size, link=base.nodes[0].link, cores=0) for size in sizes)
    return replace(base, nodes=nodes)


@pytest.mark.parametrize(
    "sizes,used,count,found",
    [
        # All fresh: whole machines, or one device of each in turn.
        ((4, 4), (), 4, ((0, 1, 2, 3), (0, 1, 4, 5))),
        ((2, 2, 2), (), 3, ((0, 1, 2), (0, 2, 4))),
        # One machine partly used: a fresh one; the rest of it, then fresh ones; the same scattered.
        ((4, 4, 4), (0, 1), 4, ((4, 5, 6, 7), (2, 3, 4, 5), (2, 3, 4, 8))),
        # Two partly used: equally over them.
        ((4, 4, 4), (0, 4, 5), 2, ((8, 9), (1, 2), (1, 6))),
        # Nothing fresh is left.
        ((2, 2), (0, 2), 2, ((1, 3),)),
        ((4,), (0,), 3, ((1, 2, 3),)),
    ],
)  # fmt: skip
def test_three_placements(
    sizes: tuple[int, ...], used: tuple[int, ...], count: int, found: object
) -> None:
    assert placements(machines(*sizes), used, count) == found


def test_placements_of_more_than_there_is() -> None:
    with pytest.raises(PlanError, match="3 devices asked for; 2 of"):
        placements(machines(2, 2), (0, 1), 3)
