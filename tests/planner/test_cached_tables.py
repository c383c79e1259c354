"""Tables that do not fit get caches: as large as there is room for, and shared out by what they
miss."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.forms.cache.curves import MissCurve, shared_out
from meshwright.ir.errors import Infeasible, PlanError
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search_problem
from meshwright.testing.hosts import apart

ROWS, WIDTH, BATCH = (600_000, 120_000), 128, 16
LINK = 1e6
"""So slow that each missing row is waited for."""
TABLES = sum(ROWS) * WIDTH * 4


def _times(rows: int) -> dict[int, int]:
    """Times -> rows: half as many rows each time, about as often as Zipf's."""
    return {2**k: max(1, rows // 2 ** (k + 1)) for k in range(15)}


COUNTED = RowCounts({"many.weight": _times(ROWS[0]), "few.weight": _times(ROWS[1])})


class Two(nn.Module):
    """Two tables, and a small rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.many, self.few = (nn.Embedding(rows, WIDTH) for rows in ROWS)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        found: Tensor = self.out(self.many(first) + self.few(second)).square().mean()
        return found


def _searched(
    ranks: int,
    memory: int,
    optimizer: str = "adagrad",
    rows: Any = COUNTED,
    pins: tuple[str, ...] = (),
) -> Plan:
    example = tuple(torch.zeros(BATCH, dtype=torch.int64) for _ in ROWS)
    with torch.device("meta"):
        own = Two()
    problem = make_problem(
        trace(own, example), apart(ranks, LINK, memory_bytes=memory), precision="fp32",
        optimizer=optimizer, rows=RowCounts.load(rows), constraints=("tp=1", "pp=1", *pins),
    )  # fmt: skip
    return search_problem(problem)


@pytest.mark.parametrize(("ranks", "copies"), [(1, 1), (2, 1), (4, 2)])
def test_search_caches_tables_that_do_not_fit(ranks: int, copies: int) -> None:
    """Within the memory, and as large as that allows; copies of owners where somebody asks for
    them."""
    memory = TABLES // (ranks // copies) // 2
    pins = (f"dp_replicate={copies}", f"dp_shard={ranks // copies}") if copies > 1 else ()
    plan = _searched(ranks, memory, pins=pins)
    assert plan.stages[0].mesh["dp_replicate"] == copies
    assert plan.predicted and not [f for f in plan.verify() if f.severity == "error"]
    used = plan.predicted.stages[0].memory.used_bytes
    forms = {said.sync.form for said in plan.stages[0].by_parameter.values() if said.sync}
    assert forms == ({"owned_rows"} if ranks > 1 else set())
    stores = {path: said.store for path, said in plan.stages[0].by_parameter.items()}
    assert {path: store.form for path, store in stores.items() if store} == {
        "many.weight": "cached", "few.weight": "cached"
    }  # fmt: skip
    assert 0.85 * memory < used <= memory
    # As Zipf's tables, the smaller one has more of its rows in slots.
    ratios = {path: float(store.settings["ratio"]) for path, store in stores.items() if store}
    assert ratios["few.weight"] > 2 * ratios["many.weight"]


def test_what_fits_has_no_cache_and_what_nobody_counted_gets_none() -> None:
    assert not _searched(1, 20 * TABLES).stages[0].by_parameter
    with pytest.raises(Infeasible):
        _searched(1, TABLES // 2, rows=None)


def _curve(draw: np.random.Generator, rows: int) -> MissCurve:
    return MissCurve(np.sort(draw.random(rows))[::-1].copy(), np.ones(rows))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("pin", "ratio"), [("1.5%", 0.015), ("92.16MB", 0.25)])
def test_one_argument_says_how_large_caches_are(ranks: int, pin: str, ratio: float) -> None:
    """A share of rows or bytes, whether tables fit or not, and nobody has counted."""
    plan = _searched(ranks, 20 * TABLES, rows=None, pins=(f"parameters * cache={pin}",))
    said = plan.stages[0].by_parameter
    assert set(said) == {"many.weight", "few.weight"}
    for choice in said.values():
        assert choice.store and choice.store.settings["ratio"] == pytest.approx(ratio)
        assert bool(choice.sync) == (ranks == 2)
    if ranks == 1 or ratio > 0.1:
        return
    known = _searched(ranks, 20 * TABLES, pins=(f"parameters * cache={pin}",))
    assert known.predicted and plan.predicted
    assert known.predicted.step_s < plan.predicted.step_s  # as most rows that are read have slots
    for path, choice in known.stages[0].by_parameter.items():
        before = said[path].store
        assert choice.store and before and choice.store.form == before.form
        settings = choice.store.settings
        assert settings["ratio"] == before.settings["ratio"]
        assert 0 < float(settings["missing"]) < 0.8 * float(before.settings["missing"])


@pytest.mark.parametrize(
    ("pin", "says"),
    [("* cache=150%", "from 0 to 100 %"), ("* cache=500MB", "nearest is cache=100%"),
     ("* cache=some", "."), ("mny.weight cache=1%", "many"),
     ("* cache=0.0001%", "600,000 rows of 'many.weight'; nearest is cache=0.000166666667%"),
     ("few.weight cache=500B", "120,000 rows of 'few.weight'; nearest is cache=512B"),
     ("* store=cached", "store must be")],
)  # fmt: skip
def test_what_is_no_cache_is_refused(pin: str, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        _searched(1, 20 * TABLES, pins=(f"parameters {pin}",))


@pytest.mark.parametrize("pin", ["* cache=0.000166666667%", "few.weight cache=512B"])
def test_a_cache_of_one_row_is_one(pin: str) -> None:
    assert _searched(1, 20 * TABLES, pins=(f"parameters {pin}",)).stages[0].by_parameter


def _missed(curves: dict[str, MissCurve], sizes: dict[str, float], slots: dict[str, int]) -> float:
    return sum(sizes[name] * curves[name].missing(slots[name]) for name in curves)


def test_a_budget_is_shared_out_as_by_trying_all() -> None:
    """Of rows of equal bytes; of unequal ones never worse than any that fits, but for one row."""
    draw = np.random.default_rng(0)
    for _ in range(30):
        curves = {"a": _curve(draw, 6), "b": _curve(draw, 4)}
        budget = int(draw.integers(4, 11))
        for sizes in ({"a": 1.0, "b": 1.0}, {"a": 1.0, "b": 2.0}):
            found = shared_out(curves, sizes, {"a": 1, "b": 1}, budget)
            assert sum(found[n] * sizes[n] for n in found) <= max(budget, sum(sizes.values()))
            tried = [
                _missed(curves, sizes, {"a": a, "b": b})
                for a, b in product(range(1, 7), range(1, 5))
                if a * sizes["a"] + b * sizes["b"] <= budget
            ]  # fmt: skip
            slack = 0.0 if sizes["b"] == 1.0 else max(sizes.values())
            assert _missed(curves, sizes, found) <= min(tried) + slack + 1e-12


def test_a_curve_falls_from_all_that_is_read_to_nothing() -> None:
    rows = RowCounts.load("zipf:1.2")
    assert rows
    named = rows.named("x", 1000, 200)
    assert named
    curve = MissCurve(*named)
    read = rows.distinct("x", 1000, 200)
    assert curve.missing(0) == pytest.approx(curve.read()) == pytest.approx(read)
    missed = [curve.missing(slots) for slots in range(0, 1001, 50)]
    assert all(a > b for a, b in pairwise(missed)) and missed[-1] == 0
    counted = replace(rows, tables={"x": {5: 10, 1: 40}}, zipf=None)
    some = counted.named("x", 1000, 20)
    assert some and some[1].sum() == 1000 and MissCurve(*some).missing(50) == 0
