"""Questions are answered by pricing the plan again and by searching again."""

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

from meshwright.cli import app, main
from meshwright.costmodel.comm.comm import collective_time, group_levels
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.graph.routing import spread_evenly
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.plan import plan_io
from meshwright.ir.trace.trace import trace
from meshwright.planner.search.search import search
from meshwright.tools.explain import whatif
from meshwright.tools.explain.vary import with_links, with_memory
from meshwright.tools.explain.whatif import Asked

CLUSTER = Cluster.preset("a100-40", num_nodes=2, devices_per_node=2)
PINS = ("dp_replicate=4", "recompute=none", "saved=none", "num_microbatches=1")


def target(batch=64):
    """A model with its inputs and loss, as `--model` names it."""
    layers = [m for _ in range(2) for m in (nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))]
    inputs = {"input": torch.empty(batch, 512, device="meta")}
    return nn.Sequential(*layers).to("meta"), inputs, lambda y, batch: y.square().mean()


def graph(batch):
    return trace(*target(batch))


@pytest.fixture(scope="module")
def asked():
    plan = search(graph(64), CLUSTER, constraints=PINS, progress=False)
    return Asked.of(plan, CLUSTER, graph, None, time_limit_s=3.0)


def test_a_cluster_with_more_memory_or_faster_links():
    more = with_memory(CLUSTER, 1.1)
    assert more.device(0).memory_bytes == round(CLUSTER.device(0).memory_bytes * 1.1)
    ranks = range(4)
    for change, tier in (({"between": True}, 1), ({"inside": True}, 0)):
        faster = with_links(CLUSTER, 2.0, **change)
        before, after = (group_levels(ranks, c) for c in (CLUSTER, faster))
        assert after[tier].link.rate == 2 * before[tier].link.rate
        assert after[1 - tier] == before[1 - tier]
    both = with_links(CLUSTER, 2.0, between=True, inside=True)
    times = [
        collective_time(Primitive.ALL_REDUCE, 1e9, group_levels(ranks, c)) for c in (CLUSTER, both)
    ]
    assert times[1] == pytest.approx(times[0] / 2, rel=0.01)  # latency stays


def test_every_question_has_its_answer(asked):
    found = {answer.question: answer for answer in asked.answers()}
    assert list(found) == [
        "with 10 % more memory", "at twice the bandwidth between nodes",
        "at twice the bandwidth inside nodes", "at double batch",
        f"without what was asked for ({', '.join(sorted(PINS))})",
    ]  # fmt: skip
    step_s = asked.plan.predicted.step_s
    same, faster = found["with 10 % more memory"], found["at twice the bandwidth between nodes"]
    assert same.same_s == pytest.approx(step_s, rel=1e-5) and same.change == pytest.approx(0.0)
    assert faster.same_s < step_s and faster.best_s <= faster.same_s and faster.change > 0.05
    assert "it stays the best" in same.text
    for answer in found.values():
        assert answer.best_s and (answer.same_s is None or answer.best_s <= answer.same_s * 1.01)
    double = found["at double batch"]
    assert double.samples == 128 and double.same_s is None
    rate = double.samples / double.best_s
    assert double.change == pytest.approx(rate / (64 / step_s) - 1)


def test_the_command_asks_the_same(asked, tmp_path, capsys):
    plan_io.save(asked.plan, tmp_path / "plan.json")
    arguments = ["explain", str(tmp_path / "plan.json"), "--model", f"{__name__}:target"]
    with pytest.raises(SystemExit) as ended:
        main(lambda: app([*arguments, "--time-limit", "2", "--json"]))
    assert not ended.value.code
    rows = json.loads(capsys.readouterr().out)["answers"]
    assert len(rows) == 5
    assert rows[0]["same_s"] == pytest.approx(asked.plan.predicted.step_s, rel=1e-5)


def test_searches_know_where_tokens_go(asked, monkeypatch):
    known = (spread_evenly(8, 2),)
    routed, seen = replace(asked, plan=replace(asked.plan, routing=known)), []

    def found(*_, routes, **__):
        seen.append(routes)
        return routed.plan

    monkeypatch.setattr(whatif, "search", found)
    assert list(routed.answers()) and set(seen) == {known}
