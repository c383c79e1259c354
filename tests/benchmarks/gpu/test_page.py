"""Verdicts, pages, evidence and what is carried, without running anything."""

from dataclasses import replace

import pytest

from benchmarks.gpu import seen
from benchmarks.gpu.claim import Claim, banded, fact, fixed, judge, on_page, ratio
from benchmarks.gpu.evidence import curve_rows, curves_of, link_rows
from benchmarks.gpu.main import PAGE, main
from benchmarks.gpu.page import page, shown
from benchmarks.gpu.recipe import Recipe
from benchmarks.gpu.results import MODULES, PROFILE, DayRun, Result, load, save
from benchmarks.gpu.step import Step, load_steps, recipes_of
from benchmarks.gpu.steps.gpu_tests import read as read_tests
from benchmarks.gpu.steps.host_time import kernel_facts
from benchmarks.gpu.steps.rivals import RANKS, RIVALS
from benchmarks.gpu.steps.rivals import read as read_rivals
from benchmarks.vs_torch import Took, line
from meshwright.costmodel.fit.fit_compute import record_work
from meshwright.costmodel.ops.formulas import kernel_s
from meshwright.ir.cluster.device import OpClass
from meshwright.ir.cluster.host import link_rate
from meshwright.ir.errors import PlanError
from meshwright.ir.presets import DEVICES, PRESETS
from meshwright.ir.profile.evidence import FOLDER, load_curves, save_curves
from meshwright.ir.profile.profile import CopyRecord, Machine, OpRecord, Profile, Timing
from meshwright.ir.profile.profile_store import open_store

CLAIM = Claim(text="a step is short", page="concepts.md", unit="s", measured=fact("m/step_s"),
              low=banded(fact("m/predicted_s"), "m/band", -1),
              high=banded(fact("m/predicted_s"), "m/band", 1))  # fmt: skip
SAID = {"m/predicted_s": 0.1, "m/band": 0.2}


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [({"m/step_s": 0.119}, "confirmed"), ({"m/step_s": 0.121}, "refuted"),
     ({"m/step_s": 0.079}, "refuted"), ({}, "not measured"), ({"m/step_s": "x"}, "not measured")],
)  # fmt: skip
def test_a_claim_is_judged_by_the_range_that_was_said(facts, verdict):
    assert judge(CLAIM, SAID | facts).verdict == verdict
    assert judge(CLAIM, facts).verdict == "not measured"


def test_numbers_of_claims_come_from_facts_and_pages():
    assert ratio("a", "b")({"a": 3, "b": 2}) == 1.5 and ratio("a", "b")({"a": 3, "b": 0}) is None
    assert on_page("results/vs_torch.md", r"DDP \| ([\d.]+)")({}) is not None
    assert on_page("results/vs_torch.md", r"no such words (\d+)")({}) is None


def test_what_claims_read_from_pages_is_there():
    """With no facts at all, an end that a page says has a number; pages are where they are said."""
    read = [
        (step.name, claim.text, end)
        for step in load_steps()
        for claim in step.claims
        for end in (claim.low, claim.high)
        if end.__qualname__.startswith("on_page")
    ]
    assert len(read) > 1
    for name, text, end in read:
        assert end({}) is not None, (name, text)
    for step in load_steps():
        assert all((PAGE.parents[1] / claim.page).is_file() for claim in step.claims)


def _run() -> DayRun:
    result = Result(step="models", status="done", seconds=2.0, limit_s=9.0,
                    facts={"total_bytes": 2 * 10**9, "m/step_s": 0.25, "n/step_s": 1e-4,
                           "o/error": "a | b"})  # fmt: skip
    bad = Result(step="kernels", status="died", why="ended by SIGSEGV")
    return DayRun(begun="2026-11-27T08:00:00+00:00", device="cuda", rehearsal=False,
                  budget_s=570.0, results=(result, bad))  # fmt: skip


def test_a_page_says_verdicts_ends_and_facts(tmp_path):
    save(_run(), tmp_path)
    assert load(tmp_path) == _run()
    step = Step(name="models", does="models", order=1, limit_s=9, least_s=1,
                run=lambda place: iter(()), claims=(CLAIM, replace(CLAIM, low=fixed(0.2),
                                                                   high=fixed(0.3))))  # fmt: skip
    text = page(load(tmp_path), [step])
    assert "Of 2 claims: 0 refuted, 1 confirmed, 1 not measured" in text
    assert "| 200 ms to 300 ms | 250 ms | **confirmed** |" in text
    assert "| kernels |  | died | - | ended by SIGSEGV |" in text
    assert "- total bytes: 2 GB" in text and "| m | 250 ms |" in text and "| n | 100 us |" in text
    assert "| o | a / b |" in text


def test_values_are_shown_for_people():
    assert shown(None) == "-" and shown(True) == "yes" and shown(0.0, "s") == "0"
    assert shown(0.123, "share") == "12.3%" and shown(3e12, "s-1") == "3 T/s"


def test_a_damaged_or_foreign_run_is_refused(tmp_path):
    with pytest.raises(PlanError, match="has no results"):
        load(tmp_path)
    (tmp_path / "results.json").write_text('{"schema": "x"}')
    with pytest.raises(PlanError, match="not of schema"):
        load(tmp_path)
    (tmp_path / "results.json").write_text("{")
    with pytest.raises(PlanError, match="damaged"):
        load(tmp_path)


def test_the_page_of_the_docs_is_of_these_steps():
    """Until a GPU has run, it lists the claims; afterwards, each that is there now."""
    text = PAGE.read_text()
    if "No GPU has run this yet" in text:
        assert text == page(None, load_steps()), "python -m benchmarks.gpu --page -"
    assert all(claim.text in text for step in load_steps() for claim in step.claims)


def test_a_rehearsal_gets_no_page_among_the_docs_and_no_evidence(tmp_path):
    save(replace(_run(), rehearsal=True), tmp_path)
    for asked in ("--page", "--fold"):
        with pytest.raises(SystemExit, match="is a rehearsal: it measured nothing"):
            main([asked, str(tmp_path)])


def test_packages_to_carry_follow_from_a_rehearsal(tmp_path, capsys):
    with pytest.raises(SystemExit, match=r"there is no .*modules\.txt"):
        main(["--needs", "--seen", "--out", str(tmp_path)])
    (tmp_path / MODULES).write_text("pydantic\npydantic_core\njson\n")
    main(["--needs", "--seen", "--out", str(tmp_path)])
    printed = capsys.readouterr().out
    assert "pip download --no-deps" in printed and "pydantic-core==" in printed


def _profile(preset: str, factor: float) -> Profile:
    """As the preset says, but for a factor."""
    device, ops = DEVICES[preset], {}
    for size in (256, 1024, 2048, 4096, 8192):
        record = OpRecord(key=str(size), target="aten.mm", op_class="matmul", dtype="bfloat16",
                          inputs=((size, size), (size, size)), flops=2.0 * size**3,
                          moved_bytes=6.0 * size**2, forward=Timing(median_s=1, spread=0, count=5),
                          backward=None)  # fmt: skip
        took = factor * kernel_s(record_work(record, device.kind), device)
        ops[record.key] = replace(record, forward=Timing(median_s=took, spread=0.0, count=5))
    took = 2**25 / link_rate(device) * factor
    copies = (CopyRecord(direction="to_host", nbytes=2**25,
                         time=Timing(median_s=took, spread=0.0, count=5)),)  # fmt: skip
    machine = Machine(device="NVIDIA H100", kind="cuda", driver="580", torch="2.11", backend="nccl")
    return Profile(machine=machine, ops=ops, copies=copies)


def test_curves_are_set_beside_the_preset_and_kept_as_evidence(tmp_path):
    profile = _profile("h100-sxm", 1.25)
    (row,) = curve_rows(profile, DEVICES["h100-sxm"])
    assert row.curve == "matmul" and row.count == 5
    assert row.preset_over_measured == pytest.approx(0.8) == pytest.approx(row.worst)
    (link,) = link_rows(profile, DEVICES["h100-sxm"])
    assert link.curve == "host link to_host" and link.preset_over_measured == pytest.approx(0.8)
    found = curves_of(profile, "h100-sxm", "2026-11-27")
    path = save_curves(found, tmp_path)
    assert path.name == "h100-sxm-2026-11-27.json" and load_curves(path) == found
    assert set(found.curves) == {OpClass.MATMUL}
    fitted = replace(DEVICES["h100-sxm"], curves={**DEVICES["h100-sxm"].curves, **found.curves})
    (after,) = curve_rows(profile, fitted)
    assert after.preset_over_measured == pytest.approx(1.0, abs=0.05)
    path.write_text(path.read_text().replace('"share"', '"shore"'))
    with pytest.raises(PlanError, match="h100-sxm-2026-11-27"):
        load_curves(path)


def test_a_run_is_folded(tmp_path, capsys):
    machine = Result(step="environment", status="done", facts={"preset": "h100-sxm"})
    save(replace(_run(), results=(machine,)), tmp_path)
    profile = _profile("h100-sxm", 1.25)
    with open_store(tmp_path / PROFILE) as store:
        store.add(profile.machine, *profile.ops.values(), *profile.copies)
    main(["--fold", str(tmp_path), "--fold-to", str(tmp_path / "kept")])
    assert "matmul           preset over measured  0.80" in capsys.readouterr().out
    (path,) = (tmp_path / "kept").iterdir()
    found = load_curves(path)
    assert found.preset == "h100-sxm" and found.ops == 5 and "NVIDIA H100" in found.machine


def test_evidence_is_of_a_device_that_has_a_preset():
    with pytest.raises(PlanError, match="no preset 'cpu'"):
        curves_of(_profile("h100-sxm", 1.0), "cpu", "2026-11-27")


def test_evidence_that_a_preset_names_is_there_and_of_it():
    """A preset never changes by itself; what it cites must be what was kept."""
    for name, preset in PRESETS.items():
        if preset.evidence:
            assert load_curves(FOLDER / preset.evidence).preset == name


def test_recipes_of_one_name_are_one_recipe():
    names = [recipe.name for recipe in recipes_of(load_steps())]
    assert len(names) == len(set(names)) > 10
    one = next(step for step in load_steps() if step.recipes)
    other = replace(one, recipes=(replace(one.recipes[0], kernels="all"),))
    with pytest.raises(PlanError, match="another recipe is called"):
        recipes_of((one, other))
    assert Recipe(name="x", workload="gpt2-small").largest is False


def test_gaps_between_kernels_are_counted_once_where_streams_overlap():
    assert dict(kernel_facts([(0, 10), (5, 12), (20, 30)])) == {
        "kernels": 3, "busy_s": 22e-6, "span_s": 30e-6, "idle_share": pytest.approx(8 / 30),
    }  # fmt: skip
    assert dict(kernel_facts([])) == {"kernels": 0}


def test_reports_of_tests_are_read():
    text = """<testsuites><testsuite><testcase classname="tests.gpu.a" name="ok" time="2.5"/>
    <testcase classname="tests.gpu.a" name="bad"><failure message="1 != 2"/></testcase>
    <testcase classname="tests.gpu.a" name="no"><skipped message="CUDA"/></testcase>
    </testsuite></testsuites>"""
    assert dict(read_tests(text)) == {
        "failed": 1, "skipped": 1, "passed": 1, "slowest_s": 2.5, "a::bad/why": "1 != 2"
    }  # fmt: skip


def test_tests_that_were_all_skipped_confirm_nothing():
    (claim,) = next(step for step in load_steps() if step.name == "gpu_tests").claims
    assert judge(claim, {"failed": 0, "passed": 0, "skipped": 9}).verdict == "not measured"
    assert judge(claim, {"failed": 0, "passed": 1}).verdict == "confirmed"
    assert judge(claim, {"failed": 1, "passed": 0}).verdict == "refuted"


def test_the_print_of_the_rivals_is_read():
    rows = [(Took(0.5, 1.0, 0.0), Took(1.0, 3.0, 0.0))]
    printed = "\n".join(line(name, ranks, rows) for ranks in RANKS for name in RIVALS)
    facts = dict(read_rivals(printed))
    claims = next(step for step in load_steps() if step.name == "rivals").claims
    assert len(claims) == len(RANKS) * len(RIVALS) == len(facts) / 3
    assert {claim.measured(facts) for claim in claims} == {2.0}


def test_plans_are_prepared_with_what_traces_models_on_the_day():
    """On 28 November 2026 a Llama was another model to torch 2.11 and transformers 5.17."""
    there = {"torch": "2.11.0", "transformers": "5.17.0"}
    assert not seen.other_tracers(there, {"torch": "2.11.0+cpu", "transformers": "5.17.0"})
    found = seen.other_tracers(there, {"torch": "2.13.0+cpu", "transformers": "5.17.0"})
    assert found == ["torch 2.13.0+cpu here, 2.11.0 there"]


def test_what_is_there_is_not_carried_and_what_nobody_pins_is_said():
    pinned = {"pydantic": "2.14.3", "pydantic-core": "2.50.4", "psutil": "7.2.2", "pyyaml": "6.0.3"}
    modules = ["pydantic", "pydantic_core", "psutil", "yaml", "json"]
    asked = {"pydantic", "psutil", "pyyaml"}

    def lacking(*there: str) -> list[str]:
        return seen.lacking(modules, seen.versions("\n".join(there)), pinned, asked)

    core, whole = "pydantic-core==2.50.4", "pydantic==2.14.3"
    assert lacking("psutil", "PyYAML") == [whole, core]
    assert lacking("psutil", "PyYAML", "pydantic") == []
    assert lacking("psutil", "pyyaml", core) == [whole]
    # Of an unknown version it may be too new.
    assert lacking("psutil", "pyyaml", "pydantic_core") == [whole, core]
    assert lacking("psutil", "pyyaml", "pydantic_core==2.0") == [whole, core]
    with pytest.raises(PlanError, match="add it"):
        seen.lacking(["pydantic"], {}, {}, {"pydantic"})


def test_lists_of_packages_are_read():
    assert seen.versions("# x\nPyYAML==6\nPy_yaml\n") == {"pyyaml": "6", "py-yaml": ""}
    assert seen.wanted('[project]\ndependencies = ["A_b>=1"]\n'
                       '[project.optional-dependencies]\nx = ["c[d]"]') == {"a-b", "c"}  # fmt: skip
