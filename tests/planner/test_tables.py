"""Embedding tables of which few rows occur: counted, found, priced, chosen."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from meshwright.forms.sync import for_tables
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.graph.tables import tables_of
from meshwright.ir.plan.plan import Plan
from meshwright.ir.profile.row_counts import RowCounts
from meshwright.ir.trace.trace import trace
from meshwright.planner.finishing.tables import hope_s, variants
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.problem import make_problem
from meshwright.planner.search.search import search, search_problem
from meshwright.profiling.rows import count_rows
from meshwright.tools.explain.binding import binding
from meshwright.tools.explain.facts import Facts
from tests.form_files.words import Words, batch, model


class Tied(nn.Module):
    """A table that the output layer shares, and one in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.bags = nn.Embedding(300, 8), nn.EmbeddingBag(500, 8, mode="sum")
        self.out = nn.Linear(8, 300, bias=False)
        self.out.weight = self.words.weight

    def forward(self, ids: Tensor, many: Tensor) -> Tensor:
        x = self.words(ids) + self.bags(many)
        return nn.functional.cross_entropy(self.out(x), ids)


def tied_batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 300, (8,), generator=draw), torch.randint(
        0, 500, (8, 3), generator=draw
    )


def test_tables_are_found_and_shared_ones_are_not() -> None:
    found = tables_of(trace(model(), batch(0)))
    assert [(t.path, t.rows, t.row_bytes, t.lookups, t.ids) for t in found] == [
        ("words.weight", 203, 48, 48, "0"), ("marks.weight", 50, 48, 12, "1"),
    ]  # fmt: skip
    (bags,) = tables_of(trace(Tied(), tied_batch()))
    assert (bags.path, bags.rows, bags.lookups, bags.ids) == ("bags.weight", 500, 24, "1")


def test_counting() -> None:
    """Rows as often as batches name them, padding left out; the model stays as it is."""
    made = model()
    before = {name: x.clone() for name, x in made.state_dict().items()}
    counts = count_rows(made, [batch(0), batch(1)])
    ids = torch.cat([batch(0)[0].flatten(), batch(1)[0].flatten()])
    found = torch.bincount(ids, minlength=203)[1:]
    assert counts.tables["words.weight"] == {
        int(n): int((found == n).sum()) for n in found.unique() if n
    }
    first, last = counts.parts["words.weight"][0], counts.parts["words.weight"][63]
    for part, rows in ((first, range(1, 4)), (last, range(200, 203))):
        known = [int((ids == row).sum()) for row in rows]
        assert part == {n: known.count(n) for n in known if n}
    assert all(x.equal(before[name]) for name, x in made.state_dict().items())
    assert not made.words._forward_pre_hooks
    bags = count_rows(Tied(), [{"ids": tied_batch()[0], "many": tied_batch()[1]}])
    assert set(bags.tables) == {"words.weight", "bags.weight"}
    with pytest.raises(PlanError, match="are there batches"):
        count_rows(nn.Linear(2, 2), [torch.ones(1, 2)])


def test_distinct_rows_are_those_that_are_drawn() -> None:
    draw = np.random.default_rng(0)
    share = np.arange(1, 1001, dtype=float) ** -1.1
    ids = draw.choice(1000, size=200_000, p=share / share.sum())
    times, rows = np.unique(np.unique(ids, return_counts=True)[1], return_counts=True)
    counted = RowCounts({"a": dict(zip(times.tolist(), rows.tolist(), strict=True))})
    for lookups in (1, 50, 2000, 20_000):
        real = np.mean([len(np.unique(draw.choice(ids, lookups))) for _ in range(30)])
        for counts in (counted, RowCounts(zipf=1.1)):
            assert counts.distinct("a", 1000, lookups) == pytest.approx(real, rel=0.04)
    assert counted.distinct("b", 1000, 5) is None


def test_files_and_what_is_none(tmp_path: Path) -> None:
    for counts in (
        RowCounts({"a": {1: 5, 7: 2}}),
        RowCounts({"a": {1: 5, 7: 2}}, parts={"a": ({1: 3, 7: 2}, {1: 2})}),
    ):
        counts.save(tmp_path / "rows.json")
        assert RowCounts.load(tmp_path / "rows.json") == counts
    assert RowCounts.load("zipf:1.2") == RowCounts(zipf=1.2)
    for text, said in (
        ("{", "rows.json"), ('{"schema": "meshwright.plan/2.0"}', "schema"),
        ('{"schema": "meshwright.rows/1.0", "tables": {"a": 3}}', "lists of"),
        ('{"schema": "meshwright.rows/1.0", "tables": {"a": [[0, 1]]}}', "1 or more"),
        ('{"schema": "meshwright.rows/1.0", "tables": []}', "lists of"),
        ('{"schema": "meshwright.rows/1.0", "tables": {"a": [[1, 1]]}, "parts": {"a": [[[1, 2]]]}}',
         "parts of 'a'"),
    ):  # fmt: skip
        (tmp_path / "rows.json").write_text(text)
        with pytest.raises(PlanError, match=said):
            RowCounts.load(tmp_path / "rows.json")
    for text in ("zipf:", "zipf:-1", "zipf:nan", "nowhere.json"):
        with pytest.raises(PlanError):
            RowCounts.load(text)


class Large(Words):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200_000, 6)


class Two(Words):
    """Two large tables."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.marks = nn.Embedding(200_000, 6), nn.Embedding(100_000, 6)


def slow_cluster(wire: float) -> Cluster:
    """Four nodes of a GPU."""
    cluster = Cluster.preset("v100-16", num_nodes=4, devices_per_node=1)
    assert cluster.between_nodes
    between = replace(cluster.between_nodes, bandwidth_bytes_per_s=wire, curves=())
    return replace(cluster, between_nodes=between)


def found(
    wire: float = 1e8,
    kind: type[Words] = Large,
    pins: tuple[str, ...] = ("pp=1", "model=1", "dp=4"),
    **more: Any,
) -> Plan:
    problem = make_problem(
        trace(kind().double(), batch(0)), slow_cluster(wire), precision="fp64", constraints=pins,
        **more,
    )  # fmt: skip
    return search_problem(problem, progress=False)


def test_search_sends_the_rows_that_occur() -> None:
    counts = RowCounts(zipf=1.05)
    dense, rows = found(), found(rows=counts)
    assert dense.predicted and rows.predicted and rows.evidence
    choice = rows.stages[0].by_parameter["words.weight"]
    assert choice.sync and choice.sync.form in for_tables() and not rows.gives_up
    assert "words.weight" not in dense.stages[0].by_parameter
    assert rows.predicted.step_s < 0.1 * dense.predicted.step_s
    assert rows.evidence.gap is None and choice.sync.form in str(rows)
    distinct = counts.distinct("words.weight", 200_000, 48 // 4)
    assert distinct
    assert choice.sync.settings["rows_each"] == pytest.approx(distinct / 200_000, rel=1e-3)
    # What is assumed of rows may be off, and what a step takes then is said.
    (note,) = (note for note in rows.notes if "exponent" in note)
    told = re.search(r"from 0.85 to 1.25 a step takes ([\d.]+) ms to ([\d.]+) ms", note)
    assert told and float(told[1]) > 1e3 * rows.predicted.step_s > float(told[2]), note
    # Owners get less than all would, where bytes count and not the number of messages.
    slow = found(wire=1e5, rows=counts).stages[0].by_parameter["words.weight"].sync
    assert slow and slow.form == "late_rows" and slow.settings["ids"] == "0"
    again = counts.again("words.weight", 200_000, 48 // 4, 48)
    assert slow.settings["prior"] == pytest.approx(again, rel=1e-3)
    limited = found(wire=1e5, rows=counts, max_grad_norm=1.0).stages[0].by_parameter["words.weight"]
    assert limited.sync and limited.sync.form == "owned_rows", (
        "none is late where a norm is limited"
    )


def test_it_is_said_what_whole_tables_would_cost() -> None:
    dense, plan = found(), found(rows=RowCounts(zipf=1.05))
    assert dense.predicted and dense.predicted.detail and dense.predicted.detail.rows is None
    assert plan.predicted and plan.predicted.detail
    saved = plan.predicted.detail.rows
    choice = plan.stages[0].by_parameter["words.weight"]
    assert saved and choice.sync and saved.tables[0] == "words.weight"
    assert choice.sync.form in saved.forms
    # Of all rows of both tables, nearly all of which are words.
    assert saved.share == pytest.approx(choice.sync.settings["rows_each"], abs=50 / 200_000)
    # The whole plan differs in the table alone, and so does what a search without rows finds.
    assert saved.whole_step_s == pytest.approx(dense.predicted.step_s, rel=1e-3)
    assert plan.predicted.step_s < saved.whole_step_s - 0.9 * saved.whole_wait_s
    text = next(s.text for s in binding(Facts.of(plan)) if s.about == "rows")
    told = r"gradients of words.weight( and 1 more table)? went whole, a step would take .* of it "
    assert re.search(told + rf"would be waiting for {100 * saved.share:.2g} % of the rows", text)
    assert not [s for s in binding(Facts.of(dense)) if s.about == "rows"]


def test_ids_in_order_of_frequency_are_split_by_columns() -> None:
    """The first owner of rows would send most; ids that are mixed up load all alike."""
    draw = np.random.default_rng(0)
    share = np.arange(1, 20_001, dtype=float) ** -1.05
    drawn = draw.choice(20_000, size=60_000, p=share / share.sum())
    mixed = draw.permutation(20_000)
    forms, steps = {}, {}
    for name, ids in (("in order", drawn), ("mixed", mixed[drawn])):
        counts = RowCounts({"words.weight": times_of(ids)}, parts={
            "words.weight": tuple(times_of(ids[(ids >= first) & (ids < first + 500)])
                                  for first in range(0, 20_000, 500))})  # fmt: skip
        owned = np.bincount(np.unique(ids[:2000]) // 5000, minlength=4)
        busiest = counts.busiest("words.weight", 20_000, 2000, 4)
        assert busiest == pytest.approx(owned.max() / owned.mean(), rel=0.1), name
        problem = make_problem(
            trace(Wide(), (torch.zeros(8000, dtype=torch.int64),)), slow_cluster(1e7),
            precision="fp32", optimizer="sgd", rows=counts,
        )  # fmt: skip
        plan = build_plan(problem, uniform_choice(problem, dp_replicate=4))
        steps[name] = {
            choice.sync.form: variant.predicted.step_s
            for variant in variants(problem, plan) if variant.predicted
            for choice in variant.stages[0].by_parameter.values() if choice.sync
        }  # fmt: skip
        forms[name] = min(steps[name], key=steps[name].__getitem__)
    assert "columns" in forms["in order"] and "columns" not in forms["mixed"], steps
    assert steps["in order"]["owned_rows"] > 1.5 * steps["mixed"]["owned_rows"]
    for form in ("owned_columns", "late_columns"):
        assert steps["in order"][form] == pytest.approx(steps["mixed"][form], rel=0.01)


@pytest.mark.parametrize("asked", [{"dp_replicate": 4}, {"dp_shard": 4, "zero": 1}], ids=str)
def test_plans_hope_for_what_their_tables_may_bring(asked: Any) -> None:
    """Those that gather what they have stepped, too: else the search would leave them out."""
    problem = make_problem(
        trace(Wide(), (torch.zeros(800, dtype=torch.int64),)), slow_cluster(1e7),
        precision="fp32", optimizer="sgd", rows=RowCounts(zipf=1.05),
    )  # fmt: skip
    plan = build_plan(problem, uniform_choice(problem, **asked))
    best = min(v.predicted.step_s for v in variants(problem, plan) if v.predicted)
    assert plan.predicted and best < 0.5 * plan.predicted.step_s
    assert hope_s(problem, plan) <= best


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20_000, 64), nn.Linear(64, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.words(ids)).mean()
        return found


def times_of(ids: np.ndarray) -> dict[int, int]:
    """Times that a row occurs -> rows that occur so often."""
    times, rows = np.unique(np.unique(ids, return_counts=True)[1], return_counts=True)
    return dict(zip(times.tolist(), rows.tolist(), strict=True))


def test_every_table_has_its_form_where_pins_rule_one_out() -> None:
    """The form that gains most would share rows out, which is pinned not to be."""
    plan = found(kind=Two, pins=("model=1", "dp_replicate=4"), rows=RowCounts(zipf=1.05))
    forms = {path: c.sync.form for path, c in plan.stages[0].by_parameter.items() if c.sync}
    assert forms.keys() == {"words.weight", "marks.weight"}
    assert not any(c.zero for c in plan.stages[0].by_parameter.values())


def test_what_is_read_again_is_what_is_drawn() -> None:
    draw = np.random.default_rng(0)
    share = np.arange(1, 1001, dtype=float) ** -1.1
    share /= share.sum()
    for lookups, others in ((20, 80), (300, 300), (300, 2000)):
        real = []
        for _ in range(100):
            own = np.unique(draw.choice(1000, size=lookups, p=share))
            real.append(np.isin(own, draw.choice(1000, size=others, p=share)).mean())
        found = RowCounts(zipf=1.1).again("a", 1000, lookups, others)
        assert found == pytest.approx(np.mean(real), rel=0.05)
    assert RowCounts().again("a", 10, 1, 1) is None


def test_the_facade_takes_a_file(tmp_path: Path) -> None:
    count_rows(model(), [batch(0)]).save(tmp_path / "rows.json")
    plan = search(
        trace(model(), batch(0)), Cluster.local(2), precision="fp64", progress=False,
        rows=str(tmp_path / "rows.json"), constraints=("dp=2",),
    )  # fmt: skip
    assert plan.predicted
