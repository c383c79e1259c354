"""Tables with a cache: equal to one process without, whatever the cache."""

from typing import Any

import pytest

from meshwright.forms.host_link import shaped
from meshwright.forms.sync import findings
from meshwright.testing.spawn import alone, run_ranks
from tests.form_files.caches import plan_of, trained
from tests.form_files.words import VOCAB, assert_equal, plain

LARGEST = 48 / VOCAB
"""As many slots as look-ups of a batch."""


@pytest.mark.parametrize("policy", ["learnt", "lfu", "lru"])
@pytest.mark.parametrize("ratio", [LARGEST, 0.5, 1.0])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
def test_one_rank_trains_as_without(policy: str, ratio: float, prefetch: int) -> None:
    plan = plan_of(1, "adagrad", ratio=ratio, policy=policy, prefetch=prefetch)
    assert not list(findings(plan))
    with shaped(20e6):
        found = run_ranks(1, trained, plan, prefetch)[0]
    print(found[2])
    assert_equal(found, alone(plain, "adagrad", 0.05, None))
