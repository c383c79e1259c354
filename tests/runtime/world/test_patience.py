"""How long is too long is learnt, between what users set and five minutes."""

import pytest

from meshwright.runtime.world.patience import HANG_S, LEAST_S, STEPS, TIMES, Patience


@pytest.mark.parametrize(
    ("most_s", "halt_s", "limit_s"),
    [
        (HANG_S, 1.0, LEAST_S),
        (HANG_S, 100.0, 100.0 * TIMES),
        (HANG_S, 1000.0, HANG_S),
        (5.0, 1.0, 5.0),
    ],
)
def test_a_rank_learns_what_a_hang_is(most_s, halt_s, limit_s):
    patience = Patience(most_s)
    for step in range(STEPS):
        patience.saw("running", step, halt_s)
        patience.saw("running", step, 0.5 * halt_s)
    assert patience.limit_s("running") == most_s, "compilers work in the first steps"
    patience.saw("running", STEPS, 0.0)
    assert patience.limit_s("running") == limit_s
    assert patience.limit_s("receiving") == min(most_s, LEAST_S), "each phase has its own"
