"""The printed plan says what a reader must know."""

from dataclasses import replace

import pytest

from meshwright.ir.errors import PlanError
from meshwright.ir.graph.graph import Fusion, Missed
from meshwright.ir.plan.plan import ProfileId
from meshwright.ir.plan.predicted import Alternative, Breakdown, Evidence
from meshwright.ir.plan.show import seconds, to_text
from meshwright.ir.text.units import size
from tests.ir.plans import plan, prediction
from tests.tools.report.plans import many_ranks, piped

EVIDENCE = Evidence(
    searcher="dp", seed=0, candidates=1234, infeasible=5, exhausted=True, bound_s=1.0, gap=0.25,
    alternatives=(Alternative(name="dp 4", step_s=1.5, peak_bytes=10**9, why="slower: 20 %"),),
)  # fmt: skip


def test_everything_is_there() -> None:
    text = str(plan(evidence=EVIDENCE, notes=("batch-norm",), constraints=("pp=2",)))
    for part in (
        "Toy", "a100-40", "4 of 4 devices", "batch 8 = 2 x 4", "1.25 s per step", "h.0 .. h.1",
        "0-2", "dp_replicate 3", "2+1+1", "one device", "optim.", "in B", "1006.00", "one_f_one_b",
        "0F0 0F1 0B0 0B1", "1,234 candidates", "gap 25.0%", "slower: 20 %", "note: batch-norm",
        "constraints: pp=2",
    ):  # fmt: skip
        assert part in text, part


def test_where_the_step_goes_and_what_memory_is_for() -> None:
    found = prediction(2)
    shares = Breakdown(
        rank=1, forward_s=0.25, backward_s=0.5, recompute_s=0, tensor_s=0.001, wait_s=0.249,
        gradients_s=0, gather_s=0, optimizer_s=0, overhead_s=0,
    )  # fmt: skip
    stages = tuple(
        replace(s, memory=replace(s.memory, fragmentation_bytes=10**7)) for s in found.stages
    )
    made = plan(predicted=replace(found, step_s=1.0, breakdown=shares, stages=stages),
                profile=ProfileId(machine="EPYC, gloo", fingerprint="abcdef0123456"))  # fmt: skip
    text = " ".join(str(made).split())
    line = "the step of pipeline rank 1: forward 25%, backward 50%, waiting for other stages 25%;"
    assert line in text and "loading data" in text
    assert "frag." in text and "in MiB" in text and "9.54" in text and "process" not in text
    assert "profile: EPYC, gloo (abcdef01)" in text


def test_a_bare_plan_prints() -> None:
    text = to_text(plan(predicted=None), width=60)
    assert "Stages" in text and max(map(len, text.splitlines())) <= 60


def test_what_is_not_kept_is_told_once_for_all_stages() -> None:
    policy = {"h.*": {"act/*": "recompute", "attn/*": "offload"}}
    stages = tuple(replace(stage, saved=policy) for stage in plan().stages)
    text = str(plan(stages=stages))
    assert "saved, stage 0-1, h.*: recompute act/*\nsaved, stage 0-1, h.*: offload attn/*" in text


def test_blocks_that_keep_the_same_are_told_once() -> None:
    names = [f"h.{i}" for i in range(4)]
    same = {name: {"act/*": "recompute"} for name in names} | {"h.9": {"act/*": "offload"}}
    stages = tuple(replace(stage, saved=same) for stage in plan().stages)
    text = str(plan(stages=stages))
    assert "saved, stage 0-1, 4 blocks, h.0 .. h.3: recompute act/*\n" in text
    assert "saved, stage 0-1, h.9: offload act/*" in text


def test_units() -> None:
    assert [seconds(x) for x in (2.5, 0.0123, 4e-6, 0.0)] == ["2.5 s", "12.3 ms", "4 us", "0 us"]
    sizes = (2 * 2**40, 3.21 * 2**30, 1020 * 2**20, 5 * 2**20, 7 * 2**10, 12)
    assert [size(x) for x in sizes] == [
        "2 TiB", "3.21 GiB", "1,020 MiB", "5 MiB", "7 KiB", "12 B",
    ]  # fmt: skip


def test_stages_that_say_the_same_are_one_row() -> None:
    text = str(piped(4, 2, 8, 6))
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "0 10 ms 20 ms 100 us 1 ms 1 ms" in lines  # each stage has its times
    stages = (plan().predicted or prediction(2)).stages
    alike = str(plan(predicted=replace(prediction(2), stages=stages)))
    assert any(" ".join(x.split()).startswith("0-1 100 ms 200 ms") for x in alike.splitlines())


def test_limits_and_links_are_told_where_the_plan_knows_them() -> None:
    text = str(piped(4, 2, 8, 6))
    assert "4 GiB of gradients over dp on nvlink (20 ms)" in " ".join(text.split())
    row = next(line for line in text.splitlines() if line.split()[-1:] == ["78.00"])
    assert row.split()[-2:] == ["66.60", "78.00"]


def test_long_schedules_are_cut() -> None:
    lines = str(many_ranks()).splitlines()
    assert any("183 more groups" in line for line in lines)
    assert sum("199F" in line for line in lines) == 1


def test_devices_that_the_prediction_does_not_know_are_named() -> None:
    made = piped(2, 2, 8, 4)
    stages = (*made.stages[:1], replace(made.stages[1], devices=(2, 9)))
    with pytest.raises(PlanError, match="rank 9 is not among the 4 devices"):
        str(replace(made, stages=stages))


def test_kernels_that_are_missing_for_one_reason_are_told_in_one_line() -> None:
    stages = tuple(Missed(f"stage {number}", "clipped", 1) for number in (0, 1, 2, 10))
    ops = Missed("h.*.act", "odd width", 3), Missed("h.*.mix", "odd width", 1)
    text = str(plan(kernels=(Fusion("bucket_update", 0, stages), Fusion("swiglu", 0, ops))))
    assert "no bucket_update at stages 0-2, 10 (4 places): clipped" in text
    assert "no swiglu at h.*.act, h.*.mix (4 places): odd width" in text
    text = str(plan(kernels=(Fusion("swiglu", 0, ops[1:]),)))
    assert "no swiglu at h.*.mix (1 place): odd width" in text
