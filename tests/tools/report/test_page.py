"""The page as text: whole, closed, and the same figures as the plan."""

import itertools
import json
import re
from dataclasses import replace

import pytest

from meshwright.ir.errors import PlanError
from meshwright.ir.plan.plan import InputSpec
from meshwright.tools.report import timeline_rows
from meshwright.tools.report.contents import contents
from meshwright.tools.report.page import html
from meshwright.tools.report.timeline_rows import TICKS
from tests.tools.report.plans import EVIL, evil, many_ranks, piped

OUTSIDE = re.compile(r"""(?:src|href)\s*=\s*["']?(?!#)|@import|url\(|\bfetch\(|XMLHttp|https?://""")


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="plan-data">(.*?)</script>', page)
    assert found
    return json.loads(found[1])


def test_names_cannot_become_markup():
    page = html(evil())
    assert EVIL not in page and "<img" not in page
    assert page.count("<script") == 2 and page.count("</script>") == 2
    assert data_of(page)["plan"]["model"] == EVIL


def test_nothing_is_loaded_and_no_other_script_runs():
    page = html(piped(2, 2, 8, 4))
    own = page.replace("http://www.w3.org/2000/svg", "")  # the name of SVG, no address
    assert own.count("https://") == 1  # a button opens it, nothing is loaded from it
    own = own.replace('const PERFETTO = "https://ui.perfetto.dev";', "")
    assert not OUTSIDE.search(own), OUTSIDE.search(own)
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy and policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]


def test_the_timeline_is_the_simulated_one():
    plan = piped(4, 1, 8, 6)
    found = contents(plan)["timeline"]
    row = found["predicted"][0]
    bars = [row[i : i + 5] for i in range(0, len(row), 5)]
    forwards = [bar for bar in bars if bar[0] == 0]
    assert [bar[2] for bar in forwards] == list(range(6))
    seconds = (forwards[0][4] - forwards[0][3]) * found["span_s"] / TICKS
    assert seconds == pytest.approx(0.01, rel=1e-5)
    assert len(bars) == 12 + 2  # and what ends the step
    assert all(a[4] <= b[3] for a, b in itertools.pairwise(bars))


def test_rates_are_of_tokens_where_inputs_are_numbers_of_words():
    plan = piped(2, 2, 8, 4)
    assert contents(plan)["plan"]["tokens"] == 1
    words = InputSpec(name="ids", shape=(8, 32), dtype="int64")
    pixels = InputSpec(name="x", shape=(8, 3, 32, 32), dtype="float32")
    for inputs, tokens in (((words,), 32), ((words, pixels), 32), ((pixels,), 1)):
        of_these = replace(plan, model=replace(plan.model, inputs=inputs))
        assert contents(of_these)["plan"]["tokens"] == tokens


def test_another_plan_is_told_apart_and_has_its_own_rows():
    plan, other = piped(4, 1, 8, 6), piped(2, 4, 8, 3)
    assert contents(plan)["beside"] is contents(plan)["outliers"] is None
    found = contents(plan, beside=other)
    beside, rows = found["beside"], found["timeline"]
    assert beside["same_model"] and beside["name"] == "000000000000: 2 stages, 3 x 4 samples"
    assert [rank["devices"] for rank in beside["ranks"]] == ["0-3", "4-7"]
    assert rows["beside_ranks"] == [0, 1] and len(rows["beside"]) == 2
    longest = max(contents(other)["timeline"]["span_s"], contents(plan)["timeline"]["span_s"])
    assert rows["span_s"] == contents(other, beside=plan)["timeline"]["span_s"] == longest
    (step,) = [row for row in beside["figures"] if row["what"] == "step"]
    assert (step["first"], step["second"]) == (plan.predicted.step_s, other.predicted.step_s)
    assert step["change"] == pytest.approx(other.predicted.step_s / plan.predicted.step_s - 1)
    foreign = replace(other, model=replace(other.model, fingerprint="of another"))
    assert not contents(plan, beside=foreign)["beside"]["same_model"]


def test_utilisation_is_told_where_the_plan_says_what_it_is_of():
    plan = piped(2, 2, 8, 4)
    assert contents(plan)["plan"]["mfu"] is None
    told = replace(plan.predicted.detail, model_flops=3e12, peak_flops=1e14)
    plan = replace(plan, predicted=replace(plan.predicted, detail=told))
    assert contents(plan)["plan"]["mfu"] == pytest.approx(3e12 / plan.predicted.step_s / 1e14)


def test_memory_over_time_reaches_the_predicted_peak():
    plan = piped(4, 1, 8, 6)
    for group in contents(plan)["memory"]:
        base = sum(group["peak"][name] for name in ("parameters", "optimizer"))
        most = max(base + sum(point[1:]) for point in group["curve"])
        assert most == pytest.approx(group["used"], rel=0.05)


def test_equal_blocks_stand_together():
    model = contents(many_ranks())["model"]
    assert sum(run["count"] for run in model["runs"]) == 400
    assert len(model["layouts"]) == 2
    treated = {run["treatment"] for run in model["runs"]}
    assert treated == {"", "recomputed"}


def test_a_page_for_many_ranks_is_small():
    assert len(html(many_ranks())) < 700_000


def test_a_plan_without_detail_still_has_a_page():
    plan = piped(2, 2, 8, 4)
    assert plan.predicted
    bare = replace(plan, predicted=replace(plan.predicted, detail=None), evidence=None)
    found = contents(bare)
    assert "keeps no detail" in " ".join(found["warnings"])
    assert found["timeline"]["predicted"][1] and not found["traffic"]
    assert html(bare)


@pytest.mark.parametrize(
    ("source", "said"),
    [("assumption", "is an assumption"), ("datasheet", "is that of data sheets"), ("measured", "")],
)
def test_a_page_says_what_its_times_rest_on(source, said):
    plan = piped(2, 2, 8, 4)
    told = contents(replace(plan, predicted=replace(plan.predicted, source=source)))["warnings"]
    rests = [text for text in told if "How fast the devices are" in text]
    assert len(rests) == bool(said)
    assert all(said in text and "`meshwright profile` measures them" in text for text in rests)


def test_a_plan_without_a_prediction_is_refused():
    with pytest.raises(PlanError, match="no prediction"):
        html(replace(piped(2, 2, 8, 4), predicted=None))


def test_of_too_many_actions_some_rows_are_shown(monkeypatch):
    plan = piped(8, 1, 8, 6)
    monkeypatch.setattr(timeline_rows, "MOST", 40)
    found = contents(plan)["timeline"]
    assert found["ranks"] == [0, 3, 6] and found["left_out"] == 5
    assert len(found["predicted"]) == 3
    monkeypatch.undo()
    assert contents(plan)["timeline"]["ranks"] == list(range(8))
