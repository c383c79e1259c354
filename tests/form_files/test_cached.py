"""Tables with a cache: equal to one process without, whatever the cache."""

from typing import Any

import pytest

from meshwright.forms.host_link import shaped
from meshwright.forms.sync import findings
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.caches import all_trained, plan_of
from tests.form_files.words import VOCAB, assert_equal, plain

LARGEST = 48 / VOCAB
"""As many slots as a batch has look-ups."""
LINK = 20e6
"""Bytes per second: rows are on their way for a while."""


@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_training_is_that_of_one_process_without(ranks: int, prefetch: int) -> None:
    """From as few slots as the largest batch takes to all rows, 203 and 50 of them."""
    few = LARGEST if ranks == 1 else 0.3
    plans = [
        plan_of(ranks, "adagrad", ratio=ratio, policy=policy, prefetch=prefetch)
        for ratio, policy in [
            (few, "lru"), (few, "lfu"), (few, "learnt"), (0.5, "learnt"), (1.0, "lfu"),
        ]
    ]  # fmt: skip
    assert not [finding for plan in plans for finding in findings(plan)]
    wanted = alone(plain, "adagrad", 0.05, None)
    with shaped(LINK):
        every = run_ranks(ranks, all_trained, [(plan, {"depth": prefetch}) for plan in plans])
    for number, plan in enumerate(plans):
        assert_equal(every[0][number], wanted)
        for rank in every:
            words = rank[number][2][0]
            store = plan.stages[0].by_parameter["words.weight"].store
            assert words.path == "words.weight" and store
            if store.settings["ratio"] == 1.0:
                assert not words.written
            elif store.settings["ratio"] == LARGEST and ranks == 1:
                assert words.slots == 48 and words.written > 100


@pytest.mark.parametrize("optimizer", ["sgd", "sgd_momentum", "adamw"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_optimizers(ranks: int, optimizer: str) -> None:
    """With moments and decay of rows that do not occur; somebody looks at all after each step; a
    checkpoint in between; a norm that is limited."""
    plan = plan_of(ranks, optimizer, ratio=0.4)
    hows: list[dict[str, Any]] = [{"depth": 1}, {"depth": 1, "read": True}, {"clip": 0.3}]
    with shaped(LINK):
        found = run_ranks(ranks, all_trained, [(plan, how) for how in hows])[0]
    for how, one in zip(hows, found, strict=True):
        assert_equal(one, alone(plain, optimizer, 0.05, how.get("clip")))
