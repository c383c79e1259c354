"""What jobs of nanotron's sweep say of their networks before they start."""

import json
from dataclasses import replace
from statistics import median

import pytest

from benchmarks.fit.fit_comm import CommTiming, outer_timings
from benchmarks.fit.link_tables import continued, p5_series
from benchmarks.published import calibration
from benchmarks.published.efa import as_measured, broken, checked, usual_rates
from benchmarks.published.predict import predict
from benchmarks.published.recipes import recipe_of
from benchmarks.published.rows import Context, read_row
from benchmarks.published.sites import ground_of
from benchmarks.published.stages import stages_of
from benchmarks.published.sync import extra_of
from benchmarks.published.systems import system_of
from meshwright.costmodel.comm.comm import Level, collective_time
from meshwright.ir.layout.conversions import Primitive
from meshwright.ir.presets import LINKS
from tests.benchmarks.nanotron_rows import nanotron, sweep
from tests.benchmarks.published_rows import raw

GIB = 2.0**30
# 64 GPUs, as the sweep prints them: without torch's check of collectives and with it.
PLAIN = {"ar": 180.0, "ag": 179.0, "rs": 179.0, "ar_intra": 458.0, "ag_intra": 264.0}
CHECKED = {"ar": 95.0, "ag": 53.0, "rs": 53.0, "ar_intra": 425.0, "ag_intra": 242.0}


def test_jobs_tell_by_their_own_test_whether_they_check():
    assert checked(PLAIN) is False and checked(CHECKED) is True and checked({}) is None
    old = replace(nanotron(64, tp=8, dp=8), revised=False)
    assert system_of(replace(old, bandwidths=CHECKED)).check_s > 0
    assert system_of(replace(sweep(64, tp=8, dp=8), bandwidths=PLAIN)).check_s == 0


def times(rates, tp=64):
    row = replace(nanotron(64, tp=tp, dp=64 // tp), bandwidths=rates)
    levels = ground_of(row).tp
    primitives = (Primitive.ALL_REDUCE, Primitive.ALL_GATHER, Primitive.REDUCE_SCATTER)
    return [collective_time(primitive, GIB, levels) for primitive in primitives]


def test_the_network_is_as_the_job_measured_it():
    moved = 63 / 64 * GIB / 1e9
    reduced, gathered, scattered = times(PLAIN)
    assert reduced == pytest.approx(2 * moved / PLAIN["ar"], rel=1e-3)
    assert gathered == pytest.approx(moved / PLAIN["ag"], rel=0.03)
    assert scattered == pytest.approx(moved / PLAIN["rs"], rel=0.03)
    # As much slower as its test was: twice the wait per step.
    waits = gathered - moved / 334
    slower = {**PLAIN, "ag": moved / (moved / 334 + 2 * (moved / PLAIN["ag"] - moved / 334))}
    assert times(slower)[1] == pytest.approx(gathered + waits, rel=0.02)


def test_a_ring_waits_at_each_of_its_steps():
    row = replace(nanotron(64, tp=16, dp=4), bandwidths=PLAIN)
    steps = [
        collective_time(Primitive.ALL_GATHER, 2.0**20, levels)
        for levels in (ground_of(row).tp, ground_of(replace(row)).dp)
    ]
    # 15 steps between sixteen ranks of two nodes, 3 between four of every second node.
    assert steps[0] == pytest.approx(15 * 43e-6, rel=0.1)
    assert steps[1] == pytest.approx(3 * 43e-6, rel=0.2)


def test_tests_of_checked_jobs_say_nothing_of_the_network():
    slow = {**CHECKED, "ar": 40.0, "ag": 20.0, "rs": 20.0}
    assert times(slow) == times(CHECKED) == times({**PLAIN, **usual_rates(8)})
    assert times(CHECKED)[1] < 0.5 * 63 / 64 * GIB / 53e9


def test_what_a_job_did_not_measure_is_as_usual():
    whole = {**PLAIN, **usual_rates(8)}
    assert times({"ar_intra": 458.0, "ag_intra": 264.0}) == times(whole)
    assert times({**whole, "rs": None}) == times(whole)
    slower = times({**whole, "ar": usual_rates(8)["ar"] / 2})
    assert slower[0] == pytest.approx(2 * times(whole)[0], rel=1e-3)
    assert checked({"ar_intra": None}) is None and not broken({"ar_intra": None})


def test_other_networks_are_left_as_they_are():
    levels = (Level(8, LINKS["nvlink4"]), Level(2, LINKS["efa-p5"]))
    assert as_measured(levels, PLAIN, 2) == levels
    assert as_measured((), PLAIN, 2) == ()


def test_jobs_with_a_broken_device_have_no_time():
    rates = {**CHECKED, "ar_intra": 45.0}
    assert broken(rates) and not broken(CHECKED) and not broken({})
    made = {"parallel": {"tp": 8}, "measured": {"step_time_s": 9.0}, "network_gb_s": CHECKED}
    context = Context("nanotron_sweep", {}, "nanotron")
    assert read_row(raw(**made), 0, context).step_s == 9.0
    found = read_row(raw(**{**made, "network_gb_s": rates}), 0, context)
    assert found.step_s is None and "device" in found.untimed


def test_buckets_are_reduced_one_by_one_and_hidden_in_part():
    row = replace(nanotron(128, dp=128, gbs=128, zero=0), bandwidths=usual_rates(16))

    def after(**changes):
        recipe = recipe_of(row, replace(system_of(row), **changes))
        ground = ground_of(row)
        (part,) = stages_of(row, recipe, ground)
        return extra_of(row, recipe, ground, part).after_s

    at_once, one_by_one = after(bucket=0, hidden=0.0), after(hidden=0.0)
    # About a hundred of 25 MiB, which wait more often than one.
    assert one_by_one > 1.3 * at_once
    assert after(hidden=1.0) < after() < one_by_one


def test_calibration_runs_are_completed_and_predicted(tmp_path, capsys, monkeypatch):
    shape = {"hidden": 3072, "layers": 28, "heads": 32, "ffn": 8192, "vocab": 131072}
    sixteen = {"gpu": "H100-SXM5-80GB", "gpus": 16, "gpus_per_node": 8}
    rows = [
        {"kind": "tp_sp_scaling", "hardware": sixteen, "model": shape,
         "parallel": {"tp": 16, "dp": 1, "pp": 1, "sp": True}, "batch": {"seq": 4096},
         "measured": {"tokens_per_s_per_gpu": 6159.3, "max_micro_batch_that_fits": 40}},
        {"kind": "collective_bandwidth", "hardware": sixteen},
    ]  # fmt: skip
    (tmp_path / calibration.TABLE).write_text(json.dumps({"rows": rows}))
    ((kind, row),) = calibration.runs(tmp_path)
    assert kind == "tp_sp_scaling" and (row.mbs, row.gbs) == (40, 40)
    # What the network's constants rest on: between two nodes at tp 16.
    assert predict(row).step_s == pytest.approx(row.step_s, rel=0.06)
    monkeypatch.setattr("sys.argv", ["calibration", str(tmp_path)])
    assert calibration.main() == 0 and "tp_sp_scaling" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["calibration", str(tmp_path / "none")])
    assert calibration.main() == 2


def test_aws_p5_is_priced_as_nccl_tests_measured_it():
    found = {s.nodes: s for s in p5_series()}
    assert sorted(found) == [2, 4, 8, 16, 32]
    errors = []
    for nodes, series in found.items():
        levels = (Level(8, LINKS["nvlink4"]), Level(nodes, LINKS["efa-p5"]))
        for row in series.rows:
            seconds = collective_time(Primitive(row.operation), row.nbytes, levels)
            errors.append(abs(seconds / row.seconds - 1))
    # A step of the all-reduces over 4 nodes between 1 and 2 GiB is passed over.
    assert median(errors) < 0.01 and max(errors) < 0.16
    row = next(r for r in found[2].rows if r.operation == "all_to_all" and r.nbytes == 16 * 2**25)
    assert row.seconds == pytest.approx(2**25 * 15 / 16 / 44.79e9)


def test_twice_the_nodes_are_continued_from_two_series():
    half, last = (s for s in p5_series() if s.nodes in (16, 32))
    found = continued(half, last)
    assert found.nodes == 64 and found.inside == 8
    for operation, more in (("all_gather", 2), ("all_reduce", 1)):
        a, b, c = (
            next(r.seconds for r in s.rows if (r.operation, r.nbytes) == (operation, 2**25))
            for s in (half, last, found)
        )
        assert c == pytest.approx(b + more * (b - a))


def test_all_to_alls_between_nodes_are_taken_apart_as_they_are_put_together():
    inner, outer = Level(8, LINKS["nvlink4"]), Level(4, LINKS["efa-p5"])
    timings = [
        (n, collective_time(Primitive.ALL_TO_ALL, n, (inner, outer))) for n in (2.0**30, 2.0**36)
    ]
    (_, low), (_, high) = outer_timings(timings, inner, outer, "all_to_all")
    assert high - low == pytest.approx(8 * (timings[1][1] - timings[0][1]))
    assert CommTiming("all_to_all", 1.0, 32, low).seconds > 0
