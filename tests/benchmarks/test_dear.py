"""WFBP, MG-WFBP and DeAR on cases small enough to be done by hand."""

import pytest

from benchmarks.dear.main import METHODS, NETWORKS, bsp_s, calibrated
from benchmarks.dear.models import MODELS, timed
from benchmarks.dear.rows import ALPHA_S, GPUS, TABLE
from benchmarks.dear.schedules import (
    SMALL_BYTES,
    Gradient,
    Line,
    dear_step,
    merged_by_bytes,
    merged_by_wait,
    reduced_step,
)

KB = 100_000.0  # above the size that is always merged
# Backward 1, 2 and 3 s; forward of the same parts, in forward order 1.5, 1 and 0.5 s.
THREE = (Gradient(1, KB, 0.5), Gradient(2, KB, 1.0), Gradient(3, KB, 1.5))


def test_collectives_hide_behind_the_backward() -> None:
    # Ready at 1, 3, 6 after the forward of 2; each takes 1.5: over at 2.5, 4.5, 7.5.
    assert reduced_step(2, THREE, (1, 1, 1), Line(1.5, 0)) == pytest.approx(2 + 7.5)


def test_a_slow_channel_queues_them() -> None:
    # 4 s each, one after the other from 1 on.
    assert reduced_step(2, THREE, (1, 1, 1), Line(4, 0)) == pytest.approx(2 + 1 + 12)


def test_merging_pays_the_start_up_once() -> None:
    # Two groups: ready at 3 and 6, 4 + 2 and 4 + 1 s: over at 9 and 14.
    line = Line(4, 1 / KB)
    assert reduced_step(0, THREE, (2, 1), line) == pytest.approx(14)
    assert reduced_step(0, THREE, (3,), line) == pytest.approx(6 + 4 + 3)
    assert reduced_step(0, THREE, (1, 1, 1), line) == pytest.approx(1 + 15)


def test_groups_close_when_they_reach_the_limit() -> None:
    assert merged_by_bytes(THREE, 1.5 * KB) == (2, 1)
    assert merged_by_bytes(THREE, KB) == (1, 1, 1)
    assert merged_by_bytes(THREE, 10 * KB) == (3,)


def test_a_gradient_waits_only_where_waiting_costs_less_than_a_start() -> None:
    # Start-up 0.1: each collective is over (0.1 s) before the next gradient comes.
    assert merged_by_wait(THREE, Line(0.1, 0)) == (1, 1, 1)
    # Start-up 2.5: the first would start at 1 and the second is ready at 3: 2 < 2.5, merged. Both
    # start at 3, the third is ready at 6: 3 > 2.5, not merged.
    assert merged_by_wait(THREE, Line(2.5, 0)) == (2, 1)
    assert merged_by_wait(THREE, Line(4, 0)) == (3,)


def test_a_busy_channel_merges_what_comes_meanwhile() -> None:
    # Start-up 0.5, and 20 s for the first: the channel is busy to 21.5 when the others are ready.
    gradients = (Gradient(1, KB), Gradient(2, KB / 10 * 5), Gradient(3, KB))
    assert merged_by_wait(gradients, Line(0.5, 20 / KB)) == (1, 2)


def test_small_gradients_never_go_alone() -> None:
    small = SMALL_BYTES / 2
    gradients = (Gradient(1, small), Gradient(10, small), Gradient(10, KB), Gradient(10, KB))
    assert merged_by_wait(gradients, Line(0.001, 0)) == (2, 1, 1)


def test_dear_gathers_one_group_ahead_of_the_forward() -> None:
    # Scatters of 0.5 s at 1, 3, 6: over at 6.5. Gathers: the first exposed (0.5), the others
    # behind 1.5 and 1 s of computing: 3 s of forward in all.
    assert dear_step(THREE, (1, 1, 1), Line(0.5, 0)) == pytest.approx(6.5 + 0.5 + 3)


def test_dear_waits_for_gathers_that_are_longer_than_the_forward() -> None:
    # 2 s each: scatters from 1, 3, 6 are over at 8; gathers at 10, 12, 14, then the last 0.5 s.
    assert dear_step(THREE, (1, 1, 1), Line(2, 0)) == pytest.approx(8 + 6 + 0.5)


def test_resnet_50_as_measured() -> None:
    """All its rows within 15 %; in a queue half of the start-up is left, and a step with one
    all-reduce, which has all of it, is what sets the rest."""
    model = MODELS[0]
    step = timed(model)
    for network in NETWORKS:
        for index, gpus in enumerate(GPUS):
            site = calibrated(model, network, gpus)
            alpha_s = ALPHA_S[network][gpus]
            assert site.line.alpha_s == pytest.approx(alpha_s / 2)
            whole_s = model.one_gpu_s + alpha_s + site.line.beta_s * step.nbytes
            assert whole_s + site.extra_s == pytest.approx(bsp_s(model, network, gpus))
            for _, method, measured in METHODS:
                found = gpus * model.batch / method(step, site, TABLE[network][gpus])
                assert found == pytest.approx(measured[model.name, network][index], rel=0.15)
