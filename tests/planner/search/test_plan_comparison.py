"""The reason that a plan gives for having lost is the largest part of the difference."""

from dataclasses import replace

from meshwright.ir.plan.plan import Plan
from meshwright.ir.plan.predicted import Breakdown
from meshwright.planner.search.plan_comparison import alternative, parts_of
from tests.ir.plans import plan, prediction

SPENT = Breakdown(
    rank=0, forward_s=0.3, backward_s=0.6, recompute_s=0.0, tensor_s=0.05, wait_s=0.02,
    gradients_s=0.02, gather_s=0.0, optimizer_s=0.01, overhead_s=0.0,
)  # fmt: skip


def taking(step_s: float, **spent: float) -> Plan:
    made = replace(prediction(2), step_s=step_s, breakdown=replace(SPENT, **spent))
    return plan(predicted=made)


def test_the_parts_are_all_of_the_step():
    assert sum(parts_of(taking(1.0)).values()) == 1.0


def test_the_largest_difference_is_the_reason():
    best = taking(1.0)
    assert alternative(taking(1.2, tensor_s=0.25), best, 0).why == (
        "20.0% slower: collectives in blocks 250 ms against 50 ms"
    )
    slower = taking(1.1, recompute_s=0.15, gradients_s=0.0, wait_s=0.0)
    assert alternative(slower, best, 0).why == "10.0% slower: recomputing 150 ms against 0 us"
    gathering = taking(1.05, gather_s=0.05)
    assert alternative(gathering, best, 0).why.endswith("gathering parameters 50 ms against 0 us")


def test_what_does_not_fit_or_is_no_slower_says_so():
    best = taking(1.0)
    assert alternative(taking(0.9), best, 3 * 2**30).why == "does not fit: 3 GiB too much on a rank"
    full = replace(prediction(2, 2**30), step_s=1.0, breakdown=SPENT)
    assert alternative(replace(best, predicted=full), best, 0).why.startswith(
        "needs more memory: 1"
    )
    assert alternative(taking(1.0), best, 0).why == "as fast, with as much memory"


def test_ties_go_to_what_is_simpler():
    best = taking(1.0)
    one = replace(best, stages=best.stages[:1])
    assert alternative(taking(0.99), one, 0).why == (
        "1.0% faster, within the tie, but less simple: stages 2 against 1"
    )
    sharded = replace(best, stages=tuple(replace(stage, zero=3) for stage in best.stages))
    assert alternative(sharded, best, 0).why == "as fast, but less simple: zero 3 against 0"
    least = replace(one, objective="memory")
    assert (
        alternative(taking(0.99), least, 0).why
        == "1.0% faster, within the tie, with as much memory"
    )
