"""Which rows are in which slots, under each policy."""

from dataclasses import replace

import numpy as np
import pytest

from meshwright.forms.cache.policies import POLICIES, policy
from meshwright.forms.cache.slots import SlotMap, TooFewSlots
from meshwright.ir.errors import PlanError
from meshwright.testing.hit_rate import hit_rate
from meshwright.testing.ids import DRIFTS, drifting, zipf_batches

ROWS = 40


def _map(name: str, slots: int, rows: int = ROWS) -> SlotMap:
    counts = np.arange(rows, 0, -1, dtype=float) if name == "frequency" else None
    return SlotMap(rows, slots, policy(name, rows, slots, counts))


@pytest.mark.parametrize("name", POLICIES)
def test_maps_agree_and_nothing_that_is_held_leaves(name: str) -> None:
    """Of two batches that are held at once, whatever comes."""
    draw, found, held = np.random.default_rng(0), _map(name, 16), []
    for _ in range(200):
        rows = np.unique(draw.integers(0, ROWS, 8))
        moves = found.admit(rows)
        held.append(rows)
        for batch in held:
            at = found.at(batch)
            assert (at >= 0).all() and (found.row_in[at] == batch).all()
        assert set(moves.came) <= set(rows) and not set(moves.left) & set(np.concatenate(held))
        in_slots = np.flatnonzero(found.slot_of >= 0)
        assert sorted(found.row_in[found.row_in >= 0]) == list(in_slots)
        if len(held) == 2:
            found.release(held.pop(0))


@pytest.mark.parametrize("name", POLICIES)
def test_what_does_not_fit_changes_nothing(name: str) -> None:
    found = _map(name, 6)
    found.admit(np.arange(4))
    before, counts = found.slot_of.copy(), replace(found.counts)
    with pytest.raises(TooFewSlots, match="7 rows are needed at once, and there are 6 slots") as e:
        found.admit(np.array([3, 10, 11, 12]))
    assert e.value.wanted == 7
    assert (found.slot_of == before).all() and found.counts == counts
    found.release(np.arange(4))
    found.admit(np.array([3, 10, 11, 12]))
    assert (found.slot_of >= 0).sum() == 6


def test_who_changed_is_written_and_nobody_else() -> None:
    found = _map("lru", 4)
    found.admit(np.array([0, 1, 2, 3]))
    found.release(np.array([0, 1, 2, 3]))
    found.changed[found.at(np.array([1, 2]))] = True
    moves = found.admit(np.array([5, 6]))
    assert list(moves.left) == [1] and found.counts.written == 1
    assert not found.changed[moves.into].any()
    assert list(found.changed_rows()[0]) == [2]


def test_counts_come_close_to_the_rows_that_occur_most() -> None:
    """Within one point of them, and 2.5 above LFU: a million rows, slots for 1.5 %."""
    rows, slots = 1_000_000, 15_000
    batches, share = zipf_batches(rows, 1.05, 100, 2048, seed=0)
    order = np.argsort(-share)
    warm = np.sort(order[: int(0.7 * slots)])
    best = float(np.isin(np.concatenate(batches), order[:slots]).mean())
    counted = hit_rate("frequency", batches, rows, slots, share, warm)
    lfu = hit_rate("lfu", batches, rows, slots, None, warm)
    assert best - 0.01 < counted < best
    assert counted > lfu + 0.025
    learnt = hit_rate("learnt", batches, rows, slots, np.round(share * 2e5), warm)
    assert lfu + 0.02 < learnt < counted


@pytest.mark.parametrize("kind", DRIFTS)
def test_what_is_learnt_is_no_worse_than_the_last_use_where_ids_drift(kind: str) -> None:
    """Also where counts were made before, and hold no more."""
    rows, slots = 20_000, 600
    batches = drifting(kind, 0, rows, 300, 256)
    last_use = hit_rate("lru", batches, rows, slots)
    assert hit_rate("learnt", batches, rows, slots) >= last_use
    old = np.random.default_rng(9).permutation(np.round(1e6 / np.arange(1, rows + 1)))
    assert hit_rate("learnt", batches, rows, slots, old) >= last_use - 0.01
    assert hit_rate("frequency", batches, rows, slots, old) < last_use - 0.1


def test_policies_are_known_by_name() -> None:
    with pytest.raises(PlanError, match="nearest is 'lfu'"):
        policy("lfuu", 10, 5)
    with pytest.raises(PlanError, match="nobody has counted them"):
        policy("frequency", 10, 5)
    with pytest.raises(PlanError, match="5 rows, and the table has 10"):
        policy("learnt", 10, 5, np.ones(5))


def test_the_last_use_and_uses_are_what_they_say() -> None:
    """Look-up by look-up, beside plain Python; `benchmarks.cache.hits` has libcachesim as judge."""
    draw = np.random.default_rng(3)
    ids = [int(x) for x in (draw.pareto(1.0, 3000) * 3) % ROWS]
    for name in ("lru", "lfu"):
        found, uses, last = _map(name, 10), {}, {}
        for now, row in enumerate(ids):
            assert (found.slot_of[row] >= 0) == (row in uses)
            if row not in uses and len(uses) == 10:
                worth = {r: (uses[r] * (name == "lfu"), last[r]) for r in uses}
                uses.pop(min(worth, key=worth.__getitem__))
            uses[row], last[row] = uses.get(row, 0) + 1, now
            found.admit(np.array([row]))
            found.release(np.array([row]))
