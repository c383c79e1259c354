"""The predicted step as a Chrome trace."""

import itertools
import json
from collections import defaultdict
from dataclasses import replace

import pytest

from meshwright.costmodel.simulate.replay import replay
from meshwright.tools.report.timeline_rows import collectives
from meshwright.tools.report.trace import trace, write_trace
from tests.tools.report.plans import piped


def test_it_is_a_trace_that_viewers_read(tmp_path):
    plan = piped(4, 2, 8, 6)
    write_trace(plan, tmp_path / "trace.json")
    found = json.loads((tmp_path / "trace.json").read_text())
    lines = defaultdict(list)
    for event in found["traceEvents"]:
        assert event["ph"] in "MXCbe" and event.get("ts", 0.0) >= 0.0
        if event["ph"] == "X":
            lines[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    assert len(lines) == 4
    for bars in lines.values():  # complete events of a thread must nest; ours never overlap
        bars.sort()
        assert all(a[1] <= b[0] + 1e-6 for a, b in itertools.pairwise(bars))
    names = {e["args"]["name"] for e in found["traceEvents"] if e["name"] == "process_name"}
    assert "pipeline rank 1: devices 2-3" in names


def test_every_action_and_message_is_there_once():
    plan = piped(4, 2, 8, 6)
    events = trace(plan)["traceEvents"]
    actions = [e for e in events if e["ph"] == "X" and "args" in e]
    assert len(actions) == len({e["name"] for e in actions}) == 4 * 6 * 2
    begun = {e["id"] for e in events if e["ph"] == "b"}
    ended = {e["id"] for e in events if e["ph"] == "e"}
    assert begun == ended and len(begun) == 3 * 6 * 2


def test_collectives_inside_blocks_have_a_line_of_their_own():
    plan = piped(4, 2, 8, 6)
    detail = plan.predicted.detail
    kinds = tuple(replace(kind, collectives={"B last": 0.002}) for kind in detail.kinds)
    told = replace(plan.predicted, detail=replace(detail, kinds=kinds))
    found = [e for e in trace(replace(plan, predicted=told))["traceEvents"] if e.get("tid") == 2]
    assert len([e for e in found if e["ph"] == "M"]) == 4  # a line for each rank
    bars = [e for e in found if e["ph"] == "X"]
    assert len(bars) == 4 * 6 and all(e["name"].startswith("in ") for e in bars)
    assert sum(e["dur"] for e in bars) == pytest.approx(4 * 6 * 2000, rel=1e-2)


def test_a_kind_has_the_share_of_its_plainest_action_that_has_any():
    """Forwards that keep all, and what is made again, are drawn as forwards."""
    plan = piped(2, 2, 8, 6)
    detail = plan.predicted.detail
    acts = {"F": 0.01, "K": 0.02, "R": 0.01, "B": 0.02, "B last": 0.03, "W": 0.0}
    seconds = [
        ({"K": 0.004, "R": 0.004}, [0.2, 0.0, 0.0, 0.0]),
        ({"B last": 0.01, "B": 0.005, "F": 0.001}, [0.1, 0.25, 0.0, 0.0]),
        ({"I": 0.001, "W": 0.001}, [0.0, 0.0, 0.0, 0.0]),  # no seconds to be a share of
    ]
    for collectives_s, shares in seconds:
        kinds = [replace(kind, actions=acts, collectives=collectives_s) for kind in detail.kinds]
        told = replace(plan.predicted, detail=replace(detail, kinds=tuple(kinds)))
        assert collectives(replace(replay(plan), predicted=told)) == [shares] * 2
    assert collectives(replace(replay(plan), predicted=replace(told, detail=None))) == []


def test_it_ends_when_the_step_ends():
    plan = piped(4, 2, 8, 6)
    played = replay(plan)
    last = max(e["ts"] + e["dur"] for e in trace(plan)["traceEvents"] if e["ph"] == "X")
    assert last / 1e6 == pytest.approx(played.met_s + 0.002)
