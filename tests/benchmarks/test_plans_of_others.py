"""Benchmarks against published plans: how profiles and rows are read, on texts of our own."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import experts, pipedream, tensor_volume
from benchmarks.dapple import table4 as dapple_table4
from benchmarks.dapple.setup import Published, config, corrected, problem
from benchmarks.published.rows import Parallel, Row
from benchmarks.published.shapes import Shape
from meshwright.ir.cluster.cluster import Cluster
from meshwright.ir.errors import PlanError
from meshwright.ir.profile.layer_profile import LayerProfile, parse_layer_profile
from meshwright.planner.problem.candidates import build_plan, uniform_choice
from meshwright.planner.problem.predict import excess_bytes
from meshwright.planner.problem.problem import make_problem

GB = 10**9


def line(node: int, name: str, sent: int, weights: int) -> str:
    return (
        f"node{node} -- {name} -- forward_compute_time=10, backward_compute_time=20, "
        f"activation_size={sent}, parameter_size={weights}"
    )


def text(first: int = 10**6) -> str:
    layers = [line(1, "Input", first, 0), *(line(i, "fc", 10**6, 2 * 10**8) for i in range(2, 6))]
    return "\n".join(layers + [f"\tnode{i} -- node{i + 1}" for i in range(1, 5)])


def profile() -> LayerProfile:
    return parse_layer_profile(text(), "toy", 1)


def test_a_device_holds_so_many_samples_and_no_more() -> None:
    graph = dapple_table4.graph_of(profile(), 64, 3)
    given = problem(graph, config("B"))
    for count, fits in ((1, False), (2, True)):  # 4 and 2 samples at a time
        plan = build_plan(given, uniform_choice(given, dp_replicate=16, num_microbatches=count))
        assert (excess_bytes(given, plan) == 0) == fits


def test_strategies_in_words() -> None:
    given = problem(dapple_table4.graph_of(profile(), 64, 64), config("B"))

    def of(*replicas: int) -> str:
        choice = uniform_choice(
            given, pp=len(replicas), stage_dp=replicas, cuts=range(1, len(replicas)),
            num_microbatches=2,
        )  # fmt: skip
        return dapple_table4.strategy(build_plan(given, choice, predict=False))

    assert [of(16), of(1, 1, 1), of(11, 5)] == ["DP", "straight", "11:5"]


def test_published_replicas_may_be_cut_better() -> None:
    cell = dapple_table4.Cell("VGG-19", "B", profile(), 32, Published((8, 8), ("fc",)), "auto")
    assert [stage.first for stage in cell.published.stages] == ["node1.Input", "node2.fc"]
    assert [stage.first for stage in cell.same_replicas.stages] == ["node1.Input", "node4.fc"]
    assert dapple_table4.strategy(cell.same_replicas) == "8:8"


def test_the_micro_batch_is_in_the_name_or_the_input(tmp_path: Path) -> None:
    path = tmp_path / "net.txt"
    path.write_text(text(5 * pipedream.IMAGE))
    assert pipedream.read(path).micro_batch == 5
    assert pipedream.batch_of(pipedream.read(path)) == 80
    path.write_text(text(5 * pipedream.IMAGE + 1))
    with pytest.raises(PlanError, match="no whole number"):
        pipedream.read(path)
    path.write_text(text().replace("Input", "Input0"))
    assert pipedream.read(path).micro_batch == pipedream.SENTENCES
    with pytest.raises(PlanError, match="holds no layer profiles"):
        list(pipedream.rows(tmp_path / "none", "auto"))


def test_position_encodings_of_xlnet_come_from_no_parameter() -> None:
    lines = [line(1, "Input", 8, 0), line(2, "Embed-Token", 8, 4), line(3, "dropout", 16, 0)]
    edges = [(1, 2), (1, 3), (2, 3), (2, 4), (3, 4)]
    whole = "\n".join(
        [*lines, line(4, "Layer", 8, 4), *(f"\tnode{a} -- node{b}" for a, b in edges)]
    )
    found = parse_layer_profile(whole, "xlnet-36-pbs-1", 1)
    assert (found.cut_bytes(3), corrected(found).cut_bytes(3)) == (24, 8)
    assert corrected(replace(found, name="other")).cut_bytes(3) == 24


def row(**changed: object) -> Row:
    shape = Shape(layers=4, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=512, gated=False,
                  tied=True, positions=32)  # fmt: skip
    found = Row(
        table="toy", index=0, system="", framework="", gpu="A100-SXM4-80GB", gpus=8,
        gpus_per_node=8, network="", bandwidths={}, shape=shape,
        parallel=Parallel(tp=2, pp=2, dp=2, zero=1, shard=2), gbs=16,
        mbs=2, seq=32, precision="bf16", recompute="full", compiled=False, revised=False,
        step_s=1.0, peak_bytes=None, memory_kind="", fits=None, label="toy",
    )  # fmt: skip
    return replace(found, **changed)  # type: ignore[arg-type]


def test_rows_that_are_left_out() -> None:
    assert experts.lacks(row()) == ""
    assert experts.lacks(row(step_s=None)) == "no step time"
    assert experts.lacks(row(parallel=Parallel(dp=4, cp=2))) == "context parallel"
    assert experts.lacks(row(gbs=15)) == "an odd batch"
    assert [r.gbs for r in experts.sample([row(gbs=n) for n in range(10)], 4)] == [0, 3, 6, 9]


def test_the_verdict_says_what_the_ratios_show() -> None:
    def said(*found: tuple[float, int]) -> str:
        rows = [SimpleNamespace(ratio=ratio, excess_bytes=excess) for ratio, excess in found]
        return experts.verdict(rows)  # type: ignore[arg-type]

    assert "never slower" in said((0.9, 0), (1.0, 0)) and "1.000 at most" in said((1.0, 0))
    assert "slower in 1:" in said((0.9, 0), (1.01, 0))
    assert "never slower" in said((0.9, 0), (1.5, 10**9)) and "1 do not fit" in said(
        (1.5, 1), (1, 0)
    )
    assert "No published layout fits" in said((1.5, 1))


@pytest.mark.parametrize("gated", [False, True])
def test_an_experts_layout_is_a_plan(gated: bool) -> None:
    given = row(shape=replace(row().shape, gated=gated))
    graph = experts.graph_of(given.shape, given.gbs, given.seq)
    asked = make_problem(graph, Cluster.preset("a100-80"), precision="bf16-autocast")
    plan = experts.expert_plan(asked, given)
    assert [stage.mesh["dp_shard"] for stage in plan.stages] == [2, 2]
    assert {(stage.mesh["tp"], stage.zero) for stage in plan.stages} == {(2, 1)}
    assert plan.num_microbatches == 4
    assert all("full" in stage.recompute.values() for stage in plan.stages)
    looped = replace(given, parallel=replace(given.parallel, vpp=2))
    assert len(experts.expert_plan(asked, looped).stages) == 4


def test_volumes_are_the_published_ones() -> None:
    graph = tensor_volume.traced(6144, 3072)
    for name, (published, _) in tensor_volume.PUBLISHED.items():
        found = tensor_volume.by_hand(graph, name)
        counted = found.again if name in tensor_volume.MOVES_AGAIN else found.kept
        assert counted / 1e6 == pytest.approx(published, rel=2e-3), name


def test_the_planner_sends_no_more_than_the_best_form() -> None:
    graph = tensor_volume.traced(6144, 3072)
    _, mesh, ours = tensor_volume.chosen(graph)
    best = min(tensor_volume.by_hand(graph, name).kept for name in tensor_volume.SIZES)
    assert ours.kept <= best, mesh
