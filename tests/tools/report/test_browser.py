"""The page in headless Chromium: it draws, zooms, filters, fits narrow screens, and prints."""

import json
import re
from dataclasses import replace

import pytest

from meshwright.ir.plan.plan import FormChoice
from meshwright.ir.profile.profile import CopyRecord, Machine, Profile, Timing
from meshwright.tools.report.page import html, write_report
from tests.costmodel.explain.runs import predicted_plan
from tests.tools.report.browser import browser
from tests.tools.report.measured_runs import timed_runs, with_kernels
from tests.tools.report.plans import evil, many_ranks, piped

PLANS = {"plain": lambda: piped(4, 2, 8, 6), "evil": evil, "many": many_ranks}
COLOURS = """
const canvas = document.getElementById("timeline-canvas");
const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
const seen = {};
for (let i = 0; i < pixels.length; i += 4) {
  const key = pixels.slice(i, i + 3).join();
  seen[key] = (seen[key] || 0) + 1;
}
return seen;
"""


FAINT = """
const light = (rgb) => rgb.map((c) => c / 255)
  .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const parts = (text) => text.match(/[0-9.]+/g).map(Number);
const clear = (text) => parts(text).length === 4 && parts(text)[3] === 0;
function behind(node) {
  for (let up = node; up; up = up.parentElement) {
    const colour = getComputedStyle(up).backgroundColor;
    if (!clear(colour)) return parts(colour).slice(0, 3);
  }
  return [255, 255, 255];
}
const found = [];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const node = walk.currentNode.parentElement;
  const box = node.getBoundingClientRect();
  const text = walk.currentNode.data.trim().slice(0, 40);
  if (!text || !box.width || ["SCRIPT", "OPTION"].includes(node.tagName)) continue;
  if (node.closest(".dim")) continue;  // blocks of other stages, when one is looked at
  const style = getComputedStyle(node);
  const ink = node instanceof SVGElement ? style.fill : style.color;
  const [a, b] = [light(parts(ink).slice(0, 3)), light(behind(node))].sort((x, y) => y - x);
  const contrast = (a + 0.05) / (b + 0.05);
  if (contrast < 4.5) found.push(`${contrast.toFixed(2)}: ${text}`);
}
return found;
"""


@pytest.fixture(scope="module")
def chromium():
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pages")
    for name, plan in PLANS.items():
        write_report(plan(), folder / f"{name}.html")
    return {name: folder / f"{name}.html" for name in PLANS}


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1400, 2560])
@pytest.mark.parametrize("name", PLANS)
def test_it_draws_and_nothing_sticks_out_and_all_text_is_readable(
    chromium, pages, name, width, dark
):
    chromium.open(pages[name], width=width, dark=dark)
    chromium.frame()
    assert chromium.logged() == []
    assert chromium.run("return document.documentElement.scrollWidth <= innerWidth")
    sections = {"time", "timeline", "memory", "traffic", "model", "search", "notes"}
    found = chromium.run("return [...document.querySelectorAll('section')].map((s) => s.id)")
    assert set(found) == sections
    assert len(chromium.run(COLOURS)) > 8
    assert chromium.run(FAINT) == []


def test_what_the_next_forward_hides_is_said(chromium, pages, tmp_path):
    said = "return document.getElementById('time').innerText"
    chromium.open(pages["plain"])
    assert "hides" not in chromium.run(said)
    plan, late = piped(4, 2, 8, 6), FormChoice(form="dear", settings={"bucket_bytes": 4096})
    hidden = [replace(plan.predicted.stages[0], hidden_s=s) for s in (0.0125, 0.0, 0.0125, 0.0125)]
    stages = tuple(replace(stage, sync=late) for stage in plan.stages[:2]) + plan.stages[2:]
    predicted = replace(plan.predicted, stages=tuple(hidden))
    page = tmp_path / "late.html"
    write_report(replace(plan, stages=stages, predicted=predicted), page)
    chromium.open(page)
    text = chromium.run(said)
    assert chromium.logged() == []
    how = "dear bucket_bytes=4096: hides {} of its gathers under the next forward"
    assert text.count(how.format("12.5 ms")) == text.count(how.format("none")) == 1
    assert text.count("hides") == 2


def test_names_that_mean_harm_stay_text(chromium, pages):
    chromium.open(pages["evil"])
    assert chromium.driver.title != "owned"
    assert chromium.run("return document.querySelectorAll('img').length") == 0
    assert chromium.run("return document.querySelectorAll('script').length") == 2


def test_nothing_is_asked_of_the_network(chromium, pages):
    chromium.requested()
    chromium.open(pages["many"])
    assert all(url.startswith("file:") for url in chromium.requested())


def test_zoom_shows_a_part_and_all_of_it_again(chromium, pages):
    chromium.open(pages["plain"])
    seen = "return [view.from / span(), view.to / span()]"
    whole = chromium.run(COLOURS)
    chromium.run("document.getElementById('zoom-in').click()")
    assert chromium.run(seen) == pytest.approx([0.25, 0.75])
    chromium.frame()
    assert chromium.run(COLOURS) != whole
    drag(chromium, 0.5, 0.75)
    assert chromium.run(seen) == pytest.approx([0.5, 0.625], abs=0.01)
    chromium.run("document.getElementById('zoom-all').click()")
    assert chromium.run(seen) == [0, 1]
    assert chromium.run(COLOURS) == whole


def test_a_run_is_laid_over_the_prediction(chromium, tmp_path):
    plan = predicted_plan()
    page = tmp_path / "run.html"
    page.write_text(html(plan, timed_runs(plan)))
    chromium.open(page)
    assert chromium.logged() == []
    lanes = "return chart.lanes.map((lane) => [lane.rank, lane.measured])"
    assert chromium.run(lanes) == [[0, False], [0, True], [1, False], [1, True]]
    chromium.run(
        "[...document.querySelectorAll('button')].find((b) => b.textContent === 'measured').click()"
    )
    assert chromium.run(lanes) == [[0, True], [1, True]]
    both = "[...document.querySelectorAll('button')].find((b) => b.textContent === 'all').click()"
    chromium.run(both)
    assert chromium.run(lanes) == [[0, False], [0, True], [1, False], [1, True]]
    measured = """return traceEvents().filter((e) => chart.lanes[e.pid].measured && e.ph === "X")
        .map((e) => [e.args.stage, e.args.collectives_in_blocks_ms])"""
    assert chromium.run(measured) and not [ms for _, ms in chromium.run(measured) if ms is not None]
    assert "inside the stated 20%" in chromium.run(
        "return document.querySelector('#measured').textContent"
    )


def test_another_plan_lies_beside_it_and_goes_to_perfetto_too(chromium, tmp_path):
    plan, page = piped(4, 2, 8, 6), tmp_path / "both.html"
    detail = plan.predicted.detail
    kinds = tuple(replace(kind, collectives={"F": 0.0025}) for kind in detail.kinds)
    told = replace(detail, kinds=kinds, model_flops=3e12, peak_flops=1e14)
    plan = replace(plan, predicted=replace(plan.predicted, detail=told))
    profile = Profile(
        machine=Machine(device="a", kind="cpu", driver="", torch="2", backend="gloo"),
        copies=tuple(
            CopyRecord(direction="within", nbytes=n, time=Timing(median_s=s, spread=0.01, count=9))
            for n, s in ((1 << 20, 4e-3), (2 << 20, 2e-3), (4 << 20, 4e-3))
        ),
    )
    page.write_text(html(plan, (), piped(2, 4, 8, 6), profile))
    chromium.open(page)
    assert chromium.logged() == []
    assert chromium.run("return chart.lanes.map((l) => [l.rank, l.other])") == [
        [0, False], [0, True], [1, False], [1, True], [2, False], [3, False],
    ]  # fmt: skip
    text = chromium.run("return document.body.innerText")
    share = 3e12 / plan.predicted.step_s / 1e14
    assert f"{share:.1%}\nof the devices' peak (MFU)" in text
    assert "22.2%" in chromium.run("return document.querySelector('#beside').innerText")
    odd = chromium.run("return document.querySelector('#outliers').innerText")
    assert "copy within of 1 MiB" in odd and "2.0 times as long as copy within of 2 MiB" in odd
    assert chromium.run(FAINT) == []
    events = json.loads(chromium.run("return traceText()"))["traceEvents"]
    assert {e["pid"] for e in events} == set(range(6))
    (first,) = [e for e in events if e["pid"] == 0 and e["name"] == "0F0"]
    assert first["dur"] == pytest.approx(1e4, rel=1e-3)
    assert first["args"]["collectives_in_blocks_ms"] == pytest.approx(2.5, rel=1e-3)
    # Perfetto is asked only when the button is pressed; then it gets the trace when it listens.
    sent = chromium.run("""
        const sent = [], window_ = { closed: false, postMessage: (what) => sent.push(what) };
        window.open = (address) => { sent.push(address); return window_; };
        document.getElementById("perfetto").click();
        const say = (data, origin, source) => {
          const heard = new MessageEvent("message", { data, origin });
          Object.defineProperty(heard, "source", { value: source });
          dispatchEvent(heard);
        };
        say("PONG", "https://elsewhere.dev", window_);
        say("PONG", PERFETTO, window);
        say("PING", PERFETTO, window_);
        const early = sent.filter((what) => what.perfetto).length;
        say("PONG", PERFETTO, window_);
        say("PONG", PERFETTO, window_);
        const given = sent.filter((what) => what.perfetto);
        const told = new TextDecoder().decode(given[0].perfetto.buffer);
        return [sent[0], early, given.length, told === traceText()];
    """)
    assert sent == ["https://ui.perfetto.dev", 0, 1, True]


def test_which_way_kernels_went(chromium, tmp_path):
    plan = predicted_plan()
    page = tmp_path / "run.html"
    runs = with_kernels(plan)
    page.write_text(html(plan, runs))
    chromium.open(page)
    assert chromium.logged() == []
    rows = chromium.run(
        "return [...document.querySelectorAll('#kernels tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    assert rows == [
        ["route", "torch", "tensors are on <b>cpu</b>", f"{1500 * len(runs):,}"],
        ["swiglu", "triton", "", "7"],
    ]  # fmt: skip


def drag(chromium, begin: float, end: float) -> None:
    """Over a part of what the timeline shows."""
    left, top, width, gutter = chromium.run(
        "chart.canvas.scrollIntoView({block: 'center'});"
        "const box = chart.canvas.getBoundingClientRect();"
        "return [box.left, box.top + 40, box.width, gutter()]"
    )
    steps = (("mousePressed", begin), ("mouseMoved", end), ("mouseReleased", end))
    for kind, share in steps:
        chromium.command(
            "Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, y=top, buttons=1,
            x=left + gutter + share * (width - gutter),
        )  # fmt: skip


def test_a_stage_can_be_looked_at_alone(chromium, pages):
    chromium.open(pages["many"])
    chromium.run("""
        const list = document.getElementById('stage-filter');
        list.value = '7';
        list.dispatchEvent(new Event('change'));
    """)
    assert chromium.run("return chart.lanes.map((lane) => lane.rank)") == [7]
    assert chromium.run("return document.querySelectorAll('#memory .pick').length") == 1
    blocks = chromium.run("return document.querySelector('#model').textContent")
    assert "encoder.layers.14" in blocks and "encoder.layers.16" not in blocks


def test_many_ranks_stay_readable(chromium, pages):
    chromium.open(pages["many"])
    assert chromium.run("return chart.lanes.length") == 200
    assert chromium.run("return document.querySelectorAll('#memory .pick').length") <= 12
    assert chromium.run("return document.body.scrollHeight") < 6000
    chromium.frame()
    took_ms = chromium.run("const t = performance.now(); paint(); return performance.now() - t")
    assert took_ms < 500


def test_the_pointer_tells_what_it_is_over(chromium, pages):
    chromium.open(pages["plain"])
    left, top, gutter = chromium.run(
        "chart.canvas.scrollIntoView({block: 'center'});"
        "const box = chart.canvas.getBoundingClientRect(); return [box.left, box.top, gutter()]"
    )
    chromium.command(
        "Input.dispatchMouseEvent", type="mouseMoved", x=left + gutter + 12, y=top + 40
    )
    told = chromium.run("return document.querySelector('.tip').textContent")
    assert re.match(
        r"forward, stage 0, micro-batch 0\n10 ms, from 0 to 10 ms\npipeline rank 0", told
    )


def test_it_prints(chromium, pages):
    chromium.open(pages["many"], dark=True)
    pdf = chromium.pdf()
    assert pdf.startswith(b"%PDF") and len(pdf) > 20_000
    assert len(re.findall(rb"/Type\s*/Page\b", pdf)) >= 2
    # Light while it prints, and as it was after that.
    assert chromium.run("return document.documentElement.dataset.theme || ''") == ""
